"""The coordinator as a process of its own, and the ranks' lines to it: pipes instead of Ray.

A rank's call waits for its answer, one call at a time. Words are the product's JSON.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from coherent_ray import canonical
from coherent_ray.commit import manifest as records
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.service import Service
from coherent_ray.drill.saves import RUN
from coherent_ray.storage import LocalStorage

_END = b""


class Line:
    """A rank's line to the coordinator; see `coherent_ray.train.saving.Coordination`."""

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe = pipe
        self._rank = rank
        self._attempt = 0

    def attempt(self) -> int:
        """Wait until the coordinator has opened the attempt, and return its number."""
        self._attempt = int(self._pipe.recv_bytes())
        return self._attempt

    def acknowledge(self, word: Acknowledgement) -> Fate:
        """Hand in that a shard is durable, and wait for the generation's fate."""
        self._pipe.send_bytes(canonical.dump(["acknowledge", records.dump(word).decode()]))
        return Fate.from_json(canonical.load(self._pipe.recv_bytes()))

    def withdraw(self, number: int, reason: str) -> None:
        """Say that this rank will never acknowledge a generation, and why."""
        word = [self._attempt, number, self._rank, reason]
        self._pipe.send_bytes(canonical.dump(["withdraw", *word]))

    def close(self) -> None:
        """Say that this rank has trained to the end."""
        self._pipe.send_bytes(_END)


def coordinate(root: Path, pipes: Sequence[Connection]) -> None:
    """Be the coordinator: open an attempt, and serve until every rank has trained to the end."""
    asyncio.run(_serve_all(root, pipes))


async def _serve_all(root: Path, pipes: Sequence[Connection]) -> None:
    service = Service(RUN, lambda: LocalStorage(root))
    attempt = await service.open_attempt(uuid.uuid4().hex)
    for pipe in pipes:
        pipe.send_bytes(str(attempt).encode())
    await asyncio.gather(*(_serve(service, pipe) for pipe in pipes))
    await service.close()


async def _serve(service: Service, pipe: Connection) -> None:
    while data := await asyncio.to_thread(pipe.recv_bytes):
        verb, *words = canonical.load(data)
        if verb == "withdraw":
            await service.withdraw(*words)
        else:
            fate = await service.acknowledge(words[0].encode())
            pipe.send_bytes(canonical.dump(fate.to_json()))
