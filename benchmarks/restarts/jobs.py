"""The two training functions: one job, with the checkpoints of Ray Train or with ours."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from restarts.marks import Marks


def coherent(values: dict[str, Any]) -> None:
    """Train as ``coherent-ray run`` does, and note the way."""
    from coherent_ray.train import hooks
    from coherent_ray.train.admit import current
    from coherent_ray.train.loop import train
    from coherent_ray.train.session import Session
    from restarts import orders

    plan = orders.read()
    marks = Marks(plan.place, current().rank)
    track = Session.track

    def tracked(session: Session, *args: Any, **more: Any) -> None:
        track(session, *args, **more)
        marks.note("loaded")

    def at(point: str) -> None:
        if point.startswith("update@"):
            marks.updated(int(point.partition("@")[2]), plan.kills, plan.place)

    Session.track = tracked  # type: ignore[method-assign]
    hooks.install(at)
    train(values)


def ray_train(values: dict[str, Any]) -> None:
    """Train the same with DDP; save with torch.save and report, load with get_checkpoint."""
    from ray import train
    from ray.train.torch import prepare_model

    from jobs.language_model import LanguageModelTask
    from restarts import orders

    plan = orders.read()
    rank, ranks = train.get_context().get_world_rank(), train.get_context().get_world_size()
    marks = Marks(plan.place, rank)
    data = values["data"]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    task = LanguageModelTask(**values["task"]["args"])
    torch.manual_seed(0)
    model = prepare_model(task.build_model())
    optimizer = task.configure_optimizer(model)
    scheduler = task.configure_scheduler(optimizer, values["training"]["updates"])
    done = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            state = torch.load(f"{place}/state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        done = state["done"]
    rows = _rows(data["source"]["paths"][0])
    marks.note("loaded")
    share = data["global_batch"] // ranks
    for update in range(done + 1, values["training"]["updates"] + 1):
        first = ((update - 1) * data["global_batch"] + rank * share) % (len(rows) - share)
        batches = rows[first : first + share].split(data["microbatch"])
        for index, batch in enumerate(batches):
            model.require_backward_grad_sync = index == len(batches) - 1
            loss, count = task.loss(model, batch)
            (loss / count / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        marks.updated(update, plan.kills, plan.place)
        if update % values["checkpoint"]["every_updates"] == 0:
            _report(rank, model, optimizer, scheduler, update)


def _rows(path: str) -> torch.Tensor:
    import pyarrow.parquet as pq

    column = pq.read_table(path, columns=["text"])["text"].combine_chunks()
    data = bytearray(column.buffers()[1])
    return torch.frombuffer(data, dtype=torch.uint8).view(len(column), -1)[:4096].long()


def _report(rank: int, model: Any, optimizer: Any, scheduler: Any, done: int) -> None:
    from ray import train

    if rank:
        train.report({"done": done})
        return
    with tempfile.TemporaryDirectory() as place:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "done": done,
        }
        torch.save(state, Path(place) / "state.pt")
        train.report({"done": done}, checkpoint=train.Checkpoint.from_directory(place))
