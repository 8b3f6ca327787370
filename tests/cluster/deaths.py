"""Deaths at an exact step of the protocol, and what a reader selects at that very moment.

Whoever is about to die first writes down what a reader would select now, then sends itself the
signal that no process can catch. Each death comes once a run. Imported in workers and actors.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tiny import selected

from coherent_ray.commit.records import PublishBody, decode
from coherent_ray.storage.base import Storage
from coherent_ray.storage.local import LocalStorage
from coherent_ray.train import hooks
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.admit import current
from coherent_ray.train.loop import train

#: The save in whose middle a worker dies, and its rank.
DEADLY_SAVE = 2
DEADLY_RANK = 1


def record_of(root: Path | str) -> Path:
    return Path(f"{root}.deaths")


def deaths_of(root: Path | str) -> dict[str, str | None]:
    """What a reader selected at the moment of each death, in order."""
    path = record_of(root)
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def die_once(root: Path | str, moment: str) -> None:
    """Write down what a reader selects now, and die; the second time, do nothing."""
    if moment in deaths_of(root):
        return
    with record_of(root).open("a") as file:
        file.write(json.dumps([moment, selected(root)]) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60.0)  # the signal is delivered in between


def half_a_shard(values: dict[str, Any]) -> None:
    """The product's training function, in a worker that dies after half of a shard."""
    saves = 0

    def strike(point: str) -> None:
        nonlocal saves
        saves += point == "save:begin"
        if point == "shard:half-written" and saves == DEADLY_SAVE:
            die_once(values["run"]["root"], "worker:half-written")

    if current().rank == DEADLY_RANK:
        hooks.install(strike)
    train(values)


class DyingCoordinator(CoordinatorActor):
    """The coordinator, that dies before it publishes generation 2 and after it published 4."""

    def _open_root(self) -> Storage:
        return DeadlyStorage(self._root)


class DeadlyStorage(LocalStorage):
    """A root where two records of the log are deadly to write."""

    def create(self, path: str, data: Any) -> None:
        number = _published_number(path, data)
        if number == 2:
            die_once(self.uri, "coordinator:before-publish")
        super().create(path, data)
        if number == 4:
            die_once(self.uri, "coordinator:after-publish")


def _published_number(path: str, data: Any) -> int | None:
    body = decode(bytes(data)).body if path.startswith("log/") else None
    return body.number if isinstance(body, PublishBody) else None
