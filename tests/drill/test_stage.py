"""The stage: who comes by an armed point first is held until the drill lets go; nobody else is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coherent_ray.drill import stage as stage_module
from coherent_ray.drill.stage import Actor, Held, Hold, Stage, stage_of
from coherent_ray.storage import Storage

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "node-1")
    monkeypatch.setattr(stage_module.ray, "get_runtime_context", lambda: context)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return stage_of(str(tmp_path / "run"))


class Walk:
    """A process that reaches points in a thread of its own."""

    def __init__(self, actor: Actor, *points: str) -> None:
        self.passed: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(actor, points), daemon=True)
        self._thread.start()

    def _run(self, actor: Actor, points: tuple[str, ...]) -> None:
        for point in points:
            actor(point)
            self.passed.append(point)

    def ends(self) -> list[str]:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"held behind {self.passed}"
        return self.passed


def reached(stage: Stage) -> list[Held]:
    until = time.monotonic() + WAIT_S
    while not (found := stage.reached()):
        assert time.monotonic() < until, "nobody was held"
        time.sleep(0.01)
    return found


def updates(*numbers: int) -> Iterator[str]:
    return (f"update@{number}" for number in numbers)


def test_it_lies_beside_the_run_not_in_it(storage: Storage, tmp_path: Path) -> None:
    Stage(storage, [])
    assert [path.name for path in tmp_path.iterdir()] == ["run.stage"]


def test_a_process_is_held_at_its_point_until_it_is_let_go(storage: Storage) -> None:
    stage = Stage(storage, [Hold("kill", "update", 3, rank=1)])
    walk = Walk(Actor(storage, 1, 2), *updates(1, 2, 3, 4))
    assert reached(stage) == [Held("kill", "update", 3, os.getpid(), "node-1", 1, 2)]
    assert walk.passed == ["update@1", "update@2"]
    assert stage.reached() == []
    assert stage.left == ()
    stage.release("kill")
    assert walk.ends()[-1] == "update@4"


def test_a_point_behind_training_waits_for_its_update(storage: Storage) -> None:
    stage = Stage(storage, [Hold("kill", "save:begin", 4)])
    walk = Walk(Actor(storage, 0, 1), "update@2", "save:begin", "update@4", "save:begin", "end")
    assert reached(stage)[0].update == 4
    assert walk.passed == ["update@2", "save:begin", "update@4"]
    stage.release("kill")
    walk.ends()


def test_only_the_first_is_held_and_only_once(storage: Storage) -> None:
    stage = Stage(storage, [Hold("kill", "update", 1)])
    first = Walk(Actor(storage, 0, 1), *updates(1))
    reached(stage)
    Walk(Actor(storage, 1, 1), *updates(1, 2)).ends()
    Walk(Actor(storage, 0, 2), *updates(1, 2)).ends()
    assert first.passed == []
    stage.release("kill")
    first.ends()


@pytest.mark.parametrize(
    ("hold", "rank", "attempt", "point"),
    [
        (Hold("x", "update", 1, rank=1), 0, 1, "update@1"),
        (Hold("x", "update", 1, attempt=2), 0, 1, "update@1"),
        (Hold("x", "publish:begin", 1), 0, 1, "publish:begin@1"),
        (Hold("x", "update", 1), None, 0, "update@1"),
        (Hold("x", "publish:begin", 2), None, 0, "publish:begin@1"),
    ],
)
def test_who_is_not_meant_passes(
    storage: Storage, hold: Hold, rank: int | None, attempt: int, point: str
) -> None:
    stage = Stage(storage, [hold])
    assert Walk(Actor(storage, rank, attempt), point).ends() == [point]
    assert stage.reached() == []
    assert stage.left == ("x",), "a strike without a moment must be seen"


def test_the_coordinator_is_held_at_its_own_points(storage: Storage) -> None:
    stage = Stage(storage, [Hold("kill", "publish:end", 4)])
    walk = Walk(Actor(storage, None, 0), "publish:end@2", "publish:end@4", "publish:end@6")
    (held,) = reached(stage)
    assert (held.rank, held.update) == (None, 4)
    stage.release("kill")
    walk.ends()


def test_a_drill_that_ends_holds_nobody_any_more(storage: Storage) -> None:
    stage = Stage(storage, [Hold("one", "update", 1), Hold("two", "update", 2)])
    walk = Walk(Actor(storage, 0, 1), *updates(1, 2, 3))
    reached(stage)
    stage.release_all()
    stage.release("one")
    assert walk.ends()[-1] == "update@3"


def test_nobody_waits_for_ever_for_a_drill_that_is_gone(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "HOLD_LIMIT_S", 0.1)
    Stage(storage, [Hold("kill", "update", 1)])
    Walk(Actor(storage, 0, 1), *updates(1, 2)).ends()
