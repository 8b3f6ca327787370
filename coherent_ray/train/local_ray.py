"""Ray for one driver: connect to a cluster, or start a local one that ends with the driver."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError

from coherent_ray.config.sections import Cluster
from coherent_ray.errors import ClusterError

#: Bytes of shared memory for Ray's object store: runs keep nothing there.
OBJECT_STORE_BYTES = 128 * 2**20
#: Seconds that a named cluster has to take a connection. Ray itself would try for a minute.
KNOCK_S = 5.0
_TOKENS = (
    "set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to what the head node "
    "has (~/.ray/auth_token, where it was generated there)"
)
_NOT_STARTED = (
    "the machine may be overloaded (see `uptime`): let it rest; or a port that Ray needs is taken, "
    "or its temporary directory full (`df`, RAY_TMPDIR)"
)
#: How Ray's error begins where a cluster listens and does not let this process in.
_UNANSWERED = "Failed to connect to Ray cluster"


@contextmanager
def connected(cluster: Cluster) -> Iterator[str]:
    """Connect to the configured cluster for the length of a ``with`` block.

    Yields:
        The cluster's address, or ``local``.

    Raises:
        ClusterError: There is no such cluster, or it did not start.
    """
    if cluster.address is None:
        try:
            _start(cluster)
        except Exception as error:  # Ray has no type of its own for it
            raise ClusterError(
                f"Ray did not start: {_first_line(error)}",
                where="local",
                remedy=_NOT_STARTED,
                # What Ray says of wrong options it says again.
                details={} if isinstance(error, ValueError) else {"may_pass": True},
            ) from error
    else:
        join(cluster.address)
    try:
        yield cluster.address or "local"
    finally:
        ray.shutdown()


def join(address: str, *, level: int = logging.WARNING) -> None:
    """Connect to a cluster that runs.

    Args:
        address: ``HOST:PORT``, ``auto``, or another that Ray knows.
        level: Of Ray's own messages.

    Raises:
        ClusterError: There is none, or it wants a token.
    """
    knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=level)
    except Exception as error:  # Ray has no type of its own for a node that does not come up
        if isinstance(error, AuthenticationError):
            raise ClusterError(
                "the cluster wants Ray's token, and this process has none or another",
                where=address,
                remedy=_TOKENS,
            ) from error
        what = f"no Ray there: {_first_line(error)}"
        remedy = "see `ray status` there; without cluster.address a local Ray is started"
        if _UNANSWERED in str(error):
            # Somebody listens. That it wants a token, Ray says in its own output only.
            what = f"what listens there does not let this process in: {_first_line(error)}"
            remedy = (
                "if it wants Ray's token (`ray start` may turn that on by itself: its output, or "
                f'the driver\'s log, says "InvalidAuthToken"), {_TOKENS}; else {remedy}'
            )
        raise ClusterError(what, where=address, remedy=remedy) from error


def knock(address: str) -> None:
    """Find out within seconds that nobody listens at an address; one without a port is not tried.

    Raises:
        ClusterError: Nobody does.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        return  # Ray says what it thinks of it
    if not host or not port:
        return
    try:
        socket.create_connection((host, port), timeout=KNOCK_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray there: {error.strerror or error}",
            where=address,
            remedy="name the head node's HOST:PORT, as `ray start --head` said it",
        ) from error


def logs_of() -> str:
    """Return where the connected Ray keeps its processes' logs, on each of its nodes."""
    node = getattr(ray._private.worker, "_global_node", None)
    return str(node.get_logs_dir_path()) if node is not None else "Ray's log directory"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _start(cluster: Cluster) -> None:
    """Start a local cluster that claims the CPUs, and other resources, that its workers need."""
    needs = cluster.needs_of(cluster.most)
    cpus = math.ceil(needs.pop("CPU", float(cluster.most)))
    needs.pop("GPU", None)  # Ray counts these itself
    ray.init(
        # One of its own, even where another Ray runs on this machine, or RAY_ADDRESS names one.
        address="local",
        num_cpus=cluster.num_cpus or max(cpus, os.cpu_count() or 1),
        resources=needs,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=OBJECT_STORE_BYTES,
    )
