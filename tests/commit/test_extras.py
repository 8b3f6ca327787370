"""Extras: what no record leads to is sorted by name and log alone, and nothing of the run is."""

from __future__ import annotations

import pytest
from ranks import Ranks
from test_history import attempt

from coherent_ray.commit.extras import extras
from coherent_ray.commit.log import CommitLog, PublishBody, RetireBody
from coherent_ray.storage.base import Entry
from coherent_ray.storage.testing.memory import MemoryStorage


def body(number: int, attempt_number: int) -> PublishBody:
    group = Ranks(ranks=1, number=number, attempt=attempt_number)
    manifest = f"{group.header.directory}/manifest.json"
    return PublishBody(
        number=number, attempt=attempt_number, update=10 * number, epoch=0, manifest=manifest,
        manifest_size=9, manifest_digest="blake3:" + "0" * 64, receipts=None,
    )  # fmt: skip


@pytest.fixture
def log() -> CommitLog:
    """Attempts 1 and 2; g1-a1 is retired, g2-a1 and g3-a2 live, attempt 2 is open."""
    log = CommitLog(MemoryStorage(), "writer")
    log.append(attempt(1), 1)
    log.append(body(1, 1), 1)
    log.append(body(2, 1), 1)
    log.append(attempt(2), 2)
    log.append(body(3, 2), 2)
    log.append(RetireBody(1, 1), 2)
    return log


@pytest.mark.parametrize(
    ("path", "sort"),
    [
        ("log/00000000000000000006.json", None),
        ("log/00000000000000000007.json", "unknown"),
        ("latest.json", None),
        ("generations/g1-a1/manifest.json", "leftover"),
        ("generations/g1-a1/notes", "foreign"),
        ("generations/g2-a1/manifest.json", None),
        ("generations/g2-a1/notes", None),  # its manifest tells
        ("generations/g3-a1/manifest.json", "leftover"),
        ("generations/g2-a2/manifest.json", "leftover"),
        ("generations/g4-a2/manifest.json", "unpublished"),
        ("generations/g1-a3/manifest.json", "unknown"),
        ("generations/g2-a1", "foreign"),
        ("receipts/000000000001-000000000010-g3-a1.jsonl", "leftover"),
        ("receipts/000000000001-000000000010-g4-a2.jsonl", "unpublished"),
        ("receipts/000000000001-000000000010-g3-a2.jsonl", "unknown"),
        ("timings/g1-a1.json", None),  # as receipts, they outlive what is retired
        ("timings/g3-a2.json", None),
        ("timings/g4-a2.json", "unknown"),
        ("timings/g1-a3.json", "unknown"),
        ("holds/g1-a1-" + "0" * 32 + ".json", None),
        ("datasets/blake3-" + "0" * 64 + ".json", None),
        ("checkpoint_manager_snapshot.json", None),
        ("x", "foreign"),
    ],
)
def test_a_file_is_sorted_by_its_name_and_the_log(
    log: CommitLog, path: str, sort: str | None
) -> None:
    found = [extra.sort for extra in extras([Entry(path, 3)], log.read())]
    assert found == ([sort] if sort else [])


def test_what_a_manifest_does_not_name_is_foreign(log: CommitLog) -> None:
    path = "generations/g2-a1/notes"
    (found,) = extras([Entry(path, 3)], log.read(), {path})
    assert found.sort == "foreign"


def test_without_a_log_everything_of_a_run_is_unknown() -> None:
    history = CommitLog(MemoryStorage(), "writer").read()
    (found,) = extras([Entry("generations/g1-a1/manifest.json", 3)], history)
    assert found.sort == "unknown"
    assert found.damage().where == "generations/g1-a1/manifest.json"
    assert found.damage().details == {"kind": "unknown", "found": 3}
