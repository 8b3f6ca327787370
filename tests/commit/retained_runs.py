"""Runs for pruning to work on: generations, receipts, and what dead attempts left."""

from __future__ import annotations

import dataclasses

from ranks import RUN, Ranks

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import History
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest, ReceiptSegment, dump
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.records import PinBody, PublishBody
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.testing.invariants import check_all
from coherent_ray.digests import digest_of
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import flipped
from coherent_ray.storage.testing.memory import MemoryStorage


class MadeRun:
    """A run, written without a coordinator."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.log = CommitLog(storage, "setup")
        self.attempt = 0
        self.number = 0
        self.newest: Ranks | None = None

    def open(self) -> None:
        self.attempt += 1
        self.log.open_attempt(RUN, f"token-{self.attempt}")

    def publish(self, update: int | None = None, *, refers: bool = False) -> PublishBody:
        """Write and publish the next generation: 2 shards, receipts, a manifest.

        It may refer to the one that was published before it.
        """
        self.number += 1
        update = 10 * self.number if update is None else update
        base = self.newest if refers else None
        group = Ranks(2, self.number, self.attempt, update=update, base=base)
        group.write(self.storage)
        self.newest = group
        segment = self.receipts(self.number, self.attempt, update)
        header = dataclasses.replace(group.header, receipts=segment, format=3 if refers else 1)
        shards = tuple(group.shard(rank) for rank in range(2))
        manifest = Manifest(header, digest_of(b"state"), shards)
        data = dump(manifest)
        body = PublishBody(
            number=self.number, attempt=self.attempt, update=update, epoch=0,
            manifest=f"{header.directory}/manifest.json", manifest_size=len(data),
            manifest_digest=digest_of(data), receipts=segment, base=manifest.base,
        )  # fmt: skip
        self.storage.create(body.manifest, data)
        self.log.append(body, self.attempt)
        return body

    def receipts(self, number: int, attempt: int, update: int) -> ReceiptSegment:
        data = f"receipts of g{number}-a{attempt}\n".encode()
        path = f"receipts/{1:012d}-{update:012d}-g{number}-a{attempt}.jsonl"
        self.storage.create(path, data)
        return ReceiptSegment(path, len(data), digest_of(data), 1, max(update, 1))

    def leave(self, number: int, attempt: int, *, manifest: bool = False) -> set[str]:
        """Leave behind what a save leaves that never came to its publish; return the paths."""
        group = Ranks(ranks=2, number=number, attempt=attempt)
        group.write(self.storage)
        paths = {group.shard(rank).path for rank in range(2)}
        paths.add(self.receipts(number, attempt, 10).path)
        if manifest:
            paths.add(f"{group.header.directory}/manifest.json")
            self.storage.create(f"{group.header.directory}/manifest.json", b"{}")
        return paths

    def pin(self, publish: PublishBody, *, pinned: bool = True) -> None:
        self.log.append(PinBody(publish.number, publish.attempt, pinned), self.attempt)


def run_of(*generations: int, storage: Storage | None = None) -> MadeRun:
    """A run with so many generations in each of its attempts."""
    run = MadeRun(storage or MemoryStorage())
    for count in generations:
        run.open()
        for _ in range(count):
            run.publish()
    return run


def paths(storage: Storage) -> set[str]:
    return {entry.path for entry in storage.list()}


def files_of(storage: Storage, name: str) -> set[str]:
    return {path for path in paths(storage) if path.startswith(f"generations/{name}/")}


def prune(run: MadeRun, keep: int | None = 1, keep_every: int | None = None) -> Pruned:
    return Pruner(run.storage, Policy(keep, keep_every)).prune()


def deleted(pruned: Pruned) -> list[str]:
    return [entry.path for entry in pruned.deleted]


def foreign(pruned: Pruned) -> list[str]:
    return [entry.path for entry in pruned.foreign]


def live_names(storage: Storage) -> list[str]:
    return [publish.name for publish in CommitLog(storage).read().live]


def damage(storage: MemoryStorage, publish: PublishBody, rank: int = 0) -> None:
    """Turn a bit of a shard; its size stays."""
    path = f"generations/{publish.name}/shard-{rank:05d}-of-00002.safetensors"
    storage.files[path] = flipped(storage.files[path], 700)


def check_live_is_whole(storage: Storage) -> History:
    """The invariant: what is live is there to the last byte, and readers take the newest of it."""
    check_all(storage)
    generations = Generations(storage)
    history = generations.history()
    for publish in history.live:
        assert not generations.verify(publish)
    if history.publishes:
        selected = generations.select("refuse")
        assert selected is not None
        assert selected.publish == history.latest == history.publishes[-1]
    named = {p.receipts.path for p in history.publishes if p.receipts}
    assert named <= paths(storage), "the receipts of what is retired are history still"
    return history
