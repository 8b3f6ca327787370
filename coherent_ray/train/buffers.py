"""Buffers that a forward pass changes (batch-norm statistics): lanes start alike, lane 0 stays.

Every lane of an update starts from the buffers that the update started with, so what a lane
computes does not depend on who ran before it. What lane 0 leaves is the update's result, as it is
rank 0's in DistributedDataParallel, and it reaches every rank bit for bit.

All buffers are compared and copied by content: batch norm changes its statistics without any sign
of it on the tensor (``_version`` stays), so no cheaper test for a change is sound. What did not
change, a causal mask for one, is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from coherent_ray.errors import TaskError
from coherent_ray.train.collectives import Group, from_first

#: Bytes to which every buffer's copy is aligned.
_ALIGNMENT = 16

Facts = tuple[str, torch.dtype, torch.Size, torch.device]


class LaneBuffers:
    """One rank's buffers through one update after another.

    The calls of an update, in order: `begin`; for each lane `lane_begin`, forward passes,
    `lane_end`; then `finish` (through ``LaneReducer.sync_buffers``), on every rank or none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._facts: list[Facts] | None = None
        self._places: list[tuple[nn.Module, str]] = []
        self._fresh = True
        self._kept = False
        self._after_kept = False
        self.begin()

    def begin(self) -> None:
        """Take the buffers as they are now for what every lane of the update starts from.

        Raises:
            TaskError: A buffer is not initialised, or the buffers lie on several devices.
        """
        facts, places = _survey(self._model)
        if facts != self._facts:
            self._facts = facts
            self._start = _Copy(facts)
            self._result = _Copy(facts)
        self._places = places
        self._start.store(self._live())
        self._fresh = True
        self._kept = self._after_kept = False

    def lane_begin(self, lane: int) -> None:
        """Put back what the update started with, if a lane has run since.

        Raises:
            TaskError: A forward pass has changed a buffer's shape, dtype or device.
        """
        if not self._fresh:
            self._start.load(self._live())
        self._fresh = False
        self._after_kept = self._kept

    def lane_end(self, lane: int) -> None:
        """Keep what lane 0 has left; drop what any other has."""
        if lane == 0:
            self._result.store(self._live())
            self._kept = True

    def start(self) -> dict[str, Tensor]:
        """Return what the update started with, by name; it stays so until the update ends."""
        return dict(zip(self._names(), self._start.views, strict=True))

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the buffers that the running lane has changed so far, by name."""
        return self._unlike_start(self._live())

    def kept(self) -> dict[str, Tensor] | None:
        """Return copies of the buffers that lane 0 has changed; None: it is not done here."""
        return self._unlike_start(self._result.views) if self._kept else None

    @torch.no_grad()
    def resume(self, changed: Mapping[str, Tensor]) -> None:
        """Put the running lane, which has just begun, where another rank or time left it.

        Args:
            changed: From `changed`.
        """
        for name, tensor in zip(self._names(), self._live(), strict=True):
            if name in changed:
                tensor.copy_(changed[name])

    @torch.no_grad()
    def keep(self, changed: Mapping[str, Tensor]) -> None:
        """Take what lane 0 has left from another rank or time, instead of running it.

        Args:
            changed: From `kept`.
        """
        self._result.bytes.copy_(self._start.bytes)
        for name, view in zip(self._names(), self._result.views, strict=True):
            if name in changed:
                view.copy_(changed[name])
        self._kept = self._after_kept = True

    def finish(self, rank: int, ranks: int, group: Group = None) -> None:
        """Leave lane 0's buffers in the model of every rank; lane 0 is rank 0's.

        Args:
            rank: This rank.
            ranks: Number of ranks; at 1 nothing is sent.
            group: The process group; None: the default one.

        Raises:
            PeerLost: Another rank is gone.
        """
        if not self._places:
            return
        if rank == 0:
            if not self._kept:
                self._result.bytes.copy_(self._start.bytes)
            if self._after_kept or not (self._kept or self._fresh):
                self._result.load(self._live())
            if ranks > 1:
                self._send(group)
            return
        if not self._fresh:
            self._start.load(self._live())
        self._receive(group)

    def _send(self, group: Group) -> None:
        pairs = zip(self._start.slices, self._result.slices, strict=True)
        same = torch.stack([torch.eq(before, after).all() for before, after in pairs])
        changed = (~same).to(torch.uint8)
        from_first(changed, group)
        slices = [s for s, flag in zip(self._result.slices, changed.tolist(), strict=True) if flag]
        if slices:
            from_first(torch.cat(slices), group)

    def _receive(self, group: Group) -> None:
        changed = torch.empty(len(self._places), dtype=torch.uint8, device=self._start.bytes.device)
        from_first(changed, group)
        which = [index for index, flag in enumerate(changed.tolist()) if flag]
        if not which:
            return
        slices = [self._start.slices[index] for index in which]
        payload = torch.empty(sum(map(len, slices)), dtype=torch.uint8, device=changed.device)
        from_first(payload, group)
        torch._foreach_copy_(slices, list(torch.split_with_sizes(payload, [*map(len, slices)])))
        live = self._live()
        torch._foreach_copy_([live[i] for i in which], [self._start.views[i] for i in which])

    def _names(self) -> list[str]:
        return [fact[0] for fact in self._facts or []]

    def _unlike_start(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors that are not, byte for byte, what they were at the start."""
        now = _Copy(self._facts or [])
        now.store(tensors)
        pairs = zip(self._names(), now.views, now.slices, self._start.slices, strict=True)
        return {name: view for name, view, mine, start in pairs if not torch.equal(mine, start)}

    def _live(self) -> list[Tensor]:
        """Return the model's buffers of this moment: a forward pass may put new tensors in."""
        live: list[Tensor] = [getattr(module, key) for module, key in self._places]
        for (name, dtype, shape, device), tensor in zip(self._facts or [], live, strict=True):
            now = (tensor.dtype, tensor.shape, tensor.device)
            if now != (dtype, shape, device):
                raise TaskError(
                    f"a forward pass turned buffer {name!r} from {dtype} {tuple(shape)} on "
                    f"{device} into {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
                    where=name,
                    remedy="give the buffer its final shape in build_model",
                )
        return live


class _Copy:
    """One copy of all buffers: flat bytes, with a typed view and a byte slice for each."""

    def __init__(self, facts: list[Facts]) -> None:
        offsets, at = [], 0
        for _, dtype, shape, _ in facts:
            offsets.append(at)
            at += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        device = facts[0][3] if facts else torch.device("cpu")
        self.bytes = torch.zeros(at, dtype=torch.uint8, device=device)
        self.slices = [
            self.bytes[offset : offset + shape.numel() * dtype.itemsize]
            for offset, (_, dtype, shape, _) in zip(offsets, facts, strict=True)
        ]
        self.views = [
            piece.view(dtype).view(shape)
            for piece, (_, dtype, shape, _) in zip(self.slices, facts, strict=True)
        ]

    @torch.no_grad()
    def store(self, live: list[Tensor]) -> None:
        if live:
            torch._foreach_copy_(self.views, live)

    @torch.no_grad()
    def load(self, live: list[Tensor]) -> None:
        if live:
            torch._foreach_copy_(live, self.views)


def _survey(model: nn.Module) -> tuple[list[Facts], list[tuple[nn.Module, str]]]:
    """Return what buffers a model has, each once, and where they hang."""
    facts: list[Facts] = []
    places: list[tuple[nn.Module, str]] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if is_lazy(tensor):
                raise TaskError(
                    f"buffer {name!r} is not initialised",
                    where=name,
                    remedy="run one forward pass in build_model, or name the sizes",
                )
            if id(tensor) not in seen:
                seen.add(id(tensor))
                facts.append((name, tensor.dtype, tensor.shape, tensor.device))
                places.append((module, key))
    devices = sorted({str(device) for _, _, _, device in facts})
    if len(devices) > 1:
        raise TaskError(
            f"the model's buffers lie on several devices: {', '.join(devices)}",
            remedy="put the whole model on one device",
        )
    return facts, places
