"""What all tests may ask for: servers of object stores. And no test starts a Ray by accident.

Where tests run in several processes, those on Ray share one, and begin first; a file's tests stay
together, so that what they share is made once.
"""

import os
from pathlib import Path
from typing import Any

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
    here = Path(__file__).parent / "cluster"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "cluster" if path.startswith("tests/cluster/") else path

    config.option.loadscopereorder = False  # the longest first, and that is the one on Ray
    return ByFile(config, log)
