"""Coherent Ray without Ray: the ranks' savers and the coordinator's service, as in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gauntlet.column import Column, Found

if TYPE_CHECKING:
    from gauntlet.column import State

COLUMN = Column(
    key="ours",
    name="Coherent Ray",
    distribution="coherent-ray",
    imports="coherent_ray",
    own=True,
    preload=("coherent_ray.drill.saves", "coherent_ray.commit.generations"),
    settings="two ranks, each with its Saver, and the coordinator's Service, in one process and "
    "without Ray (coherent_ray.drill.saves); defaults; reads by read_whole, Generations.select and "
    "load_state, as a start does",
    pointers=("latest.json", "log/*.json"),
)
RANKS = 2


class Session:
    """See `gauntlet.column.Session`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._story: Any = None
        self._states: dict[int, Any] = {}

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        self._begin(step, state)
        self._settle()

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        self._begin(step, state)
        change()
        self._settle()

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        from coherent_ray.commit.generations import Generations
        from coherent_ray.commit.traces import read_whole
        from coherent_ray.state import load_state

        storage = self._storage()
        read_whole(storage)  # as a run's start does, before anything else
        selected = Generations(storage).select("fall_back")
        if selected is None:
            return None
        state = load_state(storage, selected.manifest)
        says = "; ".join(str(damage).splitlines()[0] for damage in selected.skipped)
        return Found(selected.publish.name, state, says)

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        from coherent_ray.commit.generations import Generations

        generations = Generations(self._storage())
        publish = next(p for p in reversed(generations.history().publishes) if p.update == step)
        shards = [shard.path for shard in generations.manifest(publish).shards]
        receipts = [publish.receipts.path] if publish.receipts else []
        return [publish.manifest, *shards, *receipts]

    def close(self) -> None:
        """See `gauntlet.column.Session`."""
        if self._story is not None:
            self._story.close()

    def _begin(self, step: int, state: State) -> None:
        from coherent_ray.config.sections import Checkpoint
        from coherent_ray.drill.saves import Saves
        from coherent_ray.state import State as Flat

        if self._story is None:
            options = Checkpoint(ack_timeout_s=60.0)
            self._story = Saves(
                self._storage, RANKS, state_of=lambda update: self._states[update], options=options
            )
            self._story.open(step - 1)
        self._states = {step: Flat(dict(state), {})}
        self._story.begin()

    def _settle(self) -> None:
        fates = [saver.settle().fate for saver in self._story.savers]
        for fate in fates:
            if fate.kind != "published":
                raise RuntimeError(f"{fate.kind}: {fate.reason}")

    def _storage(self) -> Any:
        from coherent_ray.storage import LocalStorage

        return LocalStorage(self._where)


def read_on(where: str, examples: int, batch: int) -> list[int]:
    """Read an epoch with two ranks, save, and go on with three; return the examples as trained.

    Args:
        where: An empty root.
        examples: Of the epoch.
        batch: Examples of an update, over all ranks.
    """
    from coherent_ray.commit.generations import Generations
    from coherent_ray.commit.manifest import PlanIdentity
    from coherent_ray.data import order
    from coherent_ray.data.plan import Plan
    from coherent_ray.digests import digest_of
    from coherent_ray.drill.saves import Saves
    from coherent_ray.storage import LocalStorage

    identity = PlanIdentity(digest_of(b"gauntlet"), examples, 7, order.NAME, batch, 6, batch)
    plan = Plan(identity)
    half = plan.updates_per_epoch // 2
    trained = [i for update in range(1, half + 1) for i in _of_ranks(plan, update, 2)]
    story = Saves(lambda: LocalStorage(where), 2, items=1_000, plan=identity)
    story.open(half - 1)
    fates = {saved.fate.kind for saved in story.save()}
    story.close()
    selected = Generations(LocalStorage(where)).select()
    assert fates == {"published"}
    assert selected is not None
    header = selected.manifest.header
    plan = Plan(header.plan)
    for update in range(header.position.update + 1, plan.updates_per_epoch + 1):
        trained += _of_ranks(plan, update, 3)
    return trained


def _of_ranks(plan: Any, number: int, ranks: int) -> list[int]:
    update = plan.update(number)
    return [
        int(example)
        for rank in range(ranks)
        for lane in plan.lanes_of(rank, ranks)
        for microbatch in update.lanes[lane].microbatches
        for example in plan.example_ids(microbatch.start, microbatch.stop, update.epoch)
    ]
