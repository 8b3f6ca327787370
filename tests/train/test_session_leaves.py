"""A session whose group is told to leave: one more generation, and the same run afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from small_run import Left, admit, config_for, coordinating, run_loop, train
from test_session import assert_same_run, drive

from coherent_ray.errors import StorageFull
from coherent_ray.train import hooks, leaving
from coherent_ray.train.wishes import WISH_LEAVE, WISH_SAVE, WISH_STOP

pytestmark = pytest.mark.usefixtures("one_process")


def test_a_group_that_is_told_to_leave_publishes_and_is_started_again(tmp_path: Path) -> None:
    straight = train(config_for(tmp_path))
    config = config_for(tmp_path, run__root=str(tmp_path / "left"))
    with coordinating(config) as coordinator:
        coordinator.wishes = [0, 0, WISH_LEAVE | WISH_SAVE]
        admit(config, coordinator)
        with pytest.raises(RayActorError, match="leaves with g2-a1") as caught:
            run_loop(config, coordinator)
        assert caught.value.preempted
        assert coordinator.left == ["g2-a1"]
        assert Left(config).updates == [2, 3]
        assert admit(config, coordinator)[0].generation == "g2-a1"
        run_loop(config, coordinator)
    assert_same_run(straight, Left(config))


def test_who_is_told_to_leave_at_the_last_update_has_ended(tmp_path: Path) -> None:
    left = train(config_for(tmp_path), [0] * 5 + [WISH_LEAVE | WISH_SAVE])
    assert left.updates == [2, 4, 6]


def test_a_wish_to_stop_outweighs_one_to_leave(tmp_path: Path) -> None:
    left = train(config_for(tmp_path), [WISH_LEAVE | WISH_STOP | WISH_SAVE])
    assert left.updates == [1]


def test_a_group_that_cannot_save_leaves_all_the_same(tmp_path: Path) -> None:
    config = config_for(tmp_path, checkpoint__max_failed_saves=0)
    with coordinating(config) as coordinator:
        coordinator.wishes = [0, 0, WISH_LEAVE | WISH_SAVE]
        admit(config, coordinator)

        def full(point: str) -> None:
            if point == "shard:begun" and len(Left(config).updates) == 1:
                raise StorageFull("no space", where="shard")

        hooks.install(full)
        with pytest.raises(RayActorError, match="leaves with no generation"):
            run_loop(config, coordinator)
        assert coordinator.left == [None]
    assert Left(config).updates == [2]


def test_sigterm_is_a_wish_to_leave_while_a_session_trains(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    listener = leaving.sigterm
    try:
        assert listener.install()
        with coordinating(config) as coordinator:
            admit(config, coordinator)

            def terminated(update: int) -> None:
                if update == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                    deadline = time.monotonic() + 30
                    while not coordinator.wishes and time.monotonic() < deadline:
                        time.sleep(0.005)

            with pytest.raises(RayActorError, match="leaves with g2-a1"):
                drive(config, coordinator, each=terminated)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Left(config).updates == [2, 3]
