"""Coherent Ray in one rank: its Saver, with thread and snapshot, and a line to the coordinator.

The coordinator is the product's `Service` in a process of its own: acknowledgements, manifest,
publish and pruning as in a run; pipes stand for Ray's calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from judged.coordination import Line

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.service import Service
from coherent_ray.config.sections import Checkpoint
from coherent_ray.drill.saves import RUN, boundary_at
from coherent_ray.state.capture import State as Captured
from coherent_ray.state.shards import load_state
from coherent_ray.storage import LocalStorage
from coherent_ray.train.saving import Saver
from plane.product import Product, State

#: Seconds that a coordinator may take to listen.
PATIENCE_S = 120.0


class Ours(Product):
    """See `Product`. Everything is on: fingerprints, digests, acknowledgements, manifest, log."""

    def __init__(self, place: Path, rank: int, ranks: int, state: State) -> None:
        """Meet the coordinator that serves this place."""
        super().__init__(place, rank, ranks, state)
        storage = LocalStorage(place / "run")
        log = CommitLog(storage)
        self._pipe = _met(place / "line", rank)
        self._line = Line(self._pipe, rank)
        self._attempt = self._line.attempt()
        log.read()
        self._saver = Saver(storage, rank, Checkpoint(), self._line, log=log)
        self._number = 0
        self._fingerprint_cpu_s = 0.0
        self._numbers: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """See `Product`."""
        since = time.monotonic()
        self._number += 1
        self._numbers[step] = self._number
        state = Captured(dict(self.state), {"step": step})
        busy = time.thread_time()
        number = self._number
        boundary = boundary_at(state, number, number, self._attempt, self.rank, self.ranks)
        self._fingerprint_cpu_s = time.thread_time() - busy
        self._saver.begin(state, boundary, since)

    def finish(self) -> None:
        """See `Product`."""
        saved = self._saver.settle()
        if saved is None or saved.fate.kind != "published":
            raise RuntimeError(f"not published: {saved and saved.fate}")

    def done(self) -> bool:
        """See `Product`."""
        return not self._saver.in_flight

    def load(self, step: int) -> None:
        """See `Product`."""
        storage = LocalStorage(self.place / "run")
        generations = Generations(storage)
        number = self._numbers[step]
        publish = next(p for p in generations.history().publishes if p.number == number)
        load_state(storage, generations.manifest(publish), self.state)

    def of(self, step: int) -> Path:
        """See `Product`."""
        return self.place / f"run/generations/g{self._numbers[step]}-a{self._attempt}"

    def drop(self, step: int) -> None:
        """Do nothing: retention keeps two generations, as in a run."""

    def told(self) -> dict[str, float]:
        """See `Product`: what the fingerprint of the whole replica adds to the stall."""
        return {"fingerprint_cpu_s": self._fingerprint_cpu_s}

    def close(self) -> None:
        """See `Product`."""
        self._saver.close()
        self._line.close()


def _met(socket: Path, rank: int) -> Connection:
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            pipe = Client(str(socket))
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
        else:
            pipe.send(rank)
            return pipe


async def _serve_all(root: Path, pipes: list[Connection]) -> None:
    service = Service(RUN, lambda: LocalStorage(root), retention=Policy(keep=2))
    attempt = await service.open_attempt(uuid.uuid4().hex)
    for pipe in pipes:
        pipe.send_bytes(str(attempt).encode())
    await asyncio.gather(*(_serve(service, pipe) for pipe in pipes))
    await service.close()


async def _serve(service: Service, pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while data := await asyncio.to_thread(pipe.recv_bytes):
            verb, *words = canonical.load(data)
            if verb == "withdraw":
                await service.withdraw(*words)
            else:
                fate = await service.acknowledge(words[0].encode())
                pipe.send_bytes(canonical.dump(fate.to_json()))


def main() -> None:
    """Be the coordinator of a place for so many ranks: ``PLACE RANKS``."""
    place, ranks = Path(sys.argv[1]), int(sys.argv[2])
    with Listener(str(place / "line")) as listener:
        met = [listener.accept() for _ in range(ranks)]
    pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in met)]
    asyncio.run(_serve_all(place / "run", pipes))


if __name__ == "__main__":
    main()
