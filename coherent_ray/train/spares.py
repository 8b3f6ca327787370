"""Spare worker processes: started and warm before a group must start again.

Most of the time from a death to the next update goes to new Python processes that import torch and
Ray Train. So each node keeps as many idle processes as it has workers, with these imports behind
them. Ray itself holds them: they are ordinary idle workers of its pool, started by the request that
Ray has for this (``PrestartWorkers``), and a group that starts with the same runtime environment
gets them. Where the request fails, or none is left, Ray starts new processes as ever.

The request is no public interface of Ray's; ``tests/cluster/test_spares.py`` guards it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: In the environment of every worker of a run that keeps spares: the run's id.
MARK = "COHERENT_RAY_SPARES"
#: Seconds that an idle spare is kept: a week. It ends with the driver's job in any case.
KEEP_S = 7 * 86_400
#: Settings of a runtime environment that choose the Python themselves.
OWN_PYTHON = frozenset({"pip", "uv", "conda", "container", "image_uri", "py_executable", "nsight"})
_ANSWER_S = 30.0


def runtime_environment(run_id: str) -> dict[str, Any]:
    """Return the ``worker_runtime_env`` of Ray's `RunConfig` whose processes can be spares.

    Args:
        run_id: Of the run.
    """
    command = f"{shlex.quote(sys.executable)} -m coherent_ray.train.warm"
    return {"py_executable": command, "env_vars": {MARK: run_id}}


@cache
def ask() -> None:
    """In a worker that trains: see to its node's spares, once. Returns at once, never raises."""
    from ray import train

    run_id = os.environ.get(MARK)
    if run_id is None:  # without Ray, too
        return
    context = train.get_context()
    if context.get_local_rank() != 0:
        return
    workers = context.get_local_world_size()
    threading.Thread(
        target=_see_to, args=(run_id, workers), name="coherent-ray-spares", daemon=True
    ).start()


def idle(run_id: str) -> list[int]:
    """Return the process ids of a run's spares on this node, those that are starting too.

    For a worker: its siblings are looked at.
    """
    return [pid for pid in _siblings() if _is_spare(Path(f"/proc/{pid}"), run_id)]


def _see_to(run_id: str, workers: int) -> None:
    try:
        missing = workers - len(idle(run_id))
        if missing > 0:
            _prestart(missing)
    except Exception as error:  # Ray's own parts, which may move; training goes on without spares
        logger.warning("no spare workers could be asked for: %s", error)


def _prestart(count: int) -> None:
    """Ask this node's raylet for idle workers with this worker's own runtime environment."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    request = node_manager_pb2.PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=KEEP_S,
        num_workers=count,
    )
    address = f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}"
    with contextlib.closing(init_grpc_channel(address)) as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=_ANSWER_S)


def _siblings() -> list[int]:
    """Return the children of this process's parent, the raylet, without this process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and int(place.name) != os.getpid():
                found.append(int(place.name))
    return found


def _is_spare(place: Path, run_id: str) -> bool:
    with contextlib.suppress(OSError):
        words = (place / "cmdline").read_bytes()
        # Ray names an idle worker so; before, it has the command of `runtime_environment`.
        is_idle = words.startswith(b"ray::IDLE") or b"coherent_ray.train.warm" in words
        return is_idle and f"{MARK}={run_id}".encode() in (place / "environ").read_bytes()
    return False
