"""The coordinator actor: a list of methods round `coherent_ray.commit.service`, and two mailboxes.

One detached, named actor a run; `coherent_ray.train.coordinators` finds it. It holds nothing that
matters: the commit log and the ranks' repeated calls rebuild it after any death. So its methods
are idempotent (Ray runs a call at least once), and its ``__init__`` never raises (in Ray that is a
death for good). Progress, places and wishes are mail between the driver and the ranks, and die with
it; so does the owner's name, which the owner repeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from typing import Any

import ray
from ray.exceptions import RayError

from coherent_ray.commit.retention import Policy
from coherent_ray.commit.scrubbing import BYTES_PER_S as SCRUB_BYTES_PER_S
from coherent_ray.commit.scrubbing import Schedule
from coherent_ray.commit.service import STORAGE_TIMEOUT_S, Service
from coherent_ray.errors import ConfigError
from coherent_ray.storage import StorageOptions, open_storage
from coherent_ray.storage.base import Storage
from coherent_ray.train import departures, drains, hooks
from coherent_ray.train.departures import Departures
from coherent_ray.train.whereabouts import REPEAT_S, Whereabouts
from coherent_ray.train.wishes import TOKENS, Word

logger = logging.getLogger(__name__)


class CoordinatorActor:
    """The actor's class. All answers are JSON values, all arguments too, or JSON bytes."""

    def __init__(
        self,
        run_id: str,
        root: str,
        *,
        ack_timeout_s: float,
        read_back: bool,
        storage_timeout_s: float = STORAGE_TIMEOUT_S,
        keep: int | None = None,
        keep_every: int | None = None,
        scrub_every_s: float | None = None,
        scrub_bytes_per_s: int = SCRUB_BYTES_PER_S,
        storage: dict[str, Any] | None = None,
    ) -> None:
        """Remember the arguments; the log is read by the first call.

        Args:
            run_id: The run.
            root: The run's root, as this process can reach it.
            ack_timeout_s: Seconds from a generation's first acknowledgement to its last.
            read_back: Have every shard read again before its generation is published.
            storage_timeout_s: Seconds that the storage may owe the answer to one call.
            keep: Whole generations that pruning keeps; None: all.
            keep_every: Updates of which it keeps one generation for ever; None: of none.
            scrub_every_s: Seconds within which each generation is read again; None: never.
            scrub_bytes_per_s: Bytes a second that this reads at most.
            storage: How to talk to an object store: `StorageOptions` as a dictionary; None: as this
                process's environment says.
        """
        self._run_id = run_id
        self._root = root
        self._options: dict[str, Any] = {
            "ack_timeout_s": ack_timeout_s,
            "read_back": read_back,
            "storage_timeout_s": storage_timeout_s,
            "keep": keep,
            "keep_every": keep_every,
            "scrub_every_s": scrub_every_s,
            "scrub_bytes_per_s": scrub_bytes_per_s,
            "storage": dict(storage or {}),
        }
        self._service = Service(
            run_id,
            self._open_root,
            retention=Policy(keep, keep_every),
            scrub=Schedule(scrub_every_s, scrub_bytes_per_s) if scrub_every_s else None,
            hook=hooks.installed(),
            storage_timeout_s=storage_timeout_s,
            ack_timeout_s=ack_timeout_s,
            read_back=read_back,
        )
        self._incarnation = secrets.token_hex(8)
        self._wish: Word = "none"
        self._token = 0
        self._departures = Departures()
        self._heard = 0.0
        self._drain_watch: asyncio.Task[None] | None = None
        self._progress: dict[str, Any] = {}
        self._whereabouts = Whereabouts()
        self._failures: dict[str, Any] = {"count": 0, "last": "", "taken": 0}
        self._owner: dict[str, Any] | None = None
        self._renewed = 0.0
        self._admission: dict[str, Any] = {"admitted": 0, "notes": [], "ranks": 0}

    async def ping(self) -> dict[str, Any]:
        """Return who this is, within seconds whatever the storage does.

        Returns:
            ``pid``, ``run_id``, ``root``, ``options``, ``attempt`` (0: none is known),
            ``incarnation`` (another one after each start) and ``degraded`` (why the log cannot be
            read, or None).
        """
        await self._service.settle_in()
        return {
            "pid": os.getpid(),
            "root": self._root,
            "options": dict(self._options),
            **self._identity(),
        }

    async def open_attempt(self, token: str, known: int = 0) -> int:
        """Open the run's next attempt and fence all older ones; clears every wish.

        Args:
            token: The caller's own unique word. The same token gives the same attempt.
            known: The newest attempt that the caller knows of; 0: it knows of none.

        Raises:
            LogDamaged: The log cannot be trusted, or has lost that attempt.
            WrongRun: The root holds another run.
            StorageError: The storage failed.
        """
        before = self._service.attempt
        attempt = await self._service.open_attempt(token, known)
        if attempt > before:
            self._wish = "none"
            self._service.saving = False
            leave = self._departures.summary()
            if leave is not None and leave["attempt"] == before:
                latest = self._service.generation
                name = latest["name"] if latest else None
                logger.warning("%s", departures.end_in_words(leave, name))
        return attempt

    async def acknowledge(self, ack: bytes) -> dict[str, Any]:
        """Take a rank's word that its shard is durable, and return the generation's fate.

        The answer comes when the fate is known, which may take as long as the slowest rank; or
        before, where the rank must read another one's shard back and call again.

        Args:
            ack: An `Acknowledgement`'s canonical JSON.

        Returns:
            A `Fate`, or a `Request`, as `to_json` gives it.
        """
        reply = await self._service.acknowledge(ack)
        return reply.to_json()

    async def withdraw(self, attempt: int, number: int, rank: int, reason: str) -> None:
        """Take a rank's word that it will never acknowledge a generation; none waits for it then.

        Args:
            attempt: The rank's attempt.
            number: The generation's number.
            rank: The rank.
            reason: One sentence; it becomes the generation's fate.
        """
        await self._service.withdraw(attempt, number, rank, reason)

    async def admitted(self, attempt: int, notes: list[str], ranks: int = 0) -> None:
        """Take down that all ranks of an attempt were admitted; `status` shows it.

        Args:
            attempt: The attempt.
            notes: What the user should know.
            ranks: How many they are.
        """
        self._admission = {"admitted": attempt, "notes": notes, "ranks": ranks}

    async def report(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Take rank 0's latest progress, and return what is wished of the training.

        Args:
            progress: JSON values; shown to whoever asks for `status`.

        Returns:
            ``wish``: a `Word`, and its ``token``. A wish to save stands until the ranks have voted
            it, which ``progress["settled"]`` says.
        """
        self._progress = progress
        self._service.saving = bool(progress.get("saving"))
        if self._wish == "save" and self._token in progress.get("settled", ()):
            self._wish = "none"
        return self._wished()

    async def stand(self, attempt: int, rank: int, ranks: int, place: list[Any]) -> dict[str, Any]:
        """Take down where a rank is; see `coherent_ray.train.whereabouts`.

        Args:
            attempt: The rank's attempt.
            rank: The rank.
            ranks: How many there are.
            place: The update that it works on, the phase of it, and the id of the rank's node.

        Returns:
            What `report` returns.
        """
        update, phase, node = place
        self._heard = time.monotonic()
        self._whereabouts.note(attempt, rank, ranks, (update, phase), self._heard)
        self._departures.lives(attempt, rank, node)
        if self._drain_watch is None or self._drain_watch.done():
            self._drain_watch = asyncio.create_task(self._watch_drains())
        return self._wished() if attempt == self._service.attempt else {"wish": "none", "token": 0}

    async def leave(self, attempt: int, rank: int, why: str) -> None:
        """Take down that a rank was told to end; all ranks are told of it.

        Args:
            attempt: The rank's attempt.
            rank: The rank.
            why: In words.
        """
        if attempt == self._service.attempt:  # else its group is over already
            self._told(self._departures.told(attempt, [rank], why, None), attempt)

    async def resize(self, ranks: int) -> bool:
        """Take down that Ray will start the group again with another number of ranks; all leave.

        Args:
            ranks: How many there will be.

        Returns:
            Whether ranks were told. None were who have not begun to train.
        """
        attempt = self._service.attempt
        self._told(self._departures.resized(attempt, ranks), attempt)
        return self._departures.leaves(attempt)

    async def left(self, attempt: int, generation: str | None) -> None:
        """Take down that the group leaves.

        Args:
            attempt: The group's attempt.
            generation: What it has published for that; None: it could not be saved.
        """
        self._departures.left(attempt, generation)

    async def failed(self, count: int, words: str, taken: int = 0) -> None:
        """Take down that the worker group has ended; `status` shows it.

        Args:
            count: How often it has failed under this Train controller.
            words: Which rank, and how.
            taken: How often it has left, or lost a node that was reclaimed.
        """
        self._failures = {"count": count, "last": words, "taken": taken}

    async def hold(self, owner: dict[str, Any], instead_of: str | None = None) -> dict[str, Any]:
        """Let a driver be the run's owner, unless it has another; see `train.ownership`.

        Args:
            owner: An `Owner`, as a dictionary.
            instead_of: Ray job of an owner that the caller knows to be dead.

        Returns:
            ``owner``: who it is now; ``silent_s``: seconds since that one last called this.
        """
        now = time.monotonic()
        if self._owner is None or self._owner["job"] == instead_of:
            self._owner = dict(owner)
        if self._owner["job"] == owner["job"]:
            self._renewed = now
        return {"owner": self._owner, "silent_s": now - self._renewed}

    async def request(self, wish: str, token: int = 0) -> None:
        """Wish that the run saves now, or that it saves and stops.

        Args:
            wish: ``save`` or ``stop``. A wish to stop stays until the next attempt opens.
            token: The caller's own number, from 1 and below 2**53, for a wish to save: asked again
                with the same one it is the same wish. 0: one is made up.

        Raises:
            ConfigError: The wish is another.
        """
        match wish:
            case "stop":
                self._wish = "stop"
            case "save":
                if self._wish in {"none", "save"}:
                    self._wish = "save"
                    self._token = token or 1 + secrets.randbelow(TOKENS - 1)
            case _:
                raise ConfigError(f"there is no wish {wish!r}", remedy="ask for save or stop")

    async def status(self) -> dict[str, Any]:
        """Return what a progress display shows, without waiting for the storage.

        Returns:
            ``run_id``, ``attempt``, ``incarnation`` (another one after each start), ``degraded``,
            ``progress`` (as last reported), ``wish``,
            ``generation`` (the newest published one: name, number, attempt, update, epoch, seq,
            timings in seconds), ``in_flight`` (name to what it waits for), ``last_error``,
            ``scrub`` (``damaged``: what the last scrub found; None: there is no schedule),
            ``admitted``, ``notes`` and ``ranks`` (as `admitted` was last told),
            ``whereabouts`` (a `Whereabouts.summary`), ``leave`` (a `Departures.summary`),
            ``failures`` (as `failed` was last told) and ``owner`` (an `Owner`; None: nobody has
            said).
        """
        return {
            "progress": self._progress,
            "wish": self._wish,
            "generation": self._service.generation,
            "in_flight": self._service.in_flight(),
            "last_error": self._service.last_error,
            "scrub": rounds.status() if (rounds := self._service.rounds) else None,
            "whereabouts": self._whereabouts.summary(time.monotonic()),
            "leave": self._departures.summary(),
            "failures": self._failures,
            "owner": self._owner,
            **self._admission,
            **self._identity(),
        }

    async def stop(self) -> None:
        """End the actor for good, after the piece of I/O that is on its way.

        Calls that still wait are answered first: Ray would wait for them.
        """
        await self._service.close()
        ray.actor.exit_actor()

    def _wished(self) -> dict[str, Any]:
        return {"wish": self._wish, "token": self._token}

    def _told(self, news: bool, attempt: int) -> None:
        """Wish that a group leaves of which somebody must."""
        leave = self._departures.summary()
        if leave is None or leave["attempt"] != attempt or attempt != self._service.attempt:
            return
        if self._wish != "stop":
            self._wish = "leave"
        if news:
            logger.warning("attempt %d: %s", attempt, departures.told_in_words(leave))

    async def _watch_drains(self) -> None:
        """Look for nodes that are drained, as long as ranks are heard of."""
        while time.monotonic() - self._heard < 3 * REPEAT_S:
            try:
                nodes = await asyncio.to_thread(drains.draining)
            except (RayError, RuntimeError):
                nodes = {}  # the head may be away for a moment; the next look asks again
            if nodes:
                news = self._departures.drained(nodes, drains.DRAINED)
                self._told(news, self._service.attempt)
            await asyncio.sleep(drains.LOOK_EVERY_S)

    def _open_root(self) -> Storage:
        return open_storage(self._root, StorageOptions(**self._options["storage"]))

    def _identity(self) -> dict[str, Any]:
        degraded = self._service.degraded
        return {
            "run_id": self._run_id,
            "attempt": self._service.attempt,
            "incarnation": self._incarnation,
            "degraded": str(degraded) if degraded else None,
        }
