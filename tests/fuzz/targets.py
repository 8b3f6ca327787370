"""What is fuzzed: every reader of stored bytes, its valid documents, and the errors it may raise.

Where a digest guards a document, the target computes the right one for whatever it is given, as
one who can write to the root would; else nothing behind the digest would ever be reached.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from pydantic import TypeAdapter
from ranks import Ranks

from coherent_ray import canonical
from coherent_ray.commit import holds, inventory, records, references
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import History
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.manifest import Manifest, dump, load
from coherent_ray.commit.records import AttemptBody, PublishBody, encode
from coherent_ray.data.dataset import DatasetFile, DatasetManifest
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import (
    ConfigError,
    LogDamaged,
    ManifestDamaged,
    NewerFormat,
    NoGeneration,
    NotFound,
    ShardDamaged,
    StorageError,
)
from coherent_ray.state import values
from coherent_ray.state.shards import load_state, write_shard
from coherent_ray.storage.address import parse_address
from coherent_ray.storage.base import checked_path
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train import receipts

GROUP = Ranks(ranks=2)
MANIFEST = Manifest(GROUP.header, digest_of(b"state"), (GROUP.shard(0), GROUP.shard(1)))


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader of bytes from outside."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]
    """What it may raise; anything else is a crash."""


def _log() -> tuple[MemoryStorage, list[bytes]]:
    storage = MemoryStorage()
    log = CommitLog(storage, "w")
    log.open_attempt("run-1", "t")
    data = dump(MANIFEST)
    storage.create("generations/g1-a1/manifest.json", data)
    GROUP.write(storage)
    log.append(_publish(data), 1)
    log.append(records.PinBody(1, 1, True), 1)
    log.append(records.PinBody(1, 1, False), 1)
    return storage, [storage.files[record_path(seq)] for seq in range(1, 5)]


def _publish(manifest: bytes) -> PublishBody:
    path = "generations/g1-a1/manifest.json"
    size, digest = max(len(manifest), 1), digest_of(manifest)
    return PublishBody(1, 1, 10, 0, path, size, digest, GROUP.header.receipts)


LOG, RECORDS = _log()
INNER = [canonical.dump(json.loads(record)["record"]) for record in RECORDS]


def _rehashed(data: bytes) -> object:
    """A record's inside, in an envelope that is right."""
    try:
        value = json.loads(data)
        inner = canonical.digest(value)
        envelope = canonical.dump({"digest": inner, "format": 1, "record": value})
    except (ValueError, RecursionError):
        envelope = b'{"digest":"","format":1,"record":' + data + b"}"
    storage = MemoryStorage()
    storage.files = dict(LOG.files) | {record_path(4): envelope}
    return CommitLog(storage).read()


def _published(data: bytes) -> object:
    """A manifest under its right digest, and everything that a reader does with it."""
    storage = MemoryStorage()
    storage.files = dict(STATE.files)
    history = History()
    for body in (AttemptBody(1, "run-1", "t"), _publish(data)):
        record = history.successor(body, "w")
        storage.files[record_path(record.seq)] = encode(record)
        history = history.extended([record])
    storage.files["generations/g1-a1/manifest.json"] = data
    generations = Generations(storage)
    generations.verify(history.publishes[0])
    found = generations.select()
    return found and load_state(storage, found.manifest)


def _stored_state() -> tuple[MemoryStorage, Manifest]:
    state = {"a": torch.arange(300.0), "b": torch.arange(500, dtype=torch.uint8)}
    from coherent_ray.state.layout import layout_of
    from coherent_ray.state.snapshot import Snapshot

    layout, storage = layout_of(state), MemoryStorage()
    snapshot = Snapshot(layout, 0, 1)
    snapshot.take(state)
    header = dataclasses.replace(GROUP.header, layout=layout, ranks=1)
    shard = write_shard(storage, header.directory, 0, 1, layout, snapshot.memory)
    return storage, Manifest(header, digest_of(b""), (shard,))


STATE, STATE_MANIFEST = _stored_state()
(SHARD,) = STATE_MANIFEST.shards


def _shard(data: bytes) -> object:
    """A shard's file under its right digests."""
    hasher = new_hasher(SHARD.algorithm)
    hasher.update(data)
    block = hasher.hexdigest()
    digest = digest_of(bytes.fromhex(block), SHARD.algorithm)
    record = dataclasses.replace(SHARD, blocks=(block,), digest=digest)
    storage = MemoryStorage()
    storage.files[SHARD.path] = data
    return load_state(storage, dataclasses.replace(STATE_MANIFEST, shards=(record,)))


def _hold(data: bytes) -> object:
    storage = MemoryStorage()
    storage.files[f"holds/g1-a1-{0:032x}.json"] = data
    (held,) = holds.Watch(storage).look()
    return held


def _receipts() -> bytes:
    chain = receipts.ReceiptChain(digest_of(b"plan"), 0)
    for update in range(3):
        chain.append(
            epoch=0, start=update * 8, stop=update * 8 + 8, ids=digest_of(b"%d" % update), count=8,
            loss=0.5, grad_norm=1.25, lr=[0.1, float("inf")],
        )  # fmt: skip
    return receipts.encode(chain.pending)


def _dataset() -> bytes:
    file = DatasetFile("a.parquet", 10, 5, digest_of(b"a"), digest_of(b"f"))
    manifest = DatasetManifest("parquet", "content", (file,), (("x", "int64"),))
    adapter: TypeAdapter[Any] = TypeAdapter(DatasetManifest)
    return canonical.dump(adapter.dump_python(manifest, mode="json"))


def _read_dataset(data: bytes) -> object:
    canonical.load(data)
    adapter: TypeAdapter[DatasetManifest] = TypeAdapter(DatasetManifest)
    return adapter.validate_json(data).hash


def _values(data: bytes) -> object:
    return values.decode(canonical.load(data))


def _names(data: bytes) -> object:
    text = data.decode("utf-8", "surrogateescape")
    inventory.item_of(text)
    references.parse_reference(text)
    path = checked_path(text)
    inside = os.path.normpath(os.path.join("/root", path))  # noqa: PTH118
    assert inside.startswith("/root/"), path
    return inside


def _address(data: bytes) -> object:
    return parse_address(data.decode("utf-8", "surrogateescape")).where("a")


_VALUE = {
    "a": [1, 1.5, None, "x"], "b": 2**70, "c": (1, 2), "d": {1: float("nan")},
    "e": torch.arange(3), "f": torch.float32,
}  # fmt: skip

TARGETS: dict[str, Target] = {
    "canonical JSON": Target(canonical.load, (dump(MANIFEST), *RECORDS), (ValueError,)),
    "log record": Target(records.decode, tuple(RECORDS), (ValueError,)),
    "log of re-hashed records": Target(_rehashed, tuple(INNER[::-1]), (LogDamaged,)),
    "manifest": Target(lambda data: load(Manifest, data), (dump(MANIFEST),), (ValueError,)),
    "published manifest": Target(
        _published, (dump(STATE_MANIFEST),), (NoGeneration, NewerFormat, ShardDamaged)
    ),
    "shard": Target(_shard, (STATE.files[SHARD.path],), (ShardDamaged,)),
    "stored values": Target(
        _values, (canonical.dump(values.encode(_VALUE, "v")),), (ValueError, ManifestDamaged)
    ),
    "hold": Target(_hold, (dump(holds.HoldRecord(1, 1, 1, "host", 60.0, 3)),), (NotFound,)),
    "receipts": Target(receipts.decode, (_receipts(),), (ValueError,)),
    "dataset manifest": Target(_read_dataset, (_dataset(),), (ValueError,)),
    "names": Target(
        _names, (b"generations/g1-a1/manifest.json", b"RUN@g12-a3", b"log/../x"), (StorageError,)
    ),
    "addresses": Target(_address, (b"s3://bucket/prefix/a", b"az://c/../p"), (ConfigError,)),
}


def crash(target: Target, data: bytes) -> Exception | None:
    """Return what went wrong where one input is read; None: it was read, or refused clearly."""
    try:
        target.read(data)
    except target.refusals:
        return None
    except Exception as error:
        return error
    return None
