"""A whole run without Ray: real files, the real commit protocol in a thread, a tiny task.

`Coordinator` is the actor's service in an event loop of its own; `Coordinator.line` stands where
the session makes its line to the actor. `admit` is the gate for one rank: it opens an attempt,
finds out, judges. Nothing here is a double of what decides.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from coherent_ray import config as config_
from coherent_ray.commit import manifest as records
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Acknowledgement, Manifest
from coherent_ray.commit.read_back import Reply, reply_from_json
from coherent_ray.commit.service import Service
from coherent_ray.config import Config
from coherent_ray.errors import CoherentRayError
from coherent_ray.state.shards import load_state
from coherent_ray.storage import open_storage
from coherent_ray.storage.base import Storage
from coherent_ray.train import admit as admit_
from coherent_ray.train import hooks, loop
from coherent_ray.train.admission import Expected, Ticket, judge
from coherent_ray.train.admit import Admitted, Request, find_out
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import Receipt, history
from coherent_ray.train.wishes import WISH_LEAVE, WISH_SAVE, WISH_STOP, Wish

CPU = torch.device("cpu")
EXAMPLES = 21
_TOKENS = itertools.count()
WIDTH = 4


# --- the data and the task ------------------------------------------------------------------------


def write_data(path: Path, seed: int = 0, examples: int = EXAMPLES) -> None:
    """Write examples: a vector each, and a label that follows from it."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((examples, WIDTH)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), WIDTH)
    pq.write_table(pa.table({"x": vectors, "y": y}), path)


class Tiny:
    """A task small enough to train in milliseconds."""

    def __init__(self, hidden: int = 5) -> None:
        self.hidden = hidden

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, self.hidden), nn.Tanh(), nn.Dropout(0.25), nn.Linear(self.hidden, 2)
        )

    def collate(self, rows: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.stack(list(rows["x"]))), torch.as_tensor(rows["y"])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def values_for(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration's plain values; ``data__seed=7`` changes ``data.seed``."""
    values: dict[str, Any] = {
        "run": {"root": str(folder / "run"), "run_id": "small"},
        "task": {"factory": "small_run:Tiny"},
        "data": {
            "source": {"format": "parquet", "paths": [str(folder / "data.parquet")]},
            "global_batch": 8,
            "lanes": 4,
            "microbatch": 1,
            "prefetch": 0,
        },
        "training": {"updates": 6},
        "checkpoint": {"every_updates": 2, "block_bytes": 4096},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    for section, name in [("training", "epochs")]:
        if name in values[section]:
            del values[section]["updates"]
    return values


def config_for(folder: Path, **changes: Any) -> Config:
    """Return a resolved configuration over a folder, whose data is made where it is not there."""
    data = folder / "data.parquet"
    if not data.exists():
        write_data(data)
    return config_.build(values_for(folder, **changes)).resolved()


def root_of(config: Config) -> Storage:
    """Return the storage that a configuration's run lies in."""
    return open_storage(config.run.root, config.storage.options)


# --- the coordinator ------------------------------------------------------------------------------


class Coordinator:
    """The coordinator's service, alive in a thread, with what the driver would see."""

    def __init__(self, run_id: str, open_root: Callable[[], Storage], **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service = Service(run_id, open_root, **options)
        self.reports: list[dict[str, Any]] = []
        self.places: list[tuple[int, int, int, int, str]] = []
        """Where ranks said that they are: attempt, rank, ranks, update, phase."""
        self.wishes: list[int] = []
        """What the next updates are answered, one each; then nothing is wished."""
        self.settled: list[int] = []
        """Tokens of the wishes to save that were voted."""
        self.left: list[str | None] = []
        """What groups said that they leave with."""

    def open_attempt(self) -> int:
        return self.call(self.service.open_attempt(f"token-{next(_TOKENS)}"))

    def line(self, run_id: str, attempt: int, rank: int) -> Line:
        """Stand in for `coherent_ray.train.coordination.Line`."""
        return Line(self, attempt, rank)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        self.call(self.service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@dataclass
class Line:
    """A rank's line, without Ray."""

    coordinator: Coordinator
    attempt: int
    rank: int

    def acknowledge(self, word: Acknowledgement) -> Reply:
        reply = self.coordinator.call(self.coordinator.service.acknowledge(records.dump(word)))
        return reply_from_json(reply.to_json())

    def withdraw(self, number: int, reason: str) -> None:
        service = self.coordinator.service
        self.coordinator.call(service.withdraw(self.attempt, number, self.rank, reason))

    def report(self, progress: dict[str, Any], *, now: bool = False) -> None:
        self.coordinator.reports.append(progress)

    def stand(self, ranks: int, update: int, phase: str) -> None:
        self.coordinator.places.append((self.attempt, self.rank, ranks, update, phase))

    def wish(self) -> Wish:
        wishes = self.coordinator.wishes
        bits = wishes.pop(0) if wishes else 0
        return Wish(bits, next(_TOKENS) + 1 if bits & WISH_SAVE else 0)

    def settle(self, tokens: tuple[int, ...]) -> None:
        self.coordinator.settled += [token for token in tokens if token]

    def leave(self, why: str) -> None:
        self.coordinator.wishes = [WISH_LEAVE | WISH_SAVE]

    def left(self, generation: str | None) -> None:
        self.coordinator.left.append(generation)


@contextmanager
def coordinating(config: Config, **options: Any) -> Iterator[Coordinator]:
    """Run a coordinator of a configuration's run for the length of a block."""
    coordinator = Coordinator(run_id_of(config), lambda: root_of(config), **options)
    try:
        yield coordinator
    finally:
        coordinator.close()


# --- admission ------------------------------------------------------------------------------------


def request_for(config: Config, attempt: int) -> Request:
    """Return what the controller asks the workers."""
    return Request(config.model_dump(mode="json"), "", run_id_of(config), attempt)


def ticket_of(request: Request, rank: int = 0, ranks: int = 1) -> Ticket:
    """Return one rank's ticket; what it found is the process's until the next call."""
    return admit_._ticket(request, Ticket(rank, ranks, f"node-{rank}"), lambda: CPU)


def admit(config: Config, coordinator: Coordinator, ranks: int = 1) -> list[Ticket]:
    """Open an attempt and let every rank through the gate; rank 0 is left in this process."""
    request = request_for(config, coordinator.open_attempt())
    tickets = [ticket_of(request, rank, ranks) for rank in reversed(range(ranks))][::-1]
    expected = Expected(request.run_id, request.attempt, ranks)
    judge(tickets, expected, same_environment=config.run.claim != "statistical")
    return tickets


def open_attempt(config: Config) -> Request:
    """Open the next attempt as the coordinator does, and return what workers are asked."""
    log = CommitLog(root_of(config))
    history = log.read()
    log.open_attempt("small", f"by-hand-{history.attempt}")
    return request_for(config, history.attempt + 1)


def found(config: Config, rank: int = 0, ranks: int = 1) -> Admitted:
    return find_out(open_attempt(config), rank, ranks, CPU)


def refused(config: Config, kind: type[CoherentRayError], ranks: int = 1) -> CoherentRayError:
    """Return the refusal in the ticket, of exactly this type; nothing is kept for a session."""
    ticket = ticket_of(open_attempt(config), 0, ranks)
    assert type(ticket.refusal) is kind, ticket
    assert admit_._admitted is None
    return ticket.refusal


@contextmanager
def working() -> Iterator[None]:
    """Let this process be a worker: what admission and training set is put back afterwards.

    Nothing is synced to the device meanwhile: no test here cuts the power, and disks are slow.
    """
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = torch.random.get_rng_state()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda file: None)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        torch.random.set_rng_state(state)
        admit_._admitted = None
        hooks.install(None)


def run_loop(config: Config, coordinator: Coordinator) -> None:
    """Run the loop of configured tasks in this process, which was admitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coherent_ray.train.session.Line", coordinator.line)
        patch.setattr("coherent_ray.train.session.report_outcome", lambda run: None)
        loop.train(config.model_dump(mode="json"))


def train(config: Config, wishes: Sequence[int] = ()) -> Left:
    """Admit this process and train to the configured end, as one driver's life would.

    Args:
        config: The run.
        wishes: What the first updates are answered; see `WISH_SAVE` and `WISH_STOP`.
    """
    with working(), coordinating(config) as coordinator:
        coordinator.wishes = list(wishes)
        admit(config, coordinator)
        run_loop(config, coordinator)
    return Left(config)


def stop_at(update: int) -> list[int]:
    """Return the wishes that let a run stop after some updates of one life."""
    return [0] * (update - 1) + [WISH_STOP | WISH_SAVE]


# --- what a run left ------------------------------------------------------------------------------


@dataclass
class Left:
    """What can be read of a run once it has ended."""

    config: Config
    storage: Storage = field(init=False)

    def __post_init__(self) -> None:
        self.storage = root_of(self.config)

    @property
    def generations(self) -> list[str]:
        return [publish.name for publish in CommitLog(self.storage).read().publishes]

    @property
    def updates(self) -> list[int]:
        """The update of each generation."""
        return [publish.update for publish in CommitLog(self.storage).read().publishes]

    def receipts(self) -> list[Receipt]:
        return list(history(self.storage, CommitLog(self.storage).read()))

    def chain(self) -> list[Receipt]:
        """The receipts without states, which depend on when somebody saved."""
        return [replace(receipt, state=None) for receipt in self.receipts()]

    def manifest(self, name: str | None = None) -> Manifest:
        publishes = CommitLog(self.storage).read().publishes
        chosen = next(p for p in reversed(publishes) if name in {None, p.name})
        return records.load(Manifest, self.storage.read(chosen.manifest))

    def state(self, name: str | None = None) -> dict[str, Tensor]:
        return load_state(self.storage, self.manifest(name))

    def shard(self, name: str | None = None, rank: int = 0) -> Path:
        return Path(self.config.run.root) / self.manifest(name).shards[rank].path


def flip(path: Path, at: int = -1) -> None:
    """Turn one bit of a file, as a disk would."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Check two states for the same names and the same bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if not torch.equal(tensor, other[name]):
            pytest.fail(f"{name} differs")
