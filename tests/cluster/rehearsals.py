"""Many admissions of one worker group, one after the other: a start costs seconds, a judgement not.

`RehearsalBackend` puts several wrong configurations before its workers, exactly as
`AdmissionBackend` would, writes down what each was refused with, and whether any worker had a
process group by then. Then it starts with the right one. Imported in Ray Train's controller.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny
import torch

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest, dump, manifest_path
from coherent_ray.commit.records import PublishBody
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage import StorageOptions, open_storage
from coherent_ray.storage.local import LocalStorage
from coherent_ray.train import admit
from coherent_ray.train.backend import AdmissionBackend, AdmissionConfig, admit_group, torch_config

#: The rank that sees another storage.
OTHER_RANK = 1


@dataclass(frozen=True)
class Refused:
    """What one rehearsal ended with."""

    name: str
    kind: str
    what: str
    where: str
    remedy: str
    details: dict[str, Any]
    process_groups: list[bool]
    """A worker: whether it had a process group by then."""


@dataclass
class RehearsalConfig(AdmissionConfig):
    """An `AdmissionConfig` with wrong configurations before the right one."""

    rehearsals: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[RehearsalBackend]:
        return RehearsalBackend


class RehearsalBackend(AdmissionBackend):
    """Refuses in turn, then starts."""

    def on_start(self, worker_group: Any, backend_config: RehearsalConfig) -> None:
        root = Path(backend_config.run["run"]["root"])
        for name, run in backend_config.rehearsals.items():
            with _STAGES.get(name, _no_stage)(worker_group, root):
                refused = _refused(name, worker_group, replace(backend_config, run=run))
            with record_of(root).open("a") as file:
                file.write(json.dumps(refused) + "\n")
        super().on_start(worker_group, backend_config)


def rehearsing(config: Config, wrong: dict[str, Config]) -> RehearsalConfig:
    """The `torch_config` that rehearses wrong configurations before a right one."""
    right = torch_config(config)
    return RehearsalConfig(
        timeout_s=right.timeout_s,
        run=right.run,
        code_path=right.code_path,
        rehearsals={name: torch_config(other).run for name, other in wrong.items()},
    )


def record_of(root: Path) -> Path:
    return Path(f"{root}.rehearsals")


def rehearsed(root: Path) -> dict[str, Refused]:
    """What each rehearsal ended with, by its name."""
    found = [Refused(**json.loads(line)) for line in record_of(root).read_text().splitlines()]
    return {refused.name: refused for refused in found}


def _refused(name: str, worker_group: Any, config: RehearsalConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "kind": "", "what": "", "where": "", "remedy": ""}
    facts["details"] = {}
    try:
        admit_group(worker_group, config)
    except CoherentRayError as error:
        facts |= {key: getattr(error, key) for key in ("what", "where", "remedy", "details")}
        facts["kind"] = type(error).__name__
    facts["process_groups"] = worker_group.execute(torch.distributed.is_initialized)
    return facts


# --- stages: what the storage looks like during a rehearsal ---------------------------------------

Stage = Callable[[Any, Path], AbstractContextManager[None]]


def _no_stage(worker_group: Any, root: Path) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _foreign_generation(worker_group: Any, root: Path) -> Iterator[None]:
    """Another run's generation lies where this run's latest should."""
    generations = Generations(open_storage(str(root)))
    publish = generations.find("latest")
    manifest = generations.manifest(publish)
    foreign = replace(manifest, header=replace(manifest.header, run_id="another-run"))
    path = root / publish.manifest
    own = path.read_bytes()
    path.write_bytes(dump(foreign))
    try:
        yield
    finally:
        path.write_bytes(own)


@contextmanager
def _later_view(worker_group: Any, root: Path) -> Iterator[None]:
    """One rank sees a storage that has one more generation than the others see."""
    later = Path(shutil.copytree(root, f"{root}.later"))
    publish_again(later)
    worker_group.execute_single(OTHER_RANK, see, str(root), str(later))
    try:
        yield
    finally:
        worker_group.execute_single(OTHER_RANK, see, str(root), str(root))


@contextmanager
def _changed_code(worker_group: Any, root: Path) -> Iterator[None]:
    """The task's code makes another model, from the same configuration."""
    worker_group.execute(tiny.set_width, tiny.WIDTH // 2)
    try:
        yield
    finally:
        worker_group.execute(tiny.set_width, tiny.WIDTH)


_STAGES: dict[str, Stage] = {
    "model": _changed_code,
    "another run's generation": _foreign_generation,
    "a later generation in one rank's view": _later_view,
}


def see(root: str, other: str) -> None:
    """In a worker: read a root in another place, as if another disk were mounted there."""

    def opened(uri: str, options: StorageOptions) -> LocalStorage:
        return LocalStorage(other if uri == root else uri)

    admit.open_storage = opened


def publish_again(root: Path) -> PublishBody:
    """Publish the latest generation's state once more, as the generation after it."""
    storage = open_storage(str(root))
    log = CommitLog(storage)
    generations = Generations(storage, log)
    history = generations.history()
    old = generations.manifest(generations.find("latest"))
    header = replace(
        old.header, number=old.header.number + 1, attempt=history.attempt, receipts=None
    )
    shards = []
    for shard in old.shards:
        path = f"{header.directory}/{Path(shard.path).name}"
        storage.create(path, storage.read(shard.path))
        shards.append(replace(shard, path=path))
    data = dump(Manifest(header, old.fingerprint, tuple(shards)))
    path = manifest_path(header.number, header.attempt)
    storage.create(path, data)
    body = PublishBody(
        number=header.number,
        attempt=header.attempt,
        update=header.update,
        epoch=header.position.epoch,
        manifest=path,
        manifest_size=len(data),
        manifest_digest=digest_of(data),
        receipts=None,
    )
    log.append(body, header.attempt)
    return body
