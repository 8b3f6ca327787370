"""What Ray Train gets to see of a run: metrics and the last generation, once, at the end.

`ray.train.report` is a barrier that settles once a controller poll, so it stays out of the update
path; and it is never the commit. The generation is reported where it lies: nothing is copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from coherent_ray.commit.manifest import generation_directory
from coherent_ray.storage import LocalStorage, Storage, open_storage

if TYPE_CHECKING:
    from coherent_ray.train.session import Session


def report_outcome(run: Session) -> None:
    """Report the run's last metrics, and its last published generation as a Ray checkpoint.

    All ranks must call this.
    """
    metrics = {**run.progress.metrics, "stopped": run.stopped, "address": _address(run)}
    ray.train.report(
        metrics, checkpoint=_checkpoint(run), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def _address(run: Session) -> str | None:
    """Return where the last generation lies: a path, or an address in an object store."""
    name = run.boundaries.published
    if name is None:
        return None
    number, attempt = name.removeprefix("g").split("-a")
    return f"{_root(run).uri}/{generation_directory(int(number), int(attempt))}"


def _checkpoint(run: Session) -> Checkpoint | None:
    """Return rank 0's checkpoint: the directory of the last generation, inside the run's root.

    None where Ray keeps its files elsewhere, as it does for a root in an object store: it takes no
    checkpoint in place outside its own directory, and a run that is done must not fail for that.
    """
    address = _address(run)
    if run.rank != 0 or address is None or not isinstance(_root(run), LocalStorage):
        return None
    place = Path(address)
    rays = Path(ray.train.get_context().get_storage().experiment_fs_path)
    return Checkpoint.from_directory(place) if place.is_relative_to(rays) else None


def _root(run: Session) -> Storage:
    return open_storage(run.config.run.root, run.config.storage.options)
