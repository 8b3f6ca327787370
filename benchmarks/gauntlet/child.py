"""The process in which a product works: it does a list of acts, and writes down how each went.

``python -m gauntlet.child KEY ACTS OUT``: acts are JSON, and OUT gets a line of JSON for each
thing that happens, in an order that survives the process's death. What an act raises is its
result; the next act is done all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gauntlet import states
from gauntlet.column import Session

#: Seconds between two looks for the word to go on.
LOOK_S = 0.005


class Diary:
    """What has happened, line by line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.note(pid=os.getpid())

    def note(self, **words: Any) -> None:
        """Write a line."""
        with Path(self._path).open("a") as file:
            file.write(json.dumps(words) + "\n")


def perform(acts: list[dict[str, Any]], diary: Diary, session_in: Callable[[str], Session]) -> None:
    """Do acts, each in its root's session.

    Args:
        acts: Each with its ``number``, what to ``do``, and ``where``.
        diary: Gets how each went.
        session_in: Opens a session in a root.
    """
    sessions: dict[str, Session] = {}
    for act in acts:
        number, where = act["number"], act.get("where", "")
        if act["do"] == "wait":
            diary.note(waits=number)
            while not Path(act["file"]).exists():
                time.sleep(LOOK_S)
            continue
        diary.note(begins=number)
        try:
            if where not in sessions:
                sessions[where] = session_in(where)
            result = _do(act, sessions[where])
        except BaseException as error:  # how it went is the experiment's to judge
            diary.note(ends=number, error=f"{type(error).__name__}: {_words(error)}")
        else:
            diary.note(ends=number, **result)
    for session in sessions.values():
        with contextlib.suppress(Exception):
            session.close()


def _do(act: dict[str, Any], session: Session) -> dict[str, Any]:
    items = act.get("items", states.SMALL)
    if act["do"] == "members":
        return {"members": session.members(act["step"])}
    if act["do"] == "resume":
        found = session.resume(items)
        if found is None:
            return {"found": None}
        return {"found": found.name, "digest": states.digest(found.state), "says": found.says}
    state = states.make(act["step"], act.get("variant", "a"), items)
    if act["do"] == "save":
        session.save(act["step"], state)
        return {}
    later = states.make(act["step"] + 1, act.get("variant", "a"), items)

    def change() -> None:
        for name, tensor in state.items():
            tensor.copy_(later[name])

    session.save_behind(act["step"], state, change)
    return {}


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def forked(key: str, acts_path: str, out: str, log: str) -> None:
    """Do what `work` does, in a fork of a process that has the product."""
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(sink, stream)
    work(key, acts_path, out)
    os._exit(0)


def work(key: str, acts_path: str, out: str) -> int:
    """Do the acts of a file."""
    acts = json.loads(Path(acts_path).read_text())
    module = importlib.import_module(f"gauntlet.{key}")
    if (own := getattr(module, "run", None)) is not None:
        own(acts, out)
        return 0
    diary = Diary(out)
    if acts[0]["do"] == "read_on":
        read_on(acts[0], diary, module.read_on)
    else:
        perform(acts, diary, module.Session)
    return 0


def read_on(act: dict[str, Any], diary: Diary, read: Callable[[str, int, int], list[int]]) -> None:
    """Do the act of reading an epoch."""
    try:
        value = read(act["where"], act["examples"], act["batch"])
    except Exception as error:
        diary.note(ends=act["number"], error=f"{type(error).__name__}: {_words(error)}")
    else:
        diary.note(ends=act["number"], value=value)


if __name__ == "__main__":
    work(*sys.argv[1:])
    # Some products leave threads behind that would keep the process.
    sys.stdout.flush()
    os._exit(0)
