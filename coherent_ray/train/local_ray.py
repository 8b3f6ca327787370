"""Ray for one driver: connect to a cluster, or start a local one that ends with the driver."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from coherent_ray.config import Cluster
from coherent_ray.errors import ClusterError

#: Bytes of shared memory for Ray's object store: runs keep nothing there.
OBJECT_STORE_BYTES = 128 * 2**20


@contextmanager
def connected(cluster: Cluster) -> Iterator[str]:
    """Connect to the configured cluster for the length of a ``with`` block.

    Yields:
        The cluster's address, or ``local``.

    Raises:
        ClusterError: There is no such cluster, or it did not start.
    """
    try:
        if cluster.address is None:
            _start(cluster)
        else:
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(
            f"Ray did not start: {error}" if cluster.address is None else f"no Ray there: {error}",
            where=cluster.address or "local",
            remedy="see `ray status`; without cluster.address a local Ray is started",
        ) from error
    try:
        yield cluster.address or "local"
    finally:
        ray.shutdown()


def _start(cluster: Cluster) -> None:
    """Start a local cluster that claims the CPUs, and other resources, that its workers need."""
    per_worker = dict(cluster.resources_per_worker)
    needed = math.ceil(per_worker.pop("CPU", 1.0) * cluster.workers)
    per_worker.pop("GPU", None)
    ray.init(
        # One of its own, even where another Ray runs on this machine, or RAY_ADDRESS names one.
        address="local",
        num_cpus=cluster.num_cpus or max(needed, os.cpu_count() or 1),
        resources={name: amount * cluster.workers for name, amount in per_worker.items()},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=OBJECT_STORE_BYTES,
    )
