"""Strikes: failures on purpose, with Ray's own tooling, while a run is under way.

A strike has a moment (an update) and a target. Targets are found as Ray names them: training
workers and the Train controller by their class, the coordinator by its name. What kills is a
signal or `ray.kill`; nothing inside the product cooperates.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import ray
from ray._private.state import state as ray_state

from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators
from coherent_ray.train.events import Event

Target = Literal["worker", "coordinator", "controller"]

#: Ray Train's class of each kind of process.
CLASSES: dict[str, str] = {"worker": "RayTrainWorker", "controller": "TrainController"}


@dataclass(frozen=True, slots=True)
class Strike:
    """One failure on purpose."""

    update: int
    """It comes as soon as this update is seen to be done."""
    target: Target


@dataclass(frozen=True, slots=True)
class Struck:
    """A strike that was carried out."""

    strike: Strike
    seen_update: int
    victim: str
    """Process id or actor name."""


def random_strikes(
    seed: int, updates: int, workers: int = 3, coordinators_: int = 1
) -> list[Strike]:
    """Return strikes at random updates, each in its own stretch of the run, from a seed.

    Args:
        seed: Decides all of them.
        updates: Updates of the run.
        workers: Kills of a random training worker.
        coordinators_: Kills of the coordinator.
    """
    draw = random.Random(seed)
    targets: list[Target] = []
    targets += ["worker"] * workers
    targets += ["coordinator"] * coordinators_
    draw.shuffle(targets)
    stretch = updates / (len(targets) + 1)
    return [
        Strike(max(1, int((index + draw.random()) * stretch)), target)
        for index, target in enumerate(targets)
    ]


class Striker:
    """Listens to a run's events and strikes when the moment has come."""

    def __init__(self, run_id: str, strikes: Sequence[Strike], seed: int = 0) -> None:
        """Make a striker; this process must be connected to the run's cluster.

        Args:
            run_id: The run.
            strikes: In order of their updates.
            seed: Decides which worker is taken.
        """
        self._run_id = run_id
        self._left = list(strikes)
        self._draw = random.Random(seed)
        self._struck_attempt: int | None = None
        self.done: list[Struck] = []

    @property
    def left(self) -> int:
        """Strikes that have not come yet."""
        return len(self._left)

    def __call__(self, event: Event) -> None:
        """Take in an event of the run."""
        if event.kind != "progress" or not self._left:
            return
        progress = event.facts.get("progress", {})
        update, attempt = progress.get("update"), progress.get("attempt")
        # One failure at a time: what an attempt that was struck still reports is no news.
        if update is None or attempt == self._struck_attempt:
            return
        if update >= self._left[0].update:
            strike = self._left.pop(0)
            self.done.append(Struck(strike, int(update), self._carry_out(strike)))
            if strike.target != "coordinator":
                self._struck_attempt = attempt

    def _carry_out(self, strike: Strike) -> str:
        if strike.target == "coordinator":
            handle = coordinators.find(self._run_id)
            if handle is None:
                raise ClusterError(f"run {self._run_id!r} has no coordinator to strike")
            ray.kill(handle, no_restart=False)
            return coordinators.name_of(self._run_id)
        pid = self._draw.choice(pids_of(strike.target, self._job()))
        os.kill(pid, signal.SIGKILL)
        return str(pid)

    def _job(self) -> str | None:
        """Return the Ray job of the run's driver: another run's workers are not to be hit."""
        handle = coordinators.find(self._run_id)
        if handle is None:
            return None
        owner = coordinators.answer(handle.status.remote())["owner"]
        return str(owner["job"]) if owner else None


def pids_of(target: Target, job: str | None = None) -> list[int]:
    """Return the process ids of a target, in order.

    Args:
        target: What to look for.
        job: Ray job of the run, in hexadecimal; None: any.

    Raises:
        ClusterError: There is none.
    """
    # The public state API needs the dashboard, which a local cluster does without.
    actors = ray_state.actor_table(None, None, "ALIVE").values()
    pids = sorted(
        actor["Pid"]
        for actor in actors
        if actor["ActorClassName"] == CLASSES[target] and job in {None, actor["JobID"]}
    )
    if not pids:
        raise ClusterError(f"no {target} is alive")
    return pids
