"""A group that grows and shrinks, in Ray Train's controller: what it waits for, and what it counts.

Ray's own part is played by stand-ins here; ``tests/cluster/test_ray_internals.py`` holds Ray to
what they assume, and the drill ``elastic`` does it all on a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    ResizingState,
    RestartingState,
    RunningState,
)
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from small_run import config_for

from coherent_ray.config import Config
from coherent_ray.config.sections import WorkerRange
from coherent_ray.errors import AdmissionTimeout, ClusterError, PeerLost, TrainingFailed
from coherent_ray.train import backend, elastic
from coherent_ray.train.backend import FatalErrors
from coherent_ray.train.elastic import Elasticity
from coherent_ray.train.leaving import farewell

DEAD, AWAY = ActorDiedError(), ActorUnavailableError("its connection broke", None)
LOST = {0: PeerLost("rank 1 is gone")}


class Reference:
    """What a call will have answered; None: nothing yet."""

    def __init__(self, is_: object) -> None:
        self.is_ = is_


class Worker:
    """Answers, or is what it says each time it is asked; the last one stays."""

    def __init__(self, node: str, *answers: object) -> None:
        self.metadata = SimpleNamespace(node_id=node)
        self.answers = list(answers) or ["here"]
        self.asked = 0

    def execute_async(self, function: Any) -> object:
        self.asked += 1
        first, *rest = self.answers
        self.answers = rest or [first]
        return Reference(first)


class Group:
    def __init__(self, *workers: Worker, polls: Sequence[SimpleNamespace] = ()) -> None:
        self.workers = list(workers)
        self.polls = list(polls)

    def get_workers(self) -> list[Worker]:
        return self.workers

    def poll_status(self, timeout: float) -> SimpleNamespace:
        return self.polls.pop(0)


class FakeRay:
    """As much of ``ray`` as is asked; what a reference is, it says itself."""

    def __init__(self, *alive: str) -> None:
        self.alive = alive

    def wait(
        self, references: list[Any], *, num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        there = [reference for reference in references if reference.is_ is not None]
        return there, [reference for reference in references if reference.is_ is None]

    def get(self, reference: Any, timeout: float | None = None) -> object:
        if isinstance(reference.is_, Exception):
            raise reference.is_
        return reference.is_

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": n, "Alive": n in self.alive} for n in ("a", "b", "c")]


class Called(SimpleNamespace):
    """An actor's method."""

    def remote(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((*arguments, *named.values()))
        return Reference(self.answer)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_for(tmp_path)
    cluster = config.cluster.model_copy(
        update={"workers": WorkerRange(min=1, max=4), "max_failures": 1, "resize_interval_s": 8.0}
    )
    return config.model_copy(update={"cluster": cluster}).resolved()


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The actor by which Ray counts nodes."""
    method = Called(calls=[], answer={})
    made = SimpleNamespace(get_reserved_resources=method)
    monkeypatch.setattr(elastic, "get_or_create_autoscaling_coordinator", lambda: made)
    return method


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    resize, failed = Called(calls=[], answer=True), Called(calls=[], answer=None)
    made = SimpleNamespace(resize=resize, failed=failed)
    monkeypatch.setattr(elastic.coordinators, "find", lambda run_id: made)
    monkeypatch.setattr(elastic.coordinators, "answer", lambda reference: reference.is_)
    return made


def with_group(config: Config, group: Group, monkeypatch: pytest.MonkeyPatch, *alive: str) -> Any:
    monkeypatch.setattr(elastic, "ray", FakeRay(*alive))
    monkeypatch.setattr(elastic, "_LOOK_S", 0.0)
    made = Elasticity(config)
    made.after_controller_start(SimpleNamespace(run_id="abc"))
    made.after_worker_group_start(group)
    return made


def resizing(workers: int) -> ResizingState:
    return ResizingState(ResizeDecision(workers, {"CPU": 1.0}))


def poll(*, finished: bool = False, errors: dict[int, Exception] | None = None) -> SimpleNamespace:
    return SimpleNamespace(finished=finished, errors=errors or {})


# --- who is lost ----------------------------------------------------------------------------------


def test_whoever_may_be_dead_is_waited_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is no death yet, and no answer is none either."""
    lives, dies = Worker("a"), Worker("b", None, AWAY, AWAY, DEAD)
    made = with_group(config, Group(lives, dies), monkeypatch, "a")
    assert made.lost() == (1,)
    assert (lives.asked, dies.asked) == (1, 4)


def test_a_worker_that_died_alone_has_lost_no_node(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_group(config, Group(Worker("a"), Worker("b", DEAD)), monkeypatch, "a", "b")
    assert made.lost() == ()


def test_one_that_hangs_is_not_waited_for_for_ever(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "SETTLE_S", 0.05)
    made = with_group(config, Group(Worker("a"), Worker("b", None)), monkeypatch, "a", "b")
    assert made.lost() == ()
    made.after_worker_group_shutdown(None)
    assert made.lost() == (), "there is no group any more"


# --- what is counted ------------------------------------------------------------------------------


def test_a_lost_node_is_no_failure_and_a_lost_worker_is(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    monkeypatch.setattr(backend.coordinators, "find", lambda run_id: coordinator)
    group = Group(Worker("a"), Worker("b", DEAD))
    made = with_group(config, group, monkeypatch, "a", "b")
    errors = FatalErrors(config, made)
    monkeypatch.setattr(elastic, "ray", FakeRay("a"))
    for _ in range(3):
        errors.after_exception(None, LOST)
    assert coordinator.failed.calls[-1] == (0, "rank 1: its node was lost", 3)
    monkeypatch.setattr(elastic, "ray", FakeRay("a", "b"))
    errors.after_exception(None, LOST)
    assert coordinator.failed.calls[-1][0] == 1
    with pytest.raises(TrainingFailed, match="the workers failed 2 times; the last time rank 0"):
        errors.after_exception(None, LOST)
    assert coordinator.failed.calls[-1][0] == 2, "whoever watches hears of it before"


def test_a_group_that_leaves_is_not_asked_who_is_lost(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    group = Group(Worker("a"))
    errors = FatalErrors(config, with_group(config, group, monkeypatch, "a"))
    for _ in range(3):
        errors.after_exception(None, {0: farewell("as it was told to")})
    assert group.workers[0].asked == 0


def test_a_group_that_does_not_start_again_and_again_is_given_up(config: Config) -> None:
    made = Elasticity(config)
    late = ReschedulingState(WorkerGroupError("late", {1: AdmissionTimeout("rank 1 is late")}))
    made.after_controller_state_update(RunningState(), late)
    made.after_controller_state_update(
        RunningState(), RestartingState(late.training_failed_error)
    )  # that one has started, and `FatalErrors` counts it
    with pytest.raises(TrainingFailed, match="failed 2 times; the last time rank 1: AdmissionT"):
        made.after_controller_state_update(RunningState(), late)


def test_without_limit_none_is_too_many(config: Config) -> None:
    cluster = config.cluster.model_copy(update={"max_failures": -1})
    elastic.require_patience(config.model_copy(update={"cluster": cluster}), 1000, "gone")
    elastic.require_patience(config, 1, "gone")
    with pytest.raises(TrainingFailed):
        elastic.require_patience(config, 2, "gone")


# --- the cluster is counted anew ------------------------------------------------------------------


def test_before_a_group_is_made_again_the_cluster_is_counted(
    config: Config, monkeypatch: pytest.MonkeyPatch, counter: Called
) -> None:
    dies = Worker("b", None, DEAD)
    made = with_group(config, Group(Worker("a"), dies), monkeypatch, "a")
    made.before_controller_execute_failure_decision(None)
    assert dies.asked == 2, "not before it is known who is lost"
    assert counter.calls == [("train-abc", True)]
    for counter.answer in (GetTimeoutError(), AWAY):
        made.before_controller_execute_failure_decision(None)


def test_a_counter_that_is_gone_ends_the_driver_and_not_the_run(
    config: Config, monkeypatch: pytest.MonkeyPatch, counter: Called
) -> None:
    """Ray's policy would go on asking the dead one: a new driver makes a new one."""
    made = with_group(config, Group(Worker("a")), monkeypatch, "a")
    another = SimpleNamespace(get_reserved_resources=Called(calls=[], answer={}))
    monkeypatch.setattr(elastic, "get_or_create_autoscaling_coordinator", lambda: another)
    counter.answer = DEAD
    with pytest.raises(ClusterError, match="counts nodes is gone"):
        made.before_controller_execute_failure_decision(None)


def test_a_look_for_room_sees_what_is_there(
    config: Config, monkeypatch: pytest.MonkeyPatch, counter: Called
) -> None:
    made = with_group(config, Group(Worker("a")), monkeypatch, "a")
    clock = iter((1000.0, 1000.2, 1003.9, 1004.1, 1008.2))
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=clock.__next__))
    for _ in range(5):
        made.after_worker_group_poll_status(poll())
    assert len(counter.calls) == 3, "twice between two looks, and not at each poll"


# --- a running group is resized -------------------------------------------------------------------


def test_a_group_is_told_and_waited_for_before_it_is_resized(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    left = poll(errors={0: farewell("as it was told to")})
    group = Group(polls=[poll(), poll(), left, poll()])
    made = with_group(config, group, monkeypatch)
    made.after_controller_state_update(RunningState(), resizing(3))
    assert coordinator.resize.calls == [(3,)]
    assert len(group.polls) == 1, "until it has left, and no longer"


def test_a_run_that_ends_meanwhile_is_not_waited_for(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    group = Group(polls=[poll(), poll(finished=True)])
    made = with_group(config, group, monkeypatch)
    made.after_controller_state_update(RunningState(), resizing(3))
    assert group.polls == []


def test_nobody_is_waited_for_who_does_not_train_yet(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    coordinator.resize.answer = False
    made = with_group(config, Group(), monkeypatch)
    made.after_controller_state_update(RunningState(), resizing(3))
    monkeypatch.setattr(elastic.coordinators, "find", lambda run_id: None)
    made.after_controller_state_update(RunningState(), resizing(3))


def test_a_group_that_hangs_is_resized_all_the_same(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    group = Group(polls=[poll()] * 10)
    made = with_group(config, group, monkeypatch)
    clock = iter(range(0, 100_000, 100))
    clocked = SimpleNamespace(monotonic=clock.__next__, sleep=time.sleep)
    monkeypatch.setattr(elastic, "time", clocked)
    made.after_controller_state_update(RunningState(), resizing(3))
    waited = config.cluster.collective_timeout_s / 100
    assert len(group.polls) == 10 - (waited - 1)


def test_other_states_tell_nobody(
    config: Config, monkeypatch: pytest.MonkeyPatch, coordinator: SimpleNamespace
) -> None:
    made = with_group(config, Group(), monkeypatch)
    made.after_controller_state_update(RunningState(), RunningState())
    assert coordinator.resize.calls == []
