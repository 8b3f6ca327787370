"""A generation on demand: asked until it is there, and only what is newer counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import Left, config_for, train

from coherent_ray.errors import ClusterError, SaveFailed
from coherent_ray.train import on_demand
from coherent_ray.train.on_demand import save_now

STATUS: dict[str, Any] = {
    "attempt": 2,
    "admitted": 2,
    "progress": {},
    "whereabouts": {},
    "in_flight": {},
    "last_error": None,
}


class Coordinator:
    """One that does something when it is asked for a generation."""

    def __init__(self, asked: Callable[[int], None] = lambda times: None, **status: Any) -> None:
        self.tokens: list[int] = []
        self._asked = asked
        self.status = SimpleNamespace(remote=lambda: STATUS | status)
        self.request = SimpleNamespace(remote=self._request)

    def _request(self, wish: str, token: int) -> None:
        assert wish == "save"
        self.tokens.append(token)
        self._asked(len(self.tokens))


@pytest.fixture
def left(tmp_path: Path) -> Left:
    """A run whose newest generation is of update 2, in attempt 1."""
    return train(config_for(tmp_path, training__updates=2))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "_POLL_S", 0.001)
    monkeypatch.setattr(on_demand, "_ASK_EVERY_S", 0.01)


def saved(left: Left, coordinator: Coordinator | None, timeout_s: float = 30.0) -> str:
    find = lambda run_id: coordinator  # noqa: E731
    return save_now("small", left.storage, timeout_s, find=find, ask=lambda answer: answer).name


def goes_on(left: Left) -> Callable[[int], None]:
    """Train on when asked the third time: the wish was forgotten twice."""

    def asked(times: int) -> None:
        if times == 3:
            folder = Path(left.config.run.root).parent
            train(config_for(folder, training__updates=4, run__claim="statistical"))

    return asked


def test_it_is_asked_again_as_one_wish_until_a_newer_generation_is_there(left: Left) -> None:
    coordinator = Coordinator(goes_on(left))
    assert saved(left, coordinator) == "g2-a2"
    assert len(coordinator.tokens) >= 3
    assert len(set(coordinator.tokens)) == 1


def test_one_that_is_older_than_what_was_trained_by_then_does_not_count(left: Left) -> None:
    progress = {"attempt": 2, "update": 5}
    with pytest.raises(SaveFailed):
        saved(left, Coordinator(goes_on(left), progress=progress), 1.0)


def test_time_is_up_with_the_reason(left: Left) -> None:
    waits = {"in_flight": {"g3-a2": "shards of rank 1"}, "last_error": "the disk is full"}
    with pytest.raises(SaveFailed) as caught:
        saved(left, Coordinator(**waits), 0.05)
    assert "g3-a2 waits for shards of rank 1; the last error: the disk is full" in str(caught.value)
    with pytest.raises(SaveFailed, match="its workers do not train"):
        saved(left, Coordinator(admitted=1), 0.05)


def test_without_a_coordinator_nobody_trains(left: Left) -> None:
    with pytest.raises(ClusterError, match="no coordinator"):
        saved(left, None)
