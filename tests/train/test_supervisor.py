"""The supervisor, over drivers that live and die as the test says."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import config_for

from coherent_ray.config import Config
from coherent_ray.errors import (
    AdmissionRefused,
    ClusterError,
    CoherentRayError,
    DataError,
    TrainingFailed,
)
from coherent_ray.train import supervisor as supervisor_
from coherent_ray.train.events import Event
from coherent_ray.train.supervisor import (
    BARREN_LIVES,
    LONGEST_PAUSE_S,
    RAYLESS_LIVES,
    Outcome,
    Supervisor,
)

FAKE = Path(__file__).parent / "fake_driver.py"
WAIT_S = 30


def command(script: str, folder: Path) -> list[str]:
    return [sys.executable, "-I", "-S", str(FAKE), script, str(folder)]


@pytest.fixture(autouse=True)
def _logs_with_the_tests_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Watched:
    """A supervisor of fake drivers, with everything that it said."""

    def __init__(self, config: Config, script: str, folder: Path) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda event: None
        self.pauses: list[float] = []
        self.folder = folder
        self.supervisor = Supervisor(config, self._on_event, command=command(script, folder))
        self.log = self.supervisor._log

    def run(self) -> Outcome:
        return self.supervisor.run()

    def fails(self, kind: type[CoherentRayError]) -> CoherentRayError:
        with pytest.raises(kind) as caught:
            self.run()
        assert type(caught.value) is kind
        return caught.value

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    @property
    def lives(self) -> int:
        return int((self.folder / "lives").read_text())

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Makes watched supervisors, whose pauses between drivers take no time."""

    def make(script: str, **changes: Any) -> Watched:
        made = Watched(config_for(tmp_path, **changes), script, tmp_path)
        monkeypatch.setattr(made.supervisor, "_pause", made.pauses.append)
        return made

    return make


# --- one life -------------------------------------------------------------------------------------


def test_a_driver_that_finishes(watched: Callable[..., Watched], tmp_path: Path) -> None:
    run = watched("tell('started', done=0); tell('note', 'hello'); progress(1, 2); finish()")
    outcome = run.run()
    assert (outcome.stopped, outcome.restarts) == (False, 0)
    assert outcome.facts["done"] == 6
    assert outcome.log == run.log
    assert [event.kind for event in run.events] == ["started", "note", "progress", "progress"]
    assert run.events[3].facts == {"progress": {"update": 2}}
    assert (run.lives, run.pauses) == (1, [])


def test_a_driver_that_was_stopped(watched: Callable[..., Watched]) -> None:
    assert watched("finish(stopped=True)").run().stopped


def test_it_gets_the_resolved_configuration(watched: Callable[..., Watched]) -> None:
    script = "tell('note', config['run']['root'] + ' ' + config['task']['args']['name']); finish()"
    run = watched(script, task__args={"name": "größer 模型"})
    run.run()
    assert run.texts("note") == [f"{run.folder}/run größer 模型"]


def test_what_it_prints_is_in_the_log(watched: Callable[..., Watched]) -> None:
    run = watched("print('out'); print('err', file=sys.stderr); finish()")
    run.run()
    assert sorted(run.log.read_text().split()) == ["err", "out"]


@pytest.mark.parametrize("error", [DataError, AdmissionRefused, TrainingFailed])
def test_an_error_ends_the_run_as_it_was_raised(
    watched: Callable[..., Watched], error: type[CoherentRayError]
) -> None:
    facts = f"type='{error.__name__}', what='no', where='here', remedy='do', details={{'a': 1}}"
    run = watched(f"tell('error', 'no', {facts}); sys.exit(1)")
    caught = run.fails(error)
    assert (caught.what, caught.where, caught.remedy) == ("no", "here", "do")
    assert caught.details == {"a": 1, "latest": None}
    assert run.lives == 1


def test_what_comes_after_the_end_does_not_undo_it(watched: Callable[..., Watched]) -> None:
    script = "tell('finished', stopped=False); tell('error', type='ClusterError', what='at exit')"
    assert not watched(script).run().stopped
    run = watched("tell('finished', stopped=False); os.kill(os.getpid(), signal.SIGKILL)")
    assert run.run().restarts == 0


def test_a_driver_whose_orphan_holds_the_pipe_has_ended(watched: Callable[..., Watched]) -> None:
    """Nobody waits for a process that the driver left behind."""
    script = """
if os.fork() == 0:
    time.sleep(20)
    os._exit(0)
tell('finished', stopped=False)
pipe.write('{"kind": "no')
"""
    begun = time.monotonic()
    assert not watched(script).run().stopped
    assert time.monotonic() - begun < 15


def test_long_events_and_many_of_them_arrive_whole(watched: Callable[..., Watched]) -> None:
    script = "[tell('note', f'{n} ' + 'ü' * 50_000) for n in range(20)]; finish()"
    run = watched(script)
    run.run()
    assert run.texts("note") == [f"{n} " + "ü" * 50_000 for n in range(20)]


def test_a_torn_last_line_is_no_event(watched: Callable[..., Watched]) -> None:
    script = """
if life == 0:
    progress(1, 2)
    pipe.write('{"kind": "finished", "facts": {"stopp')
    pipe.flush()
    os.kill(os.getpid(), signal.SIGKILL)
finish()
"""
    run = watched(script)
    assert run.run().restarts == 1
    assert run.texts("restarting") == ["the driver died (killed by SIGKILL)"]


# --- one life after the other ---------------------------------------------------------------------


def test_a_driver_that_is_killed_is_replaced(watched: Callable[..., Watched]) -> None:
    script = """
tell('started')
progress(life * 2 + 1, life * 2 + 2)
if life < 6:
    os.kill(os.getpid(), signal.SIGKILL)
finish()
"""
    run = watched(script)
    outcome = run.run()
    # More often than barren lives are allowed: each of these led somewhere.
    assert (outcome.restarts, run.lives) == (6, 7)
    assert run.texts("restarting") == ["the driver died (killed by SIGKILL)"] * 6
    assert run.pauses == [1.0] * 6


def test_what_drivers_start_again_is_counted_over_all_of_them(
    watched: Callable[..., Watched],
) -> None:
    script = """
tell('restarted', what='worker group', times=2)
tell('restarted', what='controller', times=1)
finish() if life else sys.exit(75)
"""
    outcome = watched(script).run()
    assert outcome.restarted == {"worker group": 4, "controller": 2}


def test_a_driver_that_exits_without_a_word_is_replaced(watched: Callable[..., Watched]) -> None:
    run = watched("finish() if life else sys.exit(75)")
    assert run.run().restarts == 1
    assert run.texts("restarting") == ["the driver died (exit status 75)"]


def test_a_driver_that_dies_before_it_reads_is_replaced(watched: Callable[..., Watched]) -> None:
    script = "os.close(0); time.sleep(0.1) if life == 0 else finish()"
    assert watched(script).run().restarts == 1


def test_drivers_that_lead_nowhere_end_the_run(watched: Callable[..., Watched]) -> None:
    run = watched(
        "print('last words', flush=True); progress(5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    error = run.fails(TrainingFailed)
    assert "4 drivers in a row ended without one update" in error.what
    assert "the driver died (killed by SIGKILL)" in error.what
    assert error.where == str(run.log)
    assert run.log.read_text().split() == ["last", "words"] * 4
    assert run.lives == BARREN_LIVES + 1
    assert run.pauses == [2.0, 4.0, 8.0]
    assert max(run.pauses) <= LONGEST_PAUSE_S


TRACE = """
print('Traceback (most recent call last):\\n  File "x", line 1\\n    ray.init()', file=sys.stderr)
print('Exception: The current node timed out', file=sys.stderr)
print('  [raylet] noise', file=sys.stderr)
sys.exit(1)
"""


def test_a_driver_that_dies_says_by_what_and_where_more_is(watched: Callable[..., Watched]) -> None:
    run = watched("finish() if life == 2 else None\n" + TRACE)
    run.run()
    dead = "the driver died (exit status 1): Exception: The current node timed out"
    assert run.texts("restarting") == [dead] * 2
    assert run.texts("note") == [f"the driver's log: {run.log}"], "once"


def test_ray_that_does_not_start_ends_the_run_in_time(watched: Callable[..., Watched]) -> None:
    """What may pass is tried again, but not for ever; and each time with its reason."""
    run = watched(
        "tell('found'); tell('error', type='ClusterError', what='Ray did not start: time',"
        "where='local', remedy='is it overloaded?', details={'may_pass': True}); sys.exit(1)"
    )
    error = run.fails(ClusterError)
    assert error.what.startswith(
        "3 drivers in a row ended before Ray was up; the last one: Ray did"
    )
    assert error.remedy == "is it overloaded?"
    assert run.lives == RAYLESS_LIVES
    assert run.texts("restarting") == ["Ray did not start: time"] * 2
    assert run.texts("note") == ["what to do: is it overloaded?"]


def test_drivers_that_die_while_they_start_ray_end_the_run(watched: Callable[..., Watched]) -> None:
    run = watched("tell('found')" + TRACE)
    error = run.fails(ClusterError)
    assert error.what.endswith("(exit status 1): Exception: The current node timed out")
    assert run.lives == RAYLESS_LIVES


def test_a_start_that_takes_long_says_so(watched: Callable[..., Watched]) -> None:
    run = watched(
        "time.sleep(0.5); tell('found'); time.sleep(0.5); tell('started'); finish()",
        cluster__quiet_warning_s=0.1,
    )
    run.run()
    first, *_, last = run.texts("note")
    assert first.startswith("the driver has been starting for")
    assert last.startswith("Ray has been starting for")


def test_one_update_clears_the_count(watched: Callable[..., Watched]) -> None:
    script = """
if life == 3:
    progress(5, 6)
if life == 7:
    finish()
sys.exit(1)
"""
    run = watched(script)
    assert run.run().restarts == 7
    assert run.pauses == [2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("lives", [1, 3])
def test_an_error_of_the_cluster_ends_a_run_that_never_had_one(
    watched: Callable[..., Watched], lives: int
) -> None:
    script = f"""
if life < {lives - 1}:
    sys.exit(1)
tell('error', type='ClusterError', what='no Ray there')
"""
    run = watched(script)
    assert run.fails(ClusterError).what == "no Ray there"
    assert run.lives == lives


def test_a_cluster_that_was_there_gets_time_to_come_back(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(supervisor_, "time", clock)
    script = """
if life in (0, 9):
    tell('started')
if life == 10:
    finish()
tell('error', type='ClusterError', what='no Ray there')
"""
    run = watched(script, cluster__address="10.0.0.1:6379", cluster__reconnect_timeout_s=100.0)

    def pass_time(event: Event) -> None:
        if event.kind == "restarting":
            clock.now += 11.0

    run.react = pass_time
    # Nine lives of 11 seconds lead nowhere: more than are allowed in a row, but in time.
    assert run.run().restarts == 10
    assert set(run.texts("restarting")) == {"no Ray there"}


def test_a_cluster_that_does_not_come_back_ends_the_run(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(supervisor_, "time", clock)
    script = "tell('started') if life == 0 else None; tell('error', type='ClusterError', what='no')"
    run = watched(script, cluster__address="10.0.0.1:6379", cluster__reconnect_timeout_s=50.0)

    def pass_time(event: Event) -> None:
        if event.kind == "restarting":
            clock.now += 11.0

    run.react = pass_time
    error = run.fails(TrainingFailed)
    assert "6 drivers in a row" in error.what
    assert error.what.endswith("the last one: no")
