"""Generations: what readers are told, and which one they take."""

import dataclasses
from typing import Any

import pytest
from ranks import Ranks
from test_history import attempt

from coherent_ray.commit.generations import Generations, tensors_in
from coherent_ray.commit.log import CommitLog, PublishBody
from coherent_ray.commit.manifest import Manifest, ReceiptSegment, dump
from coherent_ray.commit.records import PinBody, RetireBody
from coherent_ray.digests import digest_of
from coherent_ray.errors import (
    Damage,
    LogDamaged,
    ManifestDamaged,
    NoGeneration,
    ShardDamaged,
    StorageError,
)
from coherent_ray.storage.base import Entry
from coherent_ray.storage.testing.faults import Fault, FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage

RECEIPTS = b'{"update":1}\n'


class Run:
    """A run in memory, written without the coordinator."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.log = CommitLog(self.storage, "writer")
        self.generations = Generations(self.storage)
        self.attempt = 0

    def open(self) -> None:
        self.attempt += 1
        self.log.append(attempt(self.attempt), self.attempt)

    def publish(self, number: int, ranks: int = 2, **changes: Any) -> PublishBody:
        """Write and publish a generation; `changes` make its manifest's header another."""
        group = Ranks(ranks=ranks, number=number, attempt=self.attempt)
        group.write(self.storage)
        segment = ReceiptSegment(
            f"receipts/{group.header.directory[12:]}.jsonl",
            len(RECEIPTS),
            digest_of(RECEIPTS),
            1,
            10,
        )
        self.storage.create(segment.path, RECEIPTS)
        header = dataclasses.replace(group.header, receipts=segment, **changes)
        shards = tuple(group.shard(rank) for rank in range(ranks))
        data = dump(Manifest(header, digest_of(b"state"), shards))
        body = PublishBody(
            number=number, attempt=self.attempt, update=10, epoch=0,
            manifest=f"{group.header.directory}/manifest.json", manifest_size=len(data),
            manifest_digest=digest_of(data), receipts=segment,
        )  # fmt: skip
        self.storage.create(body.manifest, data)
        self.log.append(body, self.attempt)
        return body

    def flip(self, path: str, bit: int = 900) -> None:
        self.storage.files[path] = flipped(self.storage.files[path], bit)

    def shard_of(self, publish: PublishBody, rank: int = 0) -> str:
        return self.generations.manifest(publish).shards[rank].path


@pytest.fixture
def run() -> Run:
    """Attempt 1 with g1 and g2, attempt 2 with g3."""
    made = Run()
    made.open()
    made.publish(1)
    made.publish(2)
    made.open()
    made.publish(3, ranks=3)
    return made


def kinds(damages: list[Damage]) -> list[object]:
    return [damage.details["kind"] for damage in damages]


# --- list and find --------------------------------------------------------------------------------


def test_the_list_is_the_logs(run: Run) -> None:
    first = run.generations.find("g1")
    run.log.append(PinBody(first.number, first.attempt, True), 2)
    run.log.append(RetireBody(3, 2), 2)
    found = run.generations.list()
    assert [(i.name, i.seq, i.retired, i.pinned, i.latest) for i in found] == [
        ("g1-a1", 2, False, True, False),
        ("g2-a1", 3, False, False, True),
        ("g3-a2", 5, True, False, False),
    ]
    assert Generations(MemoryStorage()).list() == []


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("g1", "g1-a1"), ("1", "g1-a1"), ("g2-a1", "g2-a1"), ("2-a1", "g2-a1"),
        ("latest", "g3-a2"), ("runs/one@g2", "g2-a1"), ("runs/one@latest", "g3-a2"),
        ("me@home/run@1", "g1-a1"),
    ],
)  # fmt: skip
def test_a_generation_is_found_by_its_name(run: Run, reference: str, name: str) -> None:
    assert run.generations.find(reference).name == name


def test_a_number_alone_is_what_was_published_last_under_it(run: Run) -> None:
    run.open()
    run.publish(2)
    assert run.generations.find("g2").name == "g2-a3"
    assert run.generations.find("g2-a1").name == "g2-a1"
    assert run.generations.find("latest").name == "g2-a3"


@pytest.mark.parametrize("reference", ["g9", "g1-a2", "runs/one@g3-a1"])
def test_what_was_never_published_is_not_found(run: Run, reference: str) -> None:
    with pytest.raises(NoGeneration, match="never published") as caught:
        run.generations.find(reference)
    assert caught.value.details["published"] == ["g1-a1", "g2-a1", "g3-a2"]
    assert "g3-a2" in caught.value.remedy


def test_what_is_retired_is_said_to_be(run: Run) -> None:
    run.log.append(RetireBody(1, 1), 2)
    with pytest.raises(NoGeneration, match="g1 is retired"):
        run.generations.find("g1")


@pytest.mark.parametrize("reference", ["nonsense", "g", "a3", "g1-a1-b2", ""])
def test_what_is_no_reference_is_not_found(run: Run, reference: str) -> None:
    with pytest.raises(NoGeneration):
        run.generations.find(reference)


def test_nothing_is_found_where_nothing_is() -> None:
    with pytest.raises(NoGeneration, match="no published generation"):
        Generations(MemoryStorage()).find("latest")


# --- manifests ------------------------------------------------------------------------------------


def test_a_manifest_is_what_was_published(run: Run) -> None:
    publish = run.generations.find("g3")
    manifest = run.generations.manifest(publish)
    assert (manifest.header.number, manifest.header.attempt, len(manifest.shards)) == (3, 2, 3)
    assert tensors_in(manifest.header, manifest.shards[0], 1)


def test_any_bit_that_flips_in_a_manifest_is_found(run: Run) -> None:
    publish = run.generations.find("g1")
    whole = run.storage.files[publish.manifest]
    for bit in range(0, 8 * len(whole), 11):
        run.storage.files[publish.manifest] = flipped(whole, bit)
        with pytest.raises(ManifestDamaged, match="does not hash") as caught:
            run.generations.manifest(publish)
        assert caught.value.where == publish.manifest
        assert caught.value.details["kind"] == "digest"
        assert caught.value.details["generation"] == "g1-a1"


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_torn_manifest_is_found(run: Run, length: int) -> None:
    publish = run.generations.find("g1")
    run.storage.files[publish.manifest] = run.storage.files[publish.manifest][:length]
    with pytest.raises(ManifestDamaged, match="bytes instead of"):
        run.generations.manifest(publish)


def test_a_missing_manifest_is_found(run: Run) -> None:
    publish = run.generations.find("g1")
    run.storage.delete(publish.manifest)
    with pytest.raises(ManifestDamaged, match="missing"):
        run.generations.manifest(publish)


def test_another_generations_manifest_is_found(run: Run) -> None:
    one, two = run.generations.find("g1"), run.generations.find("g2")
    run.storage.files[one.manifest] = run.storage.files[two.manifest]
    with pytest.raises(ManifestDamaged, match="does not hash"):
        run.generations.manifest(one)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "run-2"}, "of run 'run-2', the log says 'run-1'"),
        ({"number": 5}, "."),
        ({"attempt": 7}, "."),
    ],
)
def test_a_manifest_that_was_published_wrongly_is_found(
    changes: dict[str, Any], reason: str
) -> None:
    """Its digest is the published one: only its words give it away."""
    run = Run()
    run.open()
    if "run_id" in changes:
        publish = run.publish(1, **changes)
    else:
        publish = _published_with_anothers_manifest(run, changes)
    with pytest.raises(ManifestDamaged, match=reason) as caught:
        run.generations.manifest(publish)
    assert caught.value.details["kind"] == "foreign"


def _published_with_anothers_manifest(run: Run, changes: dict[str, Any]) -> PublishBody:
    group = Ranks(ranks=1, number=changes.get("number", 1), attempt=changes.get("attempt", 1))
    data = dump(Manifest(group.header, digest_of(b"state"), (group.shard(0),)))
    body = PublishBody(
        number=1, attempt=1, update=10, epoch=0, manifest="generations/g1-a1/manifest.json",
        manifest_size=len(data), manifest_digest=digest_of(data), receipts=None,
    )  # fmt: skip
    run.storage.create(body.manifest, data)
    run.log.append(body, 1)
    return body


def test_published_bytes_that_are_no_manifest_are_found() -> None:
    run = Run()
    run.open()
    data = b'{"header":1}'
    body = PublishBody(
        number=1, attempt=1, update=10, epoch=0, manifest="generations/g1-a1/manifest.json",
        manifest_size=len(data), manifest_digest=digest_of(data), receipts=None,
    )  # fmt: skip
    run.storage.create(body.manifest, data)
    run.log.append(body, 1)
    with pytest.raises(ManifestDamaged, match="the manifest is wrong: header") as caught:
        run.generations.manifest(body)
    assert caught.value.details["kind"] == "content"


# --- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_generation_verifies(run: Run, deep: bool) -> None:
    for info in run.generations.list():
        assert run.generations.verify(info.publish, deep) == []


def test_everything_that_is_wrong_is_reported_at_once(run: Run) -> None:
    publish = run.generations.find("g3")
    paths = [run.shard_of(publish, rank) for rank in range(3)]
    assert publish.receipts is not None
    run.flip(paths[0])
    run.storage.files[paths[1]] += b"x"
    run.storage.delete(paths[2])
    run.storage.files["generations/g3-a2/left-over"] = b"12345"
    run.storage.files[publish.receipts.path] = b"{}"
    damages = run.generations.verify(publish)
    assert kinds(damages) == ["block", "size", "missing", "receipts"]
    assert [damage.where for damage in damages[:3]] == paths
    assert run.generations.unnamed(publish) == [Entry("generations/g3-a2/left-over", 5)]
    assert all(isinstance(damage, ShardDamaged) for damage in damages[:3])
    assert kinds(run.generations.verify(publish, deep=False)) == [
        "size", "missing", "receipts",
    ]  # fmt: skip


def test_a_damaged_manifest_leaves_nothing_to_compare_shards_with(run: Run) -> None:
    publish = run.generations.find("g1")
    run.flip(run.shard_of(publish))
    run.flip(publish.manifest)
    assert kinds(run.generations.verify(publish)) == ["digest"]


@pytest.mark.parametrize("damage", [None, b"", RECEIPTS[:-1], RECEIPTS[:-1] + b" "])
def test_damaged_receipts_are_reported_and_do_not_damage_the_state(
    run: Run, damage: bytes | None
) -> None:
    publish = run.generations.find("latest")
    assert publish.receipts is not None
    if damage is None:
        run.storage.delete(publish.receipts.path)
    else:
        run.storage.files[publish.receipts.path] = damage
    assert kinds(run.generations.verify(publish)) == ["receipts"]
    selected = run.generations.select("refuse")
    assert selected is not None
    assert selected.publish == publish


# --- select ---------------------------------------------------------------------------------------


def test_the_newest_whole_generation_is_taken(run: Run) -> None:
    for on_damage in ("fall_back", "refuse"):
        selected = run.generations.select(on_damage)  # type: ignore[arg-type]
        assert selected is not None
        assert selected.publish.name == "g3-a2"
        assert selected.manifest == run.generations.manifest(selected.publish)
        assert selected.skipped == ()


def test_nothing_is_taken_where_nothing_was_published() -> None:
    run = Run()
    assert run.generations.select() is None
    run.open()
    assert run.generations.select() is None


def test_a_generation_that_nobody_published_is_invisible(run: Run) -> None:
    """All its files are there, the manifest too; only the record is not."""
    group = Ranks(ranks=2, number=4, attempt=2)
    group.write(run.storage)
    shards = (group.shard(0), group.shard(1))
    data = dump(Manifest(group.header, digest_of(b"state"), shards))
    run.storage.create(f"{group.header.directory}/manifest.json", data)
    selected = run.generations.select()
    assert selected is not None
    assert selected.publish.name == "g3-a2"
    assert len(run.generations.list()) == 3


def test_every_flipped_byte_of_the_newest_falls_back_to_the_one_before(run: Run) -> None:
    newest = run.generations.find("latest")
    for path in [newest.manifest, *(run.shard_of(newest, rank) for rank in range(3))]:
        whole = run.storage.files[path]
        for at in range(0, len(whole), 13):
            run.storage.files[path] = flipped(whole, 8 * at + at % 8)
            selected = run.generations.select()
            assert selected is not None
            assert selected.publish.name == "g2-a1"
            assert [damage.where for damage in selected.skipped] == [path]
        run.storage.files[path] = whole
    selected = run.generations.select()
    assert selected is not None
    assert selected.publish == newest


def test_falling_back_goes_as_far_as_it_must_and_tells_what_it_passed(run: Run) -> None:
    run.storage.delete(run.generations.find("g3").manifest)
    run.flip(run.shard_of(run.generations.find("g2"), 1))
    selected = run.generations.select()
    assert selected is not None
    assert selected.publish.name == "g1-a1"
    assert kinds(list(selected.skipped)) == ["missing", "block"]


def test_refusing_names_the_damage_of_the_newest(run: Run) -> None:
    newest = run.generations.find("latest")
    path = run.shard_of(newest, 2)
    run.flip(path)
    with pytest.raises(ShardDamaged, match="g3-a2 is not whole: block 1") as caught:
        run.generations.select("refuse")
    assert caught.value.where == path
    assert caught.value.details["block"] == 1
    assert caught.value.details["tensors"]
    assert len(caught.value.details["damages"]) == 1  # type: ignore[arg-type]
    assert "fall_back" in caught.value.remedy
    run.storage.delete(newest.manifest)
    with pytest.raises(ManifestDamaged, match="g3-a2 is not whole"):
        run.generations.select("refuse")


def test_none_whole_is_an_error_with_every_damage(run: Run) -> None:
    for info in run.generations.list():
        run.storage.delete(info.publish.manifest)
    with pytest.raises(NoGeneration, match="none of 3 published generations is whole") as caught:
        run.generations.select()
    damages = caught.value.details["damages"]
    assert isinstance(damages, list)
    assert [damage["generation"] for damage in damages] == ["g3-a2", "g2-a1", "g1-a1"]


def test_retired_generations_are_not_taken(run: Run) -> None:
    run.log.append(RetireBody(3, 2), 2)
    selected = run.generations.select()
    assert selected is not None
    assert selected.publish.name == "g2-a1"
    for number in (1, 2):
        run.log.append(RetireBody(number, 1), 2)
    with pytest.raises(NoGeneration, match="all are retired"):
        run.generations.select()


def test_a_shallow_look_compares_sizes_alone(run: Run) -> None:
    path = run.shard_of(run.generations.find("latest"))
    run.flip(path)
    selected = run.generations.select(deep=False)
    assert selected is not None
    assert selected.publish.name == "g3-a2"
    run.storage.files[path] = run.storage.files[path][:-1]
    selected = run.generations.select(deep=False)
    assert selected is not None
    assert selected.publish.name == "g2-a1"


@pytest.mark.parametrize("verb", ["read", "size", "read_into", "list"])
def test_a_storage_that_cannot_be_asked_is_never_a_reason_to_fall_back(run: Run, verb: str) -> None:
    """Else a network that is down for a second would cost the user hours of training."""
    storage = FaultyStorage(run.storage, [Fault("refuse", verb=verb, times=99)])  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="injected"):
        Generations(storage).select()


def test_a_manifest_on_a_dead_sector_is_damage(run: Run) -> None:
    newest = run.generations.find("latest")

    class BadSector(MemoryStorage):
        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            if path == newest.manifest:
                raise StorageError("input/output error", where=path, details={"errno": "EIO"})
            return super().read(path, start, length)

    storage = BadSector()
    storage.files = run.storage.files
    selected = Generations(storage).select()
    assert selected is not None
    assert selected.publish.name == "g2-a1"
    assert kinds(list(selected.skipped)) == ["unreadable"]


def test_a_damaged_log_is_never_read_round(run: Run) -> None:
    run.flip("log/00000000000000000003.json")
    for ask in (run.generations.list, run.generations.select, run.generations.history):
        with pytest.raises(LogDamaged):
            ask()
