"""The saving half of a run, without Ray and without training: what a judge watches.

The code is the product's: each rank has its `Saver`, with its thread and its snapshot, and the
coordinator is the `Service` in an event loop of its own. Only the calls between them are made in
this process. The state of each update is known in advance, so whoever reads one back knows what it
must be.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from coherent_ray.commit import manifest as records
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    Acknowledgement,
    DataPosition,
    GenerationHeader,
    PlanIdentity,
    ReceiptSegment,
)
from coherent_ray.commit.read_back import Reply, reply_from_json
from coherent_ray.commit.service import Service
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import digest_of
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import begin
from coherent_ray.state.layout import layout_of
from coherent_ray.storage.base import Storage
from coherent_ray.train.hooks import Hook
from coherent_ray.train.receipts import Segment
from coherent_ray.train.saving import Saved, Saver
from coherent_ray.train.sealing import Boundary

RUN = "judged"
GLOBAL_BATCH = 32
PLAN = PlanIdentity(digest_of(b"judged data"), 1_000_000, 7, "feistel-v1", GLOBAL_BATCH, 4, 8)
OPTIONS = Checkpoint(block_bytes=65_536, ack_timeout_s=30.0)
#: Seconds that a call to the coordinator may take before it counts as a fault of the rig.
PATIENCE_S = 120.0


def state_at(update: int, items: int = 300_000) -> State:
    """Return what the run's state is after an update: the same wherever it is asked.

    Args:
        update: The update.
        items: Numbers of the largest of three tensors, of 4 bytes each.
    """
    generator = torch.Generator().manual_seed(update)
    return State(
        {
            "model/weight": torch.randn(items, generator=generator),
            "model/bias": torch.randn(5, generator=generator, dtype=torch.float64),
            "optimizer/weight/step": torch.tensor(float(update)),
        },
        {"scheduler": {"last_lr": [1.0 / (1 + update)]}},
    )


def boundary_at(  # noqa: PLR0917 - a generation's name has this many parts
    state: State,
    update: int,
    number: int,
    attempt: int,
    rank: int,
    ranks: int,
    plan: PlanIdentity = PLAN,
) -> Boundary:
    """Return what the generation of an update says on a rank, with one line of receipts."""
    lines = f'{{"update":{update}}}\n'.encode()
    layout = layout_of(state.tensors)
    path = f"receipts/{update:012d}-{update:012d}-g{number}-a{attempt}.jsonl"
    header = GenerationHeader(
        format=1,
        run_id=RUN,
        number=number,
        attempt=attempt,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(0, plan.global_batch * update, update),
        plan=plan,
        layout=layout,
        values=state.values,
        environment={},
        recipe={},
        receipt_tip=digest_of(lines),
        receipts=None,
    )
    segment = Segment(ReceiptSegment(path, len(lines), digest_of(lines), update, update), lines)
    own = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
    prints = begin(layout, state.tensors, copied=own)
    return Boundary(header, prints.finish, lambda state: segment)


class Loop:
    """An event loop in a thread, for a coordinator whose ranks are threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine, and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class Saves:
    """One attempt: a coordinator and its ranks, from the opening on. Close it in the end."""

    def __init__(
        self,
        open_root: Callable[[], Storage],
        ranks: int = 2,
        *,
        items: int = 300_000,
        state_of: Callable[[int], State] | None = None,
        plan: PlanIdentity = PLAN,
        options: Checkpoint = OPTIONS,
        hooks: Callable[[int], Hook | None] = lambda rank: None,
        **coordinator: Any,
    ) -> None:
        """Make the coordinator and the ranks; `open` begins.

        Args:
            open_root: Opens the run's root, once for the coordinator and once for each rank.
            ranks: How many.
            items: See `state_at`.
            state_of: Gives the state of an update; None: `state_at` does.
            plan: What the generations say of the data.
            options: The configuration's checkpoint section.
            hooks: Each rank's hook.
            coordinator: Options of `Service`.
        """
        self._ranks, self._plan = ranks, plan
        self._state_of = state_of or partial(state_at, items=items)
        self._root = open_root()
        self._loop = Loop()
        self.service = Service(RUN, open_root, **coordinator)
        roots = [open_root() for _ in range(ranks)]
        self._logs = [CommitLog(root) for root in roots]
        self.savers = [
            Saver(root, rank, options, Line(self.service, self._loop, rank), hooks(rank), log=log)
            for rank, (root, log) in enumerate(zip(roots, self._logs, strict=True))
        ]
        self.attempt = 0
        self._update = 0
        self._numbers = itertools.count(1)

    def open(self, update: int | None = None) -> int:
        """Open the attempt, and return the update that it goes on from.

        Args:
            update: Go on from here; None: from the latest generation.
        """
        self.attempt = self._loop.call(self.service.open_attempt(uuid.uuid4().hex))
        history = CommitLog(self._root).read()
        for log in self._logs:
            log.read()
        self._numbers = itertools.count(history.next_number)
        latest = history.latest.update if history.latest else 0
        self._update = latest if update is None else update
        return self._update

    def save(self) -> list[Saved]:
        """Do one update and save it; return how that went, for each rank.

        Raises:
            CoherentRayError: What ends a run: too many failed saves, or a later attempt.
        """
        self.begin()
        return [saved for saver in self.savers if (saved := saver.settle())]

    def begin(self) -> None:
        """Do one update and begin to save it."""
        self._update += 1
        state, number = self._state_of(self._update), next(self._numbers)
        for rank, saver in enumerate(self.savers):
            boundary = boundary_at(
                state, self._update, number, self.attempt, rank, self._ranks, self._plan
            )
            saver.begin(state, boundary, since=0.0)

    def close(self) -> None:
        """Let what is in flight finish, and end all threads."""
        for saver in self.savers:
            saver.close()
        self._loop.call(self.service.close())
        self._loop.close()


@dataclass(frozen=True, slots=True)
class Line:
    """A rank's line to the coordinator; see `Coordination`."""

    service: Service
    loop: Loop
    rank: int

    def acknowledge(self, word: Acknowledgement) -> Reply:
        """Hand the rank's word to the coordinator, and wait for its reply."""
        reply = self.loop.call(self.service.acknowledge(records.dump(word)))
        return reply_from_json(reply.to_json())

    def withdraw(self, number: int, reason: str) -> None:
        """Tell the coordinator that the rank will not acknowledge."""
        attempt = self.service.attempt
        self.loop.call(self.service.withdraw(attempt, number, self.rank, reason))
