"""Ranks as threads of one process, so that a run of several can be looked into. No Ray.

torch's, NumPy's and Python's random states belong to a process, and so do many of torch's
settings: ranks that ran at once would draw from each other's numbers. So one rank runs at a time,
from the point where it has waited for the others to the next one. `Collectives` stands where
torch.distributed does, and only brings ranks' bytes together: vote, exchange and tree are the
product's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Crew:
    """Some ranks, each in a thread of its own. Used once."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._baton = threading.Condition()
        self._slots: dict[int, dict[int, Any]] = {}
        self._turns = [0] * ranks
        self._ended: list[int] = []
        self._local = threading.local()

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        return int(self._local.rank)

    @property
    def broken(self) -> bool:
        """Whether a rank has ended, so that nobody can wait for all any more."""
        return bool(self._ended)

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Let every rank do its work, and return what each has returned.

        Args:
            work: Called with each rank, in its own thread.

        Raises:
            BaseException: What a rank raised: the first of them, as time goes, whose cause was no
                other rank's end.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def live(rank: int) -> None:
            self._local.rank = rank
            with self._baton:
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    errors.append(error)
                finally:
                    self._ended.append(rank)
                    self._baton.notify_all()

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.ranks)]

    def meet(self, mine: Any) -> list[Any]:
        """Wait for all ranks, and return what each of them has brought.

        Raises:
            RuntimeError: A rank has ended.
        """
        turn = self._turns[self.rank]
        self._turns[self.rank] += 1
        slot = self._slots.setdefault(turn, {})
        slot[self.rank] = mine
        if len(slot) == self.ranks:
            # Whoever comes here has left the meeting before; the others hold its slot themselves.
            self._slots.pop(turn - 1, None)
            self._baton.notify_all()
        else:
            self._baton.wait_for(lambda: len(slot) == self.ranks or self.broken)
        if len(slot) < self.ranks:
            raise RuntimeError(f"rank {self._ended[0]} has ended")
        return [slot[rank] for rank in range(self.ranks)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let others run while this rank does what needs no random state, and may wait for them."""
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()


@dataclass(frozen=True, slots=True)
class Message:
    """A message from or to a rank, as torch's ``P2POp``."""

    kind: str
    tensor: Tensor
    peer: int


class Done:
    """A collective that has ended, as torch's ``Work``."""

    def wait(self) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return that it has ended."""
        return True


class Collectives:
    """The part of ``torch.distributed`` that `coherent_ray.train.collectives` uses."""

    isend, irecv = "send", "receive"

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def get_rank(self, group: object = None) -> int:
        """Return the rank of this thread."""
        return self._crew.rank

    def get_world_size(self, group: object = None) -> int:
        """Return the number of ranks."""
        return self._crew.ranks

    def all_reduce(self, tensor: Tensor, group: object = None) -> None:
        """Add every rank's tensor, in place."""
        parts = self._crew.meet(tensor.clone())
        tensor.zero_()
        for part in parts:
            tensor.add_(part)

    def broadcast(self, tensor: Tensor, group: object = None, group_src: int = 0) -> None:
        """Overwrite every rank's tensor with one rank's."""
        tensor.copy_(self._crew.meet(tensor.clone())[group_src])

    def all_gather_single(self, received: Tensor, sent: Tensor, group: object = None) -> None:
        """Bring every rank's tensor to all."""
        for place, part in zip(
            received.view(-1, sent.numel()), self._crew.meet(sent.clone()), strict=True
        ):
            place.copy_(part)

    def all_to_all_single(  # noqa: PLR0917 - as torch has it
        self,
        received: Tensor,
        sent: Tensor,
        receive: list[int],
        send: list[int],
        group: object = None,
        async_op: bool = False,
    ) -> Done:
        """Send one part to each rank."""
        own = self._crew.rank
        parts = []
        for data, sizes in self._crew.meet((sent.clone(), [*send])):
            start = sum(sizes[:own])
            parts.append(data[start : start + sizes[own]])
        at = 0
        for part in parts:
            received[at : at + len(part)].copy_(part)
            at += len(part)
        return Done()

    def P2POp(  # noqa: N802 - as torch has it
        self, kind: str, tensor: Tensor, group: object = None, tag: int = 0, group_peer: int = 0
    ) -> Message:
        """Return a message that `batch_isend_irecv` carries."""
        return Message(kind, tensor, group_peer)

    def batch_isend_irecv(self, messages: list[Message]) -> list[Done]:
        """Carry messages; all ranks call it together."""
        outgoing = {m.peer: m.tensor.clone() for m in messages if m.kind == self.isend}
        arrived = self._crew.meet(outgoing)
        for message in messages:
            if message.kind == self.irecv:
                message.tensor.copy_(arrived[message.peer][self._crew.rank])
        return [Done()]
