"""A Ray Train run without torch and without this project, that writes down what Ray hands out.

First start: the backend's ``on_start`` raises. Second start: the training function raises. Third
start: it raises again, and a callback raises in turn. Imported in Ray Train's controller, and in
one worker.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode, UserCallback, WorkerGroupError
from ray.train.backend import Backend, BackendConfig
from ray.util import placement_group_table

from coherent_ray.errors import ClusterError


@dataclass
class ProbeConfig(BackendConfig):
    """Where to write; the start is told from what is written already."""

    record: str = ""

    @property
    def backend_cls(self) -> type[ProbeBackend]:
        return ProbeBackend


class ProbeBackend(Backend):
    """Looks at the private parts of a live worker group."""

    def on_start(self, worker_group: Any, backend_config: ProbeConfig) -> None:
        starts = noted(backend_config.record, "start")
        facts: dict[str, Any] = {"missing": missing_parts(worker_group)}
        if not facts["missing"]:
            state = worker_group._worker_group_state
            facts["placement_group"] = state.placement_group_handle.placement_group.id.hex()
        facts["attempt"] = str(worker_group.get_worker_group_context().run_attempt_id)
        facts["ranks"] = ray.get(worker_group.execute_async(rank_of_worker))
        facts["main_thread"] = ray.get(worker_group.execute_async(is_main_thread))
        facts["held"] = [s["placement_group"] for s in starts if is_held(s["placement_group"])]
        note(backend_config.record, "start", facts)
        if not starts:
            raise WorkerGroupError("the first start is refused", {0: RuntimeError("refused")})


class ProbeCallback(UserCallback):
    """Raises its own error in place of a worker's."""

    def __init__(self, record: str) -> None:
        self.record = record

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        error = worker_exceptions[0]
        note(self.record, "exception", {"error": repr(error), "notes": error.__notes__})
        if len(noted(self.record, "exception")) == 2:
            raise ClusterError("the callback's own error", details={"rank": 0})


def fail(values: dict[str, Any]) -> None:
    """A training function that reports in place, then raises."""
    storage = ray.train.get_context().get_storage()
    place = Path(storage.experiment_fs_path) / "generations" / "g1-a1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "file").write_text("bytes")
    ray.train.report(
        {"seen": 1},
        checkpoint=ray.train.Checkpoint.from_directory(place),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
    error = LookupError("the function's own error")
    error.add_note("with a note")
    raise error


def missing_parts(worker_group: Any) -> list[str]:
    """The private names that coherent_ray/train/backend.py uses and this group lacks."""
    missing = []
    at = worker_group
    for name in ("_worker_group_state", "placement_group_handle", "placement_group", "id"):
        if not hasattr(at, name):
            return [*missing, name]
        at = getattr(at, name)
    if not callable(getattr(worker_group._worker_group_state, "shutdown", None)):
        missing.append("shutdown")
    return missing


def rank_of_worker() -> int:
    return int(ray.train.get_context().get_world_rank())


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_held(placement_group: str) -> bool:
    return bool(placement_group_table()[placement_group]["state"] != "REMOVED")


@ray.remote(num_cpus=0)
class Maker:
    """Reserves what it never gives back."""

    def reserve(self) -> str:
        group = ray.util.placement_group([{"CPU": 0.1}])
        ray.get(group.ready())
        return str(group.id.hex())


def note(record: str, kind: str, facts: dict[str, Any]) -> None:
    with Path(record).open("a") as file:
        file.write(json.dumps([kind, facts]) + "\n")


def noted(record: str, kind: str) -> list[dict[str, Any]]:
    path = Path(record)
    lines = path.read_text().splitlines() if path.exists() else []
    return [facts for found, facts in map(json.loads, lines) if found == kind]
