"""A storage that does not answer: training waits for it once, the save fails, and all is mended.

Silence is measured on a clock that only a struck call moves: a disk that is slow because others use
it, or a thread that gets no processor, is never taken for one that hangs.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from broken_disk import BrokenDisk, disk
from slow_clock import SlowClock
from test_saving import ScriptedLine, boundary, state

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.manifest import Acknowledgement, Manifest
from coherent_ray.commit.read_back import Reply, Request
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import digest_of
from coherent_ray.drill.saves import Saves
from coherent_ray.errors import SaveFailed
from coherent_ray.state.shards import load_state
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage
from coherent_ray.train.saving import Saved, Saver

__all__ = ["disk"]

SHORT_S = 0.2
WAIT_S = 30.0
OPTIONS = Checkpoint(block_bytes=4096, max_failed_saves=2, storage_timeout_s=SHORT_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SlowClock:
    clock = SlowClock()
    clock.rule(monkeypatch)
    return clock


@pytest.fixture
def gate(disk: BrokenDisk, clock: SlowClock) -> Iterator[threading.Event]:
    """Opens the disk again, on which every call that is struck hangs until then."""
    gate = threading.Event()

    def hang() -> None:
        clock.pass_by(SHORT_S)
        gate.wait(WAIT_S)

    disk.hang = hang
    yield gate
    gate.set()


def wait_until(condition: object, *, seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


# --- one rank -------------------------------------------------------------------------------------


class One:
    """One rank, its line, and its saves by number."""

    def __init__(self, storage: Storage, options: Checkpoint = OPTIONS) -> None:
        self.line = ScriptedLine()
        self.saver = Saver(storage, 0, options, self.line)

    def begin(self, number: int) -> float:
        now = state(number)
        begun = time.monotonic()
        self.saver.begin(now, boundary(now, number), since=begun)
        return time.monotonic() - begun

    def settle(self) -> Saved:
        saved = self.saver.settle()
        assert saved is not None
        return saved

    def acknowledged(self) -> list[int]:
        return [word.number for word in self.line.words]


@pytest.mark.parametrize("call", ["begin", "write", "sync", "link", "sync directory", "close"])
def test_a_save_that_hangs_is_given_up_and_says_where(
    call: str, root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    one = One(LocalStorage(root))
    with disk.breaks(call, "shard"):  # type: ignore[arg-type]
        one.begin(1)
        saved = one.settle()
        assert disk.struck
    assert saved.fate.kind == "failed"
    assert saved.fate.reason.startswith(
        f"rank 0 could not save: {root}/generations/g1-a1/shard-00000-of-00001.safetensors: "
        "no answer from the storage for 0 s while "
    )
    assert one.line.withdrawn == [(1, saved.fate.reason)], "the others do not wait for it"
    gate.set()


def test_a_save_is_not_left_out_for_one_that_has_to_be_given_up(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    """With on_busy: skip a storage that hangs would never be found out."""
    one = One(LocalStorage(root))
    one.line.gate = threading.Event()
    one.begin(1)
    assert one.saver.patient, "the save before goes on, and its storage answers"
    one.line.gate.set()
    assert one.settle().fate.kind == "published"
    assert not one.saver.patient
    with disk.breaks("write", "shard"):
        one.begin(2)
        wait_until(lambda: disk.struck)
        assert one.saver.in_flight
        wait_until(lambda: not one.saver.patient)
    gate.set()


def test_until_the_storage_answers_saves_fail_at_once_and_then_they_work(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    one = One(LocalStorage(root))
    with disk.breaks("write", "shard"):
        one.begin(1)
        assert one.settle().fate.kind == "failed"
        one.saver._options = OPTIONS.model_copy(update={"storage_timeout_s": WAIT_S})
        assert one.begin(2) < WAIT_S / 2, "training does not wait for it again"
        second = one.settle()
    assert second.fate.kind == "failed"
    assert "g1-a1/shard" in second.fate.reason, "what hangs is the call of the save before"
    assert second.durable_s < WAIT_S / 2
    assert [number for number, _ in one.line.withdrawn] == [1, 2]
    gate.set()
    wait_until(lambda: not one.saver._is_stuck())
    one.begin(3)
    assert one.settle().fate.kind == "published"
    assert one.acknowledged() == [3], "a word that was given up is never sent"
    one.saver.close()


def test_a_read_back_that_hangs_is_given_up_though_the_first_word_is_out(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    class Asking(ScriptedLine):
        def acknowledge(self, word: Acknowledgement) -> Reply:  # type: ignore[override]
            self.words.append(word)
            return Request(word.shard)

    one = One(LocalStorage(root))
    one.saver._line = one.line = Asking()
    with disk.breaks("read", "shard"):
        one.begin(1)
        saved = one.settle()
        assert disk.struck
    assert saved.fate.kind == "failed"
    assert "no answer from the storage for 0 s while reading" in saved.fate.reason
    assert one.line.withdrawn == [(1, saved.fate.reason)]
    gate.set()
    wait_until(lambda: not one.saver._is_stuck())
    assert len(one.line.words) == 1, "without the second word nothing is published"
    one.saver.close()


def test_a_snapshot_that_the_stuck_thread_may_read_is_not_overwritten(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    """What comes to lie on the disk at last is the state of its own boundary, if anything does."""
    one = One(LocalStorage(root))
    with disk.breaks("begin", "shard"):
        one.begin(1)
        assert one.settle().fate.kind == "failed"
    one.begin(2)
    assert one.settle().fate.kind == "failed"
    snapshot = one.saver._snapshot
    assert snapshot is not None
    held = bytes(snapshot.memory)
    gate.set()
    wait_until(lambda: not one.saver._is_stuck())
    shard = (root / "generations/g1-a1/shard-00000-of-00001.safetensors").read_bytes()
    assert shard.endswith(held)
    one.begin(3)
    assert one.settle().fate.kind == "published"
    manifest = Manifest(boundary(state(3), 3).header, digest_of(b""), (one.line.words[0].shard,))
    found = load_state(LocalStorage(root), manifest)
    assert all(torch.equal(found[name], tensor) for name, tensor in state(3).tensors.items())


def test_silence_counts_against_the_failures_that_training_survives(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    one = One(LocalStorage(root))
    with disk.breaks("sync", "shard"):
        for number in (1, 2):
            one.begin(number)
            assert one.settle().fate.kind == "failed"
        one.begin(3)
        with pytest.raises(SaveFailed, match="3 saves in a row failed") as caught:
            one.settle()
    assert "no answer from the storage" in caught.value.what
    assert str(root) in caught.value.what


def test_a_slow_save_whose_calls_come_back_is_waited_for(
    root: Path, disk: BrokenDisk, clock: SlowClock
) -> None:
    one = One(LocalStorage(root))
    disk.hang = lambda: clock.pass_by(SHORT_S * 0.9)
    with disk.breaks("write", "shard"):
        one.begin(1)
        assert one.settle().fate.kind == "published"
        assert disk.struck >= 2
    assert clock() > SHORT_S, "together they took longer than any one may"


def test_a_word_that_is_out_is_waited_for_however_long(root: Path, clock: SlowClock) -> None:
    """Its answer is the coordinator's to give, who has time-outs of his own."""
    one = One(LocalStorage(root))
    one.line.gate = threading.Event()
    one.begin(1)
    wait_until(lambda: one.saver._flight is not None and one.saver._flight._speaking)
    with one.saver._storage.attending("reading", "what another asked for"):
        clock.pass_by(SHORT_S * 100)
        threading.Timer(0.3, one.line.gate.set).start()
        assert one.settle().fate.kind == "published"


def test_closing_does_not_wait_for_a_storage_that_hangs(
    root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    one = One(LocalStorage(root))
    with disk.breaks("sync", "shard"):
        one.begin(1)
        closing = threading.Thread(target=one.saver.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert not gate.is_set()


def test_a_process_with_a_stuck_save_can_end(tmp_path: Path) -> None:
    script = """
import os, sys, threading
sys.path[:0] = sys.argv[2:]
os.fsync = lambda file: threading.Event().wait()
from test_stalled_saves import One
from coherent_ray.storage import LocalStorage
one = One(LocalStorage(sys.argv[1]))
one.begin(1)
print(one.settle().fate.kind)
one.saver.close()
"""
    here = Path(__file__).parent
    paths = map(str, (here, here.parent / "commit"))
    command = [sys.executable, "-c", script, str(tmp_path / "run"), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "failed\n"


# --- all ranks, and the coordinator ---------------------------------------------------------------


@pytest.fixture
def saves(root: Path, disk: BrokenDisk) -> Iterator[Saves]:
    """Two ranks that have published g1."""
    saves = Saves(
        lambda: LocalStorage(root), items=3000, options=OPTIONS, storage_timeout_s=SHORT_S
    )
    saves.open()
    assert kinds(saves.save()) == ["published"] * 2
    yield saves
    saves.close()


def kinds(saved: list[Saved]) -> list[str]:
    return [one.fate.kind for one in saved]


@pytest.mark.parametrize(
    ("call", "who"),
    [
        ("write", "shard"), ("sync", "receipts"), ("open", "check"), ("status", "check"),
        ("begin", "manifest"), ("sync directory", "manifest"), ("write", "record"),
        ("link", "record"), ("sync directory", "record"), ("open", "record"),
    ],
)  # fmt: skip
def test_whoever_the_storage_does_not_answer_no_rank_waits_for_ever(
    call: str, who: str, saves: Saves, root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    with disk.breaks(call, who):  # type: ignore[arg-type]
        saved = saves.save()
        assert disk.struck
        again = saves.save()
    assert kinds(saved) == kinds(again) == ["failed"] * 2
    for one in (*saved, *again):
        assert "no answer from the storage for" in one.fate.reason
        assert str(root) in one.fate.reason
    gate.set()
    for saver in saves.savers:
        wait_until(lambda saver=saver: not saver._is_stuck())
    # A record that was on its way comes through now; it is whole, and nothing overtakes it.
    wait_until(lambda: saves.service._attended.silence() is None)
    assert kinds(saves.save()) == ["published"] * 2
    found = Generations(LocalStorage(root)).select("refuse")
    assert found is not None
    assert found.publish.name == "g4-a1"


def test_one_rank_that_hangs_fails_the_save_of_all_and_is_named(
    saves: Saves, root: Path, disk: BrokenDisk, gate: threading.Event
) -> None:
    with disk.breaks("sync", "receipts", errno.EIO):  # rank 0 alone writes them
        saved = saves.save()
    assert kinds(saved) == ["failed"] * 2
    assert all(one.fate.reason.startswith("rank 0 could not save: ") for one in saved)
