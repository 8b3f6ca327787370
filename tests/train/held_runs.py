"""Runs whose snapshots stay in memory: ranks as threads, and a real shelf for each node.

What is left out is Ray: calls to a keeper are made at once, in the caller's thread, and admission's
questions are asked of the shelves directly. Deaths are exceptions that nothing of the product may
catch; what a real SIGKILL leaves is tested by `test_slots`, on real Ray by the campaign.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from small_run import CPU, Coordinator, coordinating, request_for, root_of, working
from threaded import Look, Rank, _run

from coherent_ray.commit.log import CommitLog
from coherent_ray.config import Config
from coherent_ray.train.admission import Expected, Ticket, judge
from coherent_ray.train.admit import Admitted, Request, describe, find_out
from coherent_ray.train.backend import tickets_for
from coherent_ray.train.memory.offer import Offer, of_entries
from coherent_ray.train.memory.shelf import Entry, Reserved, Shelf


class Killed(BaseException):
    """The end of a process, as far as a thread can have one."""


@dataclass
class DirectKeeper:
    """A rank's line to the shelf of its node, and to the next one's."""

    shelf: Shelf
    partner: Shelf | None = None
    answers: int = 2**31
    """How many calls about what was written are answered."""

    def reserve(self, *args: int) -> Future[tuple[list[Reserved], bool]]:
        return _done(lambda: (self.shelf.reserve(*args), self.partner is None))

    def written(self, name: str, digest: str, replicas: int) -> Future[Any]:
        self.answers -= 1
        return _done(lambda: self._written(name, digest)) if self.answers >= 0 else Future()

    def _written(self, name: str, digest: str) -> str:
        entry = self.shelf.written(name, digest)
        if self.partner is None or entry is None:
            return "alone"
        copy(self.shelf, entry, self.partner)
        return "sent"


def copy(shelf: Shelf, entry: Entry, other: Shelf, part: int = 1000) -> bool:
    """Send a snapshot to another shelf as a keeper does."""
    for start in range(0, entry.facts.size, part):
        other.receive(entry.facts, start, shelf.read(entry.at.name, entry.digest, start, part))
    return other.received(shelf.words(entry.at.name, entry.digest), entry.shard)


def _done(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass
class Cluster:
    """Nodes with a shelf each, and one run on them."""

    config: Config
    nodes: int = 1
    shelves: list[Shelf] = field(init=False)
    keepers: list[DirectKeeper] = field(init=False)
    offers: list[Offer | None] = field(default_factory=list)
    """What each attempt was offered."""
    tickets: list[Ticket] = field(default_factory=list)
    """Of the last admission."""
    diverged: int = 0
    _rank: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.shelves = [
            # The first node is this process's: "" is what it is called where there is no Ray.
            Shelf("small", keeper=f"keeper-{n}", node=f"node-{n}" if n else "")
            for n in range(self.nodes)
        ]
        ring = [*self.shelves[1:], *self.shelves[:1]]
        partners = ring if self.nodes > 1 else [None]
        self.keepers = [DirectKeeper(s, p) for s, p in zip(self.shelves, partners, strict=True)]

    def entries(self) -> list[Entry]:
        return [entry for shelf in self.shelves for entry in shelf.entries()]

    def held(self) -> dict[int, list[int]]:
        """Return the updates that are held of each rank, each once."""
        found: dict[int, set[int]] = {}
        for entry in self.entries():
            found.setdefault(entry.facts.rank, set()).add(entry.facts.update)
        return {rank: sorted(updates) for rank, updates in sorted(found.items())}

    def fetch(self, entry: Entry, start: int, length: int) -> bytes:
        shelf = next(s for s in self.shelves if s._keeper == entry.keeper)
        return shelf.read(entry.at.name, entry.digest, start, length)

    def words_of(self, entry: Entry) -> bytes:
        shelf = next(s for s in self.shelves if s._keeper == entry.keeper)
        return shelf.words(entry.at.name, entry.digest)

    def admit(self, coordinator: Coordinator, ranks: int) -> list[Admitted]:
        """Open an attempt, and let all ranks through the gate."""
        request = request_for(self.config, coordinator.open_attempt())
        history = CommitLog(root_of(self.config)).read()
        offer = of_entries(self.entries(), self.words_of, history, self.diverged)
        self.offers.append(offer)
        admitted: list[Admitted] = []

        def ask(asked: Request) -> list[Ticket]:
            admitted[:] = [find_out(asked, rank, ranks, CPU) for rank in range(ranks)]
            return [describe(a, Ticket(a.rank, ranks, "here")) for a in admitted]

        self.tickets = list(tickets_for(replace(request, offer=offer), ask))
        expected = Expected(request.run_id, request.attempt, ranks)
        judge(self.tickets, expected, same_environment=self.config.run.claim != "statistical")
        used = offer is not None and self.tickets[0].generation == offer.name
        for shelf in self.shelves:
            shelf.settle(request.attempt, offer.digests if offer is not None and used else [])
        return admitted

    def train(self, coordinator: Coordinator, ranks: int, look: Look | None = None) -> list[Rank]:
        """Let some ranks train, as one attempt, to the end or to a death."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coherent_ray.train.memory.held.fetched", self.fetch)
            admitted = self.admit(coordinator, ranks)
            homes = {id(a): self.keepers[a.rank * self.nodes // ranks] for a in admitted}
            here = threading.local()

            def wired(found: Admitted, note: Any, hook: Any) -> Any:
                patch_keeper(here, homes[id(found)])
                return memory_of(found, note, hook)

            from coherent_ray.train.memory.wiring import memory_of

            patch.setattr("coherent_ray.train.memory.wiring.keeper_of", lambda run_id: here.keeper)
            patch.setattr("coherent_ray.train.session.memory_of", wired)
            return _run(admitted, coordinator, look)


def patch_keeper(here: threading.local, keeper: DirectKeeper) -> None:
    here.keeper = keeper


@contextmanager
def running(config: Config, nodes: int = 1) -> Iterator[tuple[Cluster, Coordinator]]:
    """A cluster, and a coordinator that outlives the attempts, as the actor does."""
    with working(), coordinating(config) as coordinator:
        yield Cluster(config, nodes), coordinator


def kill_at(update: int, rank: int = 0) -> Look:
    """Return a look that kills a rank in an update, before its reduction."""

    def look(at: Rank, number: int, micro: Any) -> None:
        if (at.rank, number) == (rank, update):
            raise Killed

    return look
