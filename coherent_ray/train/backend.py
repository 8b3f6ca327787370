"""The gate in Ray Train: a torch backend whose ``on_start`` admits every worker before it goes on.

``on_start`` runs in Ray Train's controller when all workers live and before any of them has a
process group. What is raised here decides what Ray does: a plain exception ends the run (a refusal
must not be retried), a `WorkerGroupError` or a dead worker starts the group again.

Ray leaks the group's placement group when ``on_start`` raises, and at exact-fit capacity every
later start then waits for it for ever. So the group is shut down here, through a private name that
a test guards (``tests/cluster/test_ray_internals.py``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import UserCallback, WorkerGroupError
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.exceptions import RayTrainError

from coherent_ray import config as config_
from coherent_ray.commit.fates import name_ranks
from coherent_ray.config import Config
from coherent_ray.errors import (
    AdmissionTimeout,
    CoherentRayError,
    PeerLost,
    ReplicaDiverged,
    TrainingFailed,
)
from coherent_ray.train import coordinators, deaths, ownership
from coherent_ray.train.admission import Expected, Ticket, damaged_for_some, judge
from coherent_ray.train.admit import Request, take_ticket
from coherent_ray.train.code import NO_CODE, Code, code_of
from coherent_ray.train.elastic import Elasticity, require_patience
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.memory.wiring import Gate, forget_diverged

logger = logging.getLogger(__name__)

#: The newest attempt that this process has opened of the run under a root: what a log that vanishes
#: is missed by.
_opened: dict[tuple[str, str], int] = {}


class AdmissionBackend(_TorchBackend):  # type: ignore[misc]
    """Admits, then sets up the process group. Ray keeps one for all attempts: it holds no state."""

    def on_start(self, worker_group: Any, backend_config: AdmissionConfig) -> None:
        """Open an attempt, admit every rank, and let the group enter its first collective."""
        try:
            admit_group(worker_group, backend_config)
            super().on_start(worker_group, backend_config)
        except BaseException:
            release(worker_group)
            raise


@dataclass
class AdmissionConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's torch configuration, with the admission in front. See `torch_config`."""

    run: dict[str, Any] = field(default_factory=dict)
    """The whole configuration, as plain values."""
    code_path: str = ""
    """Directory from which the driver imports the task; workers look there too."""
    code: Code = NO_CODE
    """What the training function computes from, where it is the user's own."""

    @property
    def backend_cls(self) -> type[AdmissionBackend]:
        """What Ray Train runs."""
        return AdmissionBackend


def torch_config(config: Config, function: Callable[..., object] | None = None) -> AdmissionConfig:
    """Return the ``torch_config`` for Ray's `TorchTrainer` that admits every worker first.

    Args:
        config: The run's configuration.
        function: The training function, where it is one's own: the source of its module, and of
            the modules beside it that this imports, becomes part of what a resume compares.
    """
    values = config.resolved().model_dump(mode="json")
    return AdmissionConfig(
        timeout_s=int(config.cluster.collective_timeout_s),
        run=values,
        code_path=str(Path.cwd()),
        code=code_of(function) if function is not None else NO_CODE,
    )


def admit_group(worker_group: Any, backend_config: AdmissionConfig) -> None:
    """Open an attempt and judge every worker's ticket.

    Raises:
        AdmissionRefused: A rank does not agree; not retried.
        OwnedElsewhere: A driver of another job trains this run.
        WorkerGroupError: A rank did not answer in time; retried.
    """
    config = config_.build(backend_config.run)
    run_id = run_id_of(config)
    ownership.require_no_other(run_id)
    coordinator = coordinators.connect_for(config, run_id)
    # Ray starts a group that never began to train again under the same id: it is the same attempt.
    token = str(worker_group.get_worker_group_context().run_attempt_id)
    # A coordinator that was started again knows only the log, which may have vanished meanwhile.
    known = _opened.get((run_id, config.run.root), 0)
    attempt = coordinators.answer(coordinator.open_attempt.remote(token, known))
    _opened[run_id, config.run.root] = attempt
    memory = Gate(config, run_id, attempt)
    request = Request(
        backend_config.run,
        backend_config.code_path,
        run_id,
        attempt,
        backend_config.code,
        offer=memory.look(),
    )
    seconds = config.cluster.admission_timeout_s
    tickets = tickets_for(request, lambda asked: _tickets(worker_group, asked, seconds))
    expected = Expected(run_id, attempt, len(tickets))
    judge(tickets, expected, same_environment=config.run.claim != "statistical")
    # Of all ranks: under the claim statistical, each may have its own environment.
    notes = list(dict.fromkeys(note for ticket in tickets for note in ticket.notes))
    notes += memory.settle(tickets)
    for note in notes:
        logger.warning("attempt %d: %s", attempt, note)
    coordinators.answer(coordinator.admitted.remote(attempt, notes, len(tickets)))


def tickets_for(request: Request, ask: Callable[[Request], Sequence[Ticket]]) -> Sequence[Ticket]:
    """Return every rank's ticket; ask again where only some ranks have found a generation damaged.

    Args:
        request: What every rank is asked first.
        ask: Brings a request to all ranks.
    """
    tickets = ask(request)
    while new := set(damaged_for_some(tickets)) - set(request.damaged):
        request = replace(request, damaged=(*request.damaged, *sorted(new)))
        tickets = ask(request)
    return tickets


def _tickets(worker_group: Any, request: Request, timeout_s: float) -> Sequence[Ticket]:
    references = worker_group.execute_async(take_ticket, request)
    _, late = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    if late:
        missing = [rank for rank, ref in enumerate(references) if ref in late]
        timeout = AdmissionTimeout(
            f"{name_ranks(missing)} did not answer within {timeout_s:g} s",
            where="admission",
            remedy="look at those workers' nodes; cluster.admission_timeout_s gives more time",
            details={"missing": missing},
        )
        raise WorkerGroupError(str(timeout), dict.fromkeys(missing, timeout))
    tickets: list[Ticket] = ray.get(references)
    return tickets


def release(worker_group: Any) -> None:
    """Give back a worker group's workers and placement group."""
    state = worker_group._worker_group_state
    if state is not None:
        state.shutdown()


class FatalErrors(UserCallback):  # type: ignore[misc]
    """Ends the run at once for an error that a restart would only meet again.

    Ray Train restarts after *any* error of a worker. A death, or a collective that lost its peer,
    is worth a restart; an exception of the task or a refusal is not. What is raised here reaches
    ``fit`` as its error. The others are counted, and told to the coordinator, so that whoever
    watches sees who died; a group that left, or lost a node that was reclaimed, by itself; and so
    does one that lost any node, where its size follows the cluster.

    States that diverged are fatal too, unless the configuration heals them: then the group starts
    again from the last good generation, some times.
    """

    def __init__(self, config: Config | None = None, elastic: Elasticity | None = None) -> None:
        """Make the callback.

        Args:
            config: The run whose coordinator to tell; None: nobody's.
            elastic: Of a group whose size follows the cluster.
        """
        self._config = config
        self._elastic = elastic
        self._count = self._taken = self._diverged = 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the first fatal error, by rank."""
        healed = self._heal(worker_exceptions)
        for rank in sorted(worker_exceptions):
            if not (healed and _divergence(worker_exceptions[rank])):
                raise_if_fatal(rank, worker_exceptions[rank])
        # As Ray counts: one rank that had to go explains what the others raise about it.
        taken = any(deaths.is_taken(error) for error in worker_exceptions.values())
        lost = self._elastic.lost() if self._elastic and not taken else ()
        words = healed or (deaths.of_nodes(lost) if lost else deaths.in_words(worker_exceptions))
        if taken or lost:
            self._taken += 1
        else:
            self._count += 1
        if self._config is None:
            return
        with contextlib.suppress(RayError, CoherentRayError):
            handle = coordinators.find(run_id_of(self._config))
            if handle is not None:
                handle.failed.remote(self._count, words, self._taken)
        if self._elastic:
            require_patience(self._config, self._count, words, list(worker_exceptions))

    def _heal(self, errors: dict[int, Exception]) -> str:
        """Return what is told of states that diverged and are healed; empty: none are.

        Raises:
            ReplicaDiverged: They have diverged more often than the configuration allows.
        """
        found = next((e for _, error in sorted(errors.items()) if (e := _divergence(error))), None)
        if found is None or self._config is None:
            return ""
        checkpoint = self._config.checkpoint
        run_id = run_id_of(self._config)
        attempt = _opened.get((run_id, self._config.run.root), 0)
        forget_diverged(self._config, run_id, attempt)
        if checkpoint.on_divergence == "refuse":
            return ""
        self._diverged += 1
        if self._diverged > checkpoint.max_divergences:
            raise ReplicaDiverged(
                f"the workers' states have diverged {self._diverged} times, one more than "
                f"checkpoint.max_divergences allows; the last time {found.what}",
                where=found.where,
                remedy="test the machines of the ranks named here, memory first; what is "
                "published is good, and the same command resumes there",
                details={**found.details, "divergences": self._diverged},
            )
        return f"{found.what}; all resume from the last good generation"


def _divergence(error: BaseException) -> ReplicaDiverged | None:
    own = getattr(error, "_base_exc", error)
    return own if isinstance(own, ReplicaDiverged) else None


def raise_if_fatal(rank: int, error: BaseException) -> None:
    """Raise what a rank raised, unless a restart may cure it.

    Args:
        rank: The rank.
        error: As Ray Train reports it: the worker's own exception, or Ray's word for its death.
    """
    # Ray takes a worker's own exception out of this wrapper before it calls back; in case it stops:
    own = getattr(error, "_base_exc", error)
    if isinstance(own, RayError | RayTrainError | PeerLost | AdmissionTimeout):
        return
    if isinstance(own, CoherentRayError):
        raise own
    notes = "".join(f" ({note})" for note in getattr(own, "__notes__", []))
    raise TrainingFailed(
        f"rank {rank}: {type(own).__name__}: {own}{notes}",
        where=f"rank {rank}",
        remedy="mend what is named here, and run again",
    )
