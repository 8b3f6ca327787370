"""A group that grows and shrinks, seen from Ray Train's controller: told beforehand, counted anew.

Ray's elastic scaling ends a running group without a word, and starts another as large as the
cluster allows. What that would cost is taken out of it here:

| before Ray | here |
|---|---|
| ends a healthy group for a larger one | the group leaves: one more generation, no update lost |
| counts nodes after a failure | who is lost is known to be; Ray's own count is up to 20 s old |
| looks for new nodes | that count is made anew |

All of it runs in callbacks of the controller, which does nothing else meanwhile. Names inside Ray
that it needs are guarded by ``tests/cluster/test_ray_internals.py``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    get_or_create_autoscaling_coordinator,
)
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ReschedulingState, ResizingState

from coherent_ray.config import Config
from coherent_ray.errors import ClusterError, CoherentRayError, TrainingFailed
from coherent_ray.train import coordinators, deaths
from coherent_ray.train.identity import run_id_of

logger = logging.getLogger(__name__)

#: Seconds that a worker may leave open whether it lives, after another one failed.
SETTLE_S = 60.0
#: Seconds between two times that Ray's count of the cluster is made anew, at most.
COUNT_EVERY_S = 5.0
#: Seconds for one answer of the actor that counts.
_ANSWER_S = 10.0
_LOOK_S = 0.2


class Elasticity(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]
    """The callback; for ``RunConfig``, where the workers are a range."""

    def __init__(self, config: Config) -> None:
        """Make it for a run; its paths are absolute."""
        self._config = config
        self._every_s = min(COUNT_EVERY_S, config.cluster.resize_interval_s / 2)
        self._requester = ""
        self._counter: Any = None
        self._group: Any = None
        self._counted = 0.0
        self._late = 0

    # --- what Ray calls ---------------------------------------------------------------------------

    def after_controller_start(self, train_run_context: Any) -> None:
        """Remember under which name Ray's policy asks for resources, and whom."""
        self._requester = f"train-{train_run_context.run_id}"
        # Once, as the policy does, which Ray calls before this: a later one may be another actor.
        self._counter = get_or_create_autoscaling_coordinator()

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Remember the group."""
        self._group = worker_group

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Forget the group."""
        self._group = None

    def after_worker_group_abort(self, worker_group_context: Any) -> None:
        """Forget the group."""
        self._group = None

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """See to it that Ray's next look for room sees what is there."""
        now = time.monotonic()
        if now - self._counted > self._every_s:
            self._counted = now
            with contextlib.suppress(RayError, RuntimeError):
                self._count()  # whoever needs the answer asks again

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Let a group leave that is about to be ended; count the groups that did not start."""
        if isinstance(current_state, ResizingState):
            self._leave(int(current_state.scaling_decision.num_workers))
        if isinstance(current_state, ReschedulingState):
            error = current_state.training_failed_error
            if isinstance(error, WorkerGroupError):
                self._late += 1
                words = deaths.in_words(error.worker_failures)
                require_patience(self._config, self._late, words, list(error.worker_failures))

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Count the cluster anew, since the next group is made from that."""
        self.lost()
        try:
            ray.get(self._count(), timeout=_ANSWER_S)
        except ActorDiedError as error:
            # Ray's policy keeps the handle of the dead one, and would wait with it for ever.
            raise ClusterError(
                f"the actor by which Ray counts nodes is gone: {error}",
                where="AutoscalingCoordinator",
                remedy="none is needed: another driver starts another",
            ) from error
        except (RayError, RuntimeError) as error:
            # Ray goes by what it knew, and tries again where that was too much.
            logger.warning("the cluster could not be counted anew: %s", error)

    # --- what is done -----------------------------------------------------------------------------

    def lost(self) -> tuple[int, ...]:
        """Return the ranks whose node is gone; waits until each lives or is known to be dead.

        A node that is lost breaks its peers' connections at once. Ray needs some seconds more to
        call it lost, and would meanwhile count it in, and wait for it.
        """
        if self._group is None:
            return ()
        workers = dict(enumerate(self._group.get_workers()))
        settle(workers, SETTLE_S)
        try:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        except (RayError, RuntimeError):
            return ()  # the head may be away for a moment, and nobody knows
        return tuple(rank for rank, w in workers.items() if w.metadata.node_id not in alive)

    def _leave(self, workers: int) -> None:
        """Have a running group publish one more generation, and wait until it has ended.

        Which takes the rest of an update and a save. A rank that hangs ends the waiting as it ends
        a collective.
        """
        group = self._group
        if group is None or not self._told(workers):
            return
        until = time.monotonic() + self._config.cluster.collective_timeout_s
        while time.monotonic() < until:
            status = group.poll_status(timeout=_LOOK_S)
            if status.finished or status.errors:
                return
            time.sleep(_LOOK_S)
        logger.warning("the group did not leave in time; it is ended as it stands")

    def _told(self, workers: int) -> bool:
        """Tell the group that it is resized; False: nobody trains yet, so nothing can be lost."""
        try:
            handle = coordinators.find(run_id_of(self._config))
            return handle is not None and bool(coordinators.answer(handle.resize.remote(workers)))
        except (RayError, CoherentRayError) as error:
            logger.warning("the group cannot be told that it is resized: %s", error)
            return False

    def _count(self) -> Any:
        """Have Ray count the cluster now; returns the answer's reference."""
        return self._counter.get_reserved_resources.remote(self._requester, recompute=True)


def settle(workers: Mapping[int, Any], within_s: float) -> None:
    """Return once every worker has answered, or is known to be dead.

    Args:
        workers: Ray Train's, by rank.
        within_s: Seconds to wait at most: one that hangs does neither.
    """
    until = time.monotonic() + within_s
    left = dict(workers)
    while left and time.monotonic() < until:
        asked = {worker.execute_async(_nothing): rank for rank, worker in left.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
        for reference in answered:
            if _is_settled(reference):
                left.pop(asked[reference])
        time.sleep(_LOOK_S if left else 0.0)


def require_patience(config: Config, failures: int, words: str, ranks: Sequence[int] = ()) -> None:
    """Raise if a group failed more often than it may.

    Ray is not asked to: it would charge a node that was lost as well.

    Args:
        config: The run.
        failures: How many.
        words: How the last one came about.
        ranks: That failed.

    Raises:
        TrainingFailed: They were too many.
    """
    if failures <= config.cluster.max_failures or config.cluster.max_failures < 0:
        return
    times = f"{failures} time{'s' if failures > 1 else ''}"
    raise TrainingFailed(
        f"the workers failed {times}; the last time {words}",
        remedy="see their last words in Ray's logs, on their nodes; "
        "cluster.max_failures says how many failures a run survives",
        details={"failures": failures, "ranks": sorted(ranks)},
    )


def _is_settled(reference: Any) -> bool:
    try:
        ray.get(reference)
    except ActorUnavailableError:
        return False  # its connection broke; whether it is dead is not known yet
    except RayError:
        return True
    return True


def _nothing() -> None:
    """Run in a worker, to hear that it lives."""
