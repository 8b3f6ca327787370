"""Several ranks in one process: a thread each, and collectives that meet at a barrier.

Everything else is the product's: sessions, reduction, saves, the commit protocol. A process has one
random state and one current worker, so tasks here draw nothing, and nobody asks who is current.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import CPU, Coordinator, Line, coordinating, request_for, working
from torch import Tensor

from coherent_ray.config import Config
from coherent_ray.train import loop
from coherent_ray.train.admit import Admitted, find_out
from coherent_ray.train.session import Session
from coherent_ray.train.update import Micro
from coherent_ray.train.wishes import Wish, Wishes

_PATIENCE_S = 120.0

Look = Callable[["Rank", int, Micro], None]
"""Called by a rank's thread with the update when a microbatch is computed."""


class Posted:
    """Something that every rank brings, and nobody waits for before it must."""

    def __init__(self, mail: Mail, key: tuple[str, int], fill: Callable[[list[Any]], None]) -> None:
        self._mail, self._key, self._fill = mail, key, fill

    def is_there(self) -> bool:
        return self._mail.is_there(self._key)

    def wait(self) -> None:
        self._fill(self._mail.collect(self._key))


class Mail:
    """What ranks bring to one another, in an order of its own on each of them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._came = threading.Condition()
        self._rows: dict[tuple[str, int], dict[int, Any]] = {}
        self._turns: dict[tuple[str, int], int] = {}
        self.broken = False

    def post(self, kind: str, rank: int, mine: Any, fill: Callable[[list[Any]], None]) -> Posted:
        with self._came:
            turn = self._turns[kind, rank] = self._turns.get((kind, rank), 0) + 1
            self._rows.setdefault((kind, turn), {})[rank] = mine
            self._came.notify_all()
        return Posted(self, (kind, turn), fill)

    def is_there(self, key: tuple[str, int]) -> bool:
        with self._came:
            return len(self._rows[key]) == self._ranks

    def collect(self, key: tuple[str, int]) -> list[Any]:
        with self._came:
            there = self._came.wait_for(
                lambda: self.broken or len(self._rows[key]) == self._ranks, _PATIENCE_S
            )
            if not there or len(self._rows[key]) < self._ranks:
                raise threading.BrokenBarrierError
            return [self._rows[key][rank] for rank in range(self._ranks)]

    def leave(self) -> None:
        with self._came:
            self.broken = True
            self._came.notify_all()


class Together:
    """The collectives of some threads, by the names that `coherent_ray.train.collectives` has."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=_PATIENCE_S)
        self._slots: list[Any] = [None] * ranks
        self._who = threading.local()
        self._mail = Mail(ranks)
        self._group = object()
        self.dist = SimpleNamespace(
            get_rank=lambda group: self._who.rank, get_world_size=lambda group: ranks
        )

    def join(self, rank: int) -> None:
        self._who.rank = rank

    def leave(self) -> None:
        """Let nobody wait for a rank that raised."""
        self._barrier.abort()
        self._mail.leave()

    def second_group(self) -> Any:
        return self._group

    def _all(self, mine: Any) -> list[Any]:
        self._slots[self._who.rank] = mine
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def sum_over_ranks(self, tensor: Tensor, group: Any) -> None:
        tensor.copy_(torch.stack(self._all(tensor.clone())).sum(0))

    def gather_all(self, received: Tensor, sent: Tensor, group: Any) -> None:
        received.copy_(torch.cat(self._all(sent.clone())))

    def scatter_all(
        self, received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: Any
    ) -> Posted | None:
        own = self._who.rank

        def fill(rows: list[Any]) -> None:
            parts = [row[own] for row in rows]
            assert [part.numel() for part in parts] == receive
            received.copy_(torch.cat(parts))

        # On the device it would be read only now: what changes before the end is the test's to see.
        mine = torch.split(sent if group is self._group else sent.clone(), send)
        if group is self._group:
            return self._mail.post("scatter", own, mine, fill)
        fill(self._all(mine))
        return None

    def gather_begin(self, rows: Tensor, tag: int, group: Any) -> list[Posted]:
        own = self._who.rank

        def fill(found: list[Any]) -> None:
            for rank, row in enumerate(found):
                if rank != own:
                    rows[rank].copy_(row)

        return [self._mail.post("gather", own, rows[own].clone(), fill)]

    def ready(self, work: Posted, device: torch.device) -> bool:
        return work.is_there()

    def wait(self, work: Posted | None) -> None:
        if work is not None:
            work.wait()

    def from_first(self, tensor: Tensor, group: Any) -> None:
        tensor.copy_(self._all(tensor.clone())[0])


@dataclass
class ThreadLine(Line):
    """A rank's line, with wishes of its own."""

    wishes: Wishes = field(default_factory=Wishes)

    def wish(self) -> Wish:
        return self.wishes.now()

    def settle(self, tokens: tuple[int, ...]) -> None:
        self.wishes.settle(tokens)


@dataclass
class Rank:
    """One rank, while it trains."""

    rank: int
    line: ThreadLine
    session: Session
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """Update, lane and index of every microbatch that it has computed."""

    def hear(self, wish: str, token: int = 0) -> None:
        self.line.wishes.hear({"wish": wish, "token": token})


@contextmanager
def _patched(together: Together, lines: list[ThreadLine]) -> Iterator[None]:
    rooms = {
        "reduce": ("sum_over_ranks", "gather_all", "dist"),
        "exchange": ("gather_begin", "ready", "scatter_all", "wait"),
        "fsdp": ("second_group",),
        "buffers": ("from_first",),
        "sharing": ("gather_all", "scatter_all", "wait"),
        "agreement": ("gather_all",),
    }
    with pytest.MonkeyPatch.context() as patch:
        for room, names in rooms.items():
            for name in names:
                patch.setattr(f"coherent_ray.train.{room}.{name}", getattr(together, name))
        patch.setattr("coherent_ray.train.session.Line", lambda run_id, attempt, rank: lines[rank])
        patch.setattr("coherent_ray.train.session.report_outcome", lambda run: None)
        yield


def train_ranks(
    config: Config, ranks: int, look: Look | None = None, lasting: Coordinator | None = None
) -> list[Rank]:
    """Let some ranks train to the configured end, as one attempt.

    Args:
        config: The run.
        ranks: How many.
        look: Looks in at each microbatch.
        lasting: The coordinator, where it outlives the attempt, as the actor does.

    Raises:
        BaseException: What rank 0 raised, or else another.
    """
    with working(), nullcontext(lasting) if lasting else coordinating(config) as coordinator:
        attempt = coordinator.open_attempt()
        request = request_for(config, attempt)
        admitted = [find_out(request, rank, ranks, CPU) for rank in range(ranks)]
        return _run(admitted, coordinator, look)


def _run(admitted: list[Admitted], coordinator: Coordinator, look: Look | None) -> list[Rank]:
    ranks = len(admitted)
    together = Together(ranks)
    lines = [ThreadLine(coordinator, each.attempt, each.rank) for each in admitted]
    with _patched(together, lines), ThreadPoolExecutor(ranks) as pool:
        made = [Rank(r, lines[r], _session(admitted[r])) for r in range(ranks)]
        jobs = [pool.submit(_train, each, admitted[each.rank], together, look) for each in made]
        errors = [job.exception() for job in jobs]
    for error in sorted(
        (e for e in errors if e is not None),
        key=lambda e: isinstance(e, threading.BrokenBarrierError),
    ):
        raise error
    return made


def _session(admitted: Admitted) -> Session:
    assert admitted.task is not None
    return Session(admitted, admitted.task.collate)


def _train(rank: Rank, admitted: Admitted, together: Together, look: Look | None) -> None:
    """The loop of configured tasks; see `coherent_ray.train.loop`."""
    together.join(rank.rank)
    task, model = admitted.task, admitted.model
    assert task is not None
    assert model is not None
    try:
        with rank.session as run:
            optimizer = loop.make_optimizer(task, model.train(), run.config)
            scheduler = loop.make_scheduler(task, optimizer, run.updates_total)
            run.track(model, optimizer, scheduler, average=loop.make_average(task, model))
            for update in run.updates():
                for micro in update.microbatches():
                    update.backward(*task.loss(run.model, micro.batch))
                    rank.seen.append((update.number, micro.lane, micro.index))
                    if look is not None:
                        look(rank, update.number, micro)
                update.step()
    except BaseException:
        together.leave()
        raise
