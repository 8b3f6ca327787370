"""Finding, starting and stopping a run's keepers: the only place that knows their names.

A keeper is tied to its node: with it, it is gone. It is detached, so that a driver that dies leaves
it to the next one; `stop` ends it, as does its own watch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators
from coherent_ray.train.coordinators import NAMESPACE
from coherent_ray.train.memory.keeper import KeeperActor, Sent
from coherent_ray.train.memory.shelf import Entry, Reserved

logger = logging.getLogger(__name__)

#: Seconds that all keepers together have to tell what they hold, or to end.
ANSWER_S = 30.0
#: Calls that one keeper works on at once: its ranks', and another keeper's.
_CONCURRENCY = 64
_POLL_S = 0.05


def prefix_of(run_id: str) -> str:
    """Return what the names of a run's keepers begin with; the id of the node follows."""
    return f"keeper:{run_id}:"


class NodeKeeper:
    """The keeper of this process's node, as a rank uses it; started if there is none."""

    def __init__(self, run_id: str) -> None:
        """Find or start it; does not wait for it."""
        node = str(ray.get_runtime_context().get_node_id())
        name = prefix_of(run_id) + node
        # Where the user's functions have an environment of their own, it needs none of that.
        self._handle = (
            ray.remote(KeeperActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(run_id, name, node, coordinators.name_of(run_id), NAMESPACE)
        )

    def reserve(
        self, attempt: int, rank: int, data_bytes: int, count: int
    ) -> Future[tuple[list[Reserved], bool]]:
        """Ask for slots; see `KeeperActor.reserve`."""
        return _future(self._handle.reserve.remote(attempt, rank, data_bytes, count))

    def written(self, name: str, digest: str, replicas: int) -> Future[Sent]:
        """Say that a slot was written; see `KeeperActor.written`."""
        return _future(self._handle.written.remote(name, digest, replicas))


def find(run_id: str) -> dict[str, Any]:
    """Return handles of a run's keepers, by name."""
    prefix = prefix_of(run_id)
    handles = {}
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] == NAMESPACE and found["name"].startswith(prefix):
            with contextlib.suppress(ValueError):
                handles[found["name"]] = ray.get_actor(found["name"], namespace=NAMESPACE)
    return handles


def entries(keepers: Mapping[str, Any], within_s: float = ANSWER_S) -> list[Entry]:
    """Return what keepers hold; one that does not answer holds nothing.

    Args:
        keepers: By name.
        within_s: Seconds for all of them together.
    """
    asked = {keeper.entries.remote(): name for name, keeper in keepers.items()}
    if not asked:
        return []
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=within_s)
    for reference in late:
        logger.warning("%s does not say what it holds", asked[reference])
    found: list[Entry] = []
    for reference in ready:
        with contextlib.suppress(RayError):
            found += ray.get(reference)
    return found


def settle(keepers: Iterable[Any], attempt: int, kept: list[str]) -> None:
    """Tell keepers what an attempt goes on from; does not wait."""
    for keeper in keepers:
        keeper.settle.remote(attempt, kept)


def clear(run_id: str) -> None:
    """Let all keepers of a run let go of what they hold; waits a moment."""
    with contextlib.suppress(RayError):
        ray.wait(
            told := [keeper.clear.remote() for keeper in find(run_id).values()],
            num_returns=max(len(told), 1),
            timeout=ANSWER_S,
        )


def stop(run_id: str, timeout_s: float = ANSWER_S) -> int:
    """End all keepers of a run, and wait until their names are free.

    Returns:
        How many there were.

    Raises:
        ClusterError: One is still there after `timeout_s`.
    """
    keepers = find(run_id)
    for keeper in keepers.values():
        with contextlib.suppress(RayActorError, GetTimeoutError):
            # They hold nothing that must be written: nobody is asked.
            ray.kill(keeper, no_restart=True)
    until = time.monotonic() + timeout_s
    while left := find(run_id).keys() & keepers.keys():
        if time.monotonic() > until:
            raise ClusterError(
                f"{len(left)} keepers of run {run_id!r} did not end within {timeout_s:g} s",
                where=min(left),
                remedy="see with `ray status` whether their nodes are up",
            )
        time.sleep(_POLL_S)
    return len(keepers)


def _future(reference: Any) -> Future[Any]:
    future: Future[Any] = reference.future()
    return future
