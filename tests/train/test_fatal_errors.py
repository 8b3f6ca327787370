"""Which errors of a worker end a run at once, and which are worth another start of the group."""

from __future__ import annotations

import pickle

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from coherent_ray.errors import (
    AdmissionTimeout,
    ClaimRefused,
    CoherentRayError,
    PeerLost,
    SaveFailed,
    TrainingFailed,
)
from coherent_ray.train.backend import FatalErrors, raise_if_fatal
from coherent_ray.train.leaving import farewell

CURABLE = [
    ActorDiedError(),
    OutOfMemoryError("the node's memory is full"),
    WorkerHealthCheckTimeoutError("hanging"),
    WorkerHealthCheckFailedError("dead", failure=ActorDiedError()),
    PeerLost("rank 1 is gone"),
    farewell("the group leaves"),
    AdmissionTimeout("rank 1 did not answer"),
]


@pytest.mark.parametrize("error", CURABLE, ids=lambda e: type(e).__name__)
def test_a_death_is_worth_a_restart(error: Exception) -> None:
    raise_if_fatal(1, error)
    FatalErrors().after_exception(None, {0: error, 1: error})


@pytest.mark.parametrize("kind", [TrainingFailed, SaveFailed, ClaimRefused, CoherentRayError])
def test_an_error_of_the_project_is_raised_as_it_is(kind: type[CoherentRayError]) -> None:
    error = kind("what", where="where", remedy="remedy", details={"rank": 1})
    with pytest.raises(kind) as caught:
        raise_if_fatal(1, pickle.loads(pickle.dumps(error)))
    assert type(caught.value) is kind
    assert str(caught.value) == str(error)
    assert caught.value.details == {"rank": 1}


@pytest.mark.parametrize("wrapped", [False, True])
def test_any_other_exception_names_rank_type_and_line(wrapped: bool) -> None:
    error: Exception = ZeroDivisionError("by zero")
    error.add_note("in loss, task.py:12")
    if wrapped:
        error = UserExceptionWithTraceback(error, "Traceback ...")
    with pytest.raises(TrainingFailed) as caught:
        raise_if_fatal(3, error)
    assert caught.value.what == "rank 3: ZeroDivisionError: by zero (in loss, task.py:12)"
    assert caught.value.where == "rank 3"
    assert "run again" in caught.value.remedy


def test_an_exit_inside_a_training_function_is_no_success() -> None:
    with pytest.raises(TrainingFailed, match="rank 0: SystemExit: 3"):
        raise_if_fatal(0, SystemExit(3))


def test_the_fatal_error_counts_and_not_the_loss_of_the_peer() -> None:
    """Ranks that wait for the one that raised report that they lost it."""
    errors: dict[int, Exception] = {
        0: PeerLost("a rank is gone"),
        2: KeyError("second"),
        1: ValueError("first"),
    }
    with pytest.raises(TrainingFailed, match="rank 1: ValueError: first"):
        FatalErrors().after_exception(None, errors)
