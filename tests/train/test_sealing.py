"""Sealing: what a boundary says is completed behind training, from the snapshot, or not at all."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from test_saving import WAIT_S, ScriptedLine, boundary, save, saver, state

from coherent_ray.commit import manifest as records
from coherent_ray.digests import digest_of
from coherent_ray.state.fingerprint import Fingerprint, fingerprint
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


@pytest.fixture
def line() -> ScriptedLine:
    return ScriptedLine()


def test_a_sealed_boundary_has_receipts_and_fingerprint() -> None:
    now = state()
    begun = boundary(now, receipts=b"two lines\n")
    assert begun.header.receipts is None
    snapshot = Snapshot(begun.header.layout, 0, 1, pinned=False)
    snapshot.take(now.tensors)
    sealed = begun.sealed(snapshot.memory)
    assert sealed.prints == fingerprint(begun.header.layout, now.tensors)
    record = sealed.header.receipts
    assert record is not None
    assert (sealed.receipts, record.digest) == (b"two lines\n", digest_of(b"two lines\n"))
    assert replace(sealed.header, receipts=None) == begun.header
    without = boundary(now).sealed(snapshot.memory)
    assert (without.header.receipts, without.receipts) == (None, b"")


def test_what_is_acknowledged_is_what_was_sealed(line: ScriptedLine) -> None:
    now = state()
    save(saver(line), now=now, receipts=b"two lines\n")
    [word] = line.words
    assert word.header is not None
    assert word.header.receipts is not None
    assert word.header_digest == digest_of(records.dump(word.header))
    assert word.timings is not None
    assert word.timings.hash_s > 0


def test_a_fingerprint_that_cannot_be_completed_is_a_failed_save(line: ScriptedLine) -> None:
    def prints(copy: memoryview) -> Fingerprint:
        raise MemoryError("no room")

    now, storage = state(), MemoryStorage()
    one = saver(line, storage)
    begun = replace(boundary(now, receipts=b"two lines\n"), prints=prints)
    one.begin(now, begun, since=0.0)
    saved = one.settle()
    assert saved is not None
    assert saved.fate.reason == "rank 0 could not save: MemoryError: no room"
    assert (len(line.withdrawn), line.words) == (1, [])
    assert not any(path.startswith("receipts/") for path in storage.files)
    assert save(one, 2).fate.kind == "published"


def test_a_save_that_failed_lets_nobody_read_the_snapshot(line: ScriptedLine) -> None:
    """The next save copies into it."""
    now, gate = state(), threading.Event()
    plain = boundary(now)

    def prints(copy: memoryview) -> Fingerprint:
        assert gate.wait(WAIT_S)
        return plain.prints(copy)

    one = saver(line, FaultyStorage(MemoryStorage(), [Fault("full", verb="open_writer")]))
    one.begin(now, replace(plain, prints=prints), since=0.0)
    assert one._pending is not None
    assert not one._pending.done()
    with pytest.raises(TimeoutError):
        one._pending.result(0.1)
    gate.set()
    assert one._pending.result(WAIT_S).fate.kind == "failed"
    one.close()
