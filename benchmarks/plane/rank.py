"""One rank's process: does what it is told, and says what it took.

``python -m plane.rank SOCKET RANK`` answers the benchmark; a training function of Ray Train calls
`serve` itself. Times are of this rank. Processor time is that of the process with all its threads
and children, so whatever a product does behind training is in it; kernel threads that write back
the page cache are in nobody's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plane.product import Product, State
from plane.raw import Raw

#: Where each product is found, so that nobody imports what he does not have.
PRODUCTS = {
    "ours": "plane.ours:Ours",
    "torch_save": "plane.product:TorchSave",
    "dcp": "plane.rivals:Dcp",
    "dcp_thread": "plane.rivals:DcpThread",
    "dcp_process": "plane.rivals:DcpProcess",
    "checkpointing": "plane.rivals:Checkpointing",
    "ray_train": "plane.rivals:RayTrain",
}
#: Tensors of the state: parameters and both of Adam's moments, layer by layer.
LAYERS = 16
#: Side of the matrices that an update multiplies, and seconds that updates are counted for alone.
SIDE, ALONE_S = 384, 1.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def new_state(size: int) -> State:
    """Return a state of about so many bytes, the same in every rank."""
    generator = torch.Generator().manual_seed(7)
    items = size // (3 * LAYERS * 4)
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {
        f"{kind}/layer{layer}": torch.randn(items, generator=generator)
        for kind in kinds
        for layer in range(LAYERS)
    }


class Rank:
    """What one process can be told; each method returns figures by name."""

    def __init__(self, place: str, rank: int, ranks: int, size: int) -> None:
        torch.set_num_threads(1)
        self._place, self._rank, self._ranks = Path(place), rank, ranks
        self._state = new_state(size)
        self._raw = Raw(self._place / "raw", rank, ranks, self._state)
        self._products: dict[str, Product] = {}
        self._a = torch.randn(SIDE, SIDE)

    def begin_group(self, store: str) -> dict[str, Any]:
        """Let all ranks of an interpreter meet; one rank alone too, since some ask for a group."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", f"file://{store}", rank=self._rank, world_size=self._ranks
            )
        return {"pid": os.getpid(), "share": self._raw.share}

    def trim(self) -> dict[str, Any]:
        """Give free memory back, so that what a product takes is seen."""
        ctypes.CDLL(None).malloc_trim(0)
        return {}

    def start(self, key: str) -> dict[str, Any]:
        """Make a product."""
        module, name = PRODUCTS[key].split(":")
        make = getattr(importlib.import_module(module), name)
        (self._place / key).mkdir(parents=True, exist_ok=True)
        self._products[key] = make(self._place / key, self._rank, self._ranks, self._state)
        return {}

    def raw(self, verb: str) -> dict[str, Any]:
        """Do one of `Raw`'s."""
        return _timed(getattr(self._raw, verb))

    def drop(self, key: str, step: int | None) -> dict[str, Any]:
        """Delete a save, or the raw files."""
        if key == "raw":
            self._raw.drop()
        elif self._rank == 0 and step is not None:
            self._products[key].drop(step)
        return {}

    def save(self, key: str, step: int) -> dict[str, Any]:
        """Save, and wait for the end of it."""
        product = self._products[key]
        begin, busy = time.perf_counter(), _processor_s()
        stall = _timed(lambda: product.begin(step))
        product.finish()
        return {
            "stall_s": stall["s"],
            "stall_cpu_s": stall["cpu_s"],
            "s": time.perf_counter() - begin,
            "cpu_s": _processor_s() - busy,
            **product.told(),
        }

    def save_training(self, key: str, step: int) -> dict[str, Any]:
        """Save while training goes on, and tell the seconds of training that were lost.

        The updates of a second alone say how fast it goes; then they are counted from the save's
        first moment until all of it is done.
        """
        product = self._products[key]
        self._updates(product, lambda taken: taken < ALONE_S / 4)
        count, taken = self._updates(product, lambda taken: taken < ALONE_S)
        pace = count / taken
        begin = time.perf_counter()
        product.begin(step)
        count, _ = self._updates(product, lambda _: not product.done())
        product.finish()
        taken = time.perf_counter() - begin
        return {"lost_s": taken - count / pace, "s": taken, "pace": pace, "during": count / taken}

    def change(self, share: float) -> dict[str, Any]:
        """Change a part of the state, its first items, in the same way in every rank."""
        left = max(int(share * sum(tensor.numel() for tensor in self._state.values())), 1)
        for tensor in self._state.values():
            tensor.view(-1)[:left].add_(1.0)
            left -= min(left, tensor.numel())
        return {}

    def load(self, key: str, step: int, cold: bool) -> dict[str, Any]:
        """Read a save into the live tensors, or the raw files into memory."""
        product = self._products.get(key)
        files = product.files(step) if product else self._raw.files()
        for path in files:
            _forget(path) if cold else _warm(path)
        return _timed(self._raw.read if product is None else lambda: product.load(step))

    def check(self, key: str, step: int) -> dict[str, Any]:
        """See that a load brings the state back, and that it was not there already."""
        before = {name: tensor.clone() for name, tensor in self._state.items()}
        for tensor in self._state.values():
            tensor.fill_(-1.0)
        self._products[key].load(step)
        same = all(torch.equal(self._state[name], tensor) for name, tensor in before.items())
        return {"same": same}

    def written(self, key: str, step: int) -> dict[str, Any]:
        """Return the bytes of a save's files, all ranks'."""
        return {"bytes": sum(path.stat().st_size for path in self._products[key].files(step))}

    def close(self) -> dict[str, Any]:
        """End all products."""
        for product in self._products.values():
            with contextlib.suppress(Exception):
                product.close()
        return {}

    def _updates(self, product: Product, more: Callable[[float], bool]) -> tuple[int, float]:
        begin, count = time.perf_counter(), 0
        small = next(iter(self._state.values()))[:1024]
        kept = small.clone()
        while more(time.perf_counter() - begin):
            torch.mm(self._a, self._a)
            with product.changing():
                small.add_(1e-6)
            count += 1
        taken = time.perf_counter() - begin
        with product.changing():
            small.copy_(kept)  # ranks do not count alike, and must hold the same
        return count, taken


def serve(connection: Connection, rank: Rank) -> None:
    """Do what is asked until nobody asks any more; an error is an answer."""
    with contextlib.suppress(EOFError):
        while True:
            verb, *words = connection.recv()
            try:
                connection.send(getattr(rank, verb)(*words))
            except Exception as error:
                traceback.print_exc()
                connection.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def join(socket: str, number: int) -> None:
    """Call the benchmark, hear who one is, and serve."""
    connection = Client(socket)
    connection.send(number)
    place, ranks, size = connection.recv()
    serve(connection, Rank(place, number, ranks, size))


def _timed(call: Callable[[], object]) -> dict[str, Any]:
    begin, busy = time.perf_counter(), _processor_s()
    call()
    return {"s": time.perf_counter() - begin, "cpu_s": _processor_s() - busy}


def _processor_s() -> float:
    """Return the processor time of this process, its threads and its living descendants."""
    return time.process_time() + sum(_ticks(pid) for pid in descendants(os.getpid())) * _TICK_S


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _forget(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)  # dirty pages stay
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass


if __name__ == "__main__":
    join(sys.argv[1], int(sys.argv[2]))
