"""What tests of the training layer share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import config_for, stop_at, train, working


@pytest.fixture
def one_process() -> Iterator[None]:
    """Let this process be a worker for one test."""
    with working():
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run that was stopped after four of its six updates, with two
    generations; tests work on copies.
    """
    folder = tmp_path_factory.mktemp("trained")
    assert train(config_for(folder), stop_at(4)).generations == ["g1-a1", "g2-a1"]
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, and of its data, that a test may damage."""
    return shutil.copytree(trained, tmp_path / "copy")
