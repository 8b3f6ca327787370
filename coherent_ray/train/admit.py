"""One rank's side of admission: find out alone what this process would train, from what, on what.

Runs in every worker before the process group exists. Whatever goes wrong here ends up in the
ticket, so the rank still reaches the vote. What was found (the dataset, the verified state, the
task) stays in the process for the session, so that nothing is read or verified twice.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations, Selected
from coherent_ray.commit.holds import holding
from coherent_ray.commit.log import CommitLog, History
from coherent_ray.commit.manifest import DataPosition, GenerationHeader, Manifest
from coherent_ray.commit.records import PublishBody
from coherent_ray.config import Config
from coherent_ray.data.dataset import DatasetManifest
from coherent_ray.data.plan import Plan
from coherent_ray.errors import (
    AdmissionRefused,
    CoherentRayError,
    Damage,
    ManifestDamaged,
    NoGeneration,
    TaskError,
    TrainingFailed,
)
from coherent_ray.state.capture import check_spec, spec_digest, state_spec
from coherent_ray.state.reuse import Previous, previous_of
from coherent_ray.state.shards import load_rows, load_state
from coherent_ray.state.weights import Weights
from coherent_ray.storage import open_storage
from coherent_ray.storage.base import Storage
from coherent_ray.train import datasets, environment, fsdp
from coherent_ray.train import origin as origin_
from coherent_ray.train.admission import Ticket
from coherent_ray.train.claims import check_claim
from coherent_ray.train.code import NO_CODE, Code, code_of
from coherent_ray.train.memory.held import HeldShards
from coherent_ray.train.memory.offer import Kept, Offer, offered
from coherent_ray.train.receipts import first_link
from coherent_ray.train.resumable import passed_over
from coherent_ray.train.task import Task, load_factory, load_task, look_in


@dataclass(slots=True)
class Admitted:
    """What a rank found out at admission, for its session."""

    config: Config
    run_id: str
    attempt: int
    rank: int
    ranks: int
    storage: Storage
    log: CommitLog
    """As this rank has read it."""
    next_number: int
    plan: Plan
    position: DataPosition
    receipt_tip: str
    dataset: DatasetManifest
    device: torch.device
    environment: dict[str, str]
    code: Code
    """What the job computes from: its own modules, and the packages that these import."""
    selected: Selected | None
    """The generation to resume from; None: the run has none yet."""
    state: dict[str, torch.Tensor] | None
    """The verified tensors of the generation to resume from, in host memory."""
    task: Task | None
    model: torch.nn.Module | None
    """As the task built it; the session takes it."""
    notes: tuple[str, ...]
    weights: Weights | None = None
    """What a new run starts from, where it starts from other weights than the task's."""
    origin: dict[str, str] = field(default_factory=dict)
    """What the recipe tells of these, now and after every resume."""
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of these tensors of `state` only such rows were read: this rank's of a sharded model."""
    damaged: tuple[str, ...] = ()
    """Generations that this rank has passed over, since it found them damaged."""
    directory: str = ""
    """The driver's current directory, which a configuration's relative paths mean."""
    token: str = ""
    """That the attempt was opened with."""
    kept: Kept | None = None
    """The snapshot in memory to resume from, instead of a generation."""

    @property
    def header(self) -> GenerationHeader | None:
        """What the state to resume from says; None: the run begins."""
        if self.kept is not None:
            return self.kept.manifest.header
        return self.selected.manifest.header if self.selected else None

    @property
    def durable(self) -> PublishBody | None:
        """The generation that the run can go on from, whatever happens to memory."""
        if self.kept is not None:
            return self.kept.durable
        return self.selected.publish if self.selected else None

    @property
    def previous(self) -> Previous | None:
        """The generation that was verified and is gone on from, if this rank's shard is in it."""
        manifest = self.selected.manifest if self.selected else None
        if manifest is None or manifest.header.ranks != self.ranks:
            return None
        return previous_of(manifest.header, manifest.shards[self.rank])


@dataclass(frozen=True, slots=True)
class Request:
    """What the controller asks every worker to be admitted for. Plain values only."""

    config: dict[str, Any]
    code_path: str
    """The driver's current directory: its modules are looked at last, where it exists."""
    run_id: str
    attempt: int
    code: Code = NO_CODE
    """Of the user's own training function, as the driver sees it."""
    damaged: tuple[str, ...] = ()
    """Generations that some rank could not verify, so that none goes on from them; or the offer."""
    offer: Offer | None = None
    """A snapshot in memory, to go on from where every rank can prove it."""


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

    from coherent_ray.train.leaving import sigterm

    sigterm.install()
    context = ray.train.get_context()
    node_id = str(ray.get_runtime_context().get_node_id())
    where = (socket.gethostname(), node_id)
    blank = Ticket(context.get_world_rank(), context.get_world_size(), *where)
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
    selected, kept = admitted.selected, admitted.kept
    return replace(
        blank,
        run_id=admitted.run_id,
        attempt=admitted.attempt,
        generation=kept.name if kept else selected.publish.name if selected else None,
        manifest_digest=(
            kept.digest if kept else selected.publish.manifest_digest if selected else None
        ),
        dataset_hash=admitted.dataset.hash,
        sampler_digest=admitted.plan.sampler_digest(admitted.position, blank.rank, blank.ranks),
        state_spec=spec_digest(state_spec(admitted.model)) if admitted.model is not None else "",
        code=admitted.code.modules,
        environment=admitted.environment,
        next_number=admitted.next_number,
        position=admitted.position,
        plan=admitted.plan.identity,
        origin=admitted.origin,
        notes=admitted.notes,
        damaged=admitted.damaged,
    )


def find_out(request: Request, rank: int, ranks: int, device: torch.device) -> Admitted:
    """Derive everything that a rank must know, from the storage and the files alone.

    Raises:
        CoherentRayError: This rank cannot, or must not, take part.
    """
    config = config_.build(request.config)
    look_in(request.code_path, *task_folders(config, request.code_path))
    environment.prepare(
        device,
        threads=config.training.threads,
        deterministic=config.run.claim != "statistical",
    )
    storage = open_storage(config.run.root, config.storage.options)
    log = CommitLog(storage)
    history = _history(storage, log, request)
    dataset = datasets.scan_now(config)
    identity = datasets.identity_of(config, dataset)
    plan = Plan(identity)
    task = load_task(config.task.factory, config.task.args) if config.task else None
    code = request.code | task_code(config)
    facts = environment.fingerprint(device) | environment.versions(code.libraries)
    model = build_model(task, plan) if task is not None else None

    def accept(manifest: Manifest) -> list[str]:
        header = manifest.header
        datasets.check_same(storage, header.plan, identity, dataset)
        told = check_claim(config, manifest, ranks, facts, code)
        if model is not None:
            check_spec(header.layout, state_spec(model))
        return told

    def read(
        manifest: Manifest, held: HeldShards | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]]]:
        source = held.as_storage if held is not None else storage
        if config.training.strategy == "replicated":
            found = held.views(manifest) if held is not None else None
            return (load_state(source, manifest) if found is None else found), {}
        rows = fsdp.rows_at(model, manifest.header.layout, rank, ranks)
        return load_rows(source, manifest, rows), rows

    kept, passed = offered(request.offer, request.damaged, storage, log, history, accept, read)
    found: _Found | None
    if kept is not None:
        found = _Found(None, kept.state, kept.rows, kept.notes, ())
    else:
        found = _select(storage, log, history, config, accept, read, request.damaged)
    if found is None and rank == 0:
        # A later refusal can then say what changed, whoever started the run.
        datasets.keep(storage, dataset)
    selected = found.selected if found else None
    manifest = kept.manifest if kept else selected.manifest if selected else None
    header = manifest.header if manifest else None
    weights = origin_.read(config) if header is None else None
    if model is not None:
        origin_.check(config, weights, model)
    origin = (
        origin_.of_history(config, header.recipe) if header else origin_.recipe(config, weights)
    )
    return Admitted(
        config=config,
        run_id=request.run_id,
        attempt=request.attempt,
        rank=rank,
        ranks=ranks,
        storage=storage,
        log=log,
        next_number=history.next_number,
        plan=plan,
        position=header.position if header else plan.after(0),
        receipt_tip=header.receipt_tip if header else first_link(identity, origin),
        dataset=dataset,
        device=device,
        environment=facts,
        code=code,
        selected=selected,
        state=found.state if found else None,
        rows=found.rows if found else {},
        damaged=(*(found.damaged if found else ()), *passed),
        task=task,
        model=model,
        notes=(
            *_unseen(config, code),
            *(f"passed over {name}" for name in passed),
            *(found.notes if found else origin_.in_words(origin)),
        ),
        weights=weights,
        origin=origin,
        directory=request.code_path,
        token=next((a.token for a in history.attempts if a.attempt == request.attempt), ""),
        kept=kept,
    )


def task_folders(config: Config, code_path: str) -> list[str]:
    """Return where a task's modules may lie, beside the driver's current directory.

    A cluster that was sent that directory has it under another name: so the folder is looked for
    below this process's own current directory as well.
    """
    folder = config.task.folder if config.task else None
    if folder is None:
        return []
    below = Path(folder).is_relative_to(code_path) if code_path else False
    return [folder, *([str(Path.cwd() / Path(folder).relative_to(code_path))] if below else [])]


def task_code(config: Config) -> Code:
    """Return what the configured task computes from; nothing where there is none."""
    if config.task is None:
        return NO_CODE
    factory = config.task.factory
    return code_of(load_factory(factory, "task.factory"), factory.partition(":")[0])


def _unseen(config: Config, code: Code) -> list[str]:
    """Return a note where a claim cannot be held against edits."""
    if code.modules or config.run.claim == "statistical":
        return []
    whose = "training function" if config.task is None else "task"
    how = "; name it: torch_config(config, function)" if config.task is None else ""
    return [f"the source of the {whose} is not known, so an edit goes unnoticed{how}"]


def build_model(task: Task, plan: Plan) -> torch.nn.Module:
    """Return a task's model with the initial weights that the plan's seed gives.

    It is on the CPU, or on the meta device where the task has ``init_weights``.

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
    named = [*model.named_parameters(), *model.named_buffers()]
    without = next((name for name, tensor in named if tensor.device.type == "meta"), None)
    if without is not None and not hasattr(task, "init_weights"):
        raise TaskError(
            f"build_model returned a model whose {without!r} has no memory (it is on the meta "
            "device), and the task has no init_weights(model)",
            where=f"{type(task).__name__}.build_model",
            remedy="add init_weights(model), which fills all parameters and buffers; or build the "
            "model on the CPU",
        )
    return model


def _history(storage: Storage, log: CommitLog, request: Request) -> History:
    # The coordinator has read all of it when it opened the attempt, which must be in this end. What
    # lies in memory is of an attempt that may be far before it.
    history = log.read_end() if request.offer is None else log.read()
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


@dataclass(frozen=True, slots=True)
class _Found:
    """What to go on from: a generation, or a snapshot in memory."""

    selected: Selected | None
    state: dict[str, torch.Tensor]
    rows: dict[str, tuple[int, int]]
    notes: tuple[str, ...]
    damaged: tuple[str, ...]


def _select(  # noqa: PLR0917
    storage: Storage,
    log: CommitLog,
    history: History,
    config: Config,
    accept: Callable[[Manifest], list[str]],
    read: Callable[[Manifest], tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]]]],
    damaged: tuple[str, ...],
) -> _Found | None:
    """Return the newest generation that is whole, with its verified tensors; None: a fresh start.

    What can be refused by looking at the manifest is refused before the state is read. The first
    read is the verification: every block is hashed before one byte of it is used.
    """
    generations = Generations(storage, log)
    skipped: list[Damage] = []
    found_here: list[str] = []
    for publish in log.newest_first(history):
        if publish.name in damaged:
            skipped.append(
                ManifestDamaged("another rank found it damaged", where=publish.name, remedy="")
            )
            continue
        try:
            # Held, so that no prune deletes it meanwhile; what was retired already is passed by.
            with holding(storage, log, publish):
                manifest = generations.manifest(publish)
                told = accept(manifest)
                state, rows = read(manifest)
        except NoGeneration:
            continue
        except Damage as damage:
            if (publish.number, publish.attempt) in log.read_on().retired:
                continue  # nothing was held, and it was retired and deleted under the reader
            if config.checkpoint.on_damage == "refuse":
                raise
            skipped.append(damage)
            found_here.append(publish.name)
            continue
        notes = (*map(passed_over, skipped), *told)
        selected = Selected(publish, manifest, tuple(skipped))
        return _Found(selected, state, rows, notes, tuple(found_here))
    _require_fresh(storage, history, skipped)
    return None


def _require_fresh(storage: Storage, history: History, skipped: list[Damage]) -> None:
    """Return if the run never published anything: only then may it start from the beginning."""
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
