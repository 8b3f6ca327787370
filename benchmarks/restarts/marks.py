"""What a worker notes on its way back into training, as lines of JSON in one directory.

Times are those of the machine's clock (`time.time`), so that processes can be compared.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

#: The rank that dies.
VICTIM = 1
#: What each process of a new group notes, in order.
WAY = ("process", "function", "loaded", "update")


class Marks:
    """One worker's notes."""

    def __init__(self, place: str, rank: int) -> None:
        """Note when the process began, and that its function has."""
        self._file = Path(place) / f"{os.getpid()}.jsonl"
        self._rank = rank
        self._trained = False
        self.note("process", process_began())
        self.note("function")

    def note(self, what: str, at: float | None = None, **facts: Any) -> None:
        """Write one line; a killed process leaves what it had written."""
        line = {"what": what, "at": at or time.time(), "rank": self._rank, **facts}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def updated(self, update: int, kills: list[int], place: str) -> None:
        """An update is done: note the first, and die where it is the turn of the victim."""
        if not self._trained:
            self._trained = True
            self.note("update", update=update)
        if self._rank != VICTIM or update not in kills:
            return
        mark = Path(place) / f"killed-{update}"
        if not mark.exists():  # once: the next attempt comes by here again
            mark.touch()
            self.note("kill", update=update)
            os.kill(os.getpid(), signal.SIGKILL)


def process_began() -> float:
    """Return when this process was started, as Linux tells it: to a hundredth of a second."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    with Path("/proc/stat").open() as file:
        boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    # btime is a whole second: the uptime tells the rest.
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    boot_exact = time.time() - uptime
    assert abs(boot_exact - boot) < 2.0
    return boot_exact + int(words[19]) / os.sysconf("SC_CLK_TCK")


def restarts(place: Path, ranks: int) -> list[dict[str, float]]:
    """Return the parts of each restart, in seconds.

    Args:
        place: The directory of the marks.
        ranks: Ranks that each group has.

    Raises:
        ValueError: A restart is not whole.
    """
    lives = []
    for file in place.glob("*.jsonl"):
        notes = [json.loads(line) for line in file.read_text().splitlines()]
        lives.append({note["what"]: note for note in notes})
    kills = sorted(life["kill"]["at"] for life in lives if "kill" in life)
    found = []
    for index, killed in enumerate(kills):
        until = kills[index + 1] if index + 1 < len(kills) else float("inf")
        group = [life for life in lives if "update" in life]
        group = [life for life in group if killed < life["function"]["at"] < until]
        if len(group) != ranks:
            raise ValueError(f"{len(group)} ranks of {ranks} have come back after a kill")
        last = {part: max(life[part]["at"] for life in group) for part in WAY}
        # A spare was there before.
        began = max(last["process"], killed)
        found.append({
            "processes": began - killed,
            "function": last["function"] - began,
            "state": last["loaded"] - last["function"],
            "update": last["update"] - last["loaded"],
            "whole": last["update"] - killed,
        })  # fmt: skip
    return found
