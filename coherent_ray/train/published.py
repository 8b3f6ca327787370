"""What a run's root holds, for a command that ends before a driver could say it.

Only the commit log is read, and nothing is checked that it names: whether a generation is whole is
a driver's to find out, and where one has, its word counts. Neither Ray nor torch is imported here.
"""

from __future__ import annotations

from typing import Any

from coherent_ray.commit.traces import read_whole
from coherent_ray.config import Config
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage import open_storage
from coherent_ray.train.identity import run_id_in


def in_root(config: Config) -> dict[str, Any] | None:
    """Return what the log says of a run, as a driver's ``started`` would; None: it cannot be read.

    Args:
        config: The run, its paths absolute.

    Returns:
        ``run_id``, ``updates`` (of the whole run; None where only the data say how many), ``done``,
        ``latest`` and ``complete`` (False: who reads this was not done).
    """
    try:
        storage = open_storage(config.run.root, config.storage.options)
        history = read_whole(storage)
        run_id = run_id_in(config, storage, history)
    except (CoherentRayError, OSError):
        return None
    latest = history.latest
    return {
        "run_id": run_id,
        "updates": config.training.updates,
        "done": latest.update if latest else 0,
        "latest": latest.name if latest else None,
        "complete": False,
    }
