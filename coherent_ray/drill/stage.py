"""The stage: where a process of a drilled run is held at a named point until the drill has struck.

A strike from outside finds its moment only by luck, and a short run offers few. So the drill arms
points beforehand; the first process that reaches one leaves its mark and waits there, and whatever
strikes it then is a signal, `ray.kill` or a full disk like any other. Marks are small objects
beside the run's root, in the same kind of storage: every node that can train can be held.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray

from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage import LocalStorage, Storage, StorageOptions, open_storage

#: Seconds that a process waits for a drill that may be gone.
HOLD_LIMIT_S = 600.0
#: Seconds between two looks at whether it may go on: in a directory, in an object store.
_LOOK_S, _FAR_LOOK_S = 0.02, 0.2


@dataclass(frozen=True, slots=True)
class Hold:
    """A point at which the first process that comes by is held."""

    name: str
    """Of the hold; each holds once."""
    point: str
    """As `coherent_ray.train.hooks` names it, without ``@``."""
    update: int
    """Not before this update; of a generation, not before the one that holds it."""
    rank: int | None = None
    """Only this rank; None: whoever comes first."""
    attempt: int = 1
    """Not before this attempt."""


@dataclass(frozen=True, slots=True)
class Held:
    """A process that waits."""

    name: str
    point: str
    update: int
    """Updates that it has done; of the coordinator, those that the generation holds."""
    pid: int
    node: str
    """Ray's hex id of its node."""
    rank: int | None
    """None: it is the coordinator."""
    attempt: int
    """0: it does not know."""


def stage_of(root: str, options: StorageOptions | None = None) -> Storage:
    """Return the storage beside a run's root where its stage is.

    Args:
        root: The run's, absolute.
        options: How to talk to an object store.
    """
    return open_storage(f"{root.rstrip('/')}.stage", options)


class Stage:
    """The drill's side."""

    def __init__(self, storage: Storage, holds: Sequence[Hold]) -> None:
        """Arm every hold. Before the run begins: a process looks once, when it starts."""
        self._storage = storage
        self._left = [hold.name for hold in holds]
        self._released: set[str] = set()
        text = json.dumps([asdict(hold) for hold in holds])
        storage.create("holds.json", text.encode())

    @property
    def left(self) -> tuple[str, ...]:
        """Holds that nobody has reached yet."""
        return tuple(self._left)

    def reached(self) -> list[Held]:
        """Return who is held now and was not told of before."""
        found = [held for name in self._left if (held := self._held(name)) is not None]
        for held in found:
            self._left.remove(held.name)
        return found

    def release(self, name: str) -> None:
        """Let who is held go on."""
        if name in self._released:
            return
        self._released.add(name)
        self._storage.create(f"released/{name}", b"go")

    def release_all(self) -> None:
        """Let everybody go on, and hold nobody any more."""
        for name in self._left:
            # Taken, so that nobody is held by it from now on.
            try:
                self._storage.create(f"held/{name}", b"")
            except AlreadyExists:
                self.release(name)

    def _held(self, name: str) -> Held | None:
        try:
            return Held(**json.loads(self._storage.read(f"held/{name}")))
        except NotFound:
            return None


class Actor:
    """A process's side: a hook, see `coherent_ray.train.hooks`. Called from several threads."""

    def __init__(self, storage: Storage, rank: int | None, attempt: int) -> None:
        """Look at what is armed.

        Args:
            storage: The stage.
            rank: This process's; None: it is the coordinator.
            attempt: This process's; 0: it does not know.
        """
        self._storage = storage
        self._rank = rank
        self._attempt = attempt
        self._update = 0
        self._lock = threading.Lock()
        holds = [Hold(**value) for value in json.loads(storage.read("holds.json"))]
        self._holds = [hold for hold in holds if self._concerns(hold)]
        self._look_s = _LOOK_S if isinstance(storage, LocalStorage) else _FAR_LOOK_S

    def __call__(self, point: str) -> None:
        """Wait here, if the point is armed and nobody was held by it before."""
        name, _, update = point.partition("@")
        with self._lock:
            if update:
                self._update = int(update)
            due = [h for h in self._holds if h.point == name and self._update >= h.update]
            self._holds = [hold for hold in self._holds if hold not in due]
        for hold in due:
            if self._take(hold):
                self._wait(hold)

    def _concerns(self, hold: Hold) -> bool:
        is_coordinators = hold.point.startswith("publish:")
        if self._rank is None or is_coordinators:
            return self._rank is None and is_coordinators
        return hold.rank in {None, self._rank} and self._attempt >= hold.attempt

    def _take(self, hold: Hold) -> bool:
        node = ray.get_runtime_context().get_node_id()
        facts: dict[str, Any] = asdict(
            Held(hold.name, hold.point, self._update, os.getpid(), node, self._rank, self._attempt)
        )
        try:
            self._storage.create(f"held/{hold.name}", json.dumps(facts).encode())
        except AlreadyExists:
            return False
        return True

    def _wait(self, hold: Hold) -> None:
        until = time.monotonic() + HOLD_LIMIT_S
        while time.monotonic() < until:
            try:
                self._storage.size(f"released/{hold.name}")
            except NotFound:
                time.sleep(self._look_s)
            except StorageError:
                time.sleep(_FAR_LOOK_S)  # a store that is away is no reason to go on
            else:
                return
