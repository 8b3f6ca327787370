"""Others in one rank: torch DCP in its three ways, torch-checkpointing, Ray Train's report."""

from __future__ import annotations

import tempfile
import warnings
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from plane.product import Product, State, sync_files


class Dcp(Product):
    """``dcp.save`` with its defaults: files are synced, directories are not."""

    def __init__(self, place: Path, rank: int, ranks: int, state: State) -> None:
        """See `Product`."""
        super().__init__(place, rank, ranks, state)
        warnings.simplefilter("ignore")  # one process without a group: it says so at each call

    def begin(self, step: int) -> None:
        """See `Product`."""
        from torch.distributed import checkpoint

        checkpoint.save(self.state, checkpoint_id=self.of(step))

    def load(self, step: int) -> None:
        """See `Product`."""
        from torch.distributed import checkpoint

        checkpoint.load(self.state, checkpoint_id=self.of(step))


class DcpThread(Dcp):
    """``dcp.async_save``, with its default stager or with one that keeps its memory."""

    kind = "thread"
    _future: Any = None
    _stager: Any = None

    def begin(self, step: int) -> None:
        """See `Product`."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._stager is None:
            options = StagingOptions(False, self.kind == "process", False, False)
            self._stager = DefaultStager(options)
        found = checkpoint.async_save(
            self.state,
            checkpoint_id=self.of(step),
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
            async_stager=self._stager,
        )
        self._future = getattr(found, "upload_completion", found)
        staged = getattr(found, "staging_completion", None)
        if isinstance(staged, Future):
            staged.result()

    def finish(self) -> None:
        """See `Product`."""
        self._future.result()

    def done(self) -> bool:
        """See `Product`."""
        return bool(self._future.done())


class DcpProcess(DcpThread):
    """The same, written by another process."""

    kind = "process"

    def close(self) -> None:
        """See `Product`."""
        from torch.distributed.checkpoint import _async_process_executor as executor

        if (process := executor._CHECKPOINT_PROCESS) is not None:
            process.process.kill()  # it has nothing left to do, and says so at length


class Checkpointing(Product):
    """torch-checkpointing as its documentation says for CPUs, and with the sync that it lacks."""

    def __init__(self, place: Path, rank: int, ranks: int, state: State) -> None:
        """See `Product`."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(place, rank, ranks, state)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._future: Any = None
        self._step = 0

    def begin(self, step: int) -> None:
        """See `Product`."""
        self._step = step
        self._future = self._manager.save(str(self.of(step)), {"model": self.state, "step": step})

    def finish(self) -> None:
        """See `Product`."""
        self._future.result()
        if self.rank == 0:
            sync_files(self.files(self._step))

    def done(self) -> bool:
        """See `Product`."""
        return bool(self._future.done())

    def changing(self) -> AbstractContextManager[object]:
        """See `Product`."""
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def load(self, step: int) -> None:
        """See `Product`."""
        self._manager.load(str(self.of(step)), into={"model": self.state, "step": 0})

    def close(self) -> None:
        """See `Product`."""
        self._manager.close()


class RayTrain(Product):
    """``ray.train.report``; inside a training function. Nothing is synced."""

    _places: dict[int, Path]

    def begin(self, step: int) -> None:
        """See `Product`."""
        from ray import train

        self._places = getattr(self, "_places", {})
        with tempfile.TemporaryDirectory(dir=self.place) as place:
            checkpoint = None
            if self.rank == 0:
                torch.save(self.state, f"{place}/state.pt")
                checkpoint = train.Checkpoint.from_directory(place)
            train.report({"step": step}, checkpoint=checkpoint)
            reported = train.get_all_reported_checkpoints()
        last = next(r for r in reversed(reported) if r.metrics["step"] == step)
        self._places[step] = Path(last.checkpoint.path)

    def of(self, step: int) -> Path:
        """See `Product`."""
        return self._places[step]

    def load(self, step: int) -> None:
        """See `Product`."""
        found = torch.load(self.of(step) / "state.pt")
        with torch.no_grad():
            for name, tensor in self.state.items():
                tensor.copy_(found[name])

    def drop(self, step: int) -> None:
        """Do nothing: Ray keeps two."""
