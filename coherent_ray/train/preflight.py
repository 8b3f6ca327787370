"""What can be known to be wrong before Ray starts: storage, task, data, a run that is complete.

Whatever fails here costs the user seconds, and one clear error, not a cluster's start.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.traces import read_whole
from coherent_ray.config import Config
from coherent_ray.data.dataset import DatasetManifest
from coherent_ray.data.plan import Plan
from coherent_ray.errors import ConfigError, TaskError
from coherent_ray.storage import open_storage
from coherent_ray.storage.probe import probe
from coherent_ray.train import claims, datasets, resumable
from coherent_ray.train.identity import run_id_in
from coherent_ray.train.roots import require_place
from coherent_ray.train.session import total_updates
from coherent_ray.train.task import Task, call_factory, load_factory, load_task, look_in

_Made = TypeVar("_Made")
_KEYS = {"GPU": "cluster.use_gpu", "CPU": "cluster.num_cpus"}
_REMEDIES = {
    "GPU": "set cluster.use_gpu: false or fewer cluster.workers, look at CUDA_VISIBLE_DEVICES and "
    "the driver, or name a cluster that has them: cluster.address",
    "CPU": "raise cluster.num_cpus, or leave it out: then there are as many as the workers need",
}


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
        ClaimRefused: The job is another than that of the generation to go on from.
        Damage: The latest generation is damaged, and ``checkpoint.on_damage`` is ``refuse``.
        NoGeneration: No published generation is whole.
    """
    if config.task is None:
        raise ConfigError("no task is configured", where="task", remedy="set task.factory")
    check_resources(config)
    look_in(str(Path.cwd()), config.task.folder or "")
    storage = open_storage(config.run.root, config.storage.options)
    log = CommitLog(storage)
    history = read_whole(storage, log)
    run_id = run_id_in(config, storage, history)
    probe(storage, thorough=not history.records)
    load_task(config.task.factory, config.task.args)
    if config.data.prepare is not None:
        call_factory(config.data.prepare.factory, config.data.prepare.args, "data.prepare.factory")
    dataset = datasets.scan_now(config)
    datasets.keep(storage, dataset)
    plan = Plan(datasets.identity_of(config, dataset))
    updates = total_updates(config, plan.updates_per_epoch)
    found = resumable.find(storage, log, config.checkpoint.on_damage, updates)
    if found.publish is not None and found.manifest is not None and found.publish.update < updates:
        # Every rank would say so, when the workers are up.
        claims.check_job(config, found.manifest.header)
    return Preflight(
        run_id=run_id,
        updates=updates,
        done=found.publish.update if found.publish else 0,
        latest=found.publish.name if found.publish else None,
        notes=found.notes,
    )


def faults(config: Config) -> list[ConfigError]:
    """Return all that is wrong with what a configuration names; changes nothing anywhere.

    Looks at what a start looks at first: resources, the place of the root, task, and data, as far
    as its files are there. Data that `data.prepare` has yet to make is not missed. Of the bytes,
    the rows of one microbatch are read, and given to the task.
    """
    found: list[ConfigError] = []

    def tried(step: Callable[[], _Made]) -> _Made | None:
        try:
            return step()
        except ConfigError as error:
            found.append(error)
            return None

    look_in(str(Path.cwd()), (config.task.folder if config.task else None) or "")
    tried(lambda: check_resources(config))
    tried(lambda: require_place(config.run.root))
    named, prepare = config.task, config.data.prepare
    task = tried(lambda: load_task(named.factory, named.args)) if named else None
    if prepare is not None:
        tried(lambda: load_factory(prepare.factory, "data.prepare.factory"))
    if prepare is None or all(map(_is_there, config.data.source.paths)):
        data = config.data.model_copy(update={"verify": "structure"})
        dataset = tried(lambda: datasets.scan_now(config.model_copy(update={"data": data})))
        if dataset is not None and task is not None:
            tried(lambda: _try_collate(task, config, dataset))
    return found


def _try_collate(task: Task, config: Config, dataset: DatasetManifest) -> None:
    """Give a task the rows of one microbatch, as the loader would.

    Raises:
        TaskError: Its ``collate`` raised: most often because a column is missing.
        DataError: The rows cannot be read.
    """
    rows = datasets.rows_to_try(config, dataset)
    try:
        task.collate(rows)
    except Exception as error:
        kind, columns = type(error).__name__, ", ".join(name for name, _ in dataset.columns)
        missing = f"the data has no column {error}" if isinstance(error, KeyError) else f"{error}"
        raise TaskError(
            f"collate failed on the first rows of the data with {kind}: {missing}",
            where=f"{type(task).__name__}.collate",
            remedy=f"the columns that are used are: {columns}; see data.source.columns, which may "
            "leave some out, and the task's arguments, which may name others",
            details={"traceback": traceback.format_exc(), "columns": list(rows)},
        ) from error


def _is_there(path: str) -> bool:
    return Path(path).exists()


def check_resources(config: Config) -> None:
    """Check that a local Ray can have what the workers need; it would wait for it for ever.

    CPUs are only counted, never measured: a local Ray claims as many as its workers need.

    Raises:
        ConfigError: It cannot.
    """
    cluster = config.cluster
    if cluster.address is not None:
        return
    need = cluster.needs
    have = {"GPU": float(torch.cuda.device_count()), "memory": 0.0, "object_store_memory": 0.0}
    if cluster.num_cpus is not None:
        have["CPU"] = float(cluster.num_cpus)
    short = [name for name in need if need[name] > have.get(name, need[name])]
    if not short:
        return
    name = short[0]
    workers = "1 worker needs" if cluster.fewest == 1 else f"{cluster.fewest} workers need"
    raise ConfigError(
        f"{workers} {need[name]:g} {name}, and a local Ray has {have[name]:g} here",
        where=_KEYS.get(name, f"cluster.resources_per_worker.{name}"),
        remedy=_REMEDIES.get(name, "leave it out; a local Ray does not portion this"),
        details={"resource": name, "needed": need[name], "here": have[name]},
    )
