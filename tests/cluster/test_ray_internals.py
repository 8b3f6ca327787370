"""Guards for what this project takes from inside Ray: each says what moved, and who needs it.

Ray promises none of these names. When a new version moves one, a test here must fail first, before
a run leaks its placement group or retries a refusal for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import probes
import pytest
import ray
import tiny
from ray.exceptions import RayActorError
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group

from coherent_ray import config as config_
from coherent_ray.drill.strikes import CLASSES
from coherent_ray.errors import AdmissionTimeout, ClusterError
from coherent_ray.train import (
    backend,
    coordinators,
    drains,
    elastic,
    leaving,
    placements,
    trainer,
    watch,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def moved(what: str, needed_by: str) -> str:
    return f"Ray {ray.__version__} moved {what}; coherent_ray/{needed_by} needs it"


# --- a live run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probed:
    starts: list[dict[str, Any]]
    exceptions: list[dict[str, Any]]
    error: BaseException
    folder: Path


@pytest.fixture(scope="module")
def probed(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """One worker, three starts, no torch."""
    folder = tmp_path_factory.mktemp("probe")
    record = str(folder / "record")
    error = tiny.error_of(
        DataParallelTrainer(
            probes.fail,
            backend_config=probes.ProbeConfig(record=record),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=2),
                callbacks=[probes.ProbeCallback(record)],
            ),
        )
    )
    starts = probes.noted(record, "start")
    yield Probed(starts, probes.noted(record, "exception"), error, folder)
    for start in starts:
        if probes.is_held(start["placement_group"]):
            group = ray.PlacementGroupID.from_hex(start["placement_group"])
            remove_placement_group(PlacementGroup(group))


def test_the_worker_group_s_private_parts(probed: Probed) -> None:
    for start in probed.starts:
        assert start["missing"] == [], moved(
            f"{start['missing']} of a worker group", "train/backend.py, release"
        )


def test_on_start_runs_functions_with_their_rank(probed: Probed) -> None:
    assert [start["ranks"] for start in probed.starts] == [[0]] * 3, moved(
        "worker_group.execute_async", "train/backend.py, the admission"
    )


def test_every_attempt_has_its_own_id(probed: Probed) -> None:
    first, again, restarted = (start["attempt"] for start in probed.starts)
    assert restarted != again, moved("run_attempt_id", "train/backend.py, the attempt's token")
    assert first == again, "a start that failed is no longer tried again under the same id"


def test_a_worker_group_error_in_on_start_is_retried(probed: Probed) -> None:
    assert len(probed.starts) == 3, moved(
        "the retry of WorkerGroupError", "train/backend.py, a rank that is late"
    )


def test_the_placement_group_of_a_failed_start_is_still_leaked(probed: Probed) -> None:
    first, *others = (start["placement_group"] for start in probed.starts)
    held = [start["held"] for start in probed.starts]
    assert held == [[], [first], [first]], (
        f"Ray {ray.__version__} gives back the placement group of a failed on_start: good, "
        "train/backend.py need not release it any more"
    )
    assert not any(map(probes.is_held, others)), "groups that ran were not given back either"


def test_a_callback_gets_a_worker_s_own_exception(probed: Probed) -> None:
    expected = {"error": 'LookupError("the function\'s own error")', "notes": ["with a note"]}
    assert probed.exceptions == [expected] * 2, moved(
        "what UserCallback.after_exception gets", "train/backend.py, raise_if_fatal"
    )


def test_what_a_callback_raises_ends_fit_at_once(probed: Probed) -> None:
    where = moved("errors of UserCallback.after_exception", "train/backend.py, FatalErrors")
    assert isinstance(probed.error, ControllerError), where
    failure = probed.error.controller_failure
    assert isinstance(failure, ClusterError), where
    assert (failure.what, failure.details) == ("the callback's own error", {"rank": 0})


def test_a_checkpoint_is_taken_where_it_lies(probed: Probed) -> None:
    where = moved("CheckpointUploadMode.NO_UPLOAD", "train/outcome.py")
    place = probed.folder / "run" / "generations" / "g1-a1"
    assert (place / "file").read_text() == "bytes", where
    assert list(probed.folder.rglob("file")) == [place / "file"], where


def test_ray_s_own_bookkeeping_has_the_name_that_is_removed(probed: Probed) -> None:
    snapshot = probed.folder / "run" / trainer.RAY_SNAPSHOT
    assert snapshot.is_file(), moved(trainer.RAY_SNAPSHOT, "train/trainer.py, run_config")


def test_placement_groups_are_found_by_their_job(probed: Probed) -> None:
    where = moved("PlacementGroupID.hex", "train/placements.py")
    job = ray.get_runtime_context().get_job_id()
    ours = {start["placement_group"] for start in probed.starts}
    assert ours <= set(placement_group_table()), where
    assert all(name.endswith(job) for name in ours), where


# --- names and signatures -------------------------------------------------------------------------


def test_ray_s_own_words_for_a_death_share_a_base() -> None:
    from ray.train.v2._internal import exceptions

    for name in ("WorkerHealthCheckTimeoutError", "WorkerHealthCheckFailedError"):
        assert issubclass(getattr(exceptions, name), backend.RayTrainError), moved(
            f"the base of {name}", "train/backend.py, raise_if_fatal"
        )


def test_the_torch_backend_is_extended_as_ray_calls_it() -> None:
    own = list(inspect.signature(backend.AdmissionBackend.on_start).parameters)
    rays = list(inspect.signature(backend._TorchBackend.on_start).parameters)
    assert own == rays, moved("_TorchBackend.on_start", "train/backend.py, AdmissionBackend")


def test_the_torch_config_has_the_fields_that_are_set() -> None:
    rays = {f.name for f in fields(ray.train.torch.TorchConfig)}
    assert "timeout_s" in rays, moved("TorchConfig.timeout_s", "train/backend.py, torch_config")
    ours = {f.name for f in fields(backend.AdmissionConfig)} - rays
    assert ours == {"run", "code_path", "code"}, "a field of AdmissionConfig hides one of Ray's"


def test_the_process_group_begins_in_on_start() -> None:
    text = inspect.getsource(backend._TorchBackend.on_start)
    assert "_setup_torch_process_group" in text, moved(
        "init_process_group out of _TorchBackend.on_start", "train/backend.py: admission first"
    )


def test_the_callback_is_called_as_it_is_written() -> None:
    own = list(inspect.signature(backend.FatalErrors.after_exception).parameters)
    rays = list(inspect.signature(ray.train.UserCallback.after_exception).parameters)
    assert own == rays, moved("UserCallback.after_exception", "train/backend.py, FatalErrors")


def test_classes_have_the_names_by_which_drills_find_them() -> None:
    from ray.train.v2._internal.execution.controller.controller import TrainController
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

    names = {"worker": RayTrainWorker.__name__, "controller": TrainController.__name__}
    assert names == CLASSES, moved("the names of its actors", "drill/strikes.py")
    assert names["worker"] == watch.WORKER_CLASS, moved("its workers' name", "train/watch.py")
    assert watch.rays_workers() is not None, moved("the list of actors", "train/watch.py")


@pytest.mark.parametrize(
    "name",
    [
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
    ],
)
def test_recovery_settings_still_reach_the_controller(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.v2._internal.constants import get_env_vars_to_propagate

    monkeypatch.setenv(name, "0.5")
    found = get_env_vars_to_propagate().get(name)
    assert found == "0.5", moved(name, "train/trainer.py, set_environment")


def test_workers_may_stay_in_the_driver_s_directory() -> None:
    from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR

    assert RAY_CHDIR_TO_TRIAL_DIR == "RAY_CHDIR_TO_TRIAL_DIR", moved(
        "RAY_CHDIR_TO_TRIAL_DIR", "train/trainer.py, set_environment"
    )


def test_train_is_version_2() -> None:
    assert issubclass(ray.train.torch.TorchTrainer, DataParallelTrainer), moved(
        "TorchTrainer's base", "train/backend.py: all of it is written for Ray Train 2"
    )


def test_the_head_node_has_the_resource_that_pins_the_coordinator() -> None:
    assert ray.cluster_resources().get(coordinators.HEAD_NODE) == 1.0, moved(
        coordinators.HEAD_NODE, "train/coordinators.py"
    )


def test_what_a_dead_actor_reserved_is_given_back_whoever_told_of_it() -> None:
    """As a Train controller that is killed before it, or anybody else, can tell what it holds."""
    maker = probes.Maker.remote()
    groups = ray.get([maker.reserve.remote() for _ in range(2)])
    ray.kill(maker)
    with pytest.raises(RayActorError):
        ray.get(maker.reserve.remote())
    assert all(map(probes.is_held, groups)), (
        f"Ray {ray.__version__} gives back the placement groups of a dead actor: good, "
        "train/placements.py is not needed any more"
    )
    assert set(groups) <= set(placements.release_all()), moved("something", "train/placements.py")
    assert not any(map(probes.is_held, groups))
    assert placements.release_all() == []


def test_who_is_preempted_has_a_budget_of_his_own() -> None:
    from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
    from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision

    where = moved("how it counts a preempted actor", "train/leaving.py, farewell")
    policy = DefaultFailurePolicy(FailureConfig(max_failures=0))
    left = WorkerGroupError("left", {0: leaving.farewell("as it was told to")})
    assert [policy.make_decision(left) for _ in range(3)] == [FailureDecision.RETRY] * 3, where
    died = WorkerGroupError("died", {0: ValueError()})
    assert policy.make_decision(died) == FailureDecision.RAISE, where


def test_a_group_that_is_resized_is_heard_of_before_it_is_ended() -> None:
    """In the order of the controller: it decides, tells its callbacks, and only then acts."""
    from ray.train.v2._internal.execution.controller.controller import TrainController

    step, told = (inspect.getsource(getattr(TrainController, n)) for n in ("_step", "_set_state"))
    where = moved("the state between a decision and a resize", "train/elastic.py")
    assert "next_state = ResizingState(" in step, where
    assert "scaling_decision=controller_state.scaling_decision" in step, where
    assert "after_controller_state_update" in told, where
    for name in vars(elastic.Elasticity):
        if name.startswith(("after_", "before_")):
            own = inspect.signature(getattr(elastic.Elasticity, name))
            base = next(
                kind for kind in elastic.Elasticity.__mro__[1:] if name in vars(kind)
            )  # StopIteration: Ray calls it no more
            rays = inspect.signature(getattr(base, name))
            assert list(own.parameters) == list(rays.parameters), moved(name, "train/elastic.py")


def test_a_worker_group_tells_who_lives_where() -> None:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
    from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker

    where = moved("what a worker group is asked", "train/elastic.py")
    assert "node_id" in {f.name for f in fields(ActorMetadata)}, where
    assert {"actor", "metadata"} <= {f.name for f in fields(Worker)}, where
    assert callable(Worker.execute_async), where
    assert callable(WorkerGroup.get_workers), where
    assert "timeout" in inspect.signature(WorkerGroup.poll_status).parameters, where
    assert not WorkerGroupPollStatus({}).errors, where
    assert not WorkerGroupPollStatus({}).finished, where


def test_the_cluster_is_counted_anew_for_the_one_who_asked(tmp_path: Path) -> None:
    from ray.train.v2._internal.execution.scaling_policy import create_scaling_policy

    where = moved("how an elastic policy asks for resources", "train/elastic.py")
    policy = create_scaling_policy(ScalingConfig(num_workers=(1, 2)))
    made = elastic.Elasticity(config_.build(tiny.values(tmp_path / "run", tmp_path / "rows")))
    context = SimpleNamespace(run_id="guard")
    policy.after_controller_start(context)
    try:
        made.after_controller_start(context)
        reserved = ray.get(made._count(), timeout=60.0)
        assert sum(node.get("CPU", 0.0) for node in reserved.values()) == 2.0, where
        assert policy.make_decision_for_non_running_worker_group().num_workers == 2, where
    finally:
        policy.before_controller_abort()
    assert ray.get(made._count(), timeout=60.0) == {}, where


def test_nodes_that_are_drained_can_be_asked_for() -> None:
    assert drains.draining() == {}, moved("get_draining_nodes", "train/drains.py")


def test_what_is_admitted_runs_where_a_signal_handler_can_be_set(probed: Probed) -> None:
    assert [start["main_thread"] for start in probed.starts] == [[True]] * 3, moved(
        "worker_group.execute out of the main thread", "train/admit.py, sigterm.install"
    )


def test_a_late_rank_becomes_an_error_that_ray_can_carry() -> None:
    """As `_tickets` makes it: it must survive pickling, and name the rank."""
    import cloudpickle

    late = AdmissionTimeout("rank 1 did not answer", details={"missing": [1]})
    made = WorkerGroupError(str(late), {1: late})
    again = cloudpickle.loads(cloudpickle.dumps(made))
    assert list(again.worker_failures) == [1]
    assert isinstance(again.worker_failures[1], AdmissionTimeout)
    assert "rank 1 did not answer" in str(again)
