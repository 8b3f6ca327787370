"""Running updates of a stored history again, in this process, to look into one of them.

Nothing is written, and no attempt is opened: the ranks start from a generation that is there and
train up to the update that is wanted. They are the product's sessions, in threads (`rehearsal`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations, Selected
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody
from coherent_ray.config import Config
from coherent_ray.data.plan import Plan
from coherent_ray.drill import taps
from coherent_ray.drill.cases import fixed
from coherent_ray.drill.patching import planted
from coherent_ray.drill.ranks import Crew
from coherent_ray.drill.recording import Recorder, Recording
from coherent_ray.drill.rehearsal import Here, NoLine, device_of, in_threads
from coherent_ray.errors import ConfigError, TrainingFailed
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_state
from coherent_ray.storage import open_storage
from coherent_ray.train import datasets, environment, loop, origin, session
from coherent_ray.train.admit import Admitted, build_model, task_folders
from coherent_ray.train.code import NO_CODE
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import Receipt, first_link
from coherent_ray.train.recipe import origin_of
from coherent_ray.train.reduce import Reduced
from coherent_ray.train.session import Session
from coherent_ray.train.task import load_task, look_in
from coherent_ray.train.update import Update

#: Updates between two saves of a rerun, which saves nothing.
_NEVER = 2**40


@dataclass(frozen=True, slots=True)
class Rerun:
    """Updates that were run again."""

    receipts: tuple[Receipt, ...]
    """Of all of them, without states."""
    states: tuple[tuple[str, str], ...]
    """After each of them, as rank 0 holds it: the fingerprint of all tensors, as a generation has
    it, and a digest of what is no tensor."""
    recordings: tuple[Recording, ...]
    """Of the last one, rank by rank."""

    @property
    def receipt(self) -> Receipt:
        """Of the last one."""
        return self.receipts[-1]


class _Enough(BaseException):
    """The update that is wanted is done."""


def rerun(config: Config, start: PublishBody | None, ranks: int, until: int) -> Rerun:
    """Run the updates from a generation to another one again, and record the last.

    Args:
        config: The run; its root is read, and nothing in it is changed.
        start: The generation to start from; None: the beginning.
        ranks: How many ranks.
        until: The last update to run.

    Raises:
        CoherentRayError: It cannot be run here.
    """
    config = config.resolved()
    checkpoint = config.checkpoint.model_copy(update=fixed(_NEVER))
    # Read when it is asked for, in the rank's own thread: what `collate` does is then seen, too.
    data = config.data.model_copy(update={"prefetch": 0})
    config = config.model_copy(update={"checkpoint": checkpoint, "data": data})
    crew, here = Crew(ranks), _Here()
    seen: dict[int, tuple[Receipt, tuple[str, str]]] = {}

    def advance(original: Callable[..., None]) -> Callable[..., None]:
        def end(run: Session, update: Update, reduced: Reduced) -> None:
            run.position = run.plan.after(update.number)
            if update.number >= until:
                here.recorder.end()
                here.recorder.stepped(run.model, run.capture())
            if run.rank == 0:
                seen[update.number] = run.chain.pending[-1], _digest_of(run)
            if update.number >= until:
                raise _Enough

        return end

    def live(rank: int) -> Recording:
        here.recorder = Recorder(until)
        here.admitted = _from(config, start, rank, ranks)
        try:
            loop.train(config.model_dump(mode="json"))
        except _Enough:
            return here.recorder.recording
        finally:
            here.recorder.end()
        raise TrainingFailed(f"the run has no update {until}")

    patches = [*taps.patches(here.mine), (session.Session, "advance", advance)]
    with in_threads(crew, here, _Nobody), planted(patches), taps.modules_told(here.mine):
        recordings = crew.run(live)
    done = [seen[number] for number in sorted(seen)]
    return Rerun(
        receipts=tuple(receipt for receipt, _ in done),
        states=tuple(state for _, state in done),
        recordings=tuple(recordings),
    )


def _digest_of(run: Session) -> tuple[str, str]:
    state = run.capture()
    prints = fingerprint(layout_of(state.tensors), state.tensors)
    return prints.digest, canonical.digest(state.values)


class _Here(Here):
    """What belongs to one rank's thread."""

    recorder: Recorder

    def mine(self) -> Recorder:
        """Return this thread's recorder."""
        return self.recorder


class _Nobody(NoLine):
    """A line to no coordinator."""

    def __init__(self, run_id: str, attempt: int, rank: int) -> None:
        pass


def _from(config: Config, start: PublishBody | None, rank: int, ranks: int) -> Admitted:
    """Return what admission would have found out, had this generation been the newest."""
    if config.task is None:
        raise ConfigError("no task is configured", where="task", remedy="set task.factory")
    folder = str(Path.cwd())
    look_in(folder, *task_folders(config, folder))
    device = device_of(config)
    environment.prepare(
        device,
        threads=config.training.threads,
        deterministic=config.run.claim != "statistical",
    )
    storage = open_storage(config.run.root, config.storage.options)
    dataset = datasets.scan_now(config)
    plan = Plan(datasets.identity_of(config, dataset))
    task = load_task(config.task.factory, config.task.args)
    selected: Selected | None = None
    state: dict[str, torch.Tensor] | None = None
    if start is not None:
        manifest = Generations(storage).manifest(start)
        selected, state = Selected(start, manifest, ()), load_state(storage, manifest)
    header = selected.manifest.header if selected else None
    weights = origin.read(config) if header is None else None
    began = origin.recipe(config, weights)
    return Admitted(
        config=config,
        run_id=run_id_of(config),
        attempt=0,
        rank=rank,
        ranks=ranks,
        storage=storage,
        log=CommitLog(storage),
        next_number=1,
        plan=plan,
        position=header.position if header else plan.after(0),
        receipt_tip=header.receipt_tip if header else first_link(plan.identity, began),
        dataset=dataset,
        device=device,
        environment={},
        code=NO_CODE,
        selected=selected,
        state=state,
        task=task,
        model=build_model(task, plan),
        notes=(),
        weights=weights,
        origin=origin_of(header.recipe) if header else began,
        directory=folder,
    )
