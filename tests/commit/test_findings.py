"""The note of what was scrubbed: what it says, and that nobody has to believe it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from coherent_ray.commit import findings as findings_module
from coherent_ray.commit.findings import (
    PATH,
    Finding,
    finding_from_json,
    finding_of,
    read_findings,
    write_findings,
)
from coherent_ray.errors import ShardDamaged, StorageError
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

NOON = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


def damage(block: int, tensors: int = 1) -> ShardDamaged:
    names = [f"model/{index}" for index in range(tensors)]
    details = {"kind": "block", "rank": 1, "block": block, "tensors": names}
    return ShardDamaged(f"block {block} is bad", where="a/shard", details=details)


def test_what_was_written_is_read() -> None:
    storage = MemoryStorage()
    assert read_findings(storage) == {}
    whole = finding_of("g1-a1", [], NOON)
    bad = finding_of("g2-a1", [damage(3)], NOON)
    write_findings(storage, [whole, bad])
    assert read_findings(storage) == {"g1-a1": whole, "g2-a1": bad}
    assert (whole.whole, bad.whole) == (True, False)
    assert bad.faults[0].facts["block"] == 3
    assert finding_from_json(bad.to_json()) == bad


def test_a_finding_in_words() -> None:
    assert finding_of("g1-a1", [], NOON).words() == "g1-a1 is whole"
    one = finding_of("g1-a1", [damage(3)], NOON)
    assert one.words() == "g1-a1 is damaged: a/shard: block 3 is bad"
    assert finding_of("g1-a1", [damage(3), damage(4)], NOON).words().endswith("; and 1 more fault")


def test_a_generation_of_which_nothing_holds_makes_a_short_note() -> None:
    found = finding_of("g1-a1", [damage(block, tensors=1000) for block in range(5000)], NOON)
    assert (len(found.faults), found.more) == (8, 4992)
    assert len(found.faults[0].facts["tensors"]) == 8
    assert found.words().endswith("; and 4,999 more faults")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'{"format":1}', b'{"format":2,"generations":[]}', b"\xff" * 100,
        b'{"format":1,"generations":[{"at":"x","faults":[],"generation":"g1-a1","more":-1}]}',
    ],
)  # fmt: skip
def test_a_torn_or_foreign_note_says_nothing(data: bytes) -> None:
    storage = MemoryStorage()
    storage.files[PATH] = data
    assert read_findings(storage) == {}


def test_a_huge_note_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    write_findings(storage, [finding_of("g1-a1", [], NOON)])
    monkeypatch.setattr(findings_module, "_BYTES", 10)
    assert read_findings(storage) == {}


def test_a_storage_that_is_away_is_no_empty_note() -> None:
    with pytest.raises(StorageError):
        read_findings(FaultyStorage(MemoryStorage(), [Fault("refuse", verb="read")]))


def test_ages_are_told_by_a_clock_that_may_be_wrong() -> None:
    found = finding_of("g1-a1", [], NOON)
    assert found.age_s(NOON + timedelta(seconds=90)) == 90.0
    assert found.age_s(NOON - timedelta(seconds=1)) is None
    assert Finding("g1-a1", "yesterday", (), 0).age_s(NOON) is None
    assert Finding("g1-a1", "2026-05-04T12:00:00", (), 0).age_s(NOON) is None
