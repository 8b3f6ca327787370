"""Exact replay: a run that is struck again and again must be the run that was left alone.

Runs one configuration twice or more under different roots, strikes some of them, and compares
receipts from the first update to the last, and the final state bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.drill.strikes import Strike, Striker, Struck
from coherent_ray.errors import Interrupted
from coherent_ray.state import state_digest
from coherent_ray.storage import StorageOptions, open_storage
from coherent_ray.train import receipts
from coherent_ray.train.events import Event
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import Receipt
from coherent_ray.train.supervisor import supervise


@dataclass(frozen=True, slots=True)
class Replayed:
    """One run, and what is left of it to compare."""

    root: str
    workers: int
    struck: tuple[Struck, ...]
    attempts: int
    updates: int
    tip: str
    """Digest of the last receipt: equal tips are equal histories."""
    state: str
    """Digest of the final state's bytes, whatever the rank count."""
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        return asdict(self)


def replay(
    config: Config, root: str, workers: int, strikes: Sequence[Strike] = (), seed: int = 0
) -> Replayed:
    """Run a configuration to its end under strikes.

    This process must be connected to the cluster that ``cluster.address`` names, if it strikes.

    Args:
        config: The run.
        root: Where this one lies.
        workers: Its rank count.
        strikes: What happens to it.
        seed: Decides which worker is struck.

    Raises:
        Interrupted: Somebody asked to stop.
        CoherentRayError: The run did not reach its end.
    """
    config = with_root(config, root, workers)
    striker = Striker(run_id_of(config), strikes, seed)
    notes: list[str] = []

    def listen(event: Event) -> None:
        if event.kind in {"note", "restarting"}:
            notes.append(event.text)
        striker(event)

    begun = time.monotonic()
    if supervise(config, listen).stopped:
        raise Interrupted("stopped before the run came to its end")
    seconds = time.monotonic() - begun
    if striker.left:
        notes.append(f"{striker.left} strikes found no moment")
    history = history_of(root, config.storage.options)
    storage = open_storage(root, config.storage.options)
    generations = Generations(storage)
    latest = generations.find("latest")
    return Replayed(
        root=root,
        workers=workers,
        struck=tuple(striker.done),
        attempts=generations.history().attempt,
        updates=len(history),
        tip=history[-1].digest,
        state=state_digest(storage, generations.manifest(latest)),
        seconds=seconds,
        notes=tuple(notes),
    )


def with_root(config: Config, root: str, workers: int) -> Config:
    """Return a configuration with another root and rank count."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"root": root}),
            "cluster": config.cluster.model_copy(update={"workers": workers}),
        }
    )


def history_of(root: str, options: StorageOptions | None = None) -> list[Receipt]:
    """Return all receipts that a run has published.

    Args:
        root: Path or address of the run.
        options: How to talk to an object store; None: as the environment says.

    Raises:
        ReceiptsDamaged: They are not a chain from the first update to the last.
    """
    storage = open_storage(root, options)
    return list(receipts.history(storage, Generations(storage).history()))
