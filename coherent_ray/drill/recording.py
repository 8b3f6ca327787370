"""A recording: everything that one update computed, operation by operation, as digests.

Each rank's thread writes down what its lanes did: the batch, every operation that torch carried
out, the loss, the gradients; then the sum over all lanes, and the operations of the optimizer's
step. Operations are seen by a dispatch mode, below autograd, so the backward pass is seen as well.
Digests, not tensors: a recording is small, and two of them are compared by `spots`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import coherent_ray
from coherent_ray.digests import SHARD_ALGORITHM, new_hasher
from coherent_ray.drill.parting import leaves
from coherent_ray.state.capture import State
from coherent_ray.state.flat import items_of

#: Files of whom a line says nothing to a user.
_NOT_THE_USERS = tuple(
    str(Path(str(package.__file__)).parent) for package in (coherent_ray, torch, np)
)
_unseen: Any = _disable_current_modes
#: What only takes memory: its contents are nobody's.
_EMPTY = ("empty", "new_empty", "resize_")


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a computation, and a digest of what it left."""

    name: str
    """As torch calls it, ``aten.native_dropout``; or ``batch``, ``loss``."""
    where: str
    """The module of the model, the pass, and the user's own line, as far as they are known."""
    digest: str


@dataclass(slots=True)
class Lane:
    """What one lane did."""

    operations: list[Operation] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    """Where each begins among the operations."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter's gradient."""

    def microbatch_of(self, index: int) -> int:
        """Return the microbatch that an operation belongs to."""
        return max(0, sum(start <= index for start in self.microbatches) - 1)


@dataclass(slots=True)
class Recording:
    """What one rank did in one update."""

    lanes: dict[int, Lane] = field(default_factory=dict)
    total: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter's gradient, summed over all lanes, and of the loss."""
    step: list[Operation] = field(default_factory=list)
    """From the sum to the end of the update."""
    buffers: dict[str, str] = field(default_factory=dict)
    """Of the model, at the end."""
    tensors: dict[str, str] = field(default_factory=dict)
    """Of the whole state, at the end."""
    values: dict[str, str] = field(default_factory=dict)
    """State that is no tensor, at the end, leaf by leaf."""


class Recorder:
    """One rank's, for the length of its thread. `wanted` decides which update is recorded."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.recording = Recording()
        self._mode: Any = _Mode(self)
        self._is_on = False
        self._lane: Lane | None = None
        self._has_batch = False
        self._stepping = False
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._pass = ""

    @property
    def is_on(self) -> bool:
        """Whether the wanted update is under way."""
        return self._is_on

    def begin(self, number: int) -> None:
        """Take in that an update begins."""
        if number == self.wanted and not self._is_on:
            self._is_on = True
            self._mode.__enter__()

    def end(self) -> None:
        """Take in that the update is over."""
        if self._is_on:
            self._is_on = False
            self._mode.__exit__(None, None, None)

    def know(self, model: nn.Module) -> None:
        """Learn what the modules of a model are called."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def enter(self, module: nn.Module) -> None:
        """Take in that a module's forward pass begins."""
        name = self._names.get(id(module))
        kind = type(module).__name__
        self._inside.append(f"{name} ({kind})" if name else kind)

    def leave(self) -> None:
        """Take in that it ended."""
        if self._inside:
            self._inside.pop()

    def lane_begin(self, lane: int) -> None:
        """Take in that a lane begins."""
        self._lane = self.recording.lanes.setdefault(lane, Lane())

    def batch(self, value: Any) -> None:
        """Take in that a microbatch begins; a batch's parts are told after it, and left out."""
        if self._lane is None or self._has_batch:
            return
        self._has_batch = True
        self._inside.clear()
        self._pass = "forward"
        self._lane.microbatches.append(len(self._lane.operations))
        self._add("batch", "what collate returned", tree_leaves(value))

    @contextmanager
    def backward(self, loss: Tensor, count: int) -> Iterator[None]:
        """Take in a loss, and its backward pass."""
        self._has_batch = False
        self._add(f"loss, over {count}", "", [loss])
        self._inside.clear()
        self._pass = "backward"
        try:
            yield
        finally:
            self._pass = "forward"

    def lane_done(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take in that a lane is done."""
        if self._lane is None:
            return
        for name, parameter in parameters:
            if parameter.grad is not None:
                self._lane.gradients[name] = digest([parameter.grad])
        self._lane = None

    def summed(self, loss: float, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take in the sum over all lanes."""
        self.recording.total = {"the loss": loss.hex()}
        for name, parameter in parameters:
            if parameter.grad is not None:
                self.recording.total[f"the gradient of {name}"] = digest([parameter.grad])
        self._pass = "optimizer"

    def step_begins(self) -> None:
        """Take in that what follows is the same on every rank, whatever their number."""
        self._stepping = True

    def stepped(self, model: nn.Module, state: State) -> None:
        """Take in what the update left."""
        self.recording.buffers = {name: digest([b]) for name, b in model.named_buffers()}
        self.recording.tensors = {name: digest([t]) for name, t in state.tensors.items()}
        self.recording.values = dict(leaves("", state.values))

    def operation(self, name: str, results: list[Any]) -> None:
        """Take in an operation of torch."""
        if not any(part in name for part in _EMPTY):
            self._add(name, self._where(), results)

    def _add(self, name: str, where: str, results: list[Any]) -> None:
        if self._lane is not None:
            self._lane.operations.append(Operation(name, where, digest(results)))
        elif self._stepping:
            self.recording.step.append(Operation(name, where, digest(results)))

    def _where(self) -> str:
        line = _users_line() if self._pass != "backward" else ""
        inside = self._inside[-1] if self._inside else ""
        return ", ".join(filter(None, [self._pass, inside, line]))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of its thread."""

    def __init__(self, recorder: Recorder) -> None:
        base: Any = super()  # it is not annotated, and neither is what is below
        base.__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        left = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not left and func._schema.is_mutable:
            left = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if left:
            self._recorder.operation(str(func.overloadpacket), left)
        return result


def digest(values: Iterable[Any]) -> str:
    """Return a digest of tensors bit for bit; of anything else, of its words."""
    hasher = new_hasher(SHARD_ALGORITHM)
    with _unseen():  # what is done to look is no part of what is looked at
        for value in values:
            if not isinstance(value, Tensor):
                hasher.update(repr(value).encode())
                continue
            hasher.update(f"{value.dtype}{list(value.shape)}".encode())
            if value.layout is torch.strided and value.numel():
                bits = items_of(value, 0, value.numel())
                hasher.update(bits.cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _users_line() -> str:
    """Return the innermost line of the user's own code that is being carried out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_THE_USERS, "<")):
            break
        frame = frame.f_back
    if frame is None or "threading.py" in frame.f_code.co_filename:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
