"""A rehearsal: a run in this process, without Ray. Its ranks are threads (`ranks`).

Everything that decides is the product's: admission, the loop, the reduction, the saves, the commit
protocol. What is missing is what Ray brings: other processes, and their deaths. A death here is an
exception that no one catches, in every rank at the same point; what was not published by then is
gone, as it is when processes die.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.read_back import Reply
from coherent_ray.commit.service import Service
from coherent_ray.config import Config
from coherent_ray.drill.patching import Patch, planted
from coherent_ray.drill.ranks import Collectives, Crew
from coherent_ray.storage import open_storage
from coherent_ray.train import collectives, fsdp, hooks, loop, reduce, session
from coherent_ray.train.admission import Expected, Ticket, judge
from coherent_ray.train.admit import Admitted, Request, describe, find_out
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.wishes import WISH_SAVE, WISH_STOP, Wish

Result = TypeVar("Result")
#: Seconds that a save may take to be published.
_PUBLISH_S = 120.0
#: Seconds between two looks at whether somebody has died.
_LOOK_S = 0.05
_TOKENS = itertools.count()


class Died(BaseException):
    """A rank's death. No ``Exception``: nobody may handle it."""


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of the group: how many ranks, and how it ends."""

    ranks: int
    stops_after: int | None = None
    """It is asked to stop, and publishes a generation, after this update."""
    dies_at: tuple[str, int] | None = None
    """A point of `coherent_ray.train.hooks`, and the update from which on it is deadly."""


class Here(threading.local):
    """What belongs to one rank's thread."""

    admitted: Admitted | None = None

    def current(self) -> Admitted:
        """Stand in for `coherent_ray.train.admit.current`."""
        assert self.admitted is not None
        return self.admitted


def rehearse(config: Config, life: Life, patches: Sequence[Patch] = ()) -> bool:
    """Run a configuration for one life, from where its published history ends.

    Args:
        config: The run.
        life: How many ranks it has, and how it ends.
        patches: What is to be different in it.

    Returns:
        Whether it ended by itself: with the last update, or where it was asked to stop.

    Raises:
        CoherentRayError: It was not admitted, or failed.
    """
    config = config.resolved()
    crew, here = Crew(life.ranks), Here()
    with planted(patches), _coordinating(config) as office:
        token = f"rehearsal-{os.getpid()}-{next(_TOKENS)}"
        attempt = office.call(office.service.open_attempt, token)
        values = config.model_dump(mode="json")
        request = Request(values, str(Path.cwd()), run_id_of(config), attempt)

        def lived(rank: int) -> None:
            here.admitted = _admitted(crew, request, config)
            loop.train(values)

        def line(run_id: str, attempt: int, rank: int) -> Line:
            return Line(office, crew, life, rank, here.current().position.update)

        with in_threads(crew, here, line), _hooked(life):
            try:
                crew.run(lived)
            except Died:
                return False
    return True


@contextmanager
def in_threads(crew: Crew, here: Here, line: Callable[..., Any]) -> Iterator[None]:
    """Let the product train in the threads of a crew; torch's settings are put back afterwards.

    Args:
        crew: The ranks.
        here: Where each finds what it was admitted with.
        line: Stands where `coherent_ray.train.coordination.Line` does.
    """

    def aside(original: Callable[..., None]) -> Callable[..., None]:
        def advance(run: Any, *arguments: Any) -> None:
            with crew.aside():
                original(run, *arguments)

        return advance

    stands_in = Collectives(crew)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    random_state = torch.random.get_rng_state()
    patches: list[Patch] = [
        (collectives, "dist", lambda _: stands_in),
        (reduce, "dist", lambda _: stands_in),
        (loop, "current", lambda _: here.current),
        (session, "current", lambda _: here.current),
        (session, "Line", lambda _: line),
        # One rank runs at a time: nothing can be sent while another computes.
        (fsdp, "second_group", lambda _: lambda: None),
        (session, "report_outcome", lambda _: lambda run: None),
        (session.Session, "advance", aside),
    ]
    try:
        with planted(patches):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        torch.random.set_rng_state(random_state)


def device_of(config: Config) -> torch.device:
    """Return where a rehearsal computes: the ranks share one device."""
    return torch.device("cuda") if config.cluster.use_gpu else torch.device("cpu")


def _admitted(crew: Crew, request: Request, config: Config) -> Admitted:
    """Let a rank through the gate, which opens for all of them or for none."""
    blank = Ticket(crew.rank, crew.ranks, f"rank-{crew.rank}")
    admitted = find_out(request, crew.rank, crew.ranks, device_of(config))
    tickets = crew.meet(describe(admitted, blank))
    expected = Expected(request.run_id, request.attempt, crew.ranks)
    judge(tickets, expected, same_environment=config.run.claim != "statistical")
    return admitted


# --- death ----------------------------------------------------------------------------------------


@contextmanager
def _hooked(life: Life) -> Iterator[None]:
    before = hooks.installed()
    if life.dies_at is not None:
        hooks.install(_Deadly(*life.dies_at))
    try:
        yield
    finally:
        hooks.install(before)


class _Deadly:
    """A hook at which every rank dies that comes by."""

    def __init__(self, point: str, update: int) -> None:
        self._point = point
        self._from = update
        self._update = 0

    def __call__(self, reached: str) -> None:
        name, _, update = reached.partition("@")
        if update:
            self._update = max(self._update, int(update))
        if name == self._point and self._update >= self._from:
            raise Died(reached)


# --- the coordinator ------------------------------------------------------------------------------


class _Office:
    """The coordinator's service, alive in an event loop of its own."""

    def __init__(self, config: Config) -> None:
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service = Service(
            run_id_of(config), lambda: open_storage(config.run.root, config.storage.options)
        )

    def begin(
        self, method: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any
    ) -> Future[Result]:
        if self._closed:
            raise RuntimeError("the coordinator is gone")
        return asyncio.run_coroutine_threadsafe(method(*arguments), self._loop)

    def call(self, method: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        return self.begin(method, *arguments).result(_PUBLISH_S)

    def close(self) -> None:
        self.call(self.service.close)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def _coordinating(config: Config) -> Iterator[_Office]:
    office = _Office(config)
    try:
        yield office
    finally:
        office.close()


class NoLine:
    """A rank's line, as `coherent_ray.train.coordination.Line`, to nobody: nothing is wished."""

    def acknowledge(self, word: Acknowledgement) -> Reply:
        """Refuse: nothing is saved here."""
        raise AssertionError("nothing is saved without a coordinator")

    def withdraw(self, number: int, reason: str) -> None:
        """Tell nobody."""

    def report(self, progress: dict[str, Any], *, now: bool = False) -> None:
        """Tell nobody."""

    def stand(self, ranks: int, update: int, phase: str) -> None:
        """Tell nobody."""

    def wish(self) -> Wish:
        """Wish for nothing."""
        return Wish()

    def settle(self, tokens: tuple[int, ...]) -> None:
        """Forget nothing, as nothing was wished."""

    def leave(self, why: str) -> None:
        """Tell nobody: a thread is not told to end."""

    def left(self, generation: str | None) -> None:
        """Tell nobody."""


class Line(NoLine):
    """A rank's line to the coordinator, as `coherent_ray.train.coordination.Line`."""

    def __init__(self, office: _Office, crew: Crew, life: Life, rank: int, update: int) -> None:
        self._office = office
        self._rank = rank
        self._crew = crew
        self._life = life
        self._update = update

    def acknowledge(self, word: Acknowledgement) -> Reply:
        """Hand in that a shard is durable, and wait for what the coordinator replies."""
        answer = self._office.begin(self._office.service.acknowledge, records.dump(word))
        while not self._crew.broken:
            with suppress(TimeoutError):
                return answer.result(_LOOK_S)
        # What the dead rank would have acknowledged never comes.
        return answer.result(0 if answer.done() else _LOOK_S)

    def withdraw(self, number: int, reason: str) -> None:
        """Say that this rank will never acknowledge a generation."""
        service = self._office.service
        self._office.begin(service.withdraw, service.attempt, number, self._rank, reason)

    def wish(self) -> Wish:
        """Return what is wished after the update that is under way."""
        stops = self._update + 1 == self._life.stops_after
        return Wish(WISH_STOP | WISH_SAVE if stops else 0)

    def settle(self, tokens: tuple[int, ...]) -> None:
        """Take in that the update under way has ended."""
        self._update += 1
