"""The supervisor under signals, and when it goes itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import config_for
from test_supervisor import WAIT_S, Watched, _logs_with_the_tests_files, command, watched

from coherent_ray.cli.summary import closing, headline
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import generation_directory
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import digest_of
from coherent_ray.errors import ClusterError, Interrupted
from coherent_ray.storage import LocalStorage
from coherent_ray.train import supervisor as supervisor_
from coherent_ray.train.events import Event

__all__ = ["_logs_with_the_tests_files", "watched"]

# --- signals --------------------------------------------------------------------------------------


def sending(*signals: signal.Signals, at: str = "started") -> Callable[[Event], None]:
    """Let the user press keys when an event comes: the next of these at each."""
    left = list(signals)

    def react(event: Event) -> None:
        if event.kind == at and left:
            os.kill(os.getpid(), left.pop(0))

    return react


STOPPING = "seen = wait_for_stop(); tell('note', ' '.join(seen)); finish(stopped=True)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_driver_to_stop(
    watched: Callable[..., Watched], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    run = watched(STOPPING)
    run.react = sending(number)
    assert run.run().stopped
    asked, seen = run.texts("note")
    assert asked.startswith("stopping: nothing trains yet")
    assert seen == "SIGTERM"
    assert signal.getsignal(number) is before


def test_a_driver_that_dies_while_it_is_asked_is_not_replaced(
    watched: Callable[..., Watched],
) -> None:
    run = watched("progress(1); wait_for_stop(); os.kill(os.getpid(), signal.SIGKILL)")
    run.react = sending(signal.SIGTERM)
    error = run.fails(Interrupted)
    assert "before one more generation could be published" in error.what
    assert error.details["latest"] is None
    assert run.lives == 1


def publish(root: Path, generations: int) -> None:
    """Write a commit log with some generations, one update each."""
    log = CommitLog(LocalStorage(root))
    attempt = log.open_attempt("small", "token").body.attempt
    for number in range(1, generations + 1):
        digest = digest_of(b"manifest")
        place = f"{generation_directory(number, attempt)}/manifest.json"
        log.append(PublishBody(number, attempt, number, 0, place, 8, digest, None), attempt)


#: Where a driver may be when somebody asks to stop, and nothing trains yet.
EARLY = {
    "it loads its packages": "tell('note', 'now'); time.sleep(30)",
    "it starts Ray": "tell('found', **FOUND); tell('note', 'now'); time.sleep(30)",
    "it starts Ray and hears of it": (
        "tell('found', **FOUND); ignore_stop(); tell('note', 'now'); time.sleep(0.5);"
        "tell('error', type='Interrupted', what='stopped before the training began')"
    ),
    "Ray hears of it": (
        "tell('found', **FOUND); ignore_stop(); tell('note', 'now'); time.sleep(0.5);"
        "tell('error', type='ClusterError', what='Ray did not start')"
    ),
    "workers start": "tell('found', **FOUND); tell('started', **FOUND); tell('note', 'now');"
    "time.sleep(30)",
}
FOUND = (
    "ignore_stop = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "FOUND = dict(run_id='job', updates=6, done=4, latest='g2-a1', complete=False);"
)


@pytest.mark.parametrize("script", EARLY.values(), ids=EARLY.keys())
def test_a_stop_before_anything_trains_says_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """The same end in the same words, wherever the driver was."""
    publish(tmp_path / "run", 2)
    run = Watched(config_for(tmp_path), FOUND + script, tmp_path)
    run.react = sending(signal.SIGTERM, at="note")
    outcome = run.run()
    assert outcome.stopped
    assert outcome.facts["latest"] == "g2-a1"
    assert outcome.facts["saves"] == []
    assert headline(outcome).endswith("was stopped; it resumes at g2-a1 by the same command")
    assert run.lives == 1


def test_a_stop_on_a_root_that_cannot_be_read_claims_nothing(
    watched: Callable[..., Watched],
) -> None:
    run = watched("wait_for_stop()")
    (run.folder / "run" / "log").mkdir(parents=True)
    (run.folder / "run" / "log" / f"{1:020d}.json").write_text("torn")
    run.react = sending(signal.SIGTERM)
    error = run.fails(Interrupted)
    assert "latest" not in error.details
    assert not any("Published" in line for line in closing(error))


def test_an_error_before_ray_is_up_says_what_is_published(watched: Callable[..., Watched]) -> None:
    run = watched("tell('error', type='ClusterError', what='no Ray there')")
    publish(run.folder / "run", 1)
    error = run.fails(ClusterError)
    assert "Published: g1-a1; the same command resumes there." in closing(error)


STUBBORN = """
seen = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: seen.append(number))
tell('started')
while True:
    time.sleep(0.01)
    if seen:
        seen.pop()
        tell('note', 'not yet')
"""


def test_the_third_signal_kills(watched: Callable[..., Watched]) -> None:
    run = watched(STUBBORN)
    more = sending(signal.SIGINT, signal.SIGINT, at="note")

    def react(event: Event) -> None:
        if event.kind == "started":
            os.kill(os.getpid(), signal.SIGINT)
        elif event.text == "not yet":
            more(event)

    run.react = react
    assert run.run().stopped
    assert run.texts("note").count("not yet") == 2
    child = run.supervisor._child
    assert child is not None
    assert child.returncode == -signal.SIGKILL


def test_a_signal_between_two_drivers_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at once: the pause is not sat out."""
    run = Watched(config_for(tmp_path), "sys.exit(1)", tmp_path)
    monkeypatch.setattr(supervisor_, "LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(run.supervisor, "_barren", 5)
    monkeypatch.setattr(supervisor_, "BARREN_LIVES", 9)
    run.react = sending(signal.SIGTERM, at="restarting")
    begun = time.monotonic()
    outcome = run.run()
    assert time.monotonic() - begun < 20
    assert (outcome.stopped, outcome.facts["latest"]) == (True, None)
    assert run.lives == 1


def test_a_signal_while_a_driver_is_being_started_reaches_it(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched("time.sleep(30)")
    start = subprocess.Popen

    def signalled(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*given, **named)

    monkeypatch.setattr(supervisor_.subprocess, "Popen", signalled)
    begun = time.monotonic()
    assert run.run().stopped
    assert time.monotonic() - begun < 20


def test_an_exception_of_the_display_ends_the_driver(watched: Callable[..., Watched]) -> None:
    run = watched("wait_for_stop(); (folder / 'told').write_text('SIGTERM')")

    def react(event: Event) -> None:
        raise ZeroDivisionError

    run.react = react
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert (run.folder / "told").read_text() == "SIGTERM"
    assert run.supervisor._child is not None
    assert run.supervisor._child.returncode == 0


# --- a supervisor of its own ----------------------------------------------------------------------

OUTER = """
import sys, pathlib
from coherent_ray import config
from coherent_ray.train.supervisor import Supervisor
light = not {'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules)
settings = config.load(sys.argv[1])
Supervisor(settings, lambda event: print(event.kind, light, flush=True), command=sys.argv[2:]).run()
"""


def test_a_supervisor_that_is_killed_takes_its_driver_along(tmp_path: Path) -> None:
    """It starts without torch and Ray, and its driver is asked to stop when it is gone."""
    settings = tmp_path / "config.yaml"
    settings.write_text(config_for(tmp_path).model_dump_json())
    script = "seen = wait_for_stop(); (folder / 'told').write_text(' '.join(seen))"
    outer = subprocess.Popen(
        [sys.executable, "-c", OUTER, str(settings), *command(script, tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert outer.stdout is not None
    assert outer.stdout.readline() == "started True\n"
    outer.kill()
    outer.wait()
    outer.stdout.close()
    told, until = tmp_path / "told", time.monotonic() + WAIT_S
    while not (told.exists() and told.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    assert told.read_text() == "SIGTERM"


def test_a_driver_whose_supervisor_went_before_it_began_does_not_begin() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "pass"],
        preexec_fn=supervisor_._end_with(os.getpid() + 1),
    )
    assert child.wait(WAIT_S) == 1
