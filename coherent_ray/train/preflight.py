"""What can be known to be wrong before Ray starts: storage, task, data, a run that is complete.

Whatever fails here costs the user seconds, and one clear error, not a cluster's start.
"""

from __future__ import annotations

from dataclasses import dataclass

from coherent_ray.commit.log import CommitLog
from coherent_ray.config import Config
from coherent_ray.data.plan import Plan
from coherent_ray.errors import ConfigError
from coherent_ray.storage import open_storage
from coherent_ray.storage.probe import probe
from coherent_ray.train import datasets, resumable
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.session import total_updates
from coherent_ray.train.task import call_factory, load_task


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a run before it starts."""

    run_id: str
    updates: int
    """Updates of the whole run."""
    done: int
    """Updates that the generation to resume from holds."""
    latest: str | None
    """The generation to resume from: the newest that is whole."""
    notes: tuple[str, ...] = ()
    """What the user should know although it is no reason to stop."""

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to train."""
        return self.done >= self.updates


def check(config: Config) -> Preflight:
    """Find out what a start would find out, as far as this process can.

    Makes the data where the configuration says how, and keeps the dataset's manifest in the root.

    Raises:
        ConfigError: The configuration cannot be run; or a subclass that says what is wrong.
        StorageError: The root cannot be written.
        LogDamaged: The root's commit log cannot be trusted.
        Damage: The latest generation is damaged, and ``checkpoint.on_damage`` is ``refuse``.
        NoGeneration: No published generation is whole.
    """
    if config.task is None:
        raise ConfigError("no task is configured", where="task", remedy="set task.factory")
    storage = open_storage(config.run.root, config.storage.options)
    run_id = run_id_of(config)
    probe(storage, thorough=not CommitLog(storage).read().records)
    load_task(config.task.factory, config.task.args)
    if config.data.prepare is not None:
        call_factory(config.data.prepare.factory, config.data.prepare.args, "data.prepare.factory")
    dataset = datasets.scan_now(config)
    datasets.keep(storage, dataset)
    plan = Plan(datasets.identity_of(config, dataset))
    updates = total_updates(config, plan.updates_per_epoch)
    found = resumable.find(storage, CommitLog(storage), config.checkpoint.on_damage, updates)
    return Preflight(
        run_id=run_id,
        updates=updates,
        done=found.publish.update if found.publish else 0,
        latest=found.publish.name if found.publish else None,
        notes=found.notes,
    )
