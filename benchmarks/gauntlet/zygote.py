"""A process that has imported a product once, and forks for each child: an import costs seconds.

It has one thread and has made no tensor, so a fork of it is as good as new. It takes a line of JSON
for each child (key, acts, out, log), answers with its pid, tells its exit code when it ends, and
ends when nobody can ask any more.

    python -m gauntlet.zygote MODULE...
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import threading
from typing import Any

from gauntlet import child

_LOOK_S = 0.02


def main() -> None:
    """Import, and fork whenever asked."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    asked = b""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready:
            data = os.read(0, 65_536)
            if not data:
                os._exit(0)
            asked += data
        while b"\n" in asked:
            line, _, asked = asked.partition(b"\n")
            _fork(json.loads(line))
        _tell_ends()


def _fork(arguments: list[str]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            child.forked(*arguments)
        finally:
            os._exit(1)
    print(json.dumps({"begun": pid}), flush=True)


def _tell_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


class Zygote:
    """The other end of it."""

    def __init__(self, python: str, preload: tuple[str, ...], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "gauntlet.zygote", *preload],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._news = threading.Condition()
        self._begun: list[int] = []
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, arguments: tuple[str, ...]) -> int:
        """Begin a child, and return its pid."""
        assert self._process.stdin is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        with self._news:
            self._news.wait_for(lambda: self._begun or self._process.poll() is not None)
            return self._begun.pop()

    def code(self, pid: int, timeout: float | None = 0.0) -> int | None:
        """Return a child's exit code, negative for a signal; None where it has not ended."""
        with self._news:
            self._news.wait_for(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue  # what a product prints
            words: dict[str, Any] = json.loads(line)
            with self._news:
                if "begun" in words:
                    self._begun.append(words["begun"])
                else:
                    self._codes[words["ended"]] = words["code"]
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


if __name__ == "__main__":
    main()
