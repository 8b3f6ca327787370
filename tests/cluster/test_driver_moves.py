"""The driver's node is lost, and the same job is submitted again: its driver is on another node.

On a cluster of its own, through Ray's job server, as a platform would do it: minutes long.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import yaml
from ray._private.node import Node
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from coherent_ray.train.receipts import first_difference

if TYPE_CHECKING:
    from conftest import OwnRun

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
PATIENCE_S = 180.0
NODES = ("first", "second")


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, Node]]:
    """A head that trains nothing, and two nodes; gives the first of them, too."""
    note = Path(get_ray_address_file(None))
    noted = note.read_text() if note.exists() else None
    place = tempfile.mkdtemp(prefix="cr", dir="/tmp")
    # Another Ray of this session has the usual ports, and an agent without one takes no job.
    head = {
        "num_cpus": 0,
        "include_dashboard": True,
        "dashboard_port": free_port(),
        "dashboard_agent_listen_port": free_port(),
        "temp_dir": place,
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [
            made.add_node(
                num_cpus=2,
                resources={name: 1.0},
                object_store_memory=100 * 2**20,
                dashboard_agent_listen_port=free_port(),
            )
            for name in NODES
        ]
        yield made, nodes[0]
    finally:
        made.shutdown()
    if noted is not None:
        note.write_text(noted)
    else:
        note.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(done: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert time.monotonic() < until, what
        time.sleep(0.2)
    return found


def test_the_same_job_goes_on_from_another_node(
    cluster: tuple[Cluster, Node], reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    ground, lost = cluster
    root, path = tmp_path / "run", tmp_path / "job.yaml"
    settings = tiny.values(root, tiny_data, task__factory="tiny:PacedTask")
    path.write_text(yaml.safe_dump(settings))
    address = ground.head_node.address_info["webui_url"]
    client = JobSubmissionClient(f"http://{address}")
    command = f"{sys.executable} -m coherent_ray run {path} --address auto"

    def submit(node: str) -> str:
        def job() -> str:
            with contextlib.suppress(RuntimeError):  # the job server has not found its agents yet
                return str(client.submit_job(entrypoint=command, entrypoint_resources={node: 0.1}))
            return ""

        return str(wait_for(job, "the job server takes it"))

    first = submit(NODES[0])
    wait_for(lambda: root.exists() and tiny.published(root), "it publishes")
    ground.remove_node(lost, allow_graceful=False)
    second = submit(NODES[1])
    wait_for(lambda: client.get_job_status(second).is_terminal(), "the second ends")
    assert client.get_job_status(second) == JobStatus.SUCCEEDED, client.get_job_logs(second)
    wait_for(lambda: client.get_job_status(first).is_terminal(), "the first is known to be lost")
    assert client.get_job_status(first) == JobStatus.FAILED

    ours = tiny.history(root)
    assert first_difference(ours, tiny.history(reference.root)) is None
    assert len(ours) == tiny.UPDATES
