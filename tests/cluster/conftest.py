"""One small local Ray cluster for all tests that need one.

Everything that Ray would do to its surroundings is off: no token in the home directory, no
dashboard, no usage report, no memory monitor (it looks at the whole machine), and no new cluster
behind the back of a test that calls Ray after the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# The words that ranks send are made in one place, for tests with and without Ray.
sys.path.insert(0, str(Path(__file__).parent.parent / "commit"))

#: CPUs that Ray believes in. They are only tickets; the machine may have two.
LOGICAL_CPUS = 8
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
# Ray reads some of these when it is imported, so they are set before any test module is.
os.environ.update(ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A running Ray that this process is connected to; gives its address."""
    import ray

    # Unix sockets have short names, so the directory must have one too.
    directory = tempfile.mkdtemp(prefix="cr", dir="/tmp")
    context = ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _temp_dir=directory,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
