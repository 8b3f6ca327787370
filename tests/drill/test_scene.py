"""The scene beside Ray: which strikes are due, and which have to wait for another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coherent_ray import config as config_
from coherent_ray.config import Config
from coherent_ray.drill import scene as scene_module
from coherent_ray.drill.clusters import Ground
from coherent_ray.drill.injections import Injection
from coherent_ray.drill.scene import Scene
from coherent_ray.drill.stage import Held, Hold, Stage, stage_of
from coherent_ray.drill.victims import Victim
from coherent_ray.errors import ClusterError, Interrupted, TrainingFailed
from coherent_ray.train.events import Event

HOLD = Hold("kill", "update", 3)
HELD = Held("kill", "update", 3, 4711, "node", 0, 1)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Process ids that are there."""
    pids = {HELD.pid}
    monkeypatch.setattr(Victim, "alive", property(lambda victim: victim.pid in pids))
    return pids


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    root = str(tmp_path / "run")
    values = {
        "run": {"root": root},
        "data": {
            "source": {"format": "parquet", "paths": ["x"]},
            "global_batch": 8,
            "microbatch": 1,
        },
        "training": {"updates": 12},
    }

    def made(*, or_later: bool) -> Scene:
        injection = Injection(HOLD, "worker", or_later=or_later)
        stage = Stage(stage_of(root), [HOLD])
        stage._storage.create("held/kill", b'{"name": "kill", "point": "update", "update": 3, '
                              b'"pid": 4711, "node": "node", "rank": 0, "attempt": 1}')  # fmt: skip
        return Scene(config_.build(values), Ground("here"), stage, [injection])

    return made


def progress(attempt: int, update: int = 4) -> Event:
    facts = {"attempt": attempt, "update": update, "resumed_at": 0}
    return Event("progress", facts={"progress": facts})


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def deed(scene: Scene, injection: Injection, held: Held) -> str:
        done.append(held.name)
        return "pid 1"

    monkeypatch.setitem(scene_module.DEEDS, "kill", deed)
    return done


def test_who_is_held_is_struck_at_once(scene: Any, alive: set[int], struck: list[str]) -> None:
    made = scene(or_later=True)
    made._listen(progress(1))
    assert (struck, made.left) == (["kill"], ())


def test_a_strike_whose_holder_is_gone_waits_for_a_later_attempt(
    scene: Any, alive: set[int], struck: list[str]
) -> None:
    alive.clear()
    made = scene(or_later=True)
    for _ in range(3):
        made._listen(progress(1))
    assert (struck, made.left) == ([], ("kill",)), "until then it has found no moment"
    made._listen(progress(2))
    made._listen(progress(2))
    assert (struck, made.left) == (["kill"], ())


def test_an_exact_strike_never_takes_another(
    scene: Any, alive: set[int], struck: list[str]
) -> None:
    alive.clear()
    made = scene(or_later=False)
    made._listen(progress(1))
    assert struck == ["kill"], "and its deed says that the process is gone"


def test_a_strike_that_fails_says_which(
    scene: Any, alive: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deed(scene: Scene, injection: Injection, held: Held) -> str:
        raise ProcessLookupError("no such process")

    monkeypatch.setitem(scene_module.DEEDS, "kill", deed)
    with pytest.raises(ClusterError, match="could not be carried out") as caught:
        scene(or_later=False)._listen(progress(1))
    assert "kill worker, at update" in caught.value.where


def test_what_was_lost_and_how_long_it_took(scene: Any, alive: set[int], struck: list[str]) -> None:
    made = scene(or_later=True)
    made._listen(progress(1, update=5))
    (seen,) = made.done
    assert (seen.update, seen.attempt, seen.next_update_s) == (5, 1, None)
    made._listen(progress(1, update=5))
    assert seen.next_update_s is None, "what the struck attempt still reports is no news"
    made._listen(progress(1, update=6))
    assert seen.next_update_s is None, "nor where another rank had gone on behind the save"
    made._listen(Event("progress", facts={"progress": {
        "attempt": 2, "update": 3, "resumed_at": 2}}))  # fmt: skip
    assert seen.next_update_s is not None
    assert seen.lost == 3


@pytest.mark.parametrize("stopped", [True, False])
def test_what_a_run_that_was_stopped_ends_with_is_no_verdict(
    scene: Any, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    class Failing:
        def __init__(self, config: Config, on_event: Callable[[Event], None], **_: Any) -> None:
            self._on_event = on_event

        def run(self) -> None:
            if stopped:
                self._on_event(Event("note", "stopping: one more generation is published first"))
            raise TrainingFailed("a worker hangs")

    monkeypatch.setattr(scene_module, "Supervisor", Failing)
    monkeypatch.setattr(scene_module.coordinators, "stop", lambda *_, **__: False)
    with pytest.raises(Interrupted if stopped else TrainingFailed):
        scene(or_later=False).play()
