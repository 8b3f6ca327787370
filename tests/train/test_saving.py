"""A rank's saves: what is stored, what is said, and what each fate does to training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import Coordinator, Line
from torch import Tensor

from coherent_ray.commit import manifest as records
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    Acknowledgement,
    DataPosition,
    GenerationHeader,
    Manifest,
    PlanIdentity,
)
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import digest_of
from coherent_ray.errors import ClusterError, Fenced, ReplicaDiverged, SaveFailed
from coherent_ray.state import chunks
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import begin, fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_state
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Crash, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train.receipts import Segment
from coherent_ray.train.saving import Saved, Saver, describe
from coherent_ray.train.sealing import Boundary

PLAN = PlanIdentity(digest_of(b"data"), 100, 7, "feistel-v1", 8, 4, 2)
OPTIONS = Checkpoint(block_bytes=4096, max_failed_saves=2)
WAIT_S = 30


@dataclass
class ScriptedLine:
    """A coordinator that answers as the test says, when the test says."""

    kinds: list[str] = field(default_factory=list)
    """Fates of the next generations; then all are published."""
    words: list[Acknowledgement] = field(default_factory=list)
    withdrawn: list[tuple[int, str]] = field(default_factory=list)
    gate: threading.Event | None = None
    lost: bool = False
    """Whether the coordinator cannot be reached."""

    def acknowledge(self, word: Acknowledgement) -> Fate:
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        if self.lost:
            raise ClusterError("the coordinator is gone")
        self.words.append(word)
        kind: Any = self.kinds.pop(0) if self.kinds else "published"
        reason = "" if kind == "published" else f"because of {kind}"
        return Fate(kind, word.number, word.attempt, reason, details={"why": kind})

    def withdraw(self, number: int, reason: str) -> None:
        if self.lost:
            raise ClusterError("nobody is there")
        self.withdrawn.append((number, reason))


def state(seed: int = 0, **more: Tensor) -> State:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model/weight": torch.randn(700, 3, generator=generator),
        "model/bias": torch.randn(5, generator=generator, dtype=torch.float64),
    }
    return State(tensors | more, {"scheduler": None})


def boundary(
    now: State, number: int = 1, *, rank: int = 0, ranks: int = 1, receipts: bytes = b""
) -> Boundary:
    layout = layout_of(now.tensors)
    segment = None
    if receipts:
        path = f"receipts/{1:012d}-{2:012d}-g{number}-a1.jsonl"
        record = records.ReceiptSegment(path, len(receipts), digest_of(receipts), 1, 2)
        segment = Segment(record, receipts)
    header = GenerationHeader(
        format=1,
        run_id="small",
        number=number,
        attempt=1,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(0, 16, 2),
        plan=PLAN,
        layout=layout,
        values=now.values,
        environment={},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )
    own = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
    prints = begin(layout, now.tensors, copied=own)
    return Boundary(header, prints.finish, lambda state: segment)


def saver(
    line: Any, storage: Storage | None = None, rank: int = 0, *, hook: Any = None, **options: Any
) -> Saver:
    chosen = OPTIONS.model_copy(update=options)
    return Saver(storage or MemoryStorage(), rank, chosen, line, hook)


@pytest.fixture
def line() -> ScriptedLine:
    return ScriptedLine()


def save(one: Saver, number: int = 1, **given: Any) -> Saved:
    """Save one state and return how it went, as the next boundary does."""
    now = given.pop("now", None) or state()
    one.begin(now, boundary(now, number, **given), since=0.0)
    saved = one.settle()
    assert saved is not None
    return saved


# --- what is stored, and what is said -------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_writes_its_part_and_says_so(ranks: int) -> None:
    storage, now, lines = MemoryStorage(), state(), [ScriptedLine() for _ in range(ranks)]
    for rank in range(ranks):
        one = saver(lines[rank], storage, rank)
        saved = save(one, now=now, rank=rank, ranks=ranks)
        assert (saved.name, saved.number, saved.update) == ("g1-a1", 1, 2)
        assert saved.fate.kind == "published"
        assert saved.shard_bytes == lines[rank].words[0].shard.size
        one.close()
    words = [line.words[0] for line in lines]
    header = boundary(now, ranks=ranks).header
    assert [w.header for w in words] == [header] + [None] * (ranks - 1)
    assert {w.header_digest for w in words} == {digest_of(records.dump(header))}
    assert [w.rank for w in words] == list(range(ranks))
    prints = fingerprint(header.layout, now.tensors)
    assert {w.fingerprint for w in words} == {prints.digest}
    assert {w.tensor_fingerprints for w in words} == {prints.tensors}
    found = load_state(storage, Manifest(header, prints.digest, tuple(w.shard for w in words)))
    assert all(torch.equal(found[name], tensor) for name, tensor in now.tensors.items())


def test_what_training_does_next_is_not_in_the_generation(line: ScriptedLine) -> None:
    line.gate, storage, now = threading.Event(), MemoryStorage(), state()
    begun = boundary(now)
    one = saver(line, storage)
    one.begin(now, begun, since=0.0)
    now.tensors["model/weight"].zero_()
    line.gate.set()
    assert one.settle() is not None
    word = line.words[0]
    assert word.fingerprint == fingerprint(begun.header.layout, state().tensors).digest
    manifest = Manifest(begun.header, word.fingerprint, (word.shard,))
    assert torch.equal(
        load_state(storage, manifest)["model/weight"], state().tensors["model/weight"]
    )


def test_state_that_appears_later_is_saved_too(line: ScriptedLine) -> None:
    storage = MemoryStorage()
    one = saver(line, storage)
    save(one, 1)
    more = state(1, **{"optimizer/weight/exp_avg": torch.ones(700, 3)})
    save(one, 2, now=more)
    header = boundary(more, 2).header
    manifest = Manifest(header, digest_of(b""), (line.words[1].shard,))
    found = load_state(storage, manifest)
    assert torch.equal(found["optimizer/weight/exp_avg"], torch.ones(700, 3))
    assert torch.equal(found["model/weight"], more.tensors["model/weight"])


@pytest.mark.parametrize(("rank", "written"), [(0, True), (1, False)])
def test_receipts_are_written_by_rank_0(line: ScriptedLine, rank: int, written: bool) -> None:
    storage = MemoryStorage()
    save(saver(line, storage, rank), rank=rank, ranks=2, receipts=b"two lines\n")
    path = f"receipts/{1:012d}-{2:012d}-g1-a1.jsonl"
    assert (storage.files.get(path) == b"two lines\n") is written


def test_receipts_whose_answer_was_lost_are_not_a_failure(line: ScriptedLine) -> None:
    storage = MemoryStorage()
    storage.create(f"receipts/{1:012d}-{2:012d}-g1-a1.jsonl", b"two lines\n")
    assert save(saver(line, storage), receipts=b"two lines\n").fate.kind == "published"


def test_receipts_that_are_others_are_a_failure(line: ScriptedLine) -> None:
    storage = MemoryStorage()
    storage.create(f"receipts/{1:012d}-{2:012d}-g1-a1.jsonl", b"something else\n")
    saved = save(saver(line, storage), receipts=b"two lines\n")
    assert saved.fate.kind == "failed"
    assert "the receipts are there already, and differ" in saved.fate.reason
    assert line.words == []


def test_a_save_as_json(line: ScriptedLine) -> None:
    line.kinds = ["failed"]
    shown = describe(save(saver(line)))
    assert (shown["name"], shown["update"], shown["fate"]) == ("g1-a1", 2, "failed")
    assert shown["reason"] == "because of failed"
    assert 0 < shown["stall_s"] <= shown["durable_s"]
    assert shown["shard_bytes"] > 700 * 3 * 4


# --- fates ----------------------------------------------------------------------------------------


def test_nothing_in_flight_settles_to_nothing(line: ScriptedLine) -> None:
    one = saver(line)
    assert (one.settle(), one.busy, one.last) == (None, False, None)


def outcomes(one: Saver, count: int) -> Iterator[str]:
    for number in range(1, count + 1):
        yield save(one, number).fate.kind


def test_failures_in_a_row_are_survived_up_to_the_limit(line: ScriptedLine) -> None:
    line.kinds = ["failed", "failed", "published", "failed", "failed", "failed"]
    one = saver(line)
    assert list(outcomes(one, 5)) == ["failed", "failed", "published", "failed", "failed"]
    with pytest.raises(SaveFailed, match="3 saves in a row failed") as caught:
        save(one, 6)
    error = caught.value
    assert type(error) is SaveFailed
    assert "the last one because because of failed" in error.what
    assert error.where == "generation g6-a1"
    assert "what is published is untouched" in error.remedy
    assert error.details == {"why": "failed"}


def test_where_no_failure_is_allowed_the_first_ends_the_run(line: ScriptedLine) -> None:
    line.kinds = ["failed"]
    with pytest.raises(SaveFailed, match="1 saves in a row failed"):
        save(saver(line, max_failed_saves=0))


@pytest.mark.parametrize(("kind", "error"), [("diverged", ReplicaDiverged), ("fenced", Fenced)])
def test_training_must_not_go_on_after_some_fates(
    line: ScriptedLine, kind: str, error: type[Exception]
) -> None:
    line.kinds = [kind]
    one = saver(line, max_failed_saves=100)
    with pytest.raises(error, match=f"because of {kind}"):
        save(one)
    assert not one.busy
    assert one.last is not None
    assert one.last.fate.kind == kind


def test_a_fate_is_looked_at_once(line: ScriptedLine) -> None:
    one = saver(line)
    save(one)
    assert one.settle() is None
    assert one.last is not None


def test_a_save_waits_for_the_one_before(line: ScriptedLine) -> None:
    """There is one snapshot: it is not taken while the last one is still being written."""
    line.gate, now = threading.Event(), state()
    one = saver(line)
    one.begin(now, boundary(now, 1), since=0.0)
    assert one.busy
    settled: list[Saved | None] = []
    waiting = threading.Thread(target=lambda: settled.append(one.settle()))
    waiting.start()
    waiting.join(0.05)
    assert settled == []
    line.gate.set()
    waiting.join(WAIT_S)
    assert [s.name for s in settled if s] == ["g1-a1"]
    assert not one.busy


def test_closing_lets_the_save_in_flight_finish(line: ScriptedLine) -> None:
    line.gate, now = threading.Event(), state()
    one = saver(line)
    one.begin(now, boundary(now), since=0.0)
    threading.Timer(0.05, line.gate.set).start()
    one.close()
    assert [word.number for word in line.words] == [1]
    assert not one._writer._thread.is_alive()


# --- a rank that cannot save ----------------------------------------------------------------------

LOCAL_FAULTS = [
    (Fault("full", verb="open_writer"), "no space left"),
    (Fault("full", verb="write"), "no space left"),
    (Fault("refuse", verb="finish"), "refused"),
    (Fault("lose_answer", verb="finish"), "the answer was lost"),
    (Fault("refuse", verb="create", path="receipts/"), "refused"),
]


@pytest.mark.parametrize(("fault", "words"), LOCAL_FAULTS)
def test_a_rank_that_cannot_write_says_so_to_all(
    line: ScriptedLine, fault: Fault, words: str
) -> None:
    storage = FaultyStorage(MemoryStorage(), [fault])
    saved = save(saver(line, storage), receipts=b"two lines\n")
    assert storage.struck
    assert saved.fate.kind == "failed"
    assert line.words == []
    [(number, reason)] = line.withdrawn
    assert number == 1
    assert reason == saved.fate.reason
    assert reason.startswith("rank 0 could not save: ")
    assert fault.path in reason
    assert "g1-a1" in reason
    assert words in reason


def test_after_a_local_failure_the_next_save_is_whole(line: ScriptedLine) -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("full", verb="write")])
    one = saver(line, storage)
    assert list(outcomes(one, 2)) == ["failed", "published"]
    assert [word.number for word in line.words] == [2]


def test_a_coordinator_that_is_gone_is_a_failed_save(line: ScriptedLine) -> None:
    line.lost = True
    saved = save(saver(line, rank=3), rank=3, ranks=4)
    assert saved.fate.kind == "failed"
    assert saved.fate.reason == (
        "rank 3 could not save: the coordinator is gone "
        "(and the coordinator could not be told: nobody is there)"
    )
    assert saved.shard_bytes > 0


def test_an_unforeseen_exception_is_a_failed_save(line: ScriptedLine) -> None:
    def hook(point: str) -> None:
        if point == "save:acknowledge":
            raise LookupError("in the hook")

    saved = save(saver(line, hook=hook))
    assert saved.fate.reason == "rank 0 could not save: LookupError: in the hook"
    assert len(line.withdrawn) == 1


def test_a_death_is_no_failed_save(line: ScriptedLine) -> None:
    """What kills the process reaches whoever looks, and nobody withdraws in its name."""
    one = saver(line, FaultyStorage(MemoryStorage(), [Fault("crash_before", verb="finish")]))
    with pytest.raises(Crash):
        save(one)
    assert line.withdrawn == []


def test_a_state_that_does_not_fit_is_refused_before_anything_is_in_flight(
    line: ScriptedLine,
) -> None:
    one, now = saver(line), state()
    begun = boundary(now)
    other = State({**now.tensors, "model/bias": torch.zeros(6, dtype=torch.float64)}, {})
    with pytest.raises(Exception, match="model/bias"):
        one.begin(other, begun, since=0.0)
    assert not one.busy


# --- with the real coordinator --------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Coordinator, MemoryStorage]]:
    storage = MemoryStorage()
    alive = Coordinator("small", lambda: storage, ack_timeout_s=WAIT_S)
    assert alive.open_attempt() == 1
    yield alive, storage
    alive.close()


def both(
    alive: Coordinator, storages: Sequence[Storage], states: Sequence[State], number: int = 1
) -> list[Saved]:
    """Let two ranks save at once, and return how it went for each."""
    ranks = len(storages)
    savers = [
        saver(Line(alive, 1, rank), storage, rank, max_failed_saves=5)
        for rank, storage in enumerate(storages)
    ]
    for rank, (one, now) in enumerate(zip(savers, states, strict=True)):
        one.begin(now, boundary(now, number, rank=rank, ranks=ranks), since=0.0)
    results = []
    for one in savers:
        assert one._pending is not None
        results.append(one._pending.result(WAIT_S))
        one.close()
    return results


def test_two_ranks_publish_one_generation(
    coordinator: tuple[Coordinator, MemoryStorage],
) -> None:
    alive, storage = coordinator
    saved = both(alive, [storage, storage], [state(), state()])
    assert [s.fate for s in saved] == [Fate("published", 1, 1, seq=2)] * 2
    [publish] = CommitLog(storage).read().publishes
    manifest = records.load(Manifest, storage.read(publish.manifest))
    found = load_state(storage, manifest)
    assert all(torch.equal(found[name], tensor) for name, tensor in state().tensors.items())


def test_a_rank_that_lost_the_answer_reads_the_fate_in_the_log(
    coordinator: tuple[Coordinator, MemoryStorage],
) -> None:
    """The others know that it is published: a rank that counted a failure would go its own way."""
    alive, storage = coordinator

    class Deaf(Line):
        def acknowledge(self, word: Acknowledgement) -> Fate:
            super().acknowledge(word)
            raise ClusterError("the coordinator is gone")

    saved = save(saver(Deaf(alive, 1, 0), storage))
    assert saved.fate == Fate("published", 1, 1, seq=2)


@pytest.mark.parametrize("broken", [0, 1])
def test_the_failure_of_one_rank_is_every_ranks_at_once(
    coordinator: tuple[Coordinator, MemoryStorage], broken: int
) -> None:
    """No rank waits until the time is over for one that cannot write."""
    alive, storage = coordinator
    storages: list[Storage] = [storage, storage]
    storages[broken] = FaultyStorage(storage, [Fault("full", verb="write")])
    saved = both(alive, storages, [state(), state()])
    assert [s.fate.kind for s in saved] == ["failed", "failed"]
    assert all(f"rank {broken} could not save" in s.fate.reason for s in saved)
    assert CommitLog(storage).read().publishes == ()
    # The same ranks publish the next one.
    again = both(alive, [storage, storage], [state(), state()], number=2)
    assert {s.fate.kind for s in again} == {"published"}


@pytest.mark.parametrize("row", [17, 229, 300, 464, 699])
def test_ranks_that_differ_by_one_bit_learn_it_with_name_and_tensor(
    coordinator: tuple[Coordinator, MemoryStorage], row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own part (from row 230 on), which is read behind training, or in another's."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    alive, storage = coordinator
    other = state()
    other.tensors["model/weight"].view(torch.int32)[row, 1] ^= 1
    saved = both(alive, [storage] * 3, [state(), other, state()])
    assert {s.fate.kind for s in saved} == {"diverged"}
    assert all("rank 1" in s.fate.reason and "model/weight" in s.fate.reason for s in saved)
    assert CommitLog(storage).read().publishes == ()


def test_a_rank_of_an_older_attempt_is_fenced(
    coordinator: tuple[Coordinator, MemoryStorage],
) -> None:
    alive, storage = coordinator
    assert alive.open_attempt() == 2
    one = saver(Line(alive, 1, 0), storage)
    with pytest.raises(Fenced):
        save(one)
    assert CommitLog(storage).read().publishes == ()


def test_a_save_is_in_flight_until_its_fate_is_known(line: ScriptedLine) -> None:
    line.gate = threading.Event()
    one, now = saver(line), state()
    assert not one.in_flight
    one.begin(now, boundary(now), since=0.0)
    assert one.in_flight
    line.gate.set()
    assert one._pending is not None
    one._pending.result(WAIT_S)
    assert (one.in_flight, one.busy) == (False, True)
    one.close()
