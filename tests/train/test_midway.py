"""A save between two microbatches: the same update goes on, at any rank count, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from small_run import Left, assert_same_state, config_for, write_data
from threaded import Rank, train_ranks

from coherent_ray.config import Config
from coherent_ray.train import partial
from coherent_ray.train.update import Micro

pytestmark = pytest.mark.usefixtures("one_process")

#: Four lanes of four microbatches of one example.
SHAPE: dict[str, Any] = {
    "data__global_batch": 16,
    "training__updates": 4,
    "checkpoint__every_updates": 100,
    "checkpoint__mid_update": True,
    "optimizer__lr": 0.02,
}
TASKS = {
    "plain": {"task__factory": "session_tasks:Plain"},
    "batch norm": {"task__factory": "session_tasks:Normed"},
    "layer that some lanes use": {"task__factory": "session_tasks:Sometimes"},
    "tied weights": {"task__factory": "session_tasks:Tied"},
    "frozen layer": {"task__factory": "midway_tasks:FrozenPlain"},
    "fp16": {"task__factory": "session_tasks:Plain", "training__precision": "fp16"},
}


def configured(folder: Path, name: str, **changes: Any) -> Config:
    if not (data := folder / "data.parquet").exists():
        write_data(data, examples=40)  # the third update of an epoch is short
    changes = {**SHAPE, **TASKS["plain"], **changes}
    return config_for(folder, run__root=str(folder / name), **changes)


def straight(folder: Path, **changes: Any) -> Left:
    config = configured(folder, "straight", **changes)
    train_ranks(config, 1)
    return Left(config)


def assert_same_run(one: Left, other: Left) -> None:
    assert one.chain() == other.chain()
    assert_same_state(one.state(), other.state())
    assert one.manifest().header.values == other.manifest().header.values
    assert one.manifest().fingerprint == other.manifest().fingerprint
    for ours, theirs in zip(one.receipts(), other.receipts(), strict=True):
        assert None in {ours.state, theirs.state} or ours.state == theirs.state


def asks(wish: str, update: int, done: int, rank: int = 0) -> Any:
    """Let one rank hear a wish when it has done some microbatches of an update."""
    seen = 0

    def look(who: Rank, number: int, micro: Micro) -> None:
        nonlocal seen
        if who.rank == rank and number == update:
            seen += 1
            if seen == done:
                who.hear(wish, 7)

    return look


def record_of(left: Left, name: str | None = None) -> partial.Record:
    return partial.load(left.manifest(name).header.values[partial.KEY])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 2), (3, 1)])
def test_a_run_that_stopped_in_an_update_is_the_same_run(
    tmp_path: Path, task: str, before: int, after: int
) -> None:
    whole = straight(tmp_path, **TASKS[task])
    config = configured(tmp_path, "stopped", **TASKS[task])
    # Between microbatches 2 and 3 of 4 of its last lane; the others may be anywhere.
    last = before - 1
    lanes = len(range(4 * last // before, 4))
    train_ranks(config, before, asks("stop", 2, 4 * (lanes - 1) + 2, last))
    stopped = Left(config)
    assert stopped.updates == [1]
    record = record_of(stopped)
    assert record.update == 2
    assert {lane.lane: lane.done for lane in record.lanes}[3] == 2
    resumed = train_ranks(config, after)
    # Lane 3 is gone on with where it was, by whichever rank has it now.
    again = [
        index for rank in resumed for number, lane, index in rank.seen if (number, lane) == (2, 3)
    ]
    assert again == [2, 3]
    assert Left(config).updates == [1, 4]
    assert_same_run(whole, Left(config))


@pytest.mark.parametrize("done", [1, 3, 4, 5, 11, 15, 16])
def test_one_rank_may_stop_after_any_microbatch(tmp_path: Path, done: int) -> None:
    whole = straight(tmp_path, **TASKS["batch norm"])
    config = configured(tmp_path, "stopped", **TASKS["batch norm"])
    train_ranks(config, 1, asks("stop", 2, done))
    # The last one ends the update: there, the boundary is the usual one.
    assert Left(config).updates == [1 if done < 16 else 2]
    resumed = train_ranks(config, 1)
    if done < 16:
        assert sum(number == 2 for number, _, _ in resumed[0].seen) == 16 - done, "nothing twice"
    assert_same_run(whole, Left(config))


def test_an_update_is_broken_off_again_and_again(tmp_path: Path) -> None:
    whole = straight(tmp_path, **TASKS["batch norm"])
    config = configured(tmp_path, "stopped", **TASKS["batch norm"])
    for ranks in (2, 3, 4, 2, 1):
        train_ranks(config, ranks, asks("stop", 2, 1, ranks - 1))
    assert set(Left(config).updates) == {1}
    train_ranks(config, 2)
    assert_same_run(whole, Left(config))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_wish_to_save_makes_one_generation_and_training_goes_on(
    tmp_path: Path, ranks: int
) -> None:
    whole = straight(tmp_path)
    config = configured(tmp_path, "saved")
    seen = train_ranks(config, ranks, asks("save", 2, 2))
    left = Left(config)
    assert left.updates == [1, 4]
    assert record_of(left, "g1-a1").update == 2
    assert sum(len(rank.seen) for rank in seen) == 16 + 16 + 8 + 16, "nothing was computed twice"
    assert ranks == 1 or all(rank.session.reducer.overlapped for rank in seen)
    assert_same_run(whole, left)


def test_every_rank_hears_of_the_same_wish_and_one_generation_is_made(tmp_path: Path) -> None:
    def look(who: Rank, number: int, micro: Micro) -> None:
        if number >= 2 and micro.index == who.rank:
            who.hear("save", 7)

    config = configured(tmp_path, "saved")
    train_ranks(config, 3, look)
    assert Left(config).updates == [1, 4]
    assert_same_run(straight(tmp_path), Left(config))


def test_a_group_that_is_told_to_leave_does_so_in_the_update(tmp_path: Path) -> None:
    config = configured(tmp_path, "left")
    with pytest.raises(RayActorError, match="leaves with g1-a1") as caught:
        train_ranks(config, 2, asks("leave", 2, 3, rank=1))
    assert caught.value.preempted
    assert record_of(Left(config)).update == 2
    train_ranks(config, 3)
    assert_same_run(straight(tmp_path), Left(config))


def test_what_the_new_lanes_cannot_use_is_computed_again(tmp_path: Path) -> None:
    """One rank has summed lanes 0 and 1 into one node; of three ranks none has both."""
    config = configured(tmp_path, "stopped")
    train_ranks(config, 1, asks("stop", 2, 10))
    record = record_of(Left(config))
    assert [(n.start, n.size, n.present) for n in record.nodes] == [(0, 2, (0, 1))]
    assert [(lane.lane, lane.done) for lane in record.lanes] == [(0, 4), (1, 4), (2, 2)]
    ranks = train_ranks(config, 3)
    again = sorted((lane, index) for rank in ranks for n, lane, index in rank.seen if n == 2)
    # Ranks 0, 1 and 2 of 3 carry lanes 0, 1, and 2 with 3.
    assert again == [(lane, i) for lane in (0, 1) for i in range(4)] + [(2, 2), (2, 3)] + [
        (3, i) for i in range(4)
    ]
    assert_same_run(straight(tmp_path), Left(config))


def test_without_the_setting_the_boundary_is_the_end_of_the_update(tmp_path: Path) -> None:
    config = configured(tmp_path, "stopped", checkpoint__mid_update=False)
    train_ranks(config, 2, asks("stop", 2, 1))
    left = Left(config)
    assert left.updates == [2]
    assert partial.KEY not in left.manifest().header.values


def test_a_wish_that_comes_with_the_last_microbatch_waits_for_the_update_s_end(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, "saved")
    train_ranks(config, 1, asks("save", 1, 16))
    left = Left(config)
    assert left.updates == [1, 4]
    assert partial.KEY not in left.manifest("g1-a1").header.values
