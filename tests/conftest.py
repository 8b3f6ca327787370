"""What all tests may ask for: servers of object stores. And no test starts a Ray by accident.

Where tests run in several processes, those on Ray share one, and begin first; a file's tests stay
together, so that what they share is made once.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's business: no test fails because another ran beside it.
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")

# A call of Ray's without a cluster would start one, and leave it behind.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

pytest_plugins = ["stores"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if on_ray := here / "cluster" in item.path.parents:
            item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.xdist_group("ray" if on_ray else item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
