"""The Ray that a drill runs on: one of its own, whose nodes it may take away, or a given one.

A cluster of its own is several nodes on this machine. It is thrown away, so nothing of it is kept:
no token in the home directory, no dashboard, no usage report.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coherent_ray.errors import ClusterError

#: Before Ray is imported. What the user has set stays.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: How fast the head gives up a node that does not answer: after some five seconds.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
OBJECT_STORE_BYTES = 100 * 2**20


class Ground:
    """A cluster that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.address = address

    def remove(self, node: str) -> None:
        """Kill every process of a node at once.

        Args:
            node: Ray's hex id.

        Raises:
            ClusterError: It is not the drill's to take.
        """
        raise _not_ours(node)

    def raylet(self, node: str) -> int:
        """Return the process id of a node's raylet; raises as `remove` does."""
        raise _not_ours(node)

    def add(self) -> None:
        """Add a node for one worker; raises as `remove` does. For the main thread."""
        raise _not_ours("a new one")

    def kill_head_service(self) -> int:
        """Kill the cluster's head service (GCS), and return its process id; raises as `remove`."""
        raise _not_ours("the head")

    def start_head_service(self) -> None:
        """Start it again, from what it has stored; raises as `remove`."""
        raise _not_ours("the head")

    def said(self, pid: int) -> str | None:
        """Return what a worker process or an actor has written, or None: it cannot be read."""
        return None


class OwnGround(Ground):
    """A cluster that the drill started."""

    def __init__(self, workers: int, *, apart: bool) -> None:
        """Start it.

        Args:
            workers: Training workers that must find room.
            apart: Each on a node of its own, none on the head node.
        """
        from ray._private.utils import get_ray_address_file
        from ray.cluster_utils import Cluster

        # Ray writes there which cluster ``auto`` means; after the drill it means what it meant.
        self._note = Path(get_ray_address_file(None))
        self._noted = self._note.read_text() if self._note.exists() else None
        # Unix sockets have short names, so the directory must have one too.
        self._place = Path(tempfile.mkdtemp(prefix="cr"))
        head: dict[str, Any] = {
            "num_cpus": 0 if apart else workers,
            "object_store_memory": OBJECT_STORE_BYTES,
            "temp_dir": str(self._place),
            "include_dashboard": False,
            "_system_config": {
                **HEALTH,
                # What Ray keeps of actors and nodes outlives its head service.
                **(
                    {"gcs_storage": "rocksdb", "gcs_storage_path": str(self._place / "gcs")}
                    if apart
                    else {}
                ),
            },
        }
        self._apart = apart
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        except Exception as error:  # Ray has no type of its own for it
            shutil.rmtree(self._place, ignore_errors=True)
            raise ClusterError(
                f"Ray did not start: {error}",
                where=str(self._place),
                remedy="is the machine very busy? Start it again, or name a cluster: --address",
            ) from error
        for _ in range(workers if apart else 0):
            self.add()
        super().__init__(self._cluster.address)

    def remove(self, node: str) -> None:
        """See `Ground.remove`."""
        self._cluster.remove_node(self._found(node), allow_graceful=False)

    def raylet(self, node: str) -> int:
        """See `Ground.raylet`."""
        found = self._found(node).all_processes["raylet"]
        return int(found[0].process.pid)

    def add(self) -> None:
        """See `Ground.add`."""
        self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)

    def kill_head_service(self) -> int:
        """See `Ground.kill_head_service`."""
        head = self._cluster.head_node
        pid = int(head.all_processes["gcs_server"][0].process.pid)
        head.kill_gcs_server()
        return pid

    def start_head_service(self) -> None:
        """See `Ground.start_head_service`."""
        self._cluster.head_node.start_gcs_server()

    def said(self, pid: int) -> str | None:
        """See `Ground.said`."""
        files = sorted(self._place.glob(f"session_*/logs/*-{pid}.*"))
        return "\n".join(file.read_text(errors="replace") for file in files) if files else None

    def close(self) -> None:
        """End every process of it and remove its files."""
        with contextlib.suppress(AssertionError):  # Ray's word for a process that took longer
            self._cluster.shutdown()
        if self._noted is not None:
            self._note.write_text(self._noted)
        else:
            self._note.unlink(missing_ok=True)
        shutil.rmtree(self._place, ignore_errors=True)

    def _found(self, node: str) -> Any:
        nodes = {each.node_id: each for each in self._cluster.worker_nodes}
        if node not in nodes:
            raise ClusterError(f"node {node} is the head node, or none of this cluster")
        return nodes[node]


@contextlib.contextmanager
def ground(workers: int, address: str | None, *, apart: bool = False) -> Iterator[Ground]:
    """Connect this process to a cluster for the length of a ``with`` block.

    Args:
        workers: Training workers that must find room.
        address: Of the cluster; None: one is started, and ends with the block.
        apart: Each worker on a node of its own, none on the head node.

    Raises:
        ClusterError: It is not there, or did not start.
    """
    for name, value in ENVIRONMENT.items() if address is None else ():
        os.environ.setdefault(name, value)
    import ray

    own = OwnGround(workers, apart=apart) if address is None else None
    place = own or Ground(address or "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=place.address, log_to_driver=False, logging_level="ERROR")
        yield place
    except ConnectionError as error:
        raise ClusterError(
            f"no Ray there: {error}", where=place.address, remedy="see `ray status` there"
        ) from error
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)  # Ray has put one of its own there
        if own is not None:
            own.close()


def _not_ours(node: str) -> ClusterError:
    return ClusterError(
        f"node {node} belongs to a cluster that the drill did not start",
        remedy="leave out --address: a node is taken from a cluster of the drill's own only",
    )
