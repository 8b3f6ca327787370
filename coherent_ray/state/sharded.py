"""Tensors of which each rank has some rows (`DTensor`, as FSDP2 makes them), and what fits in here.

One rule, so that nothing has to be stored or asked: a tensor is cut by its first dimension over
all ranks, ``ceil(rows / ranks)`` of them each, as torch cuts (`commit.manifest.rows_of`). What is
cut in another way is refused by name. No collectives: all of this is about a rank's own rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coherent_ray.commit.manifest import rows_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a `DTensor`, sharded or not."""
    if not isinstance(tensor, torch.Tensor) or not is_traceable_wrapper_subclass(tensor):
        return False
    # torch.distributed.tensor takes a second to import: only those who have such a tensor pay.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def parts_of(tensor: torch.Tensor) -> int:
    """Return how many ranks a tensor's rows are cut over; 0: this rank has all of it."""
    if not is_distributed(tensor) or not tensor.numel():
        return 0
    ranks = tensor.device_mesh.size()
    return ranks if ranks > 1 and tensor.placements[0].is_shard() else 0


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: a plain tensor that shares its memory."""
    return tensor._local_tensor.detach() if is_distributed(tensor) else tensor


def rows_here(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first row of a sharded tensor that this rank has, and the one after its last."""
    assert is_distributed(tensor)
    return rows_of(tensor.shape[0], _rank(tensor), parts_of(tensor))


def first_item_here(tensor: torch.Tensor) -> int:
    """Return the first item, in row-major order, of what this rank has of a tensor."""
    if not parts_of(tensor):
        return 0
    return rows_here(tensor)[0] * (tensor.numel() // tensor.shape[0])


def unstorable(tensor: torch.Tensor) -> str | None:
    """Return why a wrapped tensor does not fit in here; None: it does."""
    if not is_distributed(tensor):
        return f"is a {type(tensor).__name__}: wrapped tensors are not supported"
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if mesh.ndim != 1:
        return f"is distributed over a mesh of {mesh.ndim} dimensions: only one is supported"
    by_rows = placement.is_shard(0) and type(placement).__name__ == "Shard"
    if not by_rows and not placement.is_replicate():
        return f"is distributed as {placement}: only rows, Shard(dim=0), are supported"
    if parts_of(tensor):
        first, last = rows_here(tensor)
        if tuple(here(tensor).shape) != (last - first, *tensor.shape[1:]):
            return f"has {list(here(tensor).shape)} here: its rows are not cut as torch cuts them"
    return None


def like(live: DTensor, loaded: torch.Tensor) -> DTensor:
    """Return a tensor as one that is distributed like another; nothing is copied.

    Args:
        live: How it is to lie.
        loaded: The whole of it, or the rows that this rank has; any device and dtype.

    Raises:
        ValueError: It is neither.
    """
    from torch.distributed.tensor import DTensor

    local = here(live)
    if loaded.shape == live.shape and local.shape != live.shape:
        loaded = loaded[slice(*rows_here(live))]
    loaded = loaded.to(local.device)
    if loaded.shape != here(live).shape:
        raise ValueError(f"{list(loaded.shape)} are not the rows of {list(live.shape)}")
    return DTensor.from_local(
        loaded,
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def placed(
    tensors: Mapping[str, torch.Tensor],
    live: Mapping[str, torch.Tensor],
    rows: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Return loaded tensors as the running job has them, so that each can be copied into its own.

    Args:
        tensors: Plain ones, by name in the flat state.
        live: The model's parameters, by their names in the model. The optimizer's state of a
            sharded parameter is sharded with it where it has its shape.
        rows: Names of those tensors that are this rank's rows; all others are whole.
    """
    result = dict(tensors)
    for name, tensor in tensors.items():
        parameter = live.get(parameter_of(name, live))
        if is_distributed(parameter) and (name in rows or tensor.shape == parameter.shape):
            result[name] = like(parameter, tensor)
    return result


def parameter_of(name: str, live: Mapping[str, object]) -> str:
    """Return the parameter that a tensor of the flat state is, or belongs to; empty: none."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        rest = rest.rpartition("/")[0]
    return rest if kind in {"model", "optimizer"} and rest in live else ""


def _rank(tensor: DTensor) -> int:
    return tensor.device_mesh.get_local_rank()
