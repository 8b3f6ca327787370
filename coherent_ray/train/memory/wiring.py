"""Putting the tier together for Ray: for a session its rank's side, for the controller the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from coherent_ray.commit.log import CommitLog
from coherent_ray.config import Config
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage import open_storage
from coherent_ray.train.admission import Ticket
from coherent_ray.train.hooks import Hook
from coherent_ray.train.memory import keepers
from coherent_ray.train.memory.keepers import NodeKeeper
from coherent_ray.train.memory.offer import Offer, best
from coherent_ray.train.memory.tier import Keeper, MemoryTier, Owner

logger = logging.getLogger(__name__)

#: The newest attempt of a run under a root whose ranks diverged, as this process has seen it.
_diverged: dict[tuple[str, str], int] = {}


def memory_of(
    admitted: Any, note: Callable[[Iterable[str]], None], hook: Hook | None
) -> MemoryTier:
    """Return a rank's side of the tier, for its session; it is off where the configuration says so.

    Args:
        admitted: An `Admitted`.
        note: Takes what the user should know.
        hook: For drills.
    """
    options = admitted.config.checkpoint
    owner = Owner(admitted.run_id, admitted.attempt, admitted.token, admitted.rank, admitted.ranks)
    keeper = keeper_of(admitted.run_id) if options.memory is not None else None
    tier = MemoryTier(owner, options, keeper, note, hook)
    if admitted.header is not None and keeper is not None:
        # What a resume goes on from has every tensor that the next update has.
        tier.prepare(admitted.header.layout)
    return tier


def keeper_of(run_id: str) -> Keeper | None:
    """Return the keeper of this process's node; None where there is no Ray, so nobody is killed."""
    return NodeKeeper(run_id) if ray.is_initialized() else None


@dataclass
class Gate:
    """The controller's side, for one admission."""

    config: Config
    run_id: str
    attempt: int
    keepers: dict[str, Any] = field(default_factory=dict)
    offer: Offer | None = None

    def look(self) -> Offer | None:
        """Ask the keepers, and return what the attempt may go on from; None: no memory."""
        if self.config.checkpoint.memory is None:
            return None
        try:
            self.keepers = keepers.find(self.run_id)
            if self.keepers:
                storage = open_storage(self.config.run.root, self.config.storage.options)
                history = CommitLog(storage).read()
                diverged = diverged_of(self.config, self.run_id)
                self.offer = best(self.keepers, history, diverged)
        except (RayError, CoherentRayError) as error:
            logger.warning("what is held in memory is not used: %s", error)
        return self.offer

    def settle(self, tickets: Iterable[Ticket]) -> list[str]:
        """Tell the keepers what all ranks go on from; returns what the user should know."""
        if self.config.checkpoint.memory is None:
            return []
        tickets = list(tickets)
        offer = self.offer
        used = offer is not None and tickets[0].generation == offer.name
        kept = offer.digests if offer is not None and used else []
        keepers.settle(self.keepers.values(), self.attempt, kept)
        if self.config.checkpoint.memory.replicas and len({t.node_id for t in tickets}) == 1:
            return [
                "checkpoint.memory: all workers are on one node, so nothing is copied to another"
            ]
        return []


def forget_diverged(config: Config, run_id: str, attempt: int) -> None:
    """Let nothing be used that an attempt whose ranks diverged, or one before it, has kept."""
    _diverged[run_id, config.run.root] = attempt
    if config.checkpoint.memory is not None:
        with contextlib.suppress(RayError, RuntimeError):
            keepers.clear(run_id)


def diverged_of(config: Config, run_id: str) -> int:
    """Return the newest attempt whose ranks diverged, as this process has seen it; 0: none."""
    return _diverged.get((run_id, config.run.root), 0)
