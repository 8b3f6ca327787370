"""A small training job that a judge may break: ranks and a coordinator as processes, without Ray.

What saves, publishes, selects and loads is the product's own: `Saver` in each rank, `Service` in
the coordinator, `Generations` and `load_state` at the start. What is left out is Ray, whose part
(start the processes, end all when one has died) the launcher plays, and the reduction: every rank
computes the whole batch. All write through the local backend in its buffered form, which is what
such judges can hear. One process is *struck*: it alone carries the judge.

    python -m judged.job --out DIR --ranks 2 --struck coordinator

The first run trains from the start, and each later one in the same directory resumes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it, in each rank

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.config.sections import Checkpoint
from coherent_ray.drill.saves import boundary_at
from coherent_ray.state.capture import capture, restore
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_state
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage import LocalStorage, local
from coherent_ray.storage.testing.buffered import buffered
from coherent_ray.train.saving import Saver
from judged.coordination import Line, coordinate
from judged.planted import PLANTS

#: Each of them makes a generation.
UPDATES = 3
FEATURES = 32
OPTIONS = Checkpoint(block_bytes=4096, max_failed_saves=0)
#: Seconds that the others run on when one has died, as they do on a cluster.
GRACE_S = 0.3
COORDINATOR = "coordinator"


class Turns:
    """Lets a rank begin its shard only after the ranks before it, so that plans repeat.

    Whoever comes first makes the generation's directory, and a judge counts that.
    """

    def __init__(self, ranks: int) -> None:
        self._pipes = [os.pipe() for _ in range(ranks)]

    def hook(self, rank: int) -> Any:
        """Return a rank's hook."""

        def reach(point: str) -> None:
            if point == "save:begin" and rank > 0:
                os.read(self._pipes[rank][0], 1)
            if point == "shard:begun" and rank + 1 < len(self._pipes):
                os.write(self._pipes[rank + 1][1], b".")

        return reach


class Training:
    """A model that learns something different in each update, and always the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(FEATURES, FEATURES)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, update: int) -> None:
        """Make one update."""
        batch = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(update))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def final(self) -> bytes:
        """Return the whole state's bytes."""
        tensors = capture(self.model, self.optimizer).tensors
        whole = Snapshot(layout_of(tensors), 0, 1)
        whole.take(tensors)
        return bytes(whole.memory)


def train(root: Path, rank: int, ranks: int, line: Line, turns: Turns, final: Connection) -> None:
    """Be a rank: resume from the latest generation, train to the end, say what came out."""
    torch.set_num_threads(1)
    storage, training = LocalStorage(root), Training()
    attempt = line.attempt()
    saver = Saver(storage, rank, OPTIONS, line, turns.hook(rank))
    history = CommitLog(storage).read()
    numbers = itertools.count(history.next_number)
    selected = Generations(storage).select("fall_back")
    done = seq = 0
    if selected is not None:
        record = history.record_of(selected.publish)
        assert record is not None
        done, seq = selected.publish.update, record.seq
        tensors = load_state(storage, selected.manifest)
        restore(tensors, selected.manifest.header.values, training.model, training.optimizer)
    if rank == 0:
        print(f"resumed from record {seq}", flush=True)
    for update in range(done + 1, UPDATES + 1):
        training.step(update)
        saver.settle()
        state = capture(training.model, training.optimizer)
        boundary = boundary_at(state, update, next(numbers), attempt, rank, ranks)
        saver.begin(state, boundary, time.monotonic())
    saver.settle()
    saver.close()
    final.send_bytes(training.final())
    line.close()


def launch(out: Path, ranks: int, struck: str, lifeline: Any = None) -> int:
    """Run the job once, and return its exit code: that of the first process that died.

    Args:
        out: The run's root and its result come here.
        ranks: How many.
        struck: Who carries the judge: `COORDINATOR`, ``rank 0``, ...
        lifeline: Something that can be waited for; the job ends when it is ready.
    """
    out.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    turns, root = Turns(ranks), out / "run"
    lines = [fork.Pipe() for _ in range(ranks)]
    finals = [fork.Pipe(duplex=False) for _ in range(ranks)]
    parts: dict[str, tuple[Any, ...]] = {COORDINATOR: (coordinate, root, [far for _, far in lines])}
    for rank in range(ranks):
        line = Line(lines[rank][0], rank)
        parts[f"rank {rank}"] = (train, root, rank, ranks, line, turns, finals[rank][1])
    processes = [
        fork.Process(target=_part, args=(name == struck, *part), name=name)
        for name, part in parts.items()
    ]
    for process in processes:
        process.start()
    code = _wait_for(processes, lifeline)
    if code == 0:
        results = {receive.recv_bytes() for receive, _ in finals}
        if len(results) > 1:
            print("the ranks end with different states", file=sys.stderr)
            return 1
        (out / "final.bin").write_bytes(results.pop())
    return code


def _part(struck: bool, part: Any, *arguments: Any) -> None:
    if struck and "CKPT_CHAOS_WATCH" in os.environ:
        _arm()
    part(*arguments)


def _arm() -> None:
    """Let the judge in, and give temporary files names that repeat: it plans by names."""
    from ckpt_chaos.targets.common import arm_from_env

    arm_from_env(0, lazy=True)
    numbers = itertools.count()
    names: Any = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032x}"))
    vars(local)["uuid"] = names


def _wait_for(processes: Sequence[ForkProcess], lifeline: Any) -> int:
    """Wait until all have ended well, or one has not; then end the others."""
    running = {process.sentinel: process for process in processes}
    code = 0
    while running and code == 0:
        ready = wait([*running, *([lifeline] if lifeline else [])])
        for process in [running.pop(one) for one in ready if one in running]:
            process.join()
            exit_code = process.exitcode or 0
            code = code or (128 - exit_code if exit_code < 0 else exit_code)
        if lifeline in ready:
            code = 1
    if running:
        time.sleep(GRACE_S)
    for process in running.values():
        process.kill()
        process.join()
    return code


def main(argv: Sequence[str], lifeline: Any = None) -> int:
    """Run the job once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--struck", default=COORDINATOR, help="who carries the judge")
    parser.add_argument("--plant", choices=PLANTS, help="a bug that a judge must find")
    options = parser.parse_args(argv)
    bug = PLANTS[options.plant]() if options.plant else nullcontext(None)
    with bug as stand_in, buffered(stand_in):
        return launch(options.out, options.ranks, options.struck, lifeline)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
