"""Upkeep: pruning behind the coordinator's publishes, in its event loop and in nobody's way.

A prune has a thread and a view of the log of its own, so no save ever waits for one, and whatever
goes wrong in it is said and forgotten: the next publish tries again. One runs at a time; publishes
that come meanwhile make one more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from coherent_ray.commit.events import Key
from coherent_ray.commit.history import GenerationKey
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import CoherentRayError, Interrupted
from coherent_ray.storage.base import Storage

#: Seconds that `close` lets a step of a prune take that is on its way.
CLOSE_WAIT_S = 3.0


class Upkeep:
    """One run's. All methods belong to one event loop.

    Attributes:
        last: What the newest prune did; None: none has ended well yet.
    """

    def __init__(self, policy: Policy, tell: Callable[[str], None]) -> None:
        """Remember what to keep.

        Args:
            policy: What to keep.
            tell: Called with what went wrong, in words.
        """
        self._policy = policy
        self._tell = tell
        self.last: Pruned | None = None
        self._pruner: Pruner | None = None
        self._doubted: set[GenerationKey] = set()
        self._stop = threading.Event()
        self._due: int | None = None
        self._tidied = 0
        self._task: asyncio.Task[None] | None = None

    def published(self, key: Key, storage: Storage, *, read_back: bool) -> None:
        """Take in that a generation was published, and prune behind it.

        Args:
            key: The generation.
            storage: The run's root.
            read_back: Whether every byte of it was just read and found right.
        """
        if self._pruner is None:
            self._pruner = Pruner(storage, self._policy, stopped=self._stop.is_set)
            for doubted in tuple(self._doubted):
                self._pruner.doubt(doubted)
        if read_back:
            self._pruner.trust((key.number, key.attempt))
        # Where all generations are kept, all there is to remove is what older attempts left over.
        if self._policy.keep is None and self._tidied == key.attempt:
            return
        self._due = key.attempt
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(self._pruner))

    def doubt(self, key: GenerationKey) -> None:
        """Take somebody's word that a generation was found damaged; from any thread.

        Until it was read again and is whole, it replaces no other.
        """
        self._doubted.add(key)
        if self._pruner is not None:
            self._pruner.doubt(key)

    async def settled(self) -> None:
        """Wait until no prune is running or due."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """End the prune that is running after its next step."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_WAIT_S)

    async def _run(self, pruner: Pruner) -> None:
        while self._due is not None and not self._stop.is_set():
            attempt, self._due = self._due, None
            try:
                self.last = await asyncio.to_thread(pruner.prune, attempt)
            except Interrupted:
                return
            except CoherentRayError as error:
                self._tell(f"pruning failed: {error}")
            except Exception as error:
                self._tell(f"pruning failed: {type(error).__name__}: {error}")
            else:
                self._tidied = attempt
                if self.last.problems:
                    self._tell(f"pruning could not delete {'; '.join(self.last.problems)}")
