"""Every precision, optimizer, schedule and average: stopped, and resumed at another rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from precision_tasks import OPTIMIZERS, SCHEDULERS
from small_run import Left, config_for
from test_midway import assert_same_run
from threaded import Look, Rank, train_ranks

from coherent_ray.config import Config
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.train.update import Micro

pytestmark = pytest.mark.usefixtures("one_process")

SHAPE: dict[str, Any] = {"training__updates": 6, "checkpoint__every_updates": 100}


def configured(folder: Path, name: str, task: str = "Chosen", **changes: Any) -> Config:
    args = {key: changes.pop(key) for key in ("optimizer", "scheduler", "factor") if key in changes}
    return config_for(
        folder,
        run__root=str(folder / name),
        task__factory=f"precision_tasks:{task}",
        task__args=args,
        **SHAPE,
        **changes,
    )


def stops(update: int, then: Look | None = None) -> Look:
    def look(who: Rank, number: int, micro: Micro) -> None:
        if then is not None:
            then(who, number, micro)
        if who.rank == 0 and number == update:
            who.hear("stop")

    return look


def assert_resumes(
    folder: Path, task: str = "Chosen", each: Look | None = None, **changes: Any
) -> Left:
    """Check a run on 3 ranks, stopped and gone on with on 2, against one on 1; return that."""
    straight = configured(folder, "straight", task, **changes)
    train_ranks(straight, 1, each)
    config = configured(folder, "stopped", task, **changes)
    train_ranks(config, 3, stops(2, each))
    train_ranks(config, 2, each)
    assert Left(config).updates == [2, 6]
    assert_same_run(Left(straight), Left(config))
    return Left(straight)


MATRIX = [("fp32", name) for name in OPTIMIZERS if name != "closure"]
MATRIX += [(p, o) for p in ("bf16", "fp16") for o in ("adamw-foreach", "adamw-fused", "momentum")]
MATRIX += [("fp16", "adafactor"), ("fp16", "lion"), ("bf16", "odd")]


@pytest.mark.parametrize(("precision", "optimizer"), MATRIX)
def test_it_goes_on_bit_for_bit(tmp_path: Path, precision: str, optimizer: str) -> None:
    # Under fp16 the first scales are too large, so the run stops among skipped updates.
    factor = 8.0 if precision == "fp16" else 1.0
    left = assert_resumes(
        tmp_path, optimizer=optimizer, factor=factor, training__precision=precision
    )
    skipped = [receipt.skipped for receipt in left.receipts()]
    assert any(skipped) is (precision == "fp16")
    assert not all(skipped)
    if precision == "fp16":
        assert skipped[:3] == [True] * 3, "stopped between two skipped updates"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_goes_on(tmp_path: Path, scheduler: str) -> None:
    left = assert_resumes(tmp_path, optimizer="momentum", scheduler=scheduler)
    assert len({receipt.lr for receipt in left.receipts()}) > 2


# --- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, 0.05])
def test_a_gradient_is_clipped_by_value_and_then_by_norm(
    tmp_path: Path, norm: float | None
) -> None:
    limit, seen = 0.02, []

    def look(who: Rank, number: int, micro: Micro) -> None:
        step = who.session.optimizer.step

        def watched() -> None:
            seen.append(
                [p.grad.clone() for p in who.session.model.parameters() if p.grad is not None]
            )
            step()

        if number == 1 and micro.lane == micro.index == 0:
            who.session.optimizer.step = watched  # type: ignore[method-assign]

    changes = {"training__clip_value": limit, "training__clip_norm": norm, "optimizer": "momentum"}
    train_ranks(configured(tmp_path, "looked-at", **changes), 1, look)
    whole = [torch.cat([g.flatten() for g in gradients]) for gradients in seen]
    assert all(float(g.abs().max()) <= limit for g in whole)
    left = assert_resumes(tmp_path, **changes)
    before = [float.fromhex(receipt.grad_norm) for receipt in left.receipts()]
    assert min(before) > 0.1, "the receipt has the norm before clipping"
    if norm is None:
        assert any(float(g.abs().max()) == pytest.approx(limit) for g in whole)
    else:
        assert all(float(g.norm()) <= norm * 1.0001 for g in whole)
        assert any(float(g.norm()) == pytest.approx(norm, rel=1e-3) for g in whole)


# --- averages of weights --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_average_of_the_weights_goes_on(tmp_path: Path, precision: str) -> None:
    factor = 8.0 if precision == "fp16" else 1.0
    left = assert_resumes(
        tmp_path, "Averaged", training__precision=precision, factor=factor, optimizer="momentum"
    )
    state = left.state()
    taken = sum(not receipt.skipped for receipt in left.receipts())
    assert int(state["average/n_averaged"]) == taken, "a skipped update is not averaged"
    weight, averaged = state["model/0.weight"], state["average/module.0.weight"]
    assert averaged.dtype == torch.float32
    assert not torch.equal(weight, averaged)


def test_an_average_that_is_gone_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, "run", "Averaged", run__claim="statistical")
    train_ranks(config, 1, stops(2))
    without = configured(tmp_path, "run", run__claim="statistical")
    with pytest.raises(StateMismatch, match="average: stored is AveragedModel, the running job"):
        train_ranks(without, 1)


# --- groups that are added later ------------------------------------------------------------------


def grows(at: int) -> Look:
    """Let every rank add the first layer to its optimizer in an update, as a new group."""

    def look(who: Rank, number: int, micro: Micro) -> None:
        optimizer = who.session.optimizer
        if number >= at and len(optimizer.param_groups) == 1:
            first = who.session.model[0]  # type: ignore[index]
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.005})

    return look


@pytest.mark.parametrize("at", [2, 3])
def test_a_parameter_group_may_be_added_later(tmp_path: Path, at: int) -> None:
    left = assert_resumes(tmp_path, "Growing", grows(at))
    assert [len(receipt.lr) for receipt in left.receipts()] == [1] * (at - 1) + [2] * (7 - at)
    assert "optimizer/0.weight/exp_avg" in left.state()


def test_a_changed_job_keeps_a_group_that_was_added_later(tmp_path: Path) -> None:
    """Its settings have no other beginning that could win over those that are stored."""
    changes = {"run__claim": "statistical"}
    train_ranks(configured(tmp_path, "run", "Growing", **changes), 1, stops(3, grows(2)))
    config = configured(tmp_path, "run", "Growing", factor=0.5, **changes)
    train_ranks(config, 1, grows(2))
    rates = [[float.fromhex(rate) for rate in r.lr] for r in Left(config).receipts()]
    assert rates == [[0.02]] + [[0.02, 0.005]] * 5


# --- what cannot be stored ------------------------------------------------------------------------


def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_tracked(tmp_path: Path) -> None:
    config = configured(tmp_path, "run", optimizer="closure")
    with pytest.raises(TaskError, match=r"LBFGS.step\(\) needs an argument: a closure"):
        train_ranks(config, 1)
    assert Left(config).updates == []


def test_state_that_no_generation_can_hold_is_refused_in_the_first_update(tmp_path: Path) -> None:
    reached: list[int] = []
    with pytest.raises(TaskError, match=r"optimizer.state.0.weight.history.0 .* 4096 bytes"):
        train_ranks(
            configured(tmp_path, "run", "Hoarder"), 1, lambda who, n, micro: reached.append(n)
        )
    assert set(reached) == {1}, "and not at the first save"
