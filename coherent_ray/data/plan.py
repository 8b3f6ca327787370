"""The plan: which examples an update takes, in which lane and which microbatch.

Everything here follows from a `PlanIdentity` and a number by arithmetic; nothing is remembered and
nothing depends on the rank count. An update takes the next ``global_batch`` positions of its epoch;
the last update of an epoch takes what is left. Lanes split an update's positions into contiguous
parts, the first ones taking one more where they do not divide; ranks take contiguous blocks of
lanes.

Updates are numbered from 1 (update 0 is the state before the first step), epochs from 0. A position
counts examples *within its epoch*. After the last update of an epoch the position is the first of
the next epoch, never the end of the old one: one state, one name.

Randomness is keyed, never carried: `Plan.seed_for` and `Plan.example_seeds`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from coherent_ray import canonical
from coherent_ray.commit.manifest import DataPosition, PlanIdentity
from coherent_ray.data import order
from coherent_ray.data.order import EpochOrder, Positions
from coherent_ray.digests import Digest, digest_of


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The slice of a lane that one forward/backward takes."""

    index: int
    """From 0 within its lane."""
    start: int
    """First position in the epoch."""
    stop: int
    """The position after the last one."""

    @property
    def examples(self) -> int:
        """How many examples it holds, at least one."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One lane's part of an update; a lane of a short tail may be empty."""

    lane: int
    microbatches: tuple[Microbatch, ...]

    @property
    def examples(self) -> int:
        """How many examples it holds, possibly none."""
        return sum(m.examples for m in self.microbatches)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What one update takes, over all lanes."""

    update: int
    """From 1."""
    epoch: int
    """From 0."""
    start: int
    """First position in the epoch."""
    stop: int
    """The position after the last one."""
    lanes: tuple[LanePlan, ...]

    @property
    def examples(self) -> int:
        """How many examples all lanes take together, at least one."""
        return self.stop - self.start


class Plan:
    """The arithmetic of a `PlanIdentity`. Safe to share between threads."""

    def __init__(self, identity: PlanIdentity) -> None:
        """Accept an identity whose order this version computes.

        Raises:
            ValueError: The identity names another order than `order.NAME`.
        """
        if identity.order != order.NAME:
            raise ValueError(
                f"the data order is {identity.order!r}; this version computes {order.NAME!r}"
            )
        self.identity = identity
        self._orders: dict[int, EpochOrder] = {}

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch, the short last one included."""
        return -(-self.identity.examples // self.identity.global_batch)

    def update(self, number: int) -> UpdatePlan:
        """Return what an update takes.

        Args:
            number: The update, from 1.

        Raises:
            ValueError: There is no such update.
        """
        if number < 1:
            raise ValueError(f"updates are numbered from 1, and {number} was asked for")
        epoch, index = divmod(number - 1, self.updates_per_epoch)
        start = index * self.identity.global_batch
        stop = min(start + self.identity.global_batch, self.identity.examples)
        lanes = tuple(self._lane(lane, start, stop) for lane in range(self.identity.lanes))
        return UpdatePlan(number, epoch, start, stop, lanes)

    def after(self, number: int) -> DataPosition:
        """Return what is read next once an update is done; `number` 0 is the beginning."""
        if number < 0:
            raise ValueError(f"no position follows update {number}")
        epoch, index = divmod(number, self.updates_per_epoch)
        return DataPosition(epoch, index * self.identity.global_batch, number)

    def lanes_of(self, rank: int, ranks: int) -> range:
        """Return the lanes that a rank carries: a contiguous block, sizes differ by one at most.

        Args:
            rank: From 0.
            ranks: From 1 to `lanes`.

        Raises:
            ValueError: No such rank, or more ranks than lanes (a rank would carry nothing).
        """
        lanes = self.identity.lanes
        if not 0 <= rank < ranks <= lanes:
            raise ValueError(f"rank {rank} of {ranks} cannot carry a part of {lanes} lanes")
        return range(lanes * rank // ranks, lanes * (rank + 1) // ranks)

    def example_ids(self, start: int, stop: int, epoch: int) -> Positions:
        """Return the examples at the positions ``[start, stop)`` of an epoch.

        Returns:
            int64, shape ``[stop - start]``: rows of the dataset.

        Raises:
            IndexError: The positions do not lie in an epoch.
        """
        return self._order(epoch).at(np.arange(start, stop, dtype=np.int64))

    def ids_digest(self, update: UpdatePlan) -> Digest:
        """Return the digest of the examples of all lanes, in order, as receipts hold it."""
        return self._digest_of_ids(update.epoch, update.start, update.stop)

    def seed_for(self, purpose: str, *numbers: int) -> int:
        """Return a 63-bit seed that depends on the run's seed, a purpose and some numbers only.

        Args:
            purpose: What the seed is for; two purposes never share a seed.
            numbers: For example update, lane and microbatch.
        """
        key = ["seed", self.identity.seed, purpose, *numbers]
        return int(canonical.digest(key).partition(":")[2][:16], 16) >> 1

    def example_seeds(self, ids: Positions, epoch: int) -> npt.NDArray[np.uint64]:
        """Return one seed an example, keyed by (seed, epoch, example), for augmentation.

        Args:
            ids: int64, any shape.
            epoch: From 0.

        Returns:
            uint64, same shape. The same example in another batch, worker or run has the same one.
        """
        first = np.uint64(self.seed_for("example", epoch, 0))
        second = np.uint64(self.seed_for("example", epoch, 1))
        return order.mix64(order.mix64(ids.astype(np.uint64) ^ first) ^ second)

    def sampler_digest(self, position: DataPosition, rank: int, ranks: int) -> Digest:
        """Return a digest of all that decides what a rank reads next, derived anew each time.

        Covers the plan's identity, the position, the rank's lanes, and the very examples that
        these give for the next update. Any process that knows the identity can compute any rank's.

        Raises:
            ValueError: The position is not one that this plan passes through, or no such rank.
        """
        if position != self.after(position.update):
            raise ValueError(
                f"position {position.position} of epoch {position.epoch} is not where update "
                f"{position.update} ends; that is {self.after(position.update)}"
            )
        lanes = self.lanes_of(rank, ranks)
        following = self.update(position.update + 1)
        slices = [m for lane in lanes for m in following.lanes[lane].microbatches]
        start = slices[0].start if slices else following.stop
        stop = slices[-1].stop if slices else following.stop
        facts = {
            "plan": asdict(self.identity),
            "position": asdict(position),
            "rank": rank,
            "ranks": ranks,
            "lanes": list(lanes),
            "microbatches": [[m.start, m.stop] for m in slices],
            "ids": self._digest_of_ids(following.epoch, start, stop),
        }
        return canonical.digest(facts)

    def _digest_of_ids(self, epoch: int, start: int, stop: int) -> Digest:
        return digest_of(self.example_ids(start, stop, epoch).astype("<i8").tobytes())

    def _lane(self, lane: int, start: int, stop: int) -> LanePlan:
        each, more = divmod(stop - start, self.identity.lanes)
        first = start + lane * each + min(lane, more)
        last = first + each + (lane < more)
        step = self.identity.microbatch
        return LanePlan(
            lane,
            tuple(
                Microbatch(index, at, min(at + step, last))
                for index, at in enumerate(range(first, last, step))
            ),
        )

    def _order(self, epoch: int) -> EpochOrder:
        # The loader reads ahead, so neighbours stay. A race computes one twice: harmless.
        orders = self._orders
        if epoch not in orders:
            identity = self.identity
            made = EpochOrder(identity.examples, identity.dataset_hash, identity.seed, epoch)
            kept = {e: o for e, o in orders.items() if abs(e - epoch) <= 1}
            self._orders = orders = {**kept, epoch: made}
        return orders[epoch]
