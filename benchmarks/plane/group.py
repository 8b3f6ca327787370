"""The processes of one interpreter, one a rank: started, told what to do, watched, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from plane.rank import descendants

BENCHMARKS = Path(__file__).resolve().parent.parent


class Group:
    """All ranks, which do the same at once."""

    def __init__(self, lines: list[Connection], store: Path) -> None:
        self._lines = lines
        found = self.all("begin_group", str(store))
        self.pids = [answer["pid"] for answer in found]
        self.share: int = found[0]["share"]
        self.broken: dict[str, str] = {}
        """What went wrong, by the first word after the verb: a product's key."""

    def all(self, verb: str, *words: Any) -> list[dict[str, Any]]:
        """Have every rank do something, and return their answers in order."""
        for line in self._lines:
            line.send((verb, *words))
        return [line.recv() for line in self._lines]

    def try_all(self, verb: str, key: str, *words: Any) -> list[dict[str, Any]]:
        """Do the same with a product that may fail; then it is left out from here on: ``[]``."""
        if key in self.broken:
            return []
        answers = self.all(verb, key, *words)
        for answer in answers:
            if "error" in answer:
                self.broken[key] = f"{verb}: {answer['error']}"
                print(f"{key}: {self.broken[key]}", file=sys.stderr, flush=True)
                return []
        return answers

    def leave(self) -> None:
        """Hang up: who serves ends."""
        for line in self._lines:
            line.close()

    @contextmanager
    def memory(self) -> Iterator[Callable[[], int]]:
        """Watch the memory of all ranks: the function returns the bytes that came on top."""
        before, most, stop = self._proportional(), 0, threading.Event()

        def look() -> None:
            nonlocal most
            while not stop.wait(0.02):
                most = max(most, self._proportional())

        watch = threading.Thread(target=look)
        watch.start()
        try:
            yield lambda: max(most - before, 0)
        finally:
            stop.set()
            watch.join()

    def _proportional(self) -> int:
        """Return the memory of all ranks and their children; what is shared counts once."""
        pids = [pid for own in self.pids for pid in (own, *descendants(own))]
        return sum(map(_pss, pids))


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0


@contextmanager
def listening(place: Path) -> Iterator[Listener]:
    """Have a socket that ranks call."""
    with Listener(str(place / "call")) as listener:
        yield listener


def met(listener: Listener, place: Path, ranks: int, size: int, store: Path) -> Group:
    """Wait for all ranks, and tell them who they are."""
    lines: dict[int, Connection] = {}
    while len(lines) < ranks:
        line = listener.accept()
        lines[line.recv()] = line
    for line in lines.values():
        line.send((str(place), ranks, size))
    return Group([lines[rank] for rank in range(ranks)], store)


@contextmanager
def processes(python: str, place: Path, ranks: int, size: int) -> Iterator[Group]:
    """Start a process for each rank, and end them.

    Args:
        python: The interpreter.
        place: Its own directory; short, since a socket lies in it.
        ranks: How many.
        size: Bytes of the state.
    """
    place.mkdir(exist_ok=True)
    own: list[subprocess.Popen[bytes]] = []
    try:
        with listening(place) as listener:
            own = [started(python, "plane.rank", place / "call", rank) for rank in range(ranks)]
            group = met(listener, place, ranks, size, place / "store")
        yield group
        group.all("close")
    finally:
        for process in own:
            process.terminate()
        for process in own:
            process.wait()


def started(python: str, module: str, *words: object) -> subprocess.Popen[bytes]:
    """Start a module of this benchmark in an interpreter."""
    path = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [python, "-m", module, *map(str, words)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
