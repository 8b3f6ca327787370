"""The memory tier: what a copy costs training, and what taking it back costs, in plain copies.

One process stands for each rank in turn, and a keeper's shelf holds the slots, in this process; the
shared memory is the same as between processes. A copy is `Tensor.copy_` between touched buffers, of
the rank's own share where a copy is taken, and of the whole state where it is taken back. Run from
the repository's root:

    python benchmarks/memory_tier.py --out benchmarks/results/memory_tier.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    Manifest,
    PlanIdentity,
    StateLayout,
)
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import digest_of
from coherent_ray.state.capture import State
from coherent_ray.state.layout import layout_of
from coherent_ray.train.memory.held import HeldShards
from coherent_ray.train.memory.keeper import Sent
from coherent_ray.train.memory.shelf import Entry, Reserved, Shelf
from coherent_ray.train.memory.tier import MemoryTier, Owner
from coherent_ray.train.memory.words import unpack

RUN = "bench"
LAYERS = 50


class ShelfHere:
    """A keeper without Ray."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.sent: list[tuple[str, str]] = []

    def reserve(
        self, attempt: int, rank: int, data_bytes: int, count: int
    ) -> Future[tuple[list[Reserved], bool]]:
        """Make slots at once; there is no other node."""
        return _done((self._shelf.reserve(attempt, rank, data_bytes, count), True))

    def written(self, name: str, digest: str, replicas: int) -> Future[Sent]:
        """Take the slot down: who measures hashes it between two copies."""
        self.sent.append((name, digest))
        return _done("alone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory_tier.json"))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    told = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "state_mib": told.mib,
        "rounds": told.rounds,
        "cores": os.cpu_count(),
        "at": [measured(told.mib, ranks, told.rounds) for ranks in (1, 2)],
    }
    told.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["at"], indent=1))
    return 0


def measured(mib: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Return the ratios of one rank count: medians over the rounds."""
    state = state_of(mib * 2**20)
    layout = layout_of(state.tensors)
    shelf = Shelf(RUN)
    keepers = [ShelfHere(shelf) for _ in range(ranks)]
    options = Checkpoint(memory={"every_updates": 1})
    tiers = [
        MemoryTier(Owner(RUN, 1, "token", rank, ranks), options, keeper, print)
        for rank, keeper in enumerate(keepers)
    ]
    for tier in tiers:
        tier.prepare(layout)
        assert tier.can(1)
    share, whole = Copies(layout.nbytes // ranks), Copies(layout.nbytes)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.tensors.items()}
    kept: list[float] = []
    kept_cpu: list[float] = []
    back: list[float] = []
    for update in range(1, rounds + 2):
        about = header(update, ranks, layout)
        for rank, tier in enumerate(tiers):
            wall, cpu = share.timed()
            begun, begun_cpu = time.perf_counter(), time.process_time()
            tier.keep(state, lambda _state, _layout, h=about: h, (), agreed=True)
            if update > 1:  # the first touches the slots
                kept.append((time.perf_counter() - begun) / wall)
                kept_cpu.append((time.process_time() - begun_cpu) / cpu)
            shelf.written(*keepers[rank].sent[-1])
        newest = [e for e in shelf.entries() if e.facts.update == update]
        newest.sort(key=lambda entry: entry.facts.rank)
        wall, _ = whole.timed()
        begun = time.perf_counter()
        take_back(shelf, newest, live)
        if update > 1:
            back.append((time.perf_counter() - begun) / wall)
    assert all(torch.equal(live[name], tensor) for name, tensor in state.tensors.items())
    for tier in tiers:
        tier.close()
    shelf.clear()
    return {
        "ranks": ranks,
        "keep_copies": statistics.median(kept),
        "keep_cpu_copies": statistics.median(kept_cpu),
        "take_back_copies": statistics.median(back),
    }


def take_back(shelf: Shelf, parts: list[Entry], live: dict[str, torch.Tensor]) -> None:
    """Verify every block of a snapshot, and copy it into live tensors."""
    words = unpack(shelf.words(parts[0].at.name, parts[0].digest))
    shards = tuple(part.shard for part in parts)
    manifest = Manifest(words.read_header(), words.facts.fingerprint, shards)
    held = HeldShards([[part] for part in parts], node="")
    views = held.views(manifest)
    assert views is not None
    for name, tensor in live.items():
        tensor.copy_(views[name])
    held.close()


def state_of(nbytes: int) -> State:
    """Return parameters and both of Adam's moments, in fp32."""
    items = nbytes // 12 // LAYERS
    tensors = {}
    for layer in range(LAYERS):
        for part in ("model/{}.weight", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq"):
            tensors[part.format(layer)] = torch.randn(items)
        tensors[f"optimizer/{layer}/step"] = torch.ones(())
    return State(tensors, {}, {})


def header(update: int, ranks: int, layout: StateLayout) -> GenerationHeader:
    """Return the header that a generation would have here."""
    return GenerationHeader(
        format=1,
        run_id=RUN,
        number=update,
        attempt=1,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(0, update * 8, update),
        plan=PlanIdentity(digest_of(b"data"), 10**6, 0, "order-1", 8, 4, 1),
        layout=layout,
        values={},
        environment={},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )


class Copies:
    """Plain copies of some bytes between touched buffers."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes // 4)
        self._target = torch.zeros(nbytes // 4)

    def timed(self) -> tuple[float, float]:
        """Copy once; return seconds by the clock and of the processor."""
        begun, begun_cpu = time.perf_counter(), time.process_time()
        self._target.copy_(self._source)
        return time.perf_counter() - begun, time.process_time() - begun_cpu


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


if __name__ == "__main__":
    sys.exit(main())
