"""Several ranks save at the same boundary, whatever their clocks and their own saves say."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slow_clock import SlowClock
from small_run import Left, assert_same_state, config_for
from threaded import Rank, train_ranks

from coherent_ray.commit.profiles import read_profile
from coherent_ray.config import Config
from coherent_ray.train.cadence import Cadence
from coherent_ray.train.update import Micro

pytestmark = pytest.mark.usefixtures("one_process")

WAIT_S = 30.0


def configured(folder: Path, name: str, **checkpoint: Any) -> Config:
    changes = {f"checkpoint__{key}": value for key, value in checkpoint.items()}
    changes = {"task__factory": "session_tasks:Plain", "training__updates": 8, **changes}
    return config_for(folder, run__root=str(folder / name), **changes)


def assert_same_run(one: Left, other: Left) -> None:
    assert one.chain() == other.chain()
    assert_same_state(one.state(), other.state())


def wait_until_landed(rank: Rank) -> None:
    end = time.monotonic() + WAIT_S
    while rank.session.boundaries.saving:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_all_ranks_save_when_the_first_one_s_clock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' clocks run wild, and nobody asks them; the maths does not change."""
    clocks = [SlowClock() for _ in range(3)]

    def made(options: Any, rank: int, *rest: Any) -> Cadence:
        return Cadence(options, rank, *rest, clock=clocks[rank])

    monkeypatch.setattr("coherent_ray.train.boundaries.Cadence", made)

    def look(rank: Rank, update: int, micro: Micro) -> None:
        if len([one for one in rank.seen if one[0] == update]) == 1:
            clocks[rank.rank].pass_by(4.0 if rank.rank == 0 else 1_000.0)

    config = configured(tmp_path, "clock", every_updates=None, every_seconds=10.0)
    ranks = train_ranks(config, 3, look)
    left = Left(config)
    assert left.updates == [3, 6, 8]
    assert [[s.name for s in r.session.boundaries.saves] for r in ranks] == [left.generations] * 3
    straight = configured(tmp_path, "straight")
    train_ranks(straight, 1)
    assert_same_run(left, Left(straight))
    profiles = [read_profile(left.storage, name) for name in left.generations]
    abouts = [profile.about for profile in profiles if profile and profile.about]
    assert [about.why for about in abouts] == ["due", "due", "end"]
    assert [about.trained_s for about in abouts] == [12.0, 24.0, 32.0]


class Late:
    """Lets one rank learn the fate of its saves when the gate opens; the others know it."""

    def __init__(self, opens: int | None) -> None:
        self.gate = threading.Event()
        self.opens = opens
        """Before this update; None: when somebody waits for it."""

    def __call__(self, rank: Rank, update: int, micro: Micro) -> None:
        if len([one for one in rank.seen if one[0] == update]) > 1:
            return
        if update == 1 and rank.rank == 1:
            rank.line.acknowledge = partial(self._acknowledge, rank.line.acknowledge)  # type: ignore[method-assign]
        if self.opens is not None and update >= self.opens:
            self.gate.set()
        if rank.rank == 0 or self.gate.is_set():
            wait_until_landed(rank)

    def _acknowledge(self, original: Any, word: Any) -> Any:
        reply = original(word)
        assert self.gate.wait(WAIT_S)
        return reply


def test_a_save_is_left_out_by_all_ranks_while_one_of_them_is_busy(tmp_path: Path) -> None:
    config = configured(tmp_path, "skip", every_updates=1, on_busy="skip", block_bytes=4096)
    ranks = train_ranks(config, 3, Late(opens=4))
    left = Left(config)
    assert left.updates == [1, 4, 5, 6, 7, 8]
    assert [rank.session.boundaries.cadence.skipped for rank in ranks] == [2, 2, 2]
    assert ranks[0].line.coordinator.reports[-1]["skipped"] == 2
    straight = configured(tmp_path, "straight")
    train_ranks(straight, 1)
    assert_same_run(left, Left(straight))


def test_what_is_asked_for_waits_and_so_does_the_end(tmp_path: Path) -> None:
    late = Late(opens=None)

    def look(rank: Rank, update: int, micro: Micro) -> None:
        if update == 3 and rank.rank == 2 and not late.gate.is_set():
            rank.hear("save", 7)
            threading.Timer(0.1, late.gate.set).start()
        late(rank, update, micro)

    changes: dict[str, Any] = {"every_updates": 1, "on_busy": "skip"}
    config = configured(tmp_path, "asked", **changes)
    ranks = train_ranks(config, 3, look)
    assert Left(config).updates[:2] == [1, 3], "the wish was voted while rank 1 was busy"
    assert Left(config).updates[-1] == 8
    skipped = {rank.session.boundaries.cadence.skipped for rank in ranks}
    assert skipped == {8 - len(Left(config).updates)}
