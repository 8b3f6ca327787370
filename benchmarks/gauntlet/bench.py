"""One cell's bench: starts children of a product, follows what they write down, strikes them.

Each child is a session of its own, so whatever it starts can be struck with it; it ends when its
bench does, at the latest. Nothing else on the machine is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from gauntlet import states
from gauntlet.column import BENCHMARKS, Column
from gauntlet.verdict import NotRun
from gauntlet.zygote import Zygote

Act = dict[str, Any]
#: Seconds between two looks at a child.
_LOOK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an act went."""

    error: str | None = None
    """What it raised; None: nothing."""
    found: str | None = None
    """A resume: the checkpoint's name; None: from scratch."""
    digest: str | None = None
    says: str = ""
    members: tuple[str, ...] = ()
    value: tuple[int, ...] = ()
    died: bool = False
    """The process ended in it."""


@cache
def digest_of(step: int, variant: str = "a", items: int = states.SMALL) -> str:
    """Return the digest of a state that was saved; see `states.make`."""
    return states.digest(states.make(step, variant, items))


class Bench:
    """Where one experiment with one product happens."""

    def __init__(self, column: Column, python: str, small: bool = False) -> None:
        """Make a place for files.

        Args:
            column: The product.
            python: The interpreter that has it.
            small: Use small states where large ones only make striking surer.
        """
        self.column, self.python = column, python
        self.large = 3_000_000 if small else states.LARGE
        self.scratch = Path(tempfile.mkdtemp(prefix="gauntlet-"))
        self._children: list[Child] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for started in self._children:
            started.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def root(self, name: str) -> Path:
        """Make an empty root."""
        path = self.scratch / name
        path.mkdir()
        return path

    def start(self, *acts: Act) -> Child:
        """Start a child that does acts."""
        numbered = [{**act, "number": at} for at, act in enumerate(acts)]
        self._children.append(Child(self, numbered))
        return self._children[-1]

    def run(self, *acts: Act) -> list[Outcome]:
        """Do acts in a child of their own, and return how each went."""
        started = self.start(*acts)
        started.finish()
        return started.outcomes()

    def environment(self) -> dict[str, str]:
        """Return a child's environment."""
        places = [str(BENCHMARKS)] + ([str(BENCHMARKS.parent)] if self.column.own else [])
        return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(places)}

    def place(self, name: str) -> Path:
        """Return a path that nobody has used."""
        return self.scratch / f"{name}-{next(self._numbers)}"


class Child:
    """A process of the product, and what it has written down so far."""

    def __init__(self, bench: Bench, acts: list[Act]) -> None:
        self._bench, self._acts = bench, acts
        self._out, listed, self._log = (bench.place(n) for n in ("out", "acts", "log"))
        for act in acts:
            if act["do"] == "wait":
                act["file"] = str(self._word(act["number"]))
        listed.write_text(json.dumps(acts))
        self._process = (_forked if bench.column.preload else _spawned)(
            bench, (bench.column.key, str(listed), str(self._out)), self._log
        )

    @property
    def pid(self) -> int:
        """The process that does the acts."""
        return [line["pid"] for line in self._lines() if "pid" in line][-1]

    def outcomes(self) -> list[Outcome]:
        """Return how each act went; one that was not done has the reason as its error."""
        ended: dict[int, Outcome] = {}
        begun = set()
        for line in self._lines():
            for number in line.get("fails", ()):
                ended.setdefault(number, Outcome(line["error"]))
            begun.add(line.get("begins"))
            if "ends" in line:
                known = {name: line.get(name) for name in ("error", "found", "digest")}
                ended[line["ends"]] = Outcome(
                    **known,
                    says=line.get("says", ""),
                    members=tuple(line.get("members", ())),
                    value=tuple(line.get("value", ())),
                )
        lost = Outcome(f"the process ended: {self._end()}", died=True)
        return [
            ended.get(act["number"], lost if act["number"] in begun else Outcome("was not reached"))
            for act in self._acts
            if act["do"] != "wait"
        ]

    def wait_for(self, number: int, what: str = "waits") -> None:
        """Wait until the child waits at an act, or ``begins`` or ``ends`` it."""
        self._until(lambda: any(line.get(what) == number for line in self._lines()), what)

    def go(self, number: int) -> None:
        """Let a waiting child go on."""
        self._word(number).touch()

    def strike(self, number: int, root: Path, share: float, expected: int, how: int) -> bool:
        """Send a signal in the middle of a save.

        Args:
            number: The act that saves.
            root: Where it saves.
            share: Of its bytes, how much is to be there.
            expected: The bytes.
            how: The signal.

        Returns:
            Whether the save was struck; else it was over too soon.
        """
        before = _sizes(root)
        self.go(number - 1)
        self._until(lambda: self._has_begun(number), "begins")
        limit = time.monotonic() + self._bench.column.patience_s
        while time.monotonic() < limit and self._process.poll() is None:
            if _written(before, _sizes(root)) >= share * expected:
                self.signal(how)
                return not any(line.get("ends") == number for line in self._lines())
            time.sleep(_LOOK_S)
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the one who does the acts, and to all that the child has started."""
        running = self._process.poll() is None
        with contextlib.suppress(ProcessLookupError, IndexError):
            if running and self.pid != self._process.pid:
                os.kill(self.pid, number)
        # Who is only stopped must leave its cluster running; who is killed must not.
        halts = number in {signal.SIGSTOP, signal.SIGCONT}
        if running and halts and self.pid != self._process.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        """Wait for its end; it is killed where its patience runs out."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._bench.column.patience_s)
        if self._process.poll() is None:
            self.kill()

    def _has_begun(self, number: int) -> bool:
        return any(line.get("begins") == number for line in self._lines())

    def _until(self, there: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + self._bench.column.patience_s
        while not there():
            if self._process.poll() is not None and not there():
                raise NotRun(f"the child ended before it {what}: {self._end()}")
            if time.monotonic() > limit:
                raise NotRun(f"the child never {what}")
            time.sleep(_LOOK_S)

    def _lines(self) -> list[dict[str, Any]]:
        if not self._out.exists():
            return []
        # Where it happened is nobody's business but this bench's.
        text = self._out.read_text().replace(f"{self._bench.scratch}/", "")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _end(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return signal.Signals(-code).name
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        lines = text.strip().splitlines()
        return f"exit code {code}" + (f", {lines[-1][:200]}" if lines else "")

    def _word(self, number: int) -> Path:
        return self._out.with_name(f"{self._out.name}-go-{number}")


# --- processes ------------------------------------------------------------------------------------


class _Fork:
    """A fork of a process that has the product, with what is used of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, arguments: tuple[str, ...]) -> None:
        self._zygote = zygote
        self.pid = zygote.fork(arguments)

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return self._zygote.code(self.pid)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._zygote.code(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_zygotes: dict[str, Zygote] = {}


def _forked(bench: Bench, arguments: tuple[str, ...], log: Path) -> Any:
    column = bench.column
    if column.key not in _zygotes:
        _zygotes[column.key] = Zygote(bench.python, column.preload, bench.environment())
    return _Fork(_zygotes[column.key], (*arguments, str(log)))


def _spawned(bench: Bench, arguments: tuple[str, ...], log: Path) -> Any:
    with log.open("wb") as file:
        return subprocess.Popen(
            [bench.python, "-m", "gauntlet.child", *arguments],
            env=bench.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


# --- acts -----------------------------------------------------------------------------------------


def save(where: Path, step: int, variant: str = "a", items: int = states.SMALL) -> Act:
    """Return the act of saving a state."""
    return {"do": "save", "where": str(where), "step": step, "variant": variant, "items": items}


def resume(where: Path, items: int = states.SMALL) -> Act:
    """Return the act of loading what the product would go on from."""
    return {"do": "resume", "where": str(where), "items": items}


def members(where: Path, step: int) -> Act:
    """Return the act of listing a checkpoint's files."""
    return {"do": "members", "where": str(where), "step": step}


def read_on(where: Path, examples: int, batch: int) -> Act:
    """Return the act of reading an epoch at one rank count, and then at another."""
    return {"do": "read_on", "where": str(where), "examples": examples, "batch": batch}


def wait(where: Path) -> Act:
    """Return the act of waiting for the word to go on."""
    return {"do": "wait", "where": str(where)}


# --- leaves ---------------------------------------------------------------------------------------


def _sizes(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in _files(str(root)):
        with contextlib.suppress(OSError):
            status = path.stat()
            there = min(status.st_size, 512 * status.st_blocks)
            found[path.path] = (status.st_ino, status.st_mtime_ns, there)
    return found


def _files(root: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry


def _written(before: dict[str, Any], now: dict[str, tuple[int, int, int]]) -> int:
    return sum(size for path, (*_, size) in now.items() if before.get(path) != now[path])
