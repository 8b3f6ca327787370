"""One rank's side of admission: find out alone what this process would train, from what, on what.

Runs in every worker before the process group exists. Whatever goes wrong here ends up in the
ticket, so the rank still reaches the vote. What was found (the dataset, the verified state, the
task) stays in the process for the session, so that nothing is read or verified twice.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations, Selected
from coherent_ray.commit.holds import holding
from coherent_ray.commit.log import CommitLog, History
from coherent_ray.commit.manifest import DataPosition, Manifest
from coherent_ray.config import Config
from coherent_ray.data.dataset import DatasetManifest
from coherent_ray.data.plan import Plan
from coherent_ray.errors import (
    AdmissionRefused,
    ClaimRefused,
    CoherentRayError,
    Damage,
    NoGeneration,
    TaskError,
    TrainingFailed,
)
from coherent_ray.state.capture import check_spec, spec_digest, state_spec
from coherent_ray.state.shards import load_state
from coherent_ray.storage import open_storage
from coherent_ray.storage.base import Storage
from coherent_ray.train import datasets, environment
from coherent_ray.train.admission import Ticket
from coherent_ray.train.receipts import first_link
from coherent_ray.train.recipe import differences, recipe_of
from coherent_ray.train.task import Task, load_task


@dataclass(slots=True)
class Admitted:
    """What a rank found out at admission, for its session."""

    config: Config
    run_id: str
    attempt: int
    rank: int
    ranks: int
    storage: Storage
    next_number: int
    plan: Plan
    position: DataPosition
    receipt_tip: str
    dataset: DatasetManifest
    device: torch.device
    environment: dict[str, str]
    selected: Selected | None
    """The generation to resume from; None: the run has none yet."""
    state: dict[str, torch.Tensor] | None
    """The verified tensors of the generation to resume from, in host memory."""
    task: Task | None
    model: torch.nn.Module | None
    """As the task built it; the session takes it."""
    notes: tuple[str, ...]
    directory: str = ""
    """The driver's current directory, which a configuration's relative paths mean."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the controller asks every worker to be admitted for. Plain values only."""

    config: dict[str, Any]
    code_path: str
    """The driver's current directory: its modules are looked at last, where it exists."""
    run_id: str
    attempt: int


_admitted: Admitted | None = None


def current() -> Admitted:
    """Return what this process was admitted with.

    Raises:
        AdmissionRefused: It was not.
    """
    if _admitted is None:
        raise AdmissionRefused(
            "this worker was never admitted: the training function runs without the admission",
            remedy="pass torch_config=coherent_ray.torch_config(config) to Ray's TorchTrainer",
        )
    return _admitted


def take_ticket(request: Request) -> Ticket:
    """Find out everything, keep it for the session, and return the ticket; never raises.

    Args:
        request: As the controller made it; the same on every worker.
    """
    import ray.train

    context = ray.train.get_context()
    blank = Ticket(context.get_world_rank(), context.get_world_size(), socket.gethostname())
    use_gpu = request.config["cluster"]["use_gpu"]
    return _ticket(request, blank, ray.train.torch.get_device if use_gpu else _cpu)


def _ticket(request: Request, blank: Ticket, device: Callable[[], torch.device]) -> Ticket:
    global _admitted  # noqa: PLW0603 - one worker process is one rank
    _admitted = None
    try:
        admitted = find_out(request, blank.rank, blank.ranks, device())
        ticket = describe(admitted, blank)
    except CoherentRayError as error:
        return replace(blank, refusal=error)
    except Exception as error:
        kind = type(error).__name__
        unexpected = TrainingFailed(
            f"admission broke: {kind}: {error}",
            where=f"rank {blank.rank}",
            remedy="the traceback is in the details",
            details={"traceback": traceback.format_exc()},
        )
        return replace(blank, refusal=unexpected)
    _admitted = admitted
    return ticket


def _cpu() -> torch.device:
    return torch.device("cpu")


def describe(admitted: Admitted, blank: Ticket) -> Ticket:
    """Return the ticket of what a rank found out."""
    selected = admitted.selected
    return replace(
        blank,
        run_id=admitted.run_id,
        attempt=admitted.attempt,
        generation=selected.publish.name if selected else None,
        manifest_digest=selected.publish.manifest_digest if selected else None,
        dataset_hash=admitted.dataset.hash,
        sampler_digest=admitted.plan.sampler_digest(admitted.position, blank.rank, blank.ranks),
        state_spec=spec_digest(state_spec(admitted.model)) if admitted.model is not None else "",
        environment=admitted.environment,
        next_number=admitted.next_number,
        position=admitted.position,
        plan=admitted.plan.identity,
        notes=admitted.notes,
    )


def find_out(request: Request, rank: int, ranks: int, device: torch.device) -> Admitted:
    """Derive everything that a rank must know, from the storage and the files alone.

    Raises:
        CoherentRayError: This rank cannot, or must not, take part.
    """
    config = config_.build(request.config)
    if request.code_path not in sys.path and Path(request.code_path).is_dir():
        sys.path.append(request.code_path)
    environment.prepare(
        device,
        threads=config.training.threads,
        deterministic=config.run.claim != "statistical",
    )
    facts = environment.fingerprint(device)
    storage = open_storage(config.run.root)
    log = CommitLog(storage)
    history = _history(storage, log, request)
    selected, state = _select(storage, log, history, config)
    dataset = datasets.scan_now(config)
    identity = datasets.identity_of(config, dataset)
    plan = Plan(identity)
    notes = [passed_over(damage) for damage in selected.skipped] if selected else []
    position = plan.after(0)
    if selected is None:
        if rank == 0:
            # A later refusal can then say what changed, whoever started the run.
            datasets.keep(storage, dataset)
    else:
        header = selected.manifest.header
        datasets.check_same(storage, header.plan, identity, dataset)
        position = header.position
        notes += check_claim(config, selected.manifest, ranks, facts)
    task = load_task(config.task.factory, config.task.args) if config.task else None
    model = build_model(task, plan) if task is not None else None
    if selected is not None and model is not None:
        check_spec(selected.manifest.header.layout, state_spec(model))
    return Admitted(
        config=config,
        run_id=request.run_id,
        attempt=request.attempt,
        rank=rank,
        ranks=ranks,
        storage=storage,
        next_number=history.next_number,
        plan=plan,
        position=position,
        receipt_tip=selected.manifest.header.receipt_tip if selected else first_link(identity),
        dataset=dataset,
        device=device,
        environment=facts,
        selected=selected,
        state=state,
        task=task,
        model=model,
        notes=tuple(notes),
        directory=request.code_path,
    )


def passed_over(damage: Damage) -> str:
    """Return in words that a generation was passed over, and what of it is damaged."""
    return f"passed over a damaged generation: {damage.where}: {damage.what}"


def build_model(task: Task, plan: Plan) -> torch.nn.Module:
    """Return a task's model with the initial weights that the plan's seed gives, on the CPU.

    Raises:
        TaskError: The task raised, or made something else.
    """
    torch.manual_seed(plan.seed_for("model"))
    try:
        model: object = task.build_model()
    except Exception as error:
        raise TaskError(
            f"build_model failed with {type(error).__name__}: {error}",
            where=f"{type(task).__name__}.build_model",
            remedy="build the model by hand to see where; it is given nothing but task.args",
            details={"traceback": traceback.format_exc()},
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise TaskError(
            f"build_model returned {type(model).__name__}, which is no torch.nn.Module",
            where=f"{type(task).__name__}.build_model",
            remedy="return the model",
        )
    return model


def check_claim(config: Config, manifest: Manifest, ranks: int, facts: dict[str, str]) -> list[str]:
    """Check that a resume keeps what the run claims.

    Returns:
        What the user should know although the claim allows it.

    Raises:
        ClaimRefused: The claim would be broken; says by what.
    """
    header, claim = manifest.header, config.run.claim
    if _STRENGTH[claim] > _STRENGTH[header.claim]:
        raise ClaimRefused(
            f"run.claim is {claim}, but the history was made under {header.claim}: less was "
            "promised then",
            where="run.claim",
            remedy=f"set run.claim: {header.claim}, or start a new run",
        )
    other = differences(header.recipe, recipe_of(config))
    if other and claim != "statistical":
        raise ClaimRefused(
            f"the job changed, and run.claim is {claim}: {'; '.join(other)}",
            where=other[0].partition(":")[0],
            remedy="set this back; or go on with run.claim: statistical, under which updates may "
            "differ; or start a new run under another run.root",
            details={"changes": other},
        )
    changed = differences(header.environment, facts)
    if header.ranks != ranks and claim == "exact":
        raise ClaimRefused(
            f"the rank count changed from {header.ranks} to {ranks}, and run.claim is exact",
            where="cluster.workers",
            remedy=f"use {header.ranks} workers, or run.claim: invariant from the start of a run",
            details={"stored": header.ranks, "now": ranks},
        )
    if changed and claim != "statistical":
        raise ClaimRefused(
            f"the environment changed, and run.claim is {claim}: {'; '.join(changed)}",
            where="environment",
            remedy="resume in the environment that the run was started in, or start a new run "
            "with run.claim: statistical",
            details={"changes": changed},
        )
    notes = [f"the job changed: {line}" for line in other]
    notes += [f"environment changed: {line}" for line in changed]
    if header.ranks != ranks:
        notes.append(f"rank count changed from {header.ranks} to {ranks}")
    return notes


#: How much a claim promises. A statistical history has no exact past to go on from.
_STRENGTH = {"statistical": 0, "exact": 1, "invariant": 1}


def _history(storage: Storage, log: CommitLog, request: Request) -> History:
    history = log.read()
    if history.run_id != request.run_id:
        raise AdmissionRefused(
            f"the log under this root is of run {history.run_id!r}, not of {request.run_id!r}",
            where=storage.uri,
            remedy="do all nodes see the same storage under run.root?",
        )
    if history.attempt != request.attempt:
        raise AdmissionRefused(
            f"the newest attempt in the log is {history.attempt}, not {request.attempt}",
            where=storage.uri,
            remedy="do all nodes see the same storage under run.root? If two jobs run this "
            "configuration, stop one",
        )
    return history


def _select(
    storage: Storage, log: CommitLog, history: History, config: Config
) -> tuple[Selected | None, dict[str, torch.Tensor] | None]:
    """Return the newest generation that is whole, and its verified tensors.

    The first read is the verification: every block is hashed before one byte of it is used.
    """
    generations = Generations(storage, log)
    skipped: list[Damage] = []
    for publish in reversed(history.live):
        try:
            # Held, so that no prune deletes it meanwhile; what was retired already is passed by.
            with holding(storage, log, publish):
                manifest = generations.manifest(publish)
                state = load_state(storage, manifest)
        except NoGeneration:
            continue
        except Damage as damage:
            if (publish.number, publish.attempt) in log.read_on().retired:
                continue  # nothing was held, and it was retired and deleted under the reader
            if config.checkpoint.on_damage == "refuse":
                raise
            skipped.append(damage)
            continue
        return Selected(publish, manifest, tuple(skipped)), state
    if history.publishes and not skipped:
        raise NoGeneration(
            "every generation that this run has published is retired",
            where=storage.uri,
            remedy="start a new run under another run.root",
        )
    if skipped:
        raise NoGeneration(
            f"none of the {len(skipped)} published generations is whole: "
            f"{skipped[0].where}: {skipped[0].what}",
            where=storage.uri,
            remedy="`coherent-ray verify --all` lists the damage; restore the files from a copy",
            details={"damages": [f"{damage.where}: {damage.what}" for damage in skipped]},
        )
    return None, None
