"""Verified loading against raw reads of the same bytes, and against an exchange between ranks.

Every turn reads the same shards in each way, so that whatever else the machine does hits all; the
ratios are medians over turns. Raw is one thread's `preadv` into memory that was touched before.

- ``live``: into live tensors, every block verified before a byte of it is used;
- ``fresh``: into new memory, as admission does, where no live tensors are yet;
- ``exchange``: each rank reads and verifies its share, the rest comes through a process group
  (gloo over the loopback) and is verified again; against ranks that each read everything.

Run from the repository's root, with page caches that may be dropped:

    python benchmarks/loading.py --out benchmarks/results/loading.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from coherent_ray.commit.manifest import DataPosition, GenerationHeader, Manifest, PlanIdentity
from coherent_ray.digests import digest_of
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_state, write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage.local import LocalStorage

BLOCK = 16 * 2**20
TENSORS = 24


def stored(folder: str, size: int, ranks: int) -> tuple[LocalStorage, Manifest, dict[str, Any]]:
    """Write a state of some bytes as so many ranks do."""
    rows = size // 4 // TENSORS // 1024
    generator = torch.Generator().manual_seed(1)
    state = {
        f"model/l{i}.weight": torch.randn(rows, 1024, generator=generator) for i in range(TENSORS)
    }
    layout, storage = layout_of(state), LocalStorage(folder)
    header = GenerationHeader(
        format=1,
        run_id="bench",
        number=1,
        attempt=1,
        claim="exact",
        ranks=ranks,
        position=DataPosition(0, 1, 1),
        plan=PlanIdentity(digest_of(b"data"), 10**6, 7, "feistel-v1", 8, 8, 1),
        layout=layout,
        values={},
        environment={},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )
    shards = []
    for rank in range(ranks):
        snapshot = Snapshot(layout, rank, ranks)
        snapshot.take(state)
        shards.append(write_shard(storage, header.directory, rank, ranks, layout, snapshot.memory))
    return storage, Manifest(header, digest_of(b"state"), tuple(shards)), state


def forget(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(paths: list[Path], memory: memoryview) -> None:
    at = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memory[at : at + BLOCK]):
                at += count


def loads(size: int, ranks: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        storage, manifest, state = stored(folder, size, ranks)
        paths = [Path(folder, shard.path) for shard in manifest.shards]
        memory = memoryview(bytearray(sum(shard.size for shard in manifest.shards)))
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ways: dict[str, Callable[[], object]] = {
            "raw": partial(read_raw, paths, memory),
            "live": partial(load_state, storage, manifest, target),
            "fresh": partial(load_state, storage, manifest),
        }
        times: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
        for _ in range(turns):
            for cache, found in times.items():
                for name, read in ways.items():
                    if cache == "cold":
                        forget(paths)
                    else:
                        read_raw(paths, memory)
                    begun = time.perf_counter()
                    read()
                    found.setdefault(name, []).append(time.perf_counter() - begun)
        assert all(torch.equal(tensor, target[name]) for name, tensor in state.items())
        ratios = {
            cache: {
                name: statistics.median(
                    a / b for a, b in zip(found[name], found["raw"], strict=True)
                )
                for name in ("live", "fresh")
            }
            for cache, found in times.items()
        }
        raw_s = {cache: statistics.median(found["raw"]) for cache, found in times.items()}
        return {"bytes": size, "shards": ranks, "turns": turns, "ratios": ratios, "raw_s": raw_s}


def exchange_rank(rank: int, ranks: int, path: str, size: int, turns: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    state = torch.zeros(size, dtype=torch.uint8)
    memory, share = memoryview(state.numpy()), size // ranks
    file = os.open(path, os.O_RDONLY)

    def verified(at: int) -> None:
        digest_of(memory[at : at + BLOCK], "xxh3_128")

    def block(at: int) -> None:
        os.preadv(file, [memory[at : at + BLOCK]], at)
        verified(at)

    def read(start: int, stop: int) -> None:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(block, range(start, stop, BLOCK)))

    def exchange() -> None:
        read(rank * share, (rank + 1) * share)
        parts = list(state.split(share))
        dist.all_gather(parts, parts[rank].clone())
        for at in range(0, size, BLOCK):
            if at // share != rank:
                verified(at)

    times: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    for _ in range(turns):
        for cache, found in times.items():
            for name, way in {"read": partial(read, 0, size), "exchange": exchange}.items():
                if cache == "cold":
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    read(0, size)
                dist.barrier()
                begun = time.perf_counter()
                way()
                dist.barrier()
                found.setdefault(name, []).append(time.perf_counter() - begun)
    if rank == 0:
        medians = {
            cache: {name: statistics.median(seconds) for name, seconds in found.items()}
            for cache, found in times.items()
        }
        Path(out).write_text(json.dumps(medians))


def exchanged(size: int, ranks: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, out = f"{folder}/state", f"{folder}/result"
        with Path(path).open("wb") as file:
            for _ in range(size // BLOCK):
                file.write(os.urandom(BLOCK))
            file.flush()
            os.fsync(file)
        start_processes(exchange_rank, (ranks, path, size, turns, out), nprocs=ranks)
        found = json.loads(Path(out).read_text())
        return {"bytes": size, "ranks": ranks, "turns": turns, "seconds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loading.json"))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of state")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.mib * 2**20
    report = {
        "benchmark": "loading",
        "machine_facts": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load_average": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
        },
        "loads": [loads(size, shards, options.turns) for shards in (1, 2, 16)],
        "exchanges": [exchanged(size // 4, 2, options.turns)],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
