"""A clock that jumps by hours, forth and back, changes nothing: not the run, not what is kept.

Durations come from monotonic clocks. The wall clock is for people (since when a driver trains, when
a file was written) and stands in the few places that are named here.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from small_run import Left, assert_same_state, config_for, train

import coherent_ray
from coherent_ray.commit.holds import Watch, holding
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.drill.saves import Saves
from coherent_ray.storage import LocalStorage
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.ownership import Owner

PACKAGE = Path(coherent_ray.__file__).parent
HOUR = 3600.0
#: Where the wall clock is asked, and what for.
ASKED = {
    "train/ownership.py": "since when a driver trains, in messages",
    "train/driver_log.py": "names of logs, which only ever grow",
    "data/content.py": "whether a digest may be remembered; else the file is read again",
    "commit/scrubbing.py": "when it was read, for people; and at most a round sooner or later",
    "train/drains.py": "seconds that Ray's own time of day leaves, in messages",
}


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the wall clock be hours from the one before."""
    real, jumps = time.time, itertools.cycle([5 * HOUR, -7 * HOUR, 1000 * HOUR, -1000 * HOUR, 0.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps at every look."""
    jump(monkeypatch)


NAMES = {
    "time.time", "time.time_ns", "time.gmtime", "time.localtime", "time.strftime", "time.ctime",
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
}  # fmt: skip


def asks_the_wall_clock(path: Path) -> bool:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func).removeprefix("datetime.datetime") in NAMES for call in calls)


def test_the_wall_clock_is_asked_only_where_it_decides_nothing() -> None:
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    asking = {file for file in files if asks_the_wall_clock(PACKAGE / file)}
    assert asking - {file for file in asking if file.startswith("drill/")} == set(ASKED)


def test_a_signed_run_under_a_jumping_clock_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_KEY", "0123456789abcdef")

    def trained(name: str) -> Left:
        (tmp_path / name).mkdir()
        signed = {"storage__signing_key": {"env": "RUN_KEY"}, "checkpoint__digest": "blake3"}
        return train(config_for(tmp_path / name, checkpoint__keep=2, **signed))

    calm = trained("calm")
    jump(monkeypatch)
    wild = trained("wild")
    assert wild.receipts() == calm.receipts()
    assert wild.generations == calm.generations
    assert_same_state(wild.state(), calm.state())


def test_a_generation_that_is_held_stays_though_the_clock_jumps(
    tmp_path: Path, jumping: None
) -> None:
    root = LocalStorage(tmp_path / "run")
    saves = Saves(lambda: LocalStorage(tmp_path / "run"), items=3000)
    saves.open()
    saves.save()
    log = CommitLog(root)
    first = log.read().latest
    assert first is not None
    pruner = Pruner(root, Policy(keep=1))
    with holding(root, log, first):
        saves.save()
        for _ in range(10):
            assert pruner.prune().retired == ()
            [held] = Watch(root).look()
            assert 0 < held.expires_in_s <= 60
    assert pruner.prune().retired == (first,)
    saves.close()


def test_how_long_an_owner_was_silent_is_not_told_by_the_wall_clock(
    tmp_path: Path, jumping: None
) -> None:
    actor = CoordinatorActor("run", str(tmp_path), ack_timeout_s=1.0, read_back=False)
    first = asdict(Owner("01", "here", 1, time.time()))
    second = asdict(Owner("02", "there", 2, time.time()))
    asyncio.run(actor.hold(first))
    for _ in range(10):
        found = asyncio.run(actor.hold(second))
        assert found["owner"] == first
        assert 0 <= found["silent_s"] < 60


def test_a_hint_and_a_hold_tell_no_time(tmp_path: Path) -> None:
    """What two hosts read has no clock's word in it, so none can be wrong."""
    saves = Saves(lambda: LocalStorage(tmp_path / "run"), items=3000)
    saves.open()
    saves.save()
    saves.close()
    root = LocalStorage(tmp_path / "run")
    log = CommitLog(root)
    latest = log.read().latest
    assert latest is not None
    with holding(root, log, latest):
        texts = [root.read(e.path) for e in root.list() if e.path.endswith(".json")]
    today = str(int(time.time()))[:5].encode()
    assert len(texts) >= 5
    assert not any(today in text for text in texts if b"safetensors" not in text)
