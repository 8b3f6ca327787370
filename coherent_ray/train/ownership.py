"""One driver at a time: who owns a run in a Ray cluster, and when another may take it over.

The owner is written down in the run's coordinator and renewed with every look that the driver takes
there. A driver is named by its Ray job, which no other driver shares, and Ray knows whether a job
still lives. So a second driver is refused while the first one lives, and the work of one that died
is taken over. Across clusters nobody is asked: there the commit log fences.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import ray
from ray._private.state import state as ray_state

from coherent_ray.errors import OwnedElsewhere
from coherent_ray.train import coordinators

#: A driver that renewed within these seconds is alive: nobody waits for it to be found dead.
RENEWED_S = 5.0
#: Seconds that Ray is given to notice that a silent driver is dead.
PATIENCE_S = 15.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Owner:
    """A driver."""

    job: str
    """Its Ray job, in hexadecimal."""
    host: str
    pid: int
    since: float
    """When it began, in seconds since 1970."""


def this_driver() -> Owner:
    """Return the driver that this process is; it must be connected to Ray."""
    job = ray.get_runtime_context().get_job_id()
    return Owner(job, socket.gethostname(), os.getpid(), time.time())


def take(
    run_id: str,
    me: Owner,
    *,
    find: Callable[[str], Any] = coordinators.find,
    ask: Callable[[Any], Any] = coordinators.answer,
    lives: Callable[[str], bool] | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Make a driver the owner of a run, where the run has a coordinator.

    Args:
        run_id: The run.
        me: The driver.
        find: Finds the coordinator; for tests.
        ask: Waits for its answer; for tests.
        lives: Whether a Ray job lives; None: as Ray says.
        patience_s: Seconds that a silent owner has to be found dead.

    Raises:
        OwnedElsewhere: Another driver lives, or came first.
        ClusterError: The coordinator does not answer.
    """
    lives = lives or job_lives
    until = time.monotonic() + patience_s
    dead = None
    while (handle := find(run_id)) is not None:
        found = ask(handle.hold.remote(asdict(me), dead))
        owner = Owner(**found["owner"])
        if owner.job == me.job:
            return
        if not lives(owner.job):
            dead = owner.job
            continue
        if found["silent_s"] < RENEWED_S or time.monotonic() > until:
            raise refused(run_id, owner)
        time.sleep(_POLL_S)


def require_no_other(run_id: str) -> None:
    """Refuse to go on beside a living driver of another job; a run without an owner is free.

    Raises:
        OwnedElsewhere: There is one.
        ClusterError: The coordinator does not answer.
    """
    handle = coordinators.find(run_id)
    owner = coordinators.answer(handle.status.remote())["owner"] if handle is not None else None
    if owner is None or owner["job"] == ray.get_runtime_context().get_job_id():
        return
    if job_lives(owner["job"]):
        raise refused(run_id, Owner(**owner))


def refused(run_id: str, owner: Owner) -> OwnedElsewhere:
    """Return the error of a driver that came second."""
    return OwnedElsewhere(
        f"run {run_id} is already being trained: {in_words(owner)}",
        where=owner.host,
        remedy=f"let it go on; or stop it with Ctrl-C there, or: kill -TERM {owner.pid} (on "
        f"{owner.host}), which publishes one more generation first; then run again",
        details=asdict(owner),
    )


def lost(run_id: str, owner: Owner) -> OwnedElsewhere:
    """Return the error of a driver whose run another one has taken over."""
    return OwnedElsewhere(
        f"another driver took over run {run_id}: {in_words(owner)}",
        where=owner.host,
        remedy="nothing, if you meant it: the run goes on there. One driver at a time can train it",
        details=asdict(owner),
    )


def in_words(owner: Owner) -> str:
    """Return since when and from where a driver trains."""
    since = datetime.fromtimestamp(owner.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"since {since}, by process {owner.pid} on {owner.host}, Ray job {owner.job}"


def job_lives(job: str) -> bool:
    """Return whether Ray knows a job that has not ended; a silent Ray is no proof of a death."""
    try:
        # The public API needs the dashboard, which a local cluster does without.
        return any(j["JobID"] == job and not j["IsDead"] for j in ray_state.job_table())
    except (RuntimeError, ConnectionError, ray.exceptions.RayError):
        return True
