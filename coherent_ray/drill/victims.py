"""Whom a drill strikes: processes of the drilled run, found as Ray names them, and nobody else.

Actors are told apart by the Ray job of the run's driver, so other runs of the same cluster are not
touched. A process on another machine is reached by a task that Ray runs there.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coherent_ray.drill.strikes import CLASSES
from coherent_ray.drill.strikes import Target as Kind
from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators

#: Seconds that a process may take to be found, or a task on another node to strike.
PATIENCE_S = 60.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the run."""

    pid: int
    node: str
    """Ray's hex id of its node."""

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False: there is no such process any more."""
        if not _is_here(self.node):
            return bool(_from_there(self, _send, int(number)))
        return _send(self.pid, int(number))

    @property
    def alive(self) -> bool:
        """Whether there is such a process."""
        if not _is_here(self.node):
            return bool(_from_there(self, _send, 0))
        return _send(self.pid, 0)

    def __str__(self) -> str:
        return f"pid {self.pid}"


def of_job(job: str, kind: Kind) -> list[Victim]:
    """Return the training workers or the controllers of a run, in order of their process ids.

    Args:
        job: Hex id of the Ray job of the run's driver.
        kind: Which.

    Raises:
        ClusterError: There is none, and none came within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        actors = ray_state.actor_table(None, None, "ALIVE").values()
        found = sorted(
            (actor["Pid"], actor["Address"]["NodeID"])
            for actor in actors
            if actor["ActorClassName"] == CLASSES[kind] and actor["JobID"] == job
        )
        if found:
            return [Victim(*pair) for pair in found]
        if time.monotonic() > until:
            raise ClusterError(f"no {kind} of the drilled run is alive")
        time.sleep(_LOOK_S)


def coordinator_of(run_id: str) -> tuple[Any, Victim]:
    """Return a run's coordinator: the actor, and its process.

    Raises:
        ClusterError: There is none, and none came within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while (handle := coordinators.find(run_id)) is None:
        if time.monotonic() > until:
            raise ClusterError(f"run {run_id!r} has no coordinator to strike")
        time.sleep(_LOOK_S)
    pid = int(coordinators.answer(handle.ping.remote(), PATIENCE_S)["pid"])
    name = coordinators.name_of(run_id)
    actors = ray_state.actor_table(None, None, "ALIVE").values()
    nodes = [actor["Address"]["NodeID"] for actor in actors if actor["Name"] == name]
    return handle, Victim(pid, nodes[0] if nodes else _here()[0])


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _here() -> tuple[str, str]:
    own = ray.get_runtime_context().get_node_id()
    return own, next(n["NodeManagerHostname"] for n in ray.nodes() if n["NodeID"] == own)


def _is_here(node: str) -> bool:
    own, host = _here()
    hosts = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes()}
    return node == own or hosts.get(node, host) == host


def _from_there(victim: Victim, function: Any, *arguments: Any) -> Any:
    strategy = NodeAffinitySchedulingStrategy(victim.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)
    return ray.get(task.remote(victim.pid, *arguments), timeout=PATIENCE_S)
