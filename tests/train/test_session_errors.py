"""What goes wrong in a training function: one error that says what, where, and what to do."""

from __future__ import annotations

import random
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import (
    Coordinator,
    Left,
    Tiny,
    admit,
    assert_same_state,
    config_for,
    coordinating,
)
from torch import Tensor, nn
from torch.optim import SGD

from coherent_ray.config import Config
from coherent_ray.errors import (
    AdmissionRefused,
    ConfigError,
    SaveFailed,
    StateMismatch,
    TaskError,
    TrainingFailed,
)
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.train import admit as admit_
from coherent_ray.train.session import Session, session
from coherent_ray.train.update import Micro, Update, seed_everything, to_device

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path)


@pytest.fixture
def coordinator(
    config: Config, monkeypatch: pytest.MonkeyPatch, one_process: None
) -> Iterator[Coordinator]:
    """A coordinator, and this process admitted by it."""
    with coordinating(config) as alive:
        monkeypatch.setattr("coherent_ray.train.session.Line", alive.line)
        monkeypatch.setattr("coherent_ray.train.session.report_outcome", lambda run: None)
        admit(config, alive)
        yield alive


def begin(run: Session) -> nn.Module:
    """Track the admitted model with plain SGD."""
    model = admit_.current().model
    assert model is not None
    run.track(model.train(), SGD(model.parameters(), lr=0.1))
    return model


def train(run: Session, loss: Callable[[nn.Module, Micro], tuple[Any, Any]]) -> None:
    model = begin(run)
    for update in run.updates():
        for micro in update.microbatches():
            update.backward(*loss(model, micro))
        update.step()


def good(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    return Tiny().loss(model, micro.batch)


def failing(loss: Callable[[nn.Module, Micro], tuple[Any, Any]]) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught, session() as run:
        train(run, loss)
    assert not torch.is_autocast_enabled("cpu")
    return caught.value


def walk(function: Callable[[Session, Update], None]) -> None:
    """A training function that does something of its own with each update."""
    with session() as run:
        begin(run)
        for update in run.updates():
            function(run, update)


def stepping(function: Callable[[Session, Update], None]) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        walk(function)
    return caught.value


# --- the user's own exceptions --------------------------------------------------------------------


@pytest.mark.usefixtures("coordinator")
def test_an_exception_of_the_task_is_told_with_its_line() -> None:
    calls = iter(range(100))

    def raises(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
        if next(calls) == 11:
            raise LookupError("no such word")
        return good(model, micro)

    error = failing(raises)
    assert error.what.startswith("update 2 failed on rank 0: LookupError: no such word (in raises,")
    assert "test_session_errors.py:" in error.what
    assert isinstance(error.__cause__, LookupError)
    assert error.details == {"update": 2, "ranks": {"0": error.what.partition("rank 0: ")[2]}}


@pytest.mark.usefixtures("coordinator")
def test_an_exception_before_the_first_microbatch_names_its_update() -> None:
    def raises(run: Session, update: Update) -> None:
        raise LookupError("early")

    assert stepping(raises).what.startswith("update 1 failed on rank 0: LookupError: early")


@pytest.mark.usefixtures("coordinator")
def test_an_exception_outside_any_update_stays_what_it_is() -> None:
    with pytest.raises(LookupError), session():
        raise LookupError


@pytest.mark.usefixtures("coordinator")
def test_an_exception_after_the_last_update_stays_what_it_is(config: Config) -> None:
    def trains_and_raises() -> None:
        with session() as run:
            train(run, good)
            raise LookupError

    with pytest.raises(LookupError):
        trains_and_raises()
    assert Left(config).updates == [2, 4, 6]


@pytest.mark.usefixtures("coordinator")
def test_an_exception_after_the_step_is_not_voted_on_twice() -> None:
    """The others have left that update: a second vote would meet their next one."""

    def raises(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))
        update.step()
        raise LookupError("late")

    with pytest.raises(LookupError, match="late"):
        walk(raises)


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_that_cannot_be_collated_is_voted_on(config: Config, prefetch: int) -> None:
    """The other ranks wait in that update's reduction: they must hear of it."""
    calls = iter(range(100))
    collate = Tiny().collate

    def breaks(rows: Any) -> Any:
        if next(calls) == 9:
            raise LookupError("a torn row")
        return collate(rows)

    admitted = admit_.current()
    data = config.data.model_copy(update={"prefetch": prefetch})
    admitted.config = config.model_copy(update={"data": data})
    with pytest.raises(TrainingFailed) as caught, session(collate=breaks) as run:
        train(run, good)
    assert "update 2 failed on rank 0: LookupError: a torn row" in caught.value.what
    assert "while reading microbatch 1 of lane 0 of update 2" in caught.value.what
    assert not [t for t in threading.enumerate() if t.name == "coherent-ray-loader"]


# --- misuse of an update --------------------------------------------------------------------------

WRONG = [
    (lambda total, count: (total / count * torch.ones(2), count), "a tensor of shape (2,)"),
    (lambda total, count: (total.detach(), count), "requires_grad=False"),
    (lambda total, count: (total.item(), count), "not a float"),
    (lambda total, count: (total, count + 0.5), "must be a whole number, at least 0, not"),
    (lambda total, count: (total, -1), "must be a whole number, at least 0, not -1"),
    (lambda total, count: (total, None), "must be a whole number, at least 0, not None"),
    (lambda total, count: (total, float("nan")), "must be a whole number, at least 0, not nan"),
    (lambda total, count: (total, True), "must be a whole number, at least 0, not True"),
    (lambda total, count: (total, torch.ones(2)), "at least 0, not a tensor of shape (2,)"),
    (lambda total, count: (total, torch.tensor(True)), "at least 0, not a tensor of shape ()"),
    (lambda total, count: (total + 0j, count), "must be real, not complex"),
    (lambda total, count: (total.to("meta"), count), "the loss is on meta, but this rank trains"),
    (lambda total, count: (total, "three"), "must be a whole number, at least 0, not 'three'"),
]


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_loss_or_count(change: Callable[..., Any], words: str) -> None:
    error = failing(lambda model, micro: change(*good(model, micro)))
    assert "update 1 failed on rank 0: TaskError: " in error.what
    assert words in error.what
    assert error.remedy.startswith(("return ", "compute it "))
    assert "test_session_errors.py:" in error.what  # the line that called backward
    assert str(error).count("What to do") == 1
    assert isinstance(error.__cause__, TaskError)


@pytest.mark.usefixtures("coordinator")
def test_counts_may_be_numbers_of_any_kind(config: Config) -> None:
    kinds: list[Callable[[int], Any]] = [int, float, torch.tensor]
    calls = iter(range(10_000))

    def loss(model: nn.Module, micro: Micro) -> tuple[Tensor, Any]:
        total, count = good(model, micro)
        return total.reshape(1), kinds[next(calls) % 3](count)

    with session() as run:
        train(run, loss)
    assert [r.count for r in Left(config).receipts()] == [8, 8, 5, 8, 8, 5]


@pytest.mark.usefixtures("coordinator")
def test_an_update_that_accepts_nothing(config: Config) -> None:
    error = failing(lambda model, micro: (good(model, micro)[0] * 0, 0))
    assert error.what == "update 1 accepted no example or token in any lane"
    assert "count at least one" in error.remedy
    assert Left(config).generations == []


@pytest.mark.usefixtures("coordinator")
def test_a_microbatch_that_accepts_nothing_is_fine(config: Config) -> None:
    def loss(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
        total, count = good(model, micro)
        return (total * 0, 0) if micro.lane == 1 else (total, count)

    with session() as run:
        train(run, loss)
    # Lanes of two examples each; in the tail of five, lane 1 has one.
    assert [r.count for r in Left(config).receipts()] == [6, 6, 4, 6, 6, 4]


@pytest.mark.usefixtures("coordinator")
def test_an_update_that_is_not_stepped() -> None:
    def walks(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))

    error = stepping(walks)
    assert "update 1 was not stepped" in error.what
    assert "call update.step() once" in error.remedy


@pytest.mark.usefixtures("coordinator")
def test_backward_outside_a_microbatch() -> None:
    def walks(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))
        update.backward(*good(run.model, micro))

    error = stepping(walks)
    assert "TaskError: backward was called outside a microbatch" in error.what


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_step_before_all_microbatches_are_taken_is_refused(taken: int) -> None:
    """Otherwise a lane's gradient would be missing, and its loss and count would not."""

    def walks(run: Session, update: Update) -> None:
        for number, micro in enumerate(update.microbatches()):
            if number == taken:
                break
            update.backward(*good(run.model, micro))
        update.step()

    error = stepping(walks)
    assert "update 1 was stepped before all of its microbatches were taken" in error.what


@pytest.mark.usefixtures("coordinator")
def test_a_step_without_any_loop_is_refused() -> None:
    error = stepping(lambda run, update: update.step())
    assert "before all of its microbatches were taken" in error.what


@pytest.mark.usefixtures("coordinator")
def test_a_step_inside_the_loop_is_refused() -> None:
    def walks(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))
            update.step()

    assert "before all of its microbatches were taken" in stepping(walks).what


@pytest.mark.usefixtures("coordinator")
def test_microbatches_are_taken_once() -> None:
    def walks(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))
        list(update.microbatches())

    assert "the microbatches of update 1 were taken before" in stepping(walks).what


@pytest.mark.usefixtures("coordinator")
def test_a_second_step_is_refused() -> None:
    def walks(run: Session, update: Update) -> None:
        for micro in update.microbatches():
            update.backward(*good(run.model, micro))
        update.step()
        update.step()

    with pytest.raises(TaskError, match="update 1 was stepped before"):
        walk(walks)


# --- misuse of a session --------------------------------------------------------------------------


def test_a_session_without_admission_is_refused(config: Config) -> None:
    with pytest.raises(AdmissionRefused, match="never admitted"):
        session(config)


@pytest.mark.usefixtures("coordinator")
def test_another_configuration_is_refused(config: Config) -> None:
    other = config.model_copy(update={"data": config.data.model_copy(update={"seed": 5})})
    with pytest.raises(ConfigError, match="not the one that the workers were admitted with"):
        session(other)
    with session(config) as run:
        assert run.config == config


@pytest.mark.usefixtures("coordinator")
def test_without_a_task_a_collate_function_is_needed() -> None:
    admit_.current().task = None
    with pytest.raises(ConfigError, match="how rows become a batch") as caught:
        session()
    assert "collate=" in caught.value.remedy
    with session(collate=Tiny().collate) as run:
        train(run, good)


@pytest.mark.usefixtures("coordinator")
def test_updates_without_a_tracked_model_are_refused() -> None:
    with session() as run:
        with pytest.raises(ConfigError, match="no model is tracked") as caught:
            next(iter(run.updates()))
        assert "run.track" in caught.value.remedy


def test_a_resumed_state_is_given_once(config: Config, coordinator: Coordinator) -> None:
    with session() as run:
        train(run, good)
    admit(config, coordinator)
    with session() as run:
        model = begin(run)
        with pytest.raises(StateMismatch, match="track was called twice"):
            run.track(model, SGD(model.parameters(), lr=0.1))


def test_another_optimizer_on_a_resume_is_refused(config: Config, coordinator: Coordinator) -> None:
    with session() as run:
        train(run, good)
    admit(config, coordinator)
    with session() as run:
        model = admit_.current().model
        assert model is not None
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(StateMismatch, match=r"SGD.*Adam"):
            run.track(model, torch.optim.Adam(model.parameters()))
        assert_same_state(before, dict(model.state_dict()))


def test_a_model_of_ones_own_that_does_not_fit_is_refused(
    config: Config, coordinator: Coordinator
) -> None:
    with session() as run:
        train(run, good)
    admit(config, coordinator)
    with session() as run:
        model = Tiny(hidden=7).build_model()
        with pytest.raises(StateMismatch, match=r"model/0\.bias"):
            run.track(model, SGD(model.parameters(), lr=0.1))


# --- saves that fail while training goes on -------------------------------------------------------


def break_storage(config: Config, *faults: Fault) -> FaultyStorage:
    storage = FaultyStorage(LocalStorage(config.run.root), list(faults))
    admit_.current().storage = storage
    return storage


@pytest.mark.usefixtures("coordinator")
def test_a_full_disk_costs_one_generation_and_no_receipt(config: Config) -> None:
    storage = break_storage(config, Fault("full", verb="write", path="g1-a1", times=99))
    with session() as run:
        train(run, good)
    assert storage.struck
    assert [saved.fate.kind for saved in run.boundaries.saves] == ["failed"] + ["published"] * 2
    assert "no space left" in run.boundaries.saves[0].fate.reason
    left = Left(config)
    assert (left.generations, left.updates) == (["g2-a1", "g3-a1"], [4, 6])
    assert [r.update for r in left.receipts()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("coordinator")
def test_the_last_save_is_tried_again(config: Config) -> None:
    break_storage(config, Fault("refuse", verb="finish", path="g3-a1"))
    with session() as run:
        train(run, good)
    assert Left(config).generations == ["g1-a1", "g2-a1", "g4-a1"]
    assert run.boundaries.published == "g4-a1"
    assert run.progress.metrics["generation"] == "g4-a1"


@pytest.mark.usefixtures("coordinator")
def test_too_many_failed_saves_end_the_run(config: Config) -> None:
    admitted = admit_.current()
    options = config.checkpoint.model_copy(update={"every_updates": 1, "max_failed_saves": 2})
    admitted.config = config.model_copy(update={"checkpoint": options})
    break_storage(config, Fault("full", verb="open_writer", path="g", at=2, times=99))
    with (
        pytest.raises(SaveFailed, match="3 saves in a row failed, one more than") as caught,
        session() as run,
    ):
        train(run, good)
    assert "no space left" in caught.value.what
    assert "what is published is untouched" in caught.value.remedy
    # Generations 2, 3 and 4 failed; the last of them is looked at when the fifth is due.
    assert (Left(config).generations, run.position.update) == (["g1-a1"], 5)


# --- small parts ----------------------------------------------------------------------------------


def test_seeds_reach_every_generator() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    seed_everything(2**63 - 1)
    first = draws()
    seed_everything(2**63 - 1)
    assert draws() == first
    seed_everything(7)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_batches_of_any_shape_move_to_a_device() -> None:
    pair = namedtuple("pair", "x y")
    batch = {"a": [torch.ones(2), "text"], "b": pair(torch.zeros(1), (3, torch.ones(1)))}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], pair)
    assert moved["b"].y[0] == 3
    assert moved["b"].y[1].device.type == "meta"
