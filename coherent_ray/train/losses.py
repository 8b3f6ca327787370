"""What a loss function returned: a scalar with a gradient, and a count. Else: which line is wrong.

Looked at before it is used, so that the user reads about the own line and not about a backward pass
somewhere below. Whoever raises here still votes, as after any error inside an update.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coherent_ray.errors import TaskError

_REMEDY = (
    "return the loss *summed* over the microbatch, and over how many: (loss.sum(), len(batch))"
)
_OURS = str(Path(__file__).parent.parent)


def pair_of(returned: Any, function: Any) -> tuple[Tensor, int]:
    """Return the loss and the count that a task's ``loss`` gave, as they are.

    Args:
        returned: What it gave.
        function: It, to say where it is.

    Raises:
        TaskError: It is no pair.
    """
    if isinstance(returned, tuple | list) and len(returned) == 2:
        loss, count = returned
        return loss, count
    if isinstance(returned, tuple | list):
        what = f"a {type(returned).__name__} of {len(returned)}"
    else:
        what = _described(returned)
    raise TaskError(
        f"loss must return a pair, the summed loss and a count, not {what}",
        where=place_of(function),
        remedy=_REMEDY,
    )


def check(loss_sum: Any, count: Any, device: torch.device, where: str) -> int:
    """Check a loss, and return the count as an integer.

    Args:
        loss_sum: Scalar with a gradient, on the run's device.
        count: A whole number, at least 0; a tensor of one will do.
        device: The run's.
        where: File and line to name.

    Raises:
        TaskError: One of them is something else.
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1 or not loss_sum.requires_grad:
        raise TaskError(
            f"the loss must be a scalar tensor with a gradient, not {_described(loss_sum)}",
            where=where,
            remedy=_REMEDY + "; the model's output must reach it without detach() or no_grad()",
        )
    if loss_sum.is_complex():
        raise TaskError("the loss must be real, not complex", where=where, remedy=_REMEDY)
    if loss_sum.device.type != device.type:
        raise TaskError(
            f"the loss is on {loss_sum.device}, but this rank trains on {device}",
            where=where,
            remedy="compute it from model and batch, which are there already; move nothing",
        )
    number = _whole(count)
    if number is None:
        raise TaskError(
            "the count of examples or tokens must be a whole number, at least 0, not "
            f"{_described(count) if isinstance(count, Tensor) else repr(count)}",
            where=where,
            remedy=_REMEDY,
        )
    return number


def place_of(function: Any) -> str:
    """Return file and line of a function; empty: it has none."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def calling_line(depth: int) -> str:
    """Return file and line of a caller, where that is a user's; empty: it is ours.

    Args:
        depth: 1 for whoever called the function that calls this.
    """
    frame = sys._getframe(depth + 1)
    file = frame.f_code.co_filename
    return "" if file.startswith(_OURS) else f"{file}:{frame.f_lineno}"


def _whole(count: Any) -> int | None:
    if isinstance(count, bool) or (isinstance(count, Tensor) and count.dtype == torch.bool):
        return None
    try:
        number = int(count)
        return number if bool(number == count) and number >= 0 else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        return f"a tensor of shape {shape}, {value.dtype}, requires_grad={value.requires_grad}"
    return f"a {type(value).__name__}"
