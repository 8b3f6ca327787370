"""Runs of several ranks in processes over gloo, without Ray: what the tests of FSDP2 train.

The coordinator is the real service, in the parent; ranks reach it through a manager's proxy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_run import WIDTH, Coordinator, coordinating, root_of, ticket_of, working
from torch import Tensor, nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from coherent_ray.commit import manifest as records
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.read_back import Reply, reply_from_json
from coherent_ray.config import Config
from coherent_ray.state.capture import State
from coherent_ray.state.digest import tensors_digest
from coherent_ray.state.layout import layout_of
from coherent_ray.state.sharded import is_distributed
from coherent_ray.train import agreement, loop
from coherent_ray.train.admit import Request
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.memory import wiring
from coherent_ray.train.memory.offer import Offer, of_entries
from coherent_ray.train.memory.shelf import Entry, Reserved, Shelf
from coherent_ray.train.wishes import Wish

_KEY = b"a test's own"


# --- the task -------------------------------------------------------------------------------------


class Model(nn.Module):
    """Tied, frozen and tiny parameters, rows that no count of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.outward = nn.Linear(7, WIDTH, bias=False)
        self.tied = nn.Linear(7, WIDTH, bias=False)
        self.tied.weight = self.outward.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 1.0, 1.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().abs().sum()
        y = self.inward(x)
        for block in self.blocks:
            y = self.dropout(block(y).tanh())
        y = self.frozen(y) * self.gain
        return self.outward(y) * self.mask + self.tied(y.tanh())


class Rebuilding:
    """Learns to give back what it is given."""

    def build_model(self) -> nn.Module:
        return Model()

    def collate(self, rows: Mapping[str, Any]) -> Tensor:
        return torch.from_numpy(np.stack(list(rows["x"])))

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return (model(batch) - batch).square().sum(), len(batch)


class FromNothing(Rebuilding):
    """The same, built without memory."""

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return Model()

    def init_weights(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        model.seen.zero_()
        model.mask.copy_(torch.tensor([1.0, 0.5, 1.0, 1.0]))


class InBlocks(Rebuilding):
    """The same, with a word of its own on what is gathered together."""

    def shard(self, model: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh)


class Dying(Rebuilding):
    """One of whose ranks is gone in the middle of an update: of the second, unless told."""

    def __init__(self, at: int = 6) -> None:
        self.seen, self._at = 0, at

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        self.seen += 1
        if self.seen == self._at and dist.is_initialized() and dist.get_rank() == 1:
            os._exit(1)
        return super().loss(model, batch)


class Failing(Dying):
    """One of whose ranks raises instead."""

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        self.seen += 1
        if self.seen == 6 and dist.get_rank() == 1:
            raise KeyError("no such word")
        return Rebuilding.loss(self, model, batch)


class HalfSharded(Rebuilding):
    """Leaves most parameters as they are, so nobody would sum their gradients."""

    def shard(self, model: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.blocks[0], mesh=mesh)


# --- ranks ----------------------------------------------------------------------------------------


class Desk:
    """What ranks ask the coordinator, and what they say that they saw."""

    def __init__(self, coordinator: Coordinator, shelf: Shelf | None = None) -> None:
        self._coordinator = coordinator
        self._shelf = shelf
        self.starts: list[tuple[int, str]] = []
        self.resumes: dict[int, str | None] = {}
        """By rank, what it went on from."""
        self.errors: dict[int, str] = {}
        self.codes: list[int | None] = []
        """How each process ended."""

    def acknowledge(self, word: bytes) -> Any:
        service = self._coordinator.service
        return self._coordinator.call(service.acknowledge(word)).to_json()

    def withdraw(self, attempt: int, number: int, rank: int, reason: str) -> None:
        service = self._coordinator.service
        self._coordinator.call(service.withdraw(attempt, number, rank, reason))

    def reserve(self, *args: int) -> list[Reserved]:
        assert self._shelf is not None
        return self._shelf.reserve(*args)

    def written(self, name: str, digest: str) -> None:
        assert self._shelf is not None
        self._shelf.written(name, digest)

    def wish(self, rank: int) -> int:
        wishes = self._coordinator.wishes
        return wishes.pop(0) if rank == 0 and wishes else 0

    def resumed(self, rank: int, name: str | None) -> None:
        self.resumes[rank] = name

    def started(self, rank: int, digest: str) -> None:
        self.starts.append((rank, digest))

    def failed(self, rank: int, words: str) -> None:
        self.errors[rank] = words


class _Manager(BaseManager):
    pass


class Line:
    """A rank's line, through the desk."""

    def __init__(self, desk: Any, attempt: int, rank: int) -> None:
        self._desk, self._attempt, self._rank = desk, attempt, rank

    def acknowledge(self, word: Acknowledgement) -> Reply:
        return reply_from_json(self._desk.acknowledge(records.dump(word)))

    def withdraw(self, number: int, reason: str) -> None:
        self._desk.withdraw(self._attempt, number, self._rank, reason)

    def wish(self) -> Wish:
        bits = self._desk.wish(self._rank)
        return Wish(bits, 1 if bits & 1 else 0)

    def report(self, progress: dict[str, Any], *, now: bool = False) -> None: ...
    def stand(self, ranks: int, update: int, phase: str) -> None: ...
    def settle(self, tokens: tuple[int, ...]) -> None: ...
    def leave(self, why: str) -> None: ...
    def left(self, generation: str | None) -> None: ...


class KeeperAtDesk:
    """A rank's line to the shelf, through the desk."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def reserve(self, *args: int) -> Future[tuple[list[Reserved], bool]]:
        future: Future[tuple[list[Reserved], bool]] = Future()
        future.set_result((self._desk.reserve(*args), True))
        return future

    def written(self, name: str, digest: str, replicas: int) -> Future[Any]:
        future: Future[Any] = Future()
        self._desk.written(name, digest)
        future.set_result("alone")
        return future


def main(
    rank: int,
    ranks: int,
    values: dict[str, Any],
    attempt: int,
    address: Any,
    store: str,
    offer: Offer | None,
) -> None:
    """Be one rank of one attempt: be admitted, and train to the end or to a wish."""
    _Manager.register("desk")
    manager = _Manager(address, _KEY)
    manager.connect()
    desk = manager.desk()
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=600), world_size=ranks, rank=rank
    )
    same_start = agreement.check_same_start

    def check(state: State, *rest: Any) -> None:
        same_start(state, *rest)
        whole = {
            name: tensor.full_tensor() if is_distributed(tensor) else tensor
            for name, tensor in state.tensors.items()
        }
        desk.started(rank, tensors_digest(layout_of(whole), whole))

    with working(), pytest.MonkeyPatch.context() as patch:
        asked = Request(values, "", "small", attempt, offer=offer)
        ticket = ticket_of(asked, rank, ranks)
        desk.resumed(rank, ticket.generation)
        if ticket.refusal is not None:
            raise ticket.refusal
        patch.setattr("coherent_ray.train.session.Line", lambda _, a, r: Line(desk, a, r))
        patch.setattr("coherent_ray.train.session.report_outcome", lambda run: None)
        patch.setattr(agreement, "check_same_start", check)
        patch.setattr(wiring, "keeper_of", lambda run_id: KeeperAtDesk(desk))
        try:
            loop.train(values)
        except Exception as error:
            desk.failed(rank, f"{type(error).__name__}: {error}")
            raise
    dist.destroy_process_group()


@contextmanager
def _serving(desk: Desk) -> Iterator[Any]:
    _Manager.register("desk", callable=lambda: desk)
    server = _Manager(("127.0.0.1", 0), _KEY).get_server()

    def serve() -> None:
        with suppress(SystemExit):
            server.serve_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop_event.set()
        thread.join()


def run_ranks(
    config: Config,
    ranks: int,
    wishes: list[int],
    folder: Path,
    *,
    fails: bool = False,
    shelf: Shelf | None = None,
) -> Desk:
    """Run one attempt of some ranks, each a process, and return what they said."""
    assert run_id_of(config) == "small"
    get_context("forkserver").set_forkserver_preload(
        ["coherent_ray.train.session", "torch.distributed.fsdp", "torch.distributed.tensor"]
    )
    with coordinating(config) as coordinator:
        coordinator.wishes = list(wishes)
        desk = Desk(coordinator, shelf)
        attempt = coordinator.open_attempt()
        offer = offer_of(config, shelf) if shelf else None
        values = config.model_dump(mode="json")
        with _serving(desk) as address:
            arguments = (ranks, values, attempt, address, str(folder / f"store-{attempt}"), offer)
            group = start_processes(
                main, arguments, nprocs=ranks, join=False, start_method="forkserver"
            )
            # The first that ends badly does not take the others with it: they see by themselves.
            for process in group.processes:
                process.join()
            desk.codes = [process.exitcode for process in group.processes]
    if not fails:
        assert desk.codes == [0] * ranks, desk.errors
    return desk


def offer_of(config: Config, shelf: Shelf) -> Offer | None:
    """Return what an attempt that has opened may go on from."""

    def words_of(entry: Entry) -> bytes:
        return shelf.words(entry.at.name, entry.digest)

    return of_entries(shelf.entries(), words_of, CommitLog(root_of(config)).read())
