"""Records: one sequence of bytes for one record, and no byte of it can change unseen."""

import dataclasses
import json

import pytest
from pydantic import ValidationError

from coherent_ray import canonical
from coherent_ray.commit.manifest import LaterFormat, ReceiptSegment
from coherent_ray.commit.records import (
    AttemptBody,
    Body,
    PinBody,
    PublishBody,
    Record,
    RetireBody,
    decode,
    encode,
    kind_of,
)
from coherent_ray.commit.shard_records import Base
from coherent_ray.digests import digest_of
from coherent_ray.storage.testing.faults import flipped

SEGMENT = ReceiptSegment("receipts/a.jsonl", 10, digest_of(b"receipts"), 1, 10)
PUBLISH = PublishBody(
    number=12, attempt=3, update=120, epoch=1, manifest="generations/g12-a3/manifest.json",
    manifest_size=4096, manifest_digest=digest_of(b"manifest"), receipts=SEGMENT,
)  # fmt: skip
BODIES: list[Body] = [
    AttemptBody(attempt=3, run_id="run-1", token="token-1"),
    PUBLISH,
    dataclasses.replace(PUBLISH, receipts=None),
    RetireBody(number=12, attempt=3),
    PinBody(number=12, attempt=3, pinned=True),
    PinBody(number=12, attempt=3, pinned=False),
]


def record(body: Body, seq: int = 7) -> Record:
    previous = digest_of(b"the one before") if seq > 1 else None
    return Record(seq=seq, previous=previous, writer="w1", kind=kind_of(body), body=body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: kind_of(body))
def test_a_record_survives_the_trip(body: Body) -> None:
    one = record(body)
    again = decode(encode(one))
    assert again == one
    assert type(again.body) is type(body)
    assert again.digest == one.digest
    assert encode(again) == encode(one)


def test_the_bytes_are_these() -> None:
    one = record(BODIES[0], seq=1)
    inner = (
        b'{"body":{"attempt":3,"run_id":"run-1","token":"token-1"},"kind":"attempt",'
        b'"previous":null,"seq":1,"writer":"w1"}'
    )
    assert one.digest == digest_of(inner)
    assert encode(one) == (b'{"digest":"%s","format":1,"record":%s}' % (one.digest.encode(), inner))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: kind_of(body))
def test_no_bit_can_change_unseen(body: Body) -> None:
    data = encode(record(body))
    for bit in range(8 * len(data)):
        with pytest.raises(ValueError, match=r"."):
            decode(flipped(data, bit))


def test_no_part_of_a_record_is_a_record() -> None:
    data = encode(record(PUBLISH))
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            decode(data[:length])
    for tail in (b" ", b"\n", b"\0", data):
        with pytest.raises(ValueError, match=r"."):
            decode(data + tail)


def _rewritten(**changes: object) -> bytes:
    """A record with other fields, under its right digest."""
    value = json.loads(encode(record(PUBLISH)))["record"]
    value = {k: v for k, v in {**value, **changes}.items() if v is not ...}
    return canonical.dump({"digest": canonical.digest(value), "format": 1, "record": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": 0}, "seq"),
        ({"seq": "7"}, "seq"),
        ({"seq": 7.0}, "seq"),
        ({"seq": True}, "seq"),
        ({"seq": ...}, "seq"),
        ({"previous": None}, "first record"),
        ({"seq": 1}, "first record"),
        ({"previous": "md5:00"}, "previous"),
        ({"writer": ""}, "writer"),
        ({"kind": "commit"}, "kind"),
        ({"kind": "retire"}, "with the body of"),
        ({"extra": 1}, "extra"),
        ({"body": {"number": 1}}, "body"),
        ({"body": {"number": 1, "attempt": 1, "pinned": 1}}, "body"),
        ({"body": None}, "body"),
    ],
)
def test_a_record_that_says_something_impossible_is_refused(
    changes: dict[str, object], message: str
) -> None:
    assert decode(_rewritten()) == record(PUBLISH)
    with pytest.raises(ValueError, match=message):
        decode(_rewritten(**changes))


def test_another_format_is_named() -> None:
    value = json.loads(encode(record(PUBLISH)))
    with pytest.raises(LaterFormat, match="format 3, this version reads 2"):
        decode(canonical.dump({**value, "format": 3}))


def test_a_publish_that_refers_to_another_generation_is_of_format_2_and_no_other_is() -> None:
    """So that a version that does not know what it refers to deletes nothing of it."""
    refers = dataclasses.replace(PUBLISH, base=Base(1, 1))
    data = encode(record(refers))
    assert json.loads(data)["format"] == 2
    assert decode(data).body == refers
    plain = json.loads(encode(record(PUBLISH)))
    assert plain["format"] == 1
    assert "base" not in plain["record"]["body"]
    for text, other in ((data, 1), (encode(record(PUBLISH)), 2)):
        with pytest.raises(ValueError, match="is not that of such a record"):
            decode(canonical.dump({**json.loads(text), "format": other}))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_json_of_the_same_value_that_is_not_canonical_is_refused() -> None:
    value = json.loads(encode(record(PUBLISH)))
    with pytest.raises(ValueError, match="canonical"):
        decode(json.dumps(value, indent=1, sort_keys=True).encode())


@pytest.mark.parametrize(
    "path", ["generations/g12-a4/manifest.json", "manifest.json", "../x", "/etc/passwd"]
)
def test_a_publish_cannot_point_elsewhere(path: str) -> None:
    with pytest.raises(ValidationError, match="cannot be"):
        dataclasses.replace(PUBLISH, manifest=path)


@pytest.mark.parametrize("token", ["", "a b", "-", "x" * 129, "a\n", "ä"])
def test_tokens_are_plain(token: str) -> None:
    with pytest.raises(ValidationError):
        AttemptBody(attempt=1, run_id="run-1", token=token)


def test_names_are_those_that_users_see() -> None:
    assert {body.name for body in BODIES[1:]} == {"g12-a3"}  # type: ignore[union-attr]
