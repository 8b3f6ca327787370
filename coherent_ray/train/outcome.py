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
from coherent_ray.storage import open_storage

if TYPE_CHECKING:
    from coherent_ray.train.session import Session


def report_outcome(run: Session) -> None:
    """Report the run's last metrics, and its last published generation as a Ray checkpoint.

    All ranks must call this.
    """
    metrics = {**run.progress.metrics, "stopped": run.stopped}
    ray.train.report(
        metrics, checkpoint=_checkpoint(run), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def _checkpoint(run: Session) -> Checkpoint | None:
    """Return rank 0's checkpoint: the directory of the last generation, inside the run's root.

    None where Ray keeps its files elsewhere: it takes no checkpoint in place outside its own
    directory, and a run that is done must not fail for that.
    """
    name = run.boundaries.published
    if run.rank != 0 or name is None:
        return None
    number, attempt = name.removeprefix("g").split("-a")
    directory = generation_directory(int(number), int(attempt))
    place = Path(open_storage(run.config.run.root).uri) / directory
    rays = Path(ray.train.get_context().get_storage().experiment_fs_path)
    return Checkpoint.from_directory(place) if place.is_relative_to(rays) else None
