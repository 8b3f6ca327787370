"""Ray Train's own checkpoints: a TorchTrainer whose function saves with torch.save and reports.

The acts are done by the training function in a worker; for each root there is one ``fit``, in the
local cluster of `gauntlet.cluster`. A ``fit`` that fails before its function begins is the result
of all its acts.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gauntlet.column import Column, Found

if TYPE_CHECKING:
    from gauntlet.column import State

COLUMN = Column(
    key="ray_train",
    name="Ray Train",
    distribution="ray",
    imports="ray.train",
    own=True,
    patience_s=480.0,
    settings="TorchTrainer with one worker (two, then three, in the row on data); torch.save into "
    "a temporary directory, ray.train.report with Checkpoint.from_directory and default names, "
    "then get_all_reported_checkpoints, which waits until it is registered; resumed by fit with "
    "the same RunConfig(name, storage_path) and get_checkpoint, torch.load with its defaults",
    pointers=("run/checkpoint_manager_snapshot.json",),
)


class Session:
    """See `gauntlet.column.Session`; inside a training function."""

    def __init__(self, where: str) -> None:
        self._where = Path(where)

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        import torch
        from ray import train

        with tempfile.TemporaryDirectory() as place:
            torch.save(state, f"{place}/state.pt")
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(place))
            train.get_all_reported_checkpoints()

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        import torch
        from ray import train

        place = tempfile.mkdtemp()
        torch.save(state, f"{place}/state.pt")
        train.report(
            {"step": step},
            checkpoint=train.Checkpoint.from_directory(place),
            checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        )
        change()
        train.get_all_reported_checkpoints()

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        import torch
        from ray import train

        checkpoint = train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as place:
            state = torch.load(f"{place}/state.pt")
        return Found(Path(checkpoint.path).name, state)

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        from ray import train

        reported = train.get_all_reported_checkpoints()
        place = next(Path(r.checkpoint.path) for r in reported if r.metrics["step"] == step)
        files = [path for path in place.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self._where).as_posix() for path in files)

    def close(self) -> None:
        """See `gauntlet.column.Session`."""


def run(acts: list[dict[str, Any]], out: str) -> None:
    """Do acts, root by root; see `gauntlet.child`."""
    from gauntlet import child

    _join()
    diary = child.Diary(out)
    if acts[0]["do"] == "read_on":
        child.read_on(acts[0], diary, read_on)
        return
    for where, group in itertools.groupby(acts, lambda act: str(act["where"])):
        own = list(group)
        try:
            fit(_train, {"acts": own, "out": out}, where, 1)
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            diary.note(fails=[act["number"] for act in own], error=words)


def fit(function: Callable[[dict[str, Any]], None], config: Any, where: str, workers: int) -> None:
    """Train, or go on, with the checkpoints under a root."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=where),
    ).fit()


def _join() -> None:
    import ray

    ray.init(address=os.environ["GAUNTLET_CLUSTER"], log_to_driver=False)


def _train(config: dict[str, Any]) -> None:
    from gauntlet.child import Diary, perform

    perform(config["acts"], Diary(config["out"]), Session)


# --- the row on data ------------------------------------------------------------------------------


def read_on(where: str, examples: int, batch: int) -> list[int]:
    """Read an epoch with two workers, save, and go on with three; return the examples as trained.

    The loader is prepared by ``prepare_data_loader``; a run that is resumed goes on with the epoch
    that its checkpoint names, from its beginning: the loader has no position to go on from.
    """
    config = {"examples": examples, "batch": batch, "log": f"{where}/read", "stop": True}
    try:
        fit(_read, config, where, 2)
    except Exception as error:
        if "stopped half way" not in str(error):
            raise
    fit(_read, {**config, "stop": False}, where, 3)
    lines = [line for log in Path(where).glob("read-*") for line in log.read_text().split()]
    return [int(line) for line in lines]


def _read(config: dict[str, Any]) -> None:
    import torch
    from ray import train
    from ray.train.torch import prepare_data_loader
    from torch.utils.data import DataLoader, TensorDataset

    context = train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    first_epoch = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            first_epoch = torch.load(f"{place}/state.pt")["epoch"]
    numbers = TensorDataset(torch.arange(config["examples"]))
    loader = prepare_data_loader(DataLoader(numbers, config["batch"] // ranks, shuffle=True))
    half = config["examples"] // config["batch"] // 2
    for epoch in range(first_epoch, 1):
        for index, (examples,) in enumerate(loader):
            with Path(f"{config['log']}-{ranks}-{rank}").open("a") as log:
                log.write(" ".join(map(str, examples.tolist())) + "\n")
            if config["stop"] and index + 1 == half:
                with tempfile.TemporaryDirectory() as place:
                    torch.save({"epoch": epoch, "batch": index + 1}, f"{place}/state.pt")
                    found = train.Checkpoint.from_directory(place) if rank == 0 else None
                    train.report({"step": half}, checkpoint=found)
                    train.get_all_reported_checkpoints()
                raise RuntimeError("stopped half way")
