"""What tests of the commit protocol are made of: ranks with their words, and a shell that can die.

`Ranks` makes acknowledgements, and the shard files behind them. `Shell` is the actor without Ray:
one machine, one storage, and every step of I/O taken only when the test says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from typing import Any

from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    Answer,
    AskReadBack,
    Event,
    HistoryRead,
    StorageAction,
    Tick,
)
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import History
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    Acknowledgement,
    DataPosition,
    GenerationHeader,
    Manifest,
    PlanIdentity,
    ReceiptSegment,
    ShardRecord,
    StateLayout,
    TensorSpec,
    dump,
    load,
)
from coherent_ray.commit.partial_files import header_of_record
from coherent_ray.commit.performer import perform
from coherent_ray.commit.read_back import Request, read_back
from coherent_ray.commit.service import Service
from coherent_ray.commit.shard_records import Base, Places, Reuse, Run, StoredFile
from coherent_ray.commit.testing.invariants import Witness, latest_is_whole, the_log_chain_holds
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.storage.base import Storage

RUN = "run-1"
LAYOUT = StateLayout(
    (
        TensorSpec("model/bias", "F32", (8,)),
        TensorSpec("model/weight", "F32", (8, 8)),
        TensorSpec("optimizer/bias/exp_avg", "F32", (8,)),
    )
)
PLAN = PlanIdentity(digest_of(b"data"), 1000, 7, "feistel-v1", 32, 4, 8)
BLOCK = 64
HEADER_BYTES = 40


@dataclasses.dataclass(frozen=True)
class Ranks:
    """All ranks of one generation: what they write and what they say."""

    ranks: int = 3
    number: int = 1
    attempt: int = 1
    run_id: str = RUN
    update: int = 10
    base: Ranks | None = None
    """What they refer to: the last block of each shard is new, the others are the base's."""

    @property
    def header(self) -> GenerationHeader:
        receipts = ReceiptSegment(
            f"receipts/{1:012d}-{self.update:012d}-g{self.number}-a{self.attempt}.jsonl",
            100, digest_of(b"receipts"), 1, self.update,
        )  # fmt: skip
        return GenerationHeader(
            format=1,
            run_id=self.run_id,
            number=self.number,
            attempt=self.attempt,
            claim="invariant",
            ranks=self.ranks,
            position=DataPosition(epoch=0, position=32 * self.update, update=self.update),
            plan=PLAN,
            layout=LAYOUT,
            values={"scheduler": {"last_lr": [0.1, 1e-300]}},
            environment={"torch": "2.13.0"},
            recipe={},
            receipt_tip=digest_of(b"tip"),
            receipts=receipts,
        )

    def whole(self, rank: int) -> bytes:
        """The bytes of a rank's shard, wherever they lie."""
        start, stop = LAYOUT.cut(rank, self.ranks), LAYOUT.cut(rank + 1, self.ranks)
        size = HEADER_BYTES + stop - start
        seed = digest_of(f"{self.number} {self.attempt} {rank}".encode()).encode()
        data = (seed * (size // len(seed) + 1))[:size]
        if self.base is None:
            return data
        kept = (size - 1) // BLOCK * BLOCK
        return self.base.whole(rank)[:kept] + data[kept:]

    def content(self, rank: int) -> bytes:
        """The bytes of a rank's shard file."""
        if self.base is None:
            return self.whole(rank)
        data = self.whole(rank)
        return header_of_record(self.shard(rank)) + data[(len(data) - 1) // BLOCK * BLOCK :]

    def reuse(self, rank: int) -> Reuse | None:
        """Where the bytes of a rank's shard lie, if not all in its file."""
        if self.base is None:
            return None
        size, base = len(self.whole(rank)), self.base.shard(rank)
        kept = (size - 1) // BLOCK * BLOCK
        pieces = list(Places(base).pieces(0, kept))
        used = list(dict.fromkeys(piece.path for piece in pieces))
        runs = [Run(piece.size, used.index(piece.path) + 1, piece.at) for piece in pieces]
        sizes = {file.path: file.size for file in base.files}
        return Reuse(
            base=Base(self.base.number, self.base.attempt),
            written=4096 + size - kept,
            files=tuple(StoredFile(path, sizes[path]) for path in used),
            runs=(*runs, Run(size - kept, 0, 4096)),
        )

    def shard(self, rank: int) -> ShardRecord:
        data = self.whole(rank)
        blocks = [_xxh3(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        return ShardRecord(
            rank=rank,
            path=f"{self.header.directory}/shard-{rank:05d}-of-{self.ranks:05d}.safetensors",
            size=len(data),
            start=LAYOUT.cut(rank, self.ranks),
            stop=LAYOUT.cut(rank + 1, self.ranks),
            header_bytes=HEADER_BYTES,
            algorithm="xxh3_128",
            block_bytes=BLOCK,
            blocks=tuple(blocks),
            digest=f"xxh3_128:{_xxh3(bytes.fromhex(''.join(blocks)))}",
            reuse=self.reuse(rank),
        )

    def ack(self, rank: int, /, **changes: Any) -> Acknowledgement:
        """What a rank says; `changes` make it say something else."""
        words: dict[str, Any] = {
            "attempt": self.attempt,
            "number": self.number,
            "rank": rank,
            "ranks": self.ranks,
            "shard": self.shard(rank),
            "header_digest": digest_of(dump(self.header)),
            "fingerprint": digest_of(b"state"),
            "tensor_fingerprints": tuple(f"{index:016x}" for index in range(len(LAYOUT.tensors))),
            "header": self.header if rank == 0 else None,
        }
        return Acknowledgement(**(words | changes))

    def write(self, storage: Storage) -> None:
        """Write every rank's shard."""
        for rank in range(self.ranks):
            with storage.open_writer(self.shard(rank).path) as writer:
                writer.write(self.content(rank))
                writer.finish()


class Shell:
    """The coordinator actor, without Ray and without a will of its own."""

    def __init__(self, storage: Storage, run_id: str = RUN, **options: Any) -> None:
        self.storage = storage
        self.log = CommitLog(storage)
        self.machine = Coordinator(run_id, self.log.settled(), **options)
        self.todo: deque[StorageAction] = deque()
        self.answers: dict[int, Fate] = {}
        self.asked: deque[AskReadBack] = deque()
        self.words: list[Acknowledgement] = []
        self.follows: dict[int, int] = {}
        """The call that a rank made first, by the one that it made after it was asked to read."""

    def open(self, token: str) -> int:
        """Open an attempt, as the actor does."""
        body = self.log.open_attempt(self.machine.run_id, token).body
        self.tell(HistoryRead(self.log.settled()))
        return body.attempt  # type: ignore[union-attr]

    def acknowledge(self, ack: Acknowledgement, now: float = 0.0) -> int:
        """Begin an acknowledgement call, and return its number."""
        self.words.append(ack)
        self.tell(AckReceived(ack, len(self.words)), now)
        return len(self.words)

    def tell(self, event: Event, now: float = 0.0) -> None:
        """Hand the machine an event; answers arrive, I/O is queued."""
        for action in self.machine.handle(event, now):
            if isinstance(action, Answer):
                assert action.call not in self.answers, "a call was answered twice"
                self.answers[action.call] = action.fate
                self.answers[self.follows.get(action.call, action.call)] = action.fate
            elif isinstance(action, AskReadBack):
                self.asked.append(action)
            else:
                self.todo.append(action)

    def step(self, lose_event: bool = False) -> StorageAction:
        """Do the next piece of I/O; `lose_event`: the machine dies before it hears of it."""
        action = self.todo.popleft()
        event = perform(action, self.storage, self.log)
        if event is not None and not lose_event:
            self.tell(event)
        return action

    def read(self, now: float = 0.0) -> Acknowledgement:
        """Be the next rank that was asked to read; return what it says then."""
        asked = self.asked.popleft()
        word = self.words[asked.call - 1]
        header = Ranks(word.ranks, word.number, word.attempt).header
        again = dataclasses.replace(word, read_back=read_back(self.storage, header, asked.shard))
        self.follows[len(self.words) + 1] = asked.call
        self.acknowledge(again, now)
        return again

    def run(self) -> None:
        """Do all I/O until nothing is asked for."""
        while self.todo or self.asked:
            if self.asked:
                self.read()
            else:
                self.step()

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.tell(Tick(), now)

    def save(self, group: Ranks) -> list[Fate]:
        """Let every rank acknowledge, do all I/O, and return each rank's answer."""
        calls = [self.acknowledge(group.ack(rank)) for rank in range(group.ranks)]
        self.run()
        return [self.answers[call] for call in calls]


async def acknowledged(service: Service, storage: Storage, group: Ranks, rank: int) -> Fate:
    """Be a rank that has written: call, read back where it is asked to, and hear the fate."""
    reply = await service.acknowledge(dump(group.ack(rank)))
    if isinstance(reply, Request):
        read = await asyncio.to_thread(read_back, storage, group.header, reply.shard)
        reply = await service.acknowledge(dump(group.ack(rank, read_back=read)))
    assert isinstance(reply, Fate)
    return reply


def check_published_is_whole(storage: Storage) -> History:
    """The invariant: what the log publishes is there, to the last byte. Returns the log."""
    history = CommitLog(storage).read()
    the_log_chain_holds(storage, Witness())
    latest_is_whole(storage, Witness())
    seen = set()
    for publish in history.publishes:
        assert publish.name not in seen, "published twice"
        seen.add(publish.name)
        data = storage.read(publish.manifest)
        assert (len(data), digest_of(data)) == (publish.manifest_size, publish.manifest_digest)
        manifest = load(Manifest, data)
        assert (manifest.header.number, manifest.header.attempt) == (
            publish.number, publish.attempt,
        )  # fmt: skip
        for shard in manifest.shards:
            pieces = Places(shard).pieces(0, shard.size)
            content = b"".join(storage.read(path, at, size) for path, at, size in pieces)
            blocks = [
                _xxh3(content[at : at + shard.block_bytes])
                for at in range(0, len(content), shard.block_bytes)
            ]
            assert tuple(blocks) == shard.blocks
    return history


def _xxh3(data: bytes) -> str:
    hasher = new_hasher("xxh3_128")
    hasher.update(data)
    return hasher.hexdigest()
