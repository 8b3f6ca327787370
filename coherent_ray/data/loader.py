"""The loader: a rank's batches, read and collated ahead in one background thread.

What was read ahead and never used cannot be lost: positions are computed, so a new loader that
starts at the next update reads it again. An error while reading surfaces at the update that it
belongs to, after every update before it. Closing joins the thread; none outlives its loader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from coherent_ray.data.columns import Column, Rows
from coherent_ray.data.order import Positions
from coherent_ray.data.plan import LanePlan, Microbatch, Plan, UpdatePlan
from coherent_ray.data.sources import Source
from coherent_ray.digests import Digest
from coherent_ray.errors import DataError

#: Columns that the loader adds to what `collate` sees.
EXAMPLE_COLUMN = "_example"
"""int64, shape ``[n]``: row numbers of the dataset."""
SEED_COLUMN = "_seed"
"""uint64, shape ``[n]``: one seed an example, keyed by (seed, epoch, example), for augmentation."""

Collate = Callable[[Mapping[str, Column]], Any]


@dataclass(frozen=True, slots=True)
class LoadedMicrobatch:
    """One microbatch with its data."""

    plan: Microbatch
    batch: Any
    """What the task's ``collate`` returned."""


@dataclass(frozen=True, slots=True)
class LoadedLane:
    """One lane of an update with its data; a lane without examples has no microbatches."""

    lane: int
    microbatches: tuple[LoadedMicrobatch, ...]


@dataclass(frozen=True, slots=True)
class LoadedUpdate:
    """An update, and the data of the lanes that this rank carries."""

    plan: UpdatePlan
    """The whole update, over all lanes."""
    ids: Digest
    """Digest of the examples of *all* lanes in order: the same on every rank."""
    lanes: tuple[LoadedLane, ...]
    """Lanes of this rank, in order."""
    spare: LoadedMicrobatch | None = None
    """For a rank that must take a pass although its lanes are empty: the update's first."""


class Loader:
    """Reads updates one after the other for one rank."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        rank: int,
        ranks: int,
        collate: Collate,
        *,
        prefetch: int = 2,
        spare: bool = False,
    ) -> None:
        """Make a loader; nothing is read yet.

        Args:
            source: Where rows come from.
            plan: Which rows an update takes.
            rank: From 0.
            ranks: From 1 to the plan's lanes.
            collate: Rows to batch; called in the background thread, so it must not touch global
                random state (it would race the model's): `SEED_COLUMN` is there for it.
            prefetch: Updates that are read ahead; 0: read when asked, without a thread.
            spare: Read the update's first microbatch where no lane of the rank has any.

        Raises:
            DataError: The source has not as many examples as the plan.
            ValueError: No such rank.
        """
        if len(source) != plan.identity.examples:
            raise DataError(
                f"the data has {len(source)} examples, the plan {plan.identity.examples}",
                remedy="restore the data that the run was started with",
            )
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}")
        self._source = source
        self._plan = plan
        self._lanes = plan.lanes_of(rank, ranks)
        self._collate = collate
        self._prefetch = prefetch
        self._spare = spare
        self._readers: list[_Reader] = []

    def updates(self, first: int, last: int | None = None) -> Iterator[LoadedUpdate]:
        """Yield updates, in order, each exactly once.

        Args:
            first: First update, from 1.
            last: Last update, included; None: without end.

        Raises:
            Exception: What source or collate raised, with a note that names update and lane, at
                the update that it belongs to.
        """
        numbers = _count(first, last)
        if not self._prefetch:
            yield from map(self._load, numbers)
            return
        reader = _Reader(self._load, numbers, self._prefetch)
        self._readers.append(reader)
        try:
            yield from reader
        finally:
            reader.close()
            self._readers.remove(reader)

    def close(self) -> None:
        """Stop reading and wait for the thread; may be called more than once."""
        for reader in list(self._readers):
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, number: int) -> LoadedUpdate:
        update = self._plan.update(number)
        ids = self._plan.example_ids(update.start, update.stop, update.epoch)
        lanes = tuple(self._load_lane(update, update.lanes[lane], ids) for lane in self._lanes)
        spare = None
        if self._spare and not any(lane.microbatches for lane in lanes):
            first = replace(update.lanes[0], microbatches=update.lanes[0].microbatches[:1])
            spare = self._load_lane(update, first, ids).microbatches[0]
        return LoadedUpdate(update, self._plan.ids_digest(update), lanes, spare)

    def _load_lane(self, update: UpdatePlan, lane: LanePlan, ids: Positions) -> LoadedLane:
        loaded = []
        for micro in lane.microbatches:
            chosen = ids[micro.start - update.start : micro.stop - update.start]
            try:
                batch = self._collate(self._rows(chosen, update.epoch))
            except Exception as error:
                error.add_note(
                    f"while reading microbatch {micro.index} of lane {lane.lane} of update "
                    f"{update.update} (positions {micro.start} to {micro.stop - 1} of epoch "
                    f"{update.epoch})"
                )
                raise
            loaded.append(LoadedMicrobatch(micro, batch))
        return LoadedLane(lane.lane, tuple(loaded))

    def _rows(self, ids: Positions, epoch: int) -> Rows:
        rows = self._source.rows(ids)
        for name in (EXAMPLE_COLUMN, SEED_COLUMN):
            if name in rows:
                raise DataError(
                    f"the data has a column {name!r}, a name that is taken",
                    remedy="rename the column, or leave it out of data.source.columns",
                )
        seeds = self._plan.example_seeds(ids, epoch)
        return {**rows, EXAMPLE_COLUMN: ids.astype(np.int64, copy=True), SEED_COLUMN: seeds}


class _Reader:
    """A thread that stays a bounded number of updates ahead of whoever iterates."""

    def __init__(
        self, load: Callable[[int], LoadedUpdate], numbers: Iterator[int], ahead: int
    ) -> None:
        self._load = load
        self._numbers = numbers
        self._ahead = ahead
        self._ready: deque[LoadedUpdate | Exception] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="coherent-ray-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[LoadedUpdate]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
                if not self._ready:
                    return
                item = self._ready.popleft()
                self._changed.notify_all()
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for number in self._numbers:
                if not self._put(self._load(number)):
                    return
        except Exception as error:
            self._put(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: LoadedUpdate | Exception) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._closed


def _count(first: int, last: int | None) -> Iterator[int]:
    number = first
    while last is None or number <= last:
        yield number
        number += 1
