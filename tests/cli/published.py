"""A run on disk, as ranks and coordinator leave it, for commands to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    Manifest,
    PlanIdentity,
    ReceiptSegment,
    ShardRecord,
    StateLayout,
    TensorSpec,
    dump,
    generation_name,
)
from coherent_ray.commit.records import PublishBody
from coherent_ray.data.dataset import DatasetFile, DatasetManifest
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.storage import LocalStorage
from coherent_ray.train.datasets import keep
from coherent_ray.train.receipts import ReceiptChain, first_link

RUN_ID = "first"
LAYOUT = StateLayout(
    (
        TensorSpec("model/bias", "F32", (64,)),
        TensorSpec("model/weight", "F32", (64, 64)),
    )
)
DATASET = DatasetManifest(
    format="parquet",
    level="content",
    files=(DatasetFile("a.parquet", 999, 100_000, digest_of(b"data"), digest_of(b"footer")),),
    columns=(("x", "int64"),),
)
PLAN = PlanIdentity(DATASET.hash, 100_000, 7, "feistel-v1", 32, 4, 8)
BLOCK = 4096
HEADER_BYTES = 128


@dataclass
class Published:
    """A run that a test has made."""

    root: Path
    run_id: str = RUN_ID

    def __post_init__(self) -> None:
        self.storage = LocalStorage(self.root)
        self.log = CommitLog(self.storage)
        self.attempt = 0
        self.number = 0
        self.chain = ReceiptChain(first_link(PLAN), 0)

    def open_attempt(self) -> None:
        keep(self.storage, DATASET)
        self.attempt = self.log.open_attempt(self.run_id, f"token-{self.attempt}").body.attempt

    def train(self, update: int, seed: int = 0) -> ReceiptSegment | None:
        """Do the updates up to one, and store their receipts; `seed` makes another history."""
        for at in range(self.chain.update, update):
            self.chain.append(
                epoch=0,
                start=32 * at,
                stop=32 * (at + 1),
                ids=digest_of(f"{at}".encode()),
                count=32,
                loss=(2.0 + seed) / (at + 1),
                grad_norm=1.0,
                lr=[0.1, 0.1],
                skipped=at == 4,
            )
        state = digest_of(f"state {update}".encode())
        segment = self.chain.segment(generation_name(self.number, self.attempt), state)
        if segment is None:
            return None
        self.storage.create(segment.record.path, segment.data)
        self.chain.published(update)
        return segment.record

    def publish(
        self, update: int, ranks: int = 2, seed: int = 0, values: dict[str, Any] | None = None
    ) -> PublishBody:
        """Publish the next generation, with every file that it names."""
        self.number += 1
        receipts = self.train(update, seed)
        header = replace(self.header(update, ranks, receipts), values=values or {})
        shards = tuple(self.shard(header, rank) for rank in range(ranks))
        data = dump(Manifest(header, digest_of(b"state"), shards))
        body = PublishBody(
            number=self.number,
            attempt=self.attempt,
            update=update,
            epoch=header.position.epoch,
            manifest=f"{header.directory}/manifest.json",
            manifest_size=len(data),
            manifest_digest=digest_of(data),
            receipts=receipts,
        )
        self.storage.create(body.manifest, data)
        self.log.append(body, self.attempt)
        return body

    def header(self, update: int, ranks: int, receipts: ReceiptSegment | None) -> GenerationHeader:
        return GenerationHeader(
            format=1,
            run_id=self.run_id,
            number=self.number,
            attempt=self.attempt,
            claim="invariant",
            ranks=ranks,
            position=DataPosition(epoch=0, position=32 * update, update=update),
            plan=PLAN,
            layout=LAYOUT,
            values={},
            environment={"torch": "2.13.0", "threads": "1"},
            recipe={},
            receipt_tip=self.chain.tip,
            receipts=receipts,
        )

    def shard(self, header: GenerationHeader, rank: int) -> ShardRecord:
        """Write one rank's shard, and return its record."""
        start, stop = LAYOUT.cut(rank, header.ranks), LAYOUT.cut(rank + 1, header.ranks)
        size = HEADER_BYTES + stop - start
        data = (digest_of(f"{self.number}-{rank}".encode()).encode() * size)[:size]
        blocks = [_hex(data[at : at + BLOCK]) for at in range(0, size, BLOCK)]
        path = f"{header.directory}/shard-{rank:05d}-of-{header.ranks:05d}.safetensors"
        self.storage.create(path, data)
        return ShardRecord(
            rank=rank,
            path=path,
            size=size,
            start=start,
            stop=stop,
            header_bytes=HEADER_BYTES,
            algorithm="xxh3_128",
            block_bytes=BLOCK,
            blocks=tuple(blocks),
            digest=f"xxh3_128:{_hex(bytes.fromhex(''.join(blocks)))}",
        )


def _hex(data: bytes) -> str:
    hasher = new_hasher("xxh3_128")
    hasher.update(data)
    return hasher.hexdigest()


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file, as a disk would."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
