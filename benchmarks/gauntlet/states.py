"""States to save, each known in advance from a step and a variant; and the digest that names one.

Two attempts of one run may reach the same step with different values; those are two variants.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: 4-byte numbers in each of a state's two large tensors.
SMALL, LARGE = 1_000_000, 12_000_000


def make(step: int, variant: str = "a", items: int = SMALL) -> dict[str, torch.Tensor]:
    """Return a state.

    Args:
        step: The step after which a run has it.
        variant: One letter.
        items: Numbers in each of two tensors.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000 * step + ord(variant))
    return {
        "weight": torch.rand(items, generator=generator),
        "moment": torch.rand(items, generator=generator),
        "step": torch.tensor([step]),
    }


def empty(items: int) -> dict[str, torch.Tensor]:
    """Return a state to load into, for products that want one."""
    import torch

    weight, moment = torch.zeros(items), torch.zeros(items)
    return {"weight": weight, "moment": moment, "step": torch.zeros(1, dtype=torch.int64)}


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return the digest of a state's bits."""
    hasher = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()
