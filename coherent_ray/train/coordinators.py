"""Finding, starting and stopping a run's coordinator actor: the only place that knows its name.

The actor is detached: it outlives the driver that started it, and a second driver finds it by name.
It is pinned to the head node, because a detached actor dies for good with a node that it was tied
to by affinity, and the head's death ends the cluster anyway.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from coherent_ray.commit.coordinator import ACK_TIMEOUT_S
from coherent_ray.commit.scrubbing import BYTES_PER_S as SCRUB_BYTES_PER_S
from coherent_ray.commit.service import STORAGE_TIMEOUT_S
from coherent_ray.config import Config
from coherent_ray.errors import ClusterError, CoherentRayError
from coherent_ray.train.actor import CoordinatorActor

NAMESPACE = "coherent_ray"
#: Calls that may wait at once; one more would not even be heard.
MAX_CONCURRENCY = 16_384
#: A resource that only the head node has.
HEAD_NODE = "node:__internal_head__"
#: Seconds that the actor has to answer a question.
ANSWER_TIMEOUT_S = 60.0
#: Seconds that it has to start: it loads Ray, which takes minutes on an overloaded machine.
START_TIMEOUT_S = 300.0
_POLL_S = 0.05
#: Seconds that an actor that was asked to end may keep its name.
_GENTLE_S = 5.0


def name_of(run_id: str) -> str:
    """Return the actor's name in namespace `NAMESPACE`."""
    return f"coordinator:{run_id}"


def connect(
    run_id: str,
    root: str,
    *,
    ack_timeout_s: float = ACK_TIMEOUT_S,
    read_back: bool = False,
    storage_timeout_s: float = STORAGE_TIMEOUT_S,
    keep: int | None = None,
    keep_every: int | None = None,
    scrub_every_s: float | None = None,
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S,
    storage: dict[str, Any] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    actor: type[CoordinatorActor] | None = None,
) -> Any:
    """Return a handle of the run's coordinator, started if there is none.

    A coordinator that was started with other options is replaced: it is for the one who is about
    to open an attempt, not for ranks in the middle of one. Those call `find`.

    Args:
        run_id: The run.
        root: The run's root, absolute, reachable from the head node under this very name.
        ack_timeout_s: Seconds from a generation's first acknowledgement to its last.
        read_back: Have every shard read again before its generation is published.
        storage_timeout_s: Seconds that the storage may owe the answer to one call.
        keep: Whole generations that pruning keeps; None: all.
        keep_every: Updates of which it keeps one generation for ever; None: of none.
        scrub_every_s: Seconds within which each generation is read again; None: never.
        scrub_bytes_per_s: Bytes a second that this reads at most.
        storage: How to talk to an object store: `StorageOptions` as a dictionary; None: as the head
            node's environment says.
        timeout_s: Seconds to wait for the actor; one that this call has started ends with them.
        actor: The class to start it from where there is none; for drills.

    Raises:
        ClusterError: The actor did not start, or serves another root.
    """
    options = {
        "ack_timeout_s": ack_timeout_s,
        "read_back": read_back,
        "storage_timeout_s": storage_timeout_s,
        "keep": keep,
        "keep_every": keep_every,
        "scrub_every_s": scrub_every_s,
        "scrub_bytes_per_s": scrub_bytes_per_s,
        "storage": dict(storage or {}),
    }
    actor = actor or CoordinatorActor
    handle, facts = _started(actor, run_id, root, options, timeout_s)
    if facts["root"] != root:
        raise ClusterError(
            f"the coordinator of run {run_id!r} serves {facts['root']}, not {root}",
            where=name_of(run_id),
            remedy=f"choose another run id, or end that run: coherent-ray stop {facts['root']}",
            details={"found": facts["root"], "wanted": root},
        )
    if facts["options"] != options:
        stop(run_id)
        handle, _ = _started(actor, run_id, root, options, timeout_s)
    return handle


def connect_for(config: Config, run_id: str, actor: type[CoordinatorActor] | None = None) -> Any:
    """Return a handle of a configuration's coordinator, started if there is none; see `connect`.

    Args:
        config: The run, its paths absolute.
        run_id: Its id.
        actor: As `connect` takes it.
    """
    checkpoint = config.checkpoint
    return connect(
        run_id,
        config.run.root,
        ack_timeout_s=checkpoint.ack_timeout_s,
        read_back=checkpoint.verify == "read_back",
        storage_timeout_s=checkpoint.storage_timeout_s,
        keep=checkpoint.keep,
        keep_every=checkpoint.keep_every,
        scrub_every_s=checkpoint.scrub_every_s,
        scrub_bytes_per_s=checkpoint.scrub_bytes_per_s,
        storage=asdict(config.storage.options),
        actor=actor,
    )


def restart(run_id: str) -> None:
    """End the run's coordinator so that Ray starts it again; a call that waits is repeated there.

    For one that hangs: Ray sees that a process dies, but not that it has stopped answering.
    """
    handle = find(run_id)
    if handle is not None:
        ray.kill(handle, no_restart=False)


def find(run_id: str) -> Any | None:
    """Return a handle of the run's coordinator, or None where there is none."""
    try:
        return ray.get_actor(name_of(run_id), namespace=NAMESPACE)
    except ValueError:
        return None


def stop(run_id: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """End the run's coordinator for good, and wait until its name is free.

    What it was about to publish is published first, unless that takes too long; then it is killed,
    which loses nothing but that generation.

    Returns:
        Whether there was one.

    Raises:
        ClusterError: It is still there after `timeout_s`.
    """
    handle = find(run_id)
    if handle is None:
        return False
    # A call that was not answered may not have been heard either, so only the name tells.
    with contextlib.suppress(RayActorError, GetTimeoutError):
        # Never retried: the retry would wait for an actor that has just gone.
        ray.get(handle.stop.options(max_task_retries=0).remote(), timeout=timeout_s / 2)
    if not _gone(run_id, _GENTLE_S):
        ray.kill(handle, no_restart=True)
        if not _gone(run_id, timeout_s / 2):
            raise ClusterError(
                f"the coordinator of run {run_id!r} did not end within {timeout_s:g} s",
                where=name_of(run_id),
                remedy="see with `ray status` whether the head node is up",
            )
    return True


def answer(reference: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Wait for an actor call's answer, and raise what it raised as it was raised there.

    Args:
        reference: What ``handle.method.remote()`` returned.
        timeout_s: Seconds to wait.

    Raises:
        CoherentRayError: What the method raised.
        ClusterError: The actor is dead, or did not answer in time.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ClusterError(
            f"the coordinator did not answer within {timeout_s:g} s",
            remedy="the machine of the head node may be overloaded (see `uptime` there), or down "
            "(see `ray status`)",
            details={"may_pass": True},
        ) from error
    except RayActorError as error:
        raise ClusterError(f"the coordinator is gone: {error}") from error
    except RayTaskError as error:
        if isinstance(error.cause, CoherentRayError):
            raise error.cause from None
        raise


def _started(
    kind: type[CoordinatorActor], run_id: str, root: str, options: dict[str, Any], timeout_s: float
) -> tuple[Any, dict[str, Any]]:
    """Return a coordinator that answers, and its answer. One that nobody can have is not left."""
    found = find(run_id)
    handle = _start(kind, run_id, root, options)
    try:
        return handle, answer(handle.ping.remote(), timeout_s)
    except BaseException:
        if found is None:
            with contextlib.suppress(RayError):
                ray.kill(handle, no_restart=True)
        raise


def _start(kind: type[CoordinatorActor], run_id: str, root: str, options: dict[str, Any]) -> Any:
    actor = ray.remote(kind).options(
        name=name_of(run_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD_NODE: 0.001},
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=MAX_CONCURRENCY,
    )
    return actor.remote(run_id, root, **options)


def _gone(run_id: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while find(run_id) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
