"""One flipped bit in one rank's memory: no generation holds it, rank and tensor are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import Left, config_for, coordinating
from test_midway import assert_same_run
from threaded import Look, Rank, train_ranks

from coherent_ray.config import Config
from coherent_ray.errors import PeerLost, ReplicaDiverged
from coherent_ray.train import agreement
from coherent_ray.train.backend import FatalErrors
from coherent_ray.train.update import Micro

pytestmark = pytest.mark.usefixtures("one_process")

#: Where the bit is: in a parameter, or in a moment of one.
PLACES = {"model/2.weight": None, "optimizer/0.weight/exp_avg_sq": "exp_avg_sq"}


def configured(folder: Path, name: str, **changes: Any) -> Config:
    return config_for(
        folder,
        run__root=str(folder / name),
        task__factory="precision_tasks:Chosen",
        **changes,
    )


def flips(place: str, rank: int = 1, update: int = 4) -> Look:
    """Let the lowest bit of an item of one rank's state turn, right after a step."""
    done: list[int] = []

    def look(who: Rank, number: int, micro: Micro) -> None:
        if (who.rank, number) != (rank, update) or done:
            return
        done.append(number)
        optimizer = who.session.optimizer
        parameter = who.session.model.get_parameter(place.split("/")[1])

        def turn(*_: Any) -> None:
            key = PLACES[place]
            tensor = parameter if key is None else optimizer.state[parameter][key]
            tensor.detach().view(torch.int32).view(-1)[3] ^= 1
            hook.remove()

        hook = optimizer.register_step_post_hook(turn)

    return look


@pytest.mark.parametrize("place", PLACES)
def test_a_generation_with_a_flipped_bit_is_refused_and_named(tmp_path: Path, place: str) -> None:
    config = configured(tmp_path, "run")
    with pytest.raises(ReplicaDiverged) as caught:
        train_ranks(config, 3, flips(place))
    assert "rank 1 has another state than ranks 0 and 2" in caught.value.what
    assert (caught.value.details["ranks"], caught.value.details["tensor"]) == ([1], place)
    assert Left(config).updates == [2], "the generation of update 4 was not published"


@pytest.mark.parametrize("place", PLACES)
def test_a_comparison_between_saves_finds_it_in_its_update(tmp_path: Path, place: str) -> None:
    config = configured(
        tmp_path, "run", checkpoint__every_updates=100, checkpoint__check_replicas_every_updates=2
    )
    reached: list[int] = []
    flip = flips(place, rank=2)

    def look(who: Rank, number: int, micro: Micro) -> None:
        reached.append(number)
        flip(who, number, micro)

    with pytest.raises(ReplicaDiverged) as caught:
        train_ranks(config, 3, look)
    assert caught.value.what == (
        "rank 2 has another state than ranks 0 and 1 after update 4; the first tensor that "
        f"differs is {place!r}"
    )
    assert caught.value.details["tensor"] == place
    assert max(reached) == 4


def test_what_is_no_tensor_is_compared_too(tmp_path: Path) -> None:
    def look(who: Rank, number: int, micro: Micro) -> None:
        if who.rank == 1 and number == 2:
            who.session.optimizer.param_groups[0]["eps"] = 1e-7

    config = configured(
        tmp_path, "run", checkpoint__every_updates=100, checkpoint__check_replicas_every_updates=1,
        task__args={"optimizer": "momentum"},
    )  # fmt: skip
    with pytest.raises(ReplicaDiverged, match="after update 2; no tensor differs"):
        train_ranks(config, 2, look)


def test_a_comparison_changes_nothing_and_costs_other_updates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    gather = agreement._gather

    def counted(mine: bytes, ranks: int, device: torch.device) -> list[bytes]:
        sent.append(len(mine))
        return gather(mine, ranks, device)

    monkeypatch.setattr(agreement, "_gather", counted)
    config = configured(
        tmp_path, "run", checkpoint__every_updates=3, checkpoint__check_replicas_every_updates=2
    )
    train_ranks(config, 2)
    at_start, compared = 2, 2  # updates 2 and 4; what is due in update 6 its save has compared
    assert len(sent) == 2 * (at_start + compared)
    straight = configured(tmp_path, "straight")
    train_ranks(straight, 1)
    assert_same_run(Left(straight), Left(config))


# --- healing --------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What the coordinator is told of failures."""
    heard: list[tuple[int, str]] = []

    def failed(count: int, words: str, taken: int) -> None:
        heard.append((count, words))

    handle = SimpleNamespace(failed=SimpleNamespace(remote=failed))
    monkeypatch.setattr("coherent_ray.train.backend.coordinators.find", lambda run_id: handle)
    return heard


def test_a_run_that_heals_is_the_same_run(tmp_path: Path, told: list[tuple[int, str]]) -> None:
    config = configured(tmp_path, "run", checkpoint__on_divergence="heal")
    callback = FatalErrors(config)
    with coordinating(config) as coordinator:
        for place in PLACES:
            with pytest.raises(ReplicaDiverged) as caught:
                train_ranks(config, 3, flips(place), coordinator)
            # As Ray calls it, which then starts the group again.
            errors: dict[int, Exception] = {0: caught.value, 1: caught.value, 2: PeerLost("gone")}
            callback.after_exception(None, errors)
        train_ranks(config, 2, lasting=coordinator)
    left = Left(config)
    assert left.updates == [2, 4, 6]
    straight = configured(tmp_path, "straight")
    train_ranks(straight, 1)
    assert_same_run(Left(straight), left)
    assert [count for count, _ in told] == [1, 2]
    assert "rank 1 has another state" in told[0][1]
    assert "the first tensor that differs is 'model/2.weight'" in told[0][1]
    assert told[0][1].endswith("all resume from the last good generation")


def test_what_diverges_again_and_again_ends_with_rank_and_tensor(
    tmp_path: Path, told: list[tuple[int, str]]
) -> None:
    config = configured(
        tmp_path, "run", checkpoint__on_divergence="heal", checkpoint__max_divergences=2
    )
    callback = FatalErrors(config)
    what = "rank 1 has another state than ranks 0 and 2; the first tensor that differs is 'w'"
    error = ReplicaDiverged(what, where="generation g2-a1", details={"ranks": [1], "tensor": "w"})
    for _ in range(2):
        callback.after_exception(None, {0: error, 1: error})
    with pytest.raises(ReplicaDiverged) as caught:
        callback.after_exception(None, {0: error, 1: error})
    assert caught.value.what.startswith("the workers' states have diverged 3 times, one more than")
    assert what in caught.value.what
    assert caught.value.details == {"ranks": [1], "tensor": "w", "divergences": 3}


def test_another_error_beside_a_divergence_still_ends_the_run(
    tmp_path: Path, told: list[tuple[int, str]]
) -> None:
    config = configured(tmp_path, "run", checkpoint__on_divergence="heal")
    errors: dict[int, Exception] = {0: ReplicaDiverged("rank 1 differs"), 1: ValueError("mine")}
    with pytest.raises(Exception, match="rank 1: ValueError: mine"):
        FatalErrors(config).after_exception(None, errors)


def test_unless_asked_nothing_is_healed(tmp_path: Path, told: list[tuple[int, str]]) -> None:
    error = ReplicaDiverged("rank 1 differs")
    with pytest.raises(ReplicaDiverged, match="rank 1 differs"):
        FatalErrors(configured(tmp_path, "run")).after_exception(None, {0: error})
    assert told == []
