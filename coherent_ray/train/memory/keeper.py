"""The keeper actor: one a node and run, detached, so that it outlives the workers and the driver.

A list of methods round a `Shelf`, one duty of its own, and one way to end: after a snapshot was
written it sends it to the keeper of another node, where there is one; and it ends by itself when
its run's coordinator has been gone for `ORPHANED_S`, so that nothing is left behind by whoever
forgets to stop it. Its memory goes with its process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from coherent_ray.commit.manifest import ShardRecord
from coherent_ray.errors import CoherentRayError, NotFound
from coherent_ray.train.memory.shelf import Entry, Reserved, Shelf
from coherent_ray.train.memory.words import Facts

logger = logging.getLogger(__name__)

#: Seconds without a coordinator after which a keeper ends.
ORPHANED_S = 120.0
#: Bytes that are sent to another keeper at once.
PART_BYTES = 32 * 2**20
#: Seconds that another keeper may owe the answer to one call; then nothing more is sent to it.
SENT_S = 30.0
#: Seconds between two looks for a keeper on another node, where there was none.
_LOOK_EVERY_S = 10.0
_WATCH_S = 5.0

Sent = Literal["alone", "sent", "late", "failed"]
"""Whether another node has a copy: there is none; it has; it was written anew before; it failed."""


class KeeperActor:
    """The actor's class. Its methods are idempotent: Ray runs a call at least once."""

    def __init__(self, run_id: str, name: str, node: str, coordinator: str, namespace: str) -> None:
        """Make it; never raises.

        Args:
            run_id: The run.
            name: This keeper's.
            node: Its node's id.
            coordinator: Name of the actor without which it ends.
            namespace: Of all these actors.
        """
        self._name = name
        self._prefix = name.removesuffix(node)
        self._coordinator, self._namespace = coordinator, namespace
        self._shelf = Shelf(run_id, keeper=name, node=node)
        self._partner: Any = None
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._sending: dict[int, threading.Lock] = defaultdict(threading.Lock)
        threading.Thread(target=self._watch, name="keeper-watch", daemon=True).start()

    def ping(self) -> dict[str, Any]:
        """Return ``pid`` and ``nbytes``: this process, and the memory that it keeps."""
        return {"pid": os.getpid(), "nbytes": self._shelf.nbytes()}

    def reserve(
        self, attempt: int, rank: int, data_bytes: int, count: int
    ) -> tuple[list[Reserved], bool]:
        """Make slots for a rank of this node; see `Shelf.reserve`.

        Returns:
            The slots; and whether there is no other node's keeper to send copies to.
        """
        made = self._shelf.reserve(attempt, rank, data_bytes, count)
        with self._lock:
            return made, self._find_partner() is None

    def written(self, name: str, digest: str, replicas: int) -> Sent:
        """Take in that a slot was written; returns once it is hashed, and sent where it is to be.

        Args:
            name: The slot's.
            digest: Of its words.
            replicas: Copies to make on other nodes.

        Raises:
            NotFound: There is no such slot: this keeper was started again, and holds nothing.
        """
        entry = self._shelf.written(name, digest)
        with self._lock:
            partner = self._find_partner() if replicas else None
        if partner is None:
            return "alone"
        if entry is None:
            return "late"
        with self._sending[entry.facts.rank]:
            try:
                return "sent" if self._send(entry, partner) else "late"
            except NotFound:
                return "late"
            except (RayError, CoherentRayError, OSError) as error:
                logger.warning("a copy for another node failed: %s", error)
                with self._lock:
                    self._partner = None
                return "failed"

    def entries(self) -> list[Entry]:
        """Return all that is held here and whole."""
        return self._shelf.entries()

    def words(self, name: str, digest: str) -> bytes:
        """Return the words of a snapshot; see `Shelf.words`."""
        return self._shelf.words(name, digest)

    def read(self, name: str, digest: str, start: int, length: int) -> bytes:
        """Return a part of a snapshot's data; see `Shelf.read`."""
        return self._shelf.read(name, digest, start, length)

    def receive(self, facts: Facts, start: int, data: bytes) -> None:
        """Take a part of what another keeper sends; see `Shelf.receive`."""
        self._shelf.receive(facts, start, data)

    def received(self, words: bytes, shard: ShardRecord) -> bool:
        """Take the end of what another keeper sends; see `Shelf.received`."""
        return self._shelf.received(words, shard)

    def settle(self, attempt: int, kept: list[str]) -> None:
        """Take in what an attempt goes on from; see `Shelf.settle`."""
        self._shelf.settle(attempt, kept)

    def clear(self) -> None:
        """Let go of everything."""
        self._shelf.clear()

    def _find_partner(self) -> Any | None:
        """Return the keeper of the next node, in order of the names; None: there is no other."""
        if self._partner is None and time.monotonic() - self._looked > _LOOK_EVERY_S:
            self._looked = time.monotonic()
            others = [
                found["name"]
                for found in ray.util.list_named_actors(all_namespaces=True)
                if found["namespace"] == self._namespace
                and found["name"].startswith(self._prefix)
                and found["name"] != self._name
            ]
            if others:
                name = min(others, key=lambda other: (other < self._name, other))
                self._partner = ray.get_actor(name, namespace=self._namespace)
        return self._partner

    def _send(self, entry: Entry, partner: Any) -> bool:
        """Send a snapshot to another keeper; False: it was written anew meanwhile."""
        name, digest, facts = entry.at.name, entry.digest, entry.facts
        for start in range(0, facts.size, PART_BYTES):
            part = self._shelf.read(name, digest, start, PART_BYTES)
            ray.get(partner.receive.remote(facts, start, part), timeout=SENT_S)
        words = self._shelf.words(name, digest)
        return bool(ray.get(partner.received.remote(words, entry.shard), timeout=SENT_S))

    def _watch(self) -> None:
        """End with the run, whoever should have said so."""
        missed = time.monotonic()
        while time.monotonic() - missed < ORPHANED_S:
            time.sleep(_WATCH_S)
            try:
                ray.get_actor(self._coordinator, namespace=self._namespace)
            except ValueError:
                continue
            except (RayError, RuntimeError):
                pass  # the head may be away for a moment, and nobody knows
            missed = time.monotonic()
        logger.warning("run %s has no coordinator any more; its memory is let go", self._prefix)
        self._shelf.clear()
        # Final: a process that only ended would be started again.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
