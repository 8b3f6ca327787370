"""What the canonical reduction costs: against DistributedDataParallel over the same microbatches.

Both accumulate the gradients of the same lanes; DDP does so under ``no_sync``, and both reduce in
the last backward pass, overlapped. They take turns, a few updates each, so that whatever else the
machine does hits both; each pair of turns gives one ratio. A ratio of processor time, over all
ranks and threads, is told beside it: neither other programs' work nor any waiting is in that. Run
from the repository's root, on a quiet machine, for about five minutes:

    python benchmarks/reduction.py --out benchmarks/results/reduction.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from coherent_ray.train.collectives import second_group
from coherent_ray.train.reduce import LaneReducer

FEATURES = 256


def transformer() -> nn.Module:
    """4.7 M parameters in 72 tensors."""
    layer = nn.TransformerEncoderLayer(FEATURES, 4, 4 * FEATURES, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def perceptron() -> nn.Module:
    """8.9 M parameters in 6 tensors: little to compute for much to reduce."""
    return nn.Sequential(
        nn.Linear(FEATURES, 2048),
        nn.GELU(),
        nn.Linear(2048, 3840),
        nn.GELU(),
        nn.Linear(3840, FEATURES // 2),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "perceptron": perceptron,
}
#: Updates of one turn.
UPDATES = 2
#: Ranks and lanes: as many ranks as lanes, then fewer, which accumulate; three hold two nodes each.
PLACES = ((2, 2), (4, 4), (1, 4), (2, 4), (3, 8))
#: Examples a lane (a transformer's are sequences of 32).
EXAMPLES = {"transformer": 4, "perceptron": 64}
SCENES = tuple((name, *place, EXAMPLES[name]) for name in MODELS for place in PLACES)


def inputs(name: str, lane: int, examples: int) -> Tensor:
    shape = (examples, 32, FEATURES) if name == "transformer" else (examples, FEATURES)
    return torch.randn(shape, generator=torch.Generator().manual_seed(lane))


def canonical(name: str, ranks: int, lanes: int, rank: int, batches: dict[int, Tensor]) -> Any:
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    beside = second_group() if ranks > 1 else None
    reducer = LaneReducer(list(model.named_parameters()), lanes, rank, ranks, beside=beside)
    total = sum(len(batch) for batch in batches.values()) * ranks
    waited = [0.0]
    last = max(batches)

    def update() -> None:
        reducer.begin(0)
        for lane, batch in batches.items():
            if lane == last:
                reducer.closes(lane)
            model(batch).square().sum().backward()
            reducer.lane_done(lane)
        start = time.perf_counter()
        for gradient in reducer.finish({}, {}).gradients:
            gradient.div_(total)
        waited[0] += time.perf_counter() - start
        optimizer.step()

    return update, reducer, waited


def stock(name: str, ranks: int, lanes: int, rank: int, batches: dict[int, Tensor]) -> Any:
    torch.manual_seed(1)
    model = DistributedDataParallel(MODELS[name](), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    total = sum(len(batch) for batch in batches.values())
    last = max(batches)

    def update() -> None:
        optimizer.zero_grad()
        for lane, batch in batches.items():
            with contextlib.nullcontext() if lane == last else model.no_sync():
                (model(batch).square().sum() / total).backward()
        optimizer.step()

    return update


def scene(rank: int, entry: tuple[str, int, int, int], folder: str, turns: int) -> None:
    name, ranks, lanes, examples = entry
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    owned = range(lanes * rank // ranks, lanes * (rank + 1) // ranks)
    batches = {lane: inputs(name, lane, examples) for lane in owned}
    ours, reducer, waited = canonical(name, ranks, lanes, rank, batches)
    theirs = stock(name, ranks, lanes, rank, batches)

    def timed(update: Callable[[], None]) -> tuple[float, float]:
        """Return seconds an update, and processor seconds of all ranks."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(UPDATES):
            update()
        used = torch.tensor(time.process_time() - busy, dtype=torch.float64)
        dist.barrier()
        taken = time.perf_counter() - start
        dist.all_reduce(used)
        return taken / UPDATES, float(used) / UPDATES

    timed(ours), timed(theirs)
    reducer.bytes_sent, reducer.overlapped, waited[0] = 0, 0, 0.0
    pairs: dict[str, list[tuple[float, float]]] = {"canonical": [], "ddp": []}
    for turn in range(turns):
        pair = [("canonical", ours), ("ddp", theirs)]
        for key, update in pair if turn % 2 else reversed(pair):
            pairs[key].append(timed(update))
    if rank == 0:
        found = {
            "pairs": pairs,
            "sent": reducer.bytes_sent / (UPDATES * turns),
            "finish": waited[0] / (UPDATES * turns),
            "overlapped": reducer.overlapped / (UPDATES * turns),
            "buffers": reducer.buffers,
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(entry: tuple[str, int, int, int], turns: int) -> dict[str, Any]:
    name, ranks, lanes, examples = entry
    with tempfile.TemporaryDirectory() as folder:
        start_processes(scene, (entry, folder, turns), ranks, start_method="forkserver")
        found = json.loads(Path(folder, "found.json").read_text())
    ours, theirs = found["pairs"]["canonical"], found["pairs"]["ddp"]
    ratios = sorted(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True))
    busy = [a / b for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    model = MODELS[name]()
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "ranks": ranks,
        "lanes": lanes,
        "examples_per_lane": examples,
        "pairs": len(ratios),
        "ratio_min": round(ratios[0], 3),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_max": round(ratios[-1], 3),
        "processor_ratio_median": round(statistics.median(busy), 3),
        "canonical_update_s": round(statistics.median(a for a, _ in ours), 4),
        "ddp_update_s": round(statistics.median(b for b, _ in theirs), 4),
        "canonical_finish_s": round(found["finish"], 4),
        "rank0_overlapped_buckets_per_update": found["overlapped"],
        "rank0_partial_sums": found["buffers"],
        "rank0_sent_bytes_per_update": round(found["sent"]),
        "ring_bytes_per_update": 8
        * (ranks - 1)
        * sum(p.numel() for p in model.parameters())
        // ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/reduction.json"))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three turns of one model")
    parser.add_argument("--only", help="one model")
    options = parser.parse_args()
    only = "perceptron" if options.quick else options.only
    get_context("forkserver").set_forkserver_preload(["coherent_ray.train.reduce"])
    results = []
    for entry in (entry for entry in SCENES if only in {None, entry[0]}):
        results.append(measured(entry, 3 if options.quick else options.turns))
        print(json.dumps(results[-1]), flush=True)
    report = {
        "benchmark": "reduction",
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load_average": round(os.getloadavg()[0], 1),
            "threads_per_rank": 1,
            "backend": "gloo",
            "torch": torch.__version__,
        },
        "median_of_medians": round(statistics.median(r["ratio_median"] for r in results), 3),
        "scenes": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
