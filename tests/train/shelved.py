"""Snapshots made by hand, for tests of what keepers hold and what is chosen of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coherent_ray.commit import manifest as records
from coherent_ray.commit.history import History
from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    PlanIdentity,
    StateLayout,
    TensorSpec,
    manifest_path,
)
from coherent_ray.commit.records import AttemptBody, Body, PublishBody, RetireBody
from coherent_ray.digests import digest_of
from coherent_ray.state.header import header_of
from coherent_ray.state.layout import FlatState
from coherent_ray.train.memory.shelf import Entry, Shelf
from coherent_ray.train.memory.slots import open_slot
from coherent_ray.train.memory.words import Facts, Words

LAYOUT = StateLayout((TensorSpec("model/w", "F32", (1024,)),))
PLAN = PlanIdentity(digest_of(b"data"), 100, 0, "order-1", 8, 4, 1)
PRINT = digest_of(b"replica")


def header(update: int, attempt: int = 1, ranks: int = 2, **changes: Any) -> GenerationHeader:
    """Return the header of a snapshot."""
    made = GenerationHeader(
        format=1,
        run_id="small",
        number=7,
        attempt=attempt,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(0, update * 8, update),
        plan=PLAN,
        layout=LAYOUT,
        values={},
        environment={},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )
    return replace(made, **changes)


def words(rank: int, about: GenerationHeader, **changes: Any) -> Words:
    """Return what a rank's part of a snapshot says."""
    told = records.dump(about)
    start, stop = LAYOUT.cut(rank, about.ranks), LAYOUT.cut(rank + 1, about.ranks)
    facts = Facts(
        run_id=about.run_id,
        attempt=about.attempt,
        token=f"token-{about.attempt}",
        number=about.number,
        update=about.update,
        rank=rank,
        ranks=about.ranks,
        start=start,
        stop=stop,
        header_bytes=len(header_of(FlatState(LAYOUT), start, stop)),
        algorithm="xxh3_128",
        block_bytes=1024,
        header_digest=digest_of(told),
        fingerprint=PRINT,
        receipts_digest=digest_of(b""),
    )
    return Words(replace(facts, **changes), told, b"")


def data_of(about: Words) -> bytes:
    """Return the bytes of a part: a shard file's."""
    facts = about.facts
    first = header_of(FlatState(LAYOUT), facts.start, facts.stop)
    return first + bytes([facts.update % 251]) * (facts.stop - facts.start)


def put(shelf: Shelf, about: Words, slot: int = 0) -> tuple[str, str]:
    """Write a snapshot into a slot, as its rank would; return the slot's name and the digest."""
    facts = about.facts
    reserved = shelf.reserve(facts.attempt, facts.rank, facts.size, 2)[slot]
    opened = open_slot(reserved.pid, reserved.file, reserved.name)
    opened.begin()
    opened.memory(facts.size)[:] = data_of(about)
    digest = opened.end(facts.size, about.pack())
    opened.close()
    return reserved.name, digest


def shelved(rank: int, about: GenerationHeader, node: str = "", **changes: Any) -> Entry:
    """Return what a shelf of its own says about a part; the shelf is gone by then."""
    shelf = Shelf("small", keeper=f"keeper-{node}", node=node)
    name, digest = put(shelf, words(rank, about, **changes))
    entry = shelf.written(name, digest)
    assert entry is not None
    shelf.clear()
    return entry


def history_of(*bodies: Body) -> History:
    """Return the history that some bodies tell."""
    history = History()
    for body in bodies:
        history = history.extended([history.successor(body, "writer")])
    return history


def opens(attempt: int, run_id: str = "small") -> AttemptBody:
    return AttemptBody(attempt, run_id, f"token-{attempt}")


def publishes(number: int, attempt: int, update: int) -> PublishBody:
    path = manifest_path(number, attempt)
    return PublishBody(number, attempt, update, 0, path, 1, digest_of(b"manifest"), None)


def retires(number: int, attempt: int) -> RetireBody:
    return RetireBody(number, attempt)


Change = Callable[[Entry], Entry]
