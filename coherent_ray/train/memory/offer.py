"""The offer: what the controller lets all ranks of a new attempt go on from; each rank's proof.

The controller asks the keepers, chooses, and puts one offer into the request that all ranks get. A
rank proves it alone, by the commit log that it reads itself:

1. the log allows it (`choice.refusal`);
2. its receipts are a chain from the newest generation's last receipt, or from the run's identity
   where there is no generation, to the receipt that its header names;
3. the claim allows it, as it would a generation;
4. every block that is read has its digest.

A rank for which one of these does not hold says so in its ticket; then all ranks are asked again,
without the offer, and go on from the newest generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from coherent_ray.commit import manifest as records
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog, History
from coherent_ray.commit.manifest import GenerationHeader, Manifest
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import Digest, digest_of
from coherent_ray.errors import CoherentRayError, Damage
from coherent_ray.storage.base import Storage
from coherent_ray.train.memory import keepers
from coherent_ray.train.memory.choice import Choice, candidates, refusal
from coherent_ray.train.memory.held import HeldShards
from coherent_ray.train.memory.shelf import Entry
from coherent_ray.train.memory.words import Facts, Words, unpack
from coherent_ray.train.receipts import Receipt, decode, first_link_of

logger = logging.getLogger(__name__)

#: Seconds that a keeper may owe the words of what it holds.
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot in memory that a new attempt may go on from."""

    name: str
    facts: Facts
    """Of rank 0's part; what all parts have in common counts."""
    manifest: bytes
    """A `Manifest`'s canonical JSON, put together from all parts."""
    receipts: bytes
    """JSON Lines."""
    holders: tuple[tuple[Entry, ...], ...]
    """By rank, who holds its part."""

    @property
    def digests(self) -> list[str]:
        """What the snapshot's parts are known by, all ranks'."""
        return sorted({entry.digest for entries in self.holders for entry in entries})


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot in memory that a rank has proved and read."""

    name: str
    manifest: Manifest
    digest: Digest
    """Of the manifest."""
    pending: tuple[Receipt, ...]
    """The receipts since the newest generation."""
    durable: PublishBody | None
    """The newest generation; None: there is none yet."""
    state: dict[str, Any]
    """The verified tensors."""
    rows: dict[str, tuple[int, int]]
    notes: tuple[str, ...]


class Unproved(Exception):
    """An offer cannot be used; says why. Never leaves this room: the generation is taken."""


# --- the controller -------------------------------------------------------------------------------


def best(held: Mapping[str, Any], history: History, diverged: int = 0) -> Offer | None:
    """Return the newest snapshot that a new attempt may go on from; None: there is none.

    Args:
        held: Handles of the run's keepers, by name.
        history: The commit log, with the new attempt opened.
        diverged: The newest attempt whose ranks diverged; 0: none.
    """

    def words_of(entry: Entry) -> bytes:
        call = held[entry.keeper].words.remote(entry.at.name, entry.digest)
        data: bytes = ray.get(call, timeout=_ANSWER_S)
        return data

    return of_entries(keepers.entries(held), words_of, history, diverged)


def of_entries(
    entries: list[Entry],
    words_of: Callable[[Entry], bytes],
    history: History,
    diverged: int = 0,
) -> Offer | None:
    """Return the best offer that can be made of what is held; None: none can.

    Args:
        entries: What is held.
        words_of: Brings the words of one of them.
        history: The commit log, with the new attempt opened.
        diverged: The newest attempt whose ranks diverged; 0: none.
    """
    for choice in candidates(entries, history, diverged):
        for entry in choice.holders[0]:
            try:
                words = unpack(words_of(entry))
                return _offer(choice, words)
            except (RayError, CoherentRayError, ValueError) as error:
                logger.warning("%s is not used: %s", choice.name, error)
    return None


def _offer(choice: Choice, words: Words) -> Offer:
    if words.facts.header_digest != choice.facts.header_digest:
        raise ValueError("its words are of another snapshot")
    shards = tuple(entries[0].shard for entries in choice.holders)
    manifest = Manifest(words.read_header(), words.facts.fingerprint, shards)
    return Offer(choice.name, words.facts, records.dump(manifest), words.receipts, choice.holders)


# --- a rank ---------------------------------------------------------------------------------------

Read = Callable[[Manifest, HeldShards], tuple[dict[str, Any], dict[str, tuple[int, int]]]]
"""Reads a state, and says of which tensors it read only some rows."""


def offered(  # noqa: PLR0917 - what an admission has in its hands
    offer: Offer | None,
    damaged: Collection[str],
    storage: Storage,
    log: CommitLog,
    history: History,
    accept: Callable[[Manifest], list[str]],
    read: Read,
) -> tuple[Kept | None, tuple[str, ...]]:
    """Prove an offer and read it, where there is one.

    Args:
        offer: The controller's.
        damaged: Names of what some rank could not verify: none goes on from it.
        storage: The run's root.
        log: Its commit log.
        history: As this rank has read it.
        accept: Compares a manifest with the job; returns notes, or raises a refusal.
        read: Reads the state, in full or this rank's part of it.

    Returns:
        What to go on from, or None; and the names of what was passed over.

    Raises:
        AdmissionRefused: The job is another; the newest generation would be refused alike.
    """
    if offer is None:
        return None, ()
    if offer.name in damaged:
        return None, (offer.name,)
    try:
        manifest, pending, durable = _prove(offer, storage, log, history)
        told = accept(manifest)
        state, rows = _read(offer, manifest, read)
    except (Unproved, Damage, ValueError) as error:
        logger.warning("passed over %s: %s", offer.name, error)
        return None, (offer.name,)
    note = f"from memory: update {offer.facts.update} of attempt {offer.facts.attempt}; durable is "
    note += f"update {durable.update} ({durable.name})" if durable else "nothing yet"
    kept = Kept(
        name=offer.name,
        manifest=manifest,
        digest=digest_of(offer.manifest),
        pending=pending,
        durable=durable,
        state=state,
        rows=rows,
        notes=(note, *told),
    )
    return kept, ()


def _prove(
    offer: Offer, storage: Storage, log: CommitLog, history: History
) -> tuple[Manifest, tuple[Receipt, ...], PublishBody | None]:
    facts = offer.facts
    if (reason := refusal(facts, history)) is not None:
        raise Unproved(reason)
    manifest = records.load(Manifest, offer.manifest)
    header = manifest.header
    found = (header.run_id, header.attempt, header.update, header.number, header.ranks)
    if found != (facts.run_id, facts.attempt, facts.update, facts.number, facts.ranks):
        raise Unproved("its header is of another snapshot")
    if digest_of(records.dump(header)) != facts.header_digest:
        raise Unproved("its header does not have the digest that all ranks gave")
    if digest_of(offer.receipts) != facts.receipts_digest:
        raise Unproved("its receipts do not have the digest that its rank gave")
    durable = history.latest
    before = Generations(storage, log).manifest(durable).header if durable else None
    return manifest, _pending(decode(offer.receipts), header, before), durable


def _pending(
    receipts: list[Receipt], header: GenerationHeader, before: GenerationHeader | None
) -> tuple[Receipt, ...]:
    """Return the receipts that lead from a generation, or from the run's identity, to a header."""
    done = before.update if before else 0
    tip = before.receipt_tip if before else first_link_of(header)
    pending = tuple(receipt for receipt in receipts if receipt.update > done)
    if not pending or pending[0].update != done + 1 or pending[0].previous != tip:
        raise Unproved(f"its receipts do not go on from update {done}")
    last = pending[-1]
    if (last.update, last.digest) != (header.update, header.receipt_tip):
        raise Unproved("its receipts do not lead to its header")
    return pending


def _read(
    offer: Offer, manifest: Manifest, read: Read
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Read the state from the nearest who hold it; where that fails, from the others."""
    most = max(len(entries) for entries in offer.holders)
    for turn in range(most):
        held = HeldShards(offer.holders, _this_node(), turn=turn)
        try:
            return read(manifest, held)
        except Damage:
            if turn + 1 == most:
                raise
        finally:
            held.close()  # what is a view of it keeps its memory
    raise Unproved("nobody holds it")


def _this_node() -> str:
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
