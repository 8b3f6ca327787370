"""Documents from outside that mean harm: each is refused by its own error, at once and cheaply."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from ranks import Ranks

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import History
from coherent_ray.commit.holds import HOLD_BYTES, HoldRecord, Watch
from coherent_ray.commit.inventory import generation_of, item_of
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.manifest import (
    MANIFEST_BYTES,
    LaterFormat,
    Manifest,
    ReceiptSegment,
    TensorSpec,
    dump,
    load,
)
from coherent_ray.commit.records import (
    RECORD_BYTES,
    AttemptBody,
    PublishBody,
    decode,
    encode,
)
from coherent_ray.commit.references import names_generation, parse_reference
from coherent_ray.digests import digest_of
from coherent_ray.errors import LogDamaged, ManifestDamaged, NewerFormat, NewerLog
from coherent_ray.storage.address import parse_address
from coherent_ray.storage.testing.memory import MemoryStorage

GROUP = Ranks(ranks=2)
MANIFEST = Manifest(GROUP.header, digest_of(b"state"), (GROUP.shard(0), GROUP.shard(1)))
DEEP = b"[" * 1_000_000

NOT_JSON = {
    "deep": DEEP + b"]" * 1_000_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "not a double": b'{"a":1e400}',
    "not a double either": b"[-1e999]",
    "digits": b'{"a":' + b"9" * 100_000 + b"}",
    "NaN": b"[NaN]",
    "infinity": b"[-Infinity]",
    "not UTF-8": b'["\xff"]',
    "byte order mark": b"\xef\xbb\xbf[]",
    "key twice": b'{"a":1,"a":1}',
    "key twice, of many": b"{" + b"".join(b'"%d":0,' % i for i in range(30_000)) + b'"29999":0}',
    "torn": b'{"a":',
    "nothing": b"",
}


class Watched(MemoryStorage):
    """Remembers the most bytes that one read has returned."""

    most = 0

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, start, length)
        self.most = max(self.most, len(data))
        return data


def published(manifest: bytes, **changes: Any) -> tuple[Watched, PublishBody]:
    """A log whose publish names these bytes by their right digest."""
    storage = Watched()
    GROUP.write(storage)
    facts: dict[str, Any] = {
        "number": 1, "attempt": 1, "update": 10, "epoch": 0,
        "manifest": "generations/g1-a1/manifest.json",
        "manifest_size": len(manifest) or 1, "manifest_digest": digest_of(manifest),
        "receipts": None,
    }  # fmt: skip
    body = PublishBody(**(facts | changes))
    history = History()
    for said in (AttemptBody(1, "run-1", "t"), body):
        record = history.successor(said, "w")
        storage.create(record_path(record.seq), encode(record))
        history = history.extended([record])
    storage.create(body.manifest, manifest)
    return storage, body


def edited(change: Any) -> bytes:
    value = json.loads(dump(MANIFEST))
    change(value)
    return canonical.dump(value)


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_no_canonical_json_is_refused_by_every_reader(data: bytes) -> None:
    for read in (
        canonical.load,
        decode,
        lambda d: load(Manifest, d),
        lambda d: load(HoldRecord, d),
    ):
        with pytest.raises(ValueError, match=r"^(?s:.{1,600})$"):
            read(data)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1], -1, 0])
def test_a_format_that_only_looks_like_one_is_refused(wrong: Any) -> None:
    record = json.loads(encode(History().successor(AttemptBody(1, "run-1", "t"), "w")))
    with pytest.raises(ValueError, match="format") as caught:
        decode(canonical.dump(record | {"format": wrong}))
    assert not isinstance(caught.value, LaterFormat)
    with pytest.raises(ValueError, match="format"):
        load(Manifest, edited(lambda m: m["header"].update(format=wrong)))


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(ValueError, match="JSON"):
        load(Manifest, edited(lambda m: m["header"]["environment"].update(a="\ud800")))


def test_a_message_shows_what_is_from_outside_escaped_and_short() -> None:
    with pytest.raises(ValueError, match="duplicate") as caught:
        canonical.load(
            b'{"\x1b\x1b":1}'.replace(b"\x1b", b"\\u001b")[:-1] + b',"\\u001b\\u001b":2}'
        )
    assert "\x1b" not in str(caught.value)


# --- a later format -------------------------------------------------------------------------------


def test_a_record_of_a_later_format_is_told_from_a_damaged_one() -> None:
    storage, _ = published(dump(MANIFEST))
    path = record_path(2)
    value = json.loads(storage.files[path])
    storage.files[path] = canonical.dump(value | {"format": 3, "unknown": "of then"})
    with pytest.raises(NewerLog, match="format 3") as caught:
        CommitLog(storage).read()
    assert isinstance(caught.value, LogDamaged)
    assert "version" in caught.value.remedy
    assert caught.value.details["readable_until"] == 1


def test_a_manifest_of_a_later_format_is_no_damage_that_one_falls_back_from() -> None:
    data = edited(lambda m: m["header"].update(format=5, unknown=1))
    storage, _ = published(data)
    with pytest.raises(NewerFormat, match="format 5"):
        Generations(storage).select("fall_back")


# --- sizes ----------------------------------------------------------------------------------------


def test_a_record_that_is_too_long_is_not_read() -> None:
    storage, _ = published(dump(MANIFEST))
    storage.files[record_path(2)] += b" " * 10_000_000
    with pytest.raises(LogDamaged, match="more than"):
        CommitLog(storage).read()
    assert storage.most <= RECORD_BYTES + 1


def test_a_manifest_that_is_longer_than_published_is_not_read() -> None:
    storage, body = published(dump(MANIFEST))
    storage.files[body.manifest] += b" " * 10_000_000
    with pytest.raises(ManifestDamaged) as caught:
        Generations(storage).manifest(body)
    assert caught.value.details["kind"] == "size"
    assert storage.most <= body.manifest_size + 1


def test_a_publish_that_promises_a_huge_manifest_is_not_believed() -> None:
    class Endless(Watched):
        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            if path.endswith("manifest.json"):
                assert length is not None
                assert length <= MANIFEST_BYTES + 1
                return memoryview(bytes(1)).cast("B").tobytes() * length
            return super().read(path, start, length)

    made, body = published(dump(MANIFEST), manifest_size=2**62)
    storage = Endless()
    storage.files = made.files
    with pytest.raises(ManifestDamaged, match="no manifest has"):
        Generations(storage).manifest(body)


def test_a_hold_that_is_too_long_holds_and_is_not_read() -> None:
    storage = Watched()
    storage.create(f"holds/g1-a1-{0:032x}.json", bytes(10_000_000))
    (held,) = Watch(storage).look()
    assert held.expires_in_s == float("inf")
    assert storage.most <= HOLD_BYTES + 1


def test_a_hold_cannot_change_the_terminal_that_shows_it() -> None:
    with pytest.raises(ValueError, match="pattern"):
        HoldRecord(1, 1, 1, "\x1b[2J", 1.0, 0)


# --- manifests ------------------------------------------------------------------------------------

SIZE = GROUP.shard(0).size
LIES = {
    "goes up": lambda m: m["shards"][0].update(path="generations/g1-a1/../../../etc/passwd"),
    "absolute": lambda m: m["shards"][0].update(path="/etc/passwd"),
    "nul": lambda m: m["shards"][0].update(path="generations/g1-a1/a\0"),
    "backslash": lambda m: m["shards"][0].update(path="generations\\g1-a1\\a"),
    "empty part": lambda m: m["shards"][0].update(path=m["shards"][0]["path"].replace("/", "//")),
    "case": lambda m: m["shards"][0].update(path=m["shards"][0]["path"].upper()),
    "long": lambda m: m["shards"][0].update(path="generations/g1-a1/" + "a" * 100_000),
    "one file twice": lambda m: m["shards"][1].update(path=m["shards"][0]["path"]),
    "another generation's": lambda m: m["shards"][0].update(
        path=m["shards"][0]["path"].replace("g1-a1", "g1-a2")
    ),
    "gap": lambda m: m["shards"][1].update(
        start=m["shards"][1]["start"] + 1, size=m["shards"][1]["size"] - 1
    ),
    "overlap": lambda m: m["shards"][1].update(
        start=m["shards"][1]["start"] - 1, size=m["shards"][1]["size"] + 1
    ),
    "backwards": lambda m: m["shards"][0].update(stop=-1),
    "negative size": lambda m: m["shards"][0].update(size=-1),
    "64 bits": lambda m: m["shards"][0].update(size=2**64),
    "bool as int": lambda m: m["shards"][0].update(rank=False),
    "float as int": lambda m: m["shards"][0].update(size=float(SIZE)),
    "block is no hex": lambda m: m["shards"][0]["blocks"].__setitem__(0, "g" * 32),
    "block is short": lambda m: m["shards"][0]["blocks"].__setitem__(0, "0" * 31),
    "block is of another algorithm": lambda m: m["shards"][0]["blocks"].__setitem__(0, "0" * 64),
    "digest of another algorithm": lambda m: m["shards"][0].update(digest="blake3:" + "0" * 64),
    "few blocks": lambda m: m["shards"][0]["blocks"].pop(),
    "unknown key": lambda m: m.update(more=1),
    "more ranks than shards": lambda m: m["header"].update(ranks=2**62),
    "shape overflows": lambda m: m["header"]["layout"]["tensors"][0].update(shape=[2**62, 2**62]),
    "layout overflows": lambda m: [
        t.update(shape=[2**60]) for t in m["header"]["layout"]["tensors"]
    ],
    "dimensions": lambda m: m["header"]["layout"]["tensors"][0].update(shape=[2**62] * 100_000),
    "negative shape": lambda m: m["header"]["layout"]["tensors"][0].update(shape=[-1]),
    "dtype": lambda m: m["header"]["layout"]["tensors"][0].update(dtype="F1"),
    "name twice": lambda m: m["header"]["layout"]["tensors"].append(
        m["header"]["layout"]["tensors"][-1]
    ),
    "a shard's own name": lambda m: m["header"]["layout"]["tensors"][0].update(name="__metadata__"),
    "a part's name": lambda m: m["header"]["layout"]["tensors"][0].update(name="a[0:1]"),
    "receipts elsewhere": lambda m: m["header"]["receipts"].update(path="../receipts.jsonl"),
    "receipts backwards": lambda m: m["header"]["receipts"].update(first=11),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_manifest_that_lies_under_its_right_digest_is_damage(lie: Any) -> None:
    data = edited(lie)
    with pytest.raises(ValueError, match=r"^(?s:.{1,600})$"):
        load(Manifest, data)
    storage, body = published(data)
    with pytest.raises(ManifestDamaged) as caught:
        Generations(storage).manifest(body)
    assert caught.value.details["kind"] == "content"
    assert caught.value.where == body.manifest
    assert caught.value.remedy


def test_the_manifest_of_these_tests_is_whole() -> None:
    assert load(Manifest, edited(lambda m: None)) == MANIFEST
    storage, body = published(dump(MANIFEST))
    assert Generations(storage).verify(body) == []


def test_a_segment_lies_under_receipts() -> None:
    good = dataclasses.asdict(GROUP.header.receipts)  # type: ignore[call-overload]
    for path in (
        "../a.jsonl",
        "receipts/../log/a.jsonl",
        "receipts/a\n.jsonl",
        "receipts//a.jsonl",
    ):
        with pytest.raises(ValueError, match="path"):
            ReceiptSegment(**(good | {"path": path}))


def test_an_ordinary_name_with_brackets_is_a_tensors() -> None:
    assert TensorSpec("blocks[3].weight", "F32", (1,)).nbytes == 4


# --- names that a user or a directory gives -------------------------------------------------------


def test_a_name_ends_where_it_ends() -> None:
    assert not names_generation("g12\n")
    assert parse_reference("run@g12\n").number is None
    assert parse_address("s3://bucket/a").bucket == "bucket"


@pytest.mark.parametrize("name", ["٣" * 20, f"{1:020d}.json\n", "0" * 21])
def test_a_name_that_is_almost_a_records_is_foreign(name: str) -> None:
    storage, _ = published(dump(MANIFEST))
    storage.files[f"log/{name}" if name.endswith("\n") else f"log/{name}.json"] = b"{}"
    assert CommitLog(storage).read().seq == 2


def test_a_name_with_a_number_that_no_generation_has_is_foreign() -> None:
    for digits in (20, 5_000):
        assert item_of(f"generations/g{'9' * digits}-a1/manifest.json") is None
        assert generation_of(f"g1-a{'9' * digits}") is None
    assert generation_of(f"g{2**63 - 1}-a1") == (2**63 - 1, 1)
