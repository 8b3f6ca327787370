"""Training functions whose workers are killed, to be resumed from memory. Imported in workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from coherent_ray.train import hooks
from coherent_ray.train.admit import current
from coherent_ray.train.loop import train

RANK = 1
#: By attempt, the point at which that rank is killed, and in which update.
AT = {1: ("memory:whole", 5), 2: ("memory:begun", 7)}


def killed(values: dict[str, Any]) -> None:
    """The product's training function; one rank is killed in each of the first attempts.

    First between two updates, then in the middle of a copy into shared memory. Rank 0 writes down
    what each attempt goes on from.
    """
    if current().rank == 0:
        with Path(f"{current().config.run.root}-resumed").open("a") as file:
            file.write(f"{current().position.update} {time.time():.3f}\n")
    strike = AT.get(current().attempt)
    if strike is not None and current().rank == RANK:
        update = 0

        def at(point: str) -> None:
            nonlocal update
            if point.startswith("update@"):
                update = int(point.partition("@")[2])
            if (point, update) == strike:
                time.sleep(0.5)  # the other rank gets there, too
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60.0)  # the signal is delivered in between

        hooks.install(at)
    train(values)
