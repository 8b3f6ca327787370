"""Receipts: exact floats, a chain that nothing slips out of, segments that replace each other."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coherent_ray.commit.history import History
from coherent_ray.commit.manifest import PlanIdentity, ReceiptSegment, manifest_path
from coherent_ray.commit.records import AttemptBody, Body, PublishBody
from coherent_ray.digests import digest_of
from coherent_ray.errors import ReceiptsDamaged
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train.receipts import (
    Receipt,
    ReceiptChain,
    decode,
    encode,
    first_difference,
    first_link,
    history,
)

PLAN = PlanIdentity(
    dataset_hash=digest_of(b"data"),
    examples=1000,
    seed=7,
    order="feistel-v1",
    global_batch=10,
    lanes=4,
    microbatch=2,
)
ROOT = first_link(PLAN)


def grow(chain: ReceiptChain, updates: int, salt: str = "") -> list[Receipt]:
    """Add updates whose facts depend on their number, and on a salt where it is given."""
    result = []
    for _ in range(updates):
        update = chain.update + 1
        result.append(
            chain.append(
                epoch=update // 100,
                start=update % 100 * 10,
                stop=update % 100 * 10 + 10,
                ids=digest_of(f"{update}{salt}".encode()),
                count=640,
                loss=1 / update,
                grad_norm=math.sqrt(update),
                lr=(0.1, 1e-3 / update),
            )
        )
    return result


class Run:
    """A run that publishes receipts without shards or manifests."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.commits = History()
        self.number = 0

    def say(self, body: Body) -> None:
        self.commits = self.commits.extended([self.commits.successor(body, "w")])

    def open(self, chain: ReceiptChain) -> ReceiptChain:
        attempt = self.commits.attempt + 1
        self.say(AttemptBody(attempt, "run", f"t{attempt}"))
        return chain

    def publish(self, chain: ReceiptChain, state: bool = False) -> ReceiptSegment | None:
        self.number += 1
        named = digest_of(str(chain.update).encode()) if state else None
        segment = chain.segment(f"g{self.number}-a{self.commits.attempt}", named)
        if segment:
            self.storage.create(segment.record.path, segment.data)
        where = manifest_path(self.number, self.commits.attempt)
        record = segment.record if segment else None
        digest = digest_of(b"manifest")
        self.say(
            PublishBody(
                self.number, self.commits.attempt, chain.update, 0, where, 1, digest, record
            )
        )
        chain.published(chain.update)
        return record

    def receipts(self, first: str | None = ROOT) -> list[Receipt]:
        return list(history(self.storage, self.commits, first))

    def overwrite(self, path: str, data: bytes) -> None:
        self.storage.delete(path)
        self.storage.create(path, data)


@pytest.fixture
def run() -> Run:
    return Run()


# --- one receipt ----------------------------------------------------------------------------------


@given(
    loss=st.floats(),
    norm=st.floats(),
    rates=st.lists(st.floats(allow_nan=False), max_size=3),
    count=st.integers(0, 2**62),
)
def test_floats_survive_to_the_bit(
    loss: float, norm: float, rates: list[float], count: int
) -> None:
    chain = ReceiptChain(ROOT, 0)
    facts = {"epoch": 0, "start": 0, "stop": 1, "ids": ROOT}
    chain.append(**facts, count=count, loss=loss, grad_norm=norm, lr=rates)
    (receipt,) = decode(encode(chain.pending))
    assert receipt == chain.pending[0]
    for text, value in zip(
        (receipt.loss, receipt.grad_norm, *receipt.lr), (loss, norm, *rates), strict=True
    ):
        assert text == value.hex()
        assert math.copysign(1, float.fromhex(text)) == math.copysign(1, value) or value != value


def test_the_chain_covers_every_fact_but_the_state() -> None:
    (receipt,) = grow(ReceiptChain(ROOT, 0), 1)
    other: dict[str, Any] = {
        "update": 2,
        "epoch": 5,
        "start": 11,
        "stop": 21,
        "ids": ROOT,
        "count": 639,
        "loss": (2.0).hex(),
        "grad_norm": math.inf.hex(),
        "lr": (),
        "skipped": True,
        "previous": digest_of(b"x"),
        "digest": digest_of(b"x"),
    }
    assert {*other, "state"} == set(Receipt.__dataclass_fields__)
    for name, value in other.items():
        assert getattr(receipt, name) != value
        with pytest.raises(ValueError, match="does not hash to its digest"):
            replace(receipt, **{name: value})
    assert replace(receipt, state=ROOT).digest == receipt.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 0.5),
        ("loss", "0.5"),
        ("loss", "0x1p+0"),
        ("lr", ("1e-3",)),
        ("count", -1),
        ("count", 1.0),
        ("update", 0),
        ("ids", "abc"),
        ("skipped", 0),
        ("stop", 0),
    ],
)
def test_impossible_values_are_refused(name: str, value: object) -> None:
    (receipt,) = grow(ReceiptChain(ROOT, 0), 1)
    with pytest.raises(ValueError, match=r"validation error|took no positions"):
        replace(receipt, **{name: value})


def test_the_first_link_is_the_plan_s_and_nothing_else_s() -> None:
    assert first_link(PLAN) == ROOT
    assert first_link(replace(PLAN, seed=8)) != ROOT
    chains = [ReceiptChain(root, 0) for root in (ROOT, ROOT, first_link(replace(PLAN, lanes=5)))]
    tips = [grow(chain, 3)[-1].digest for chain in chains]
    assert tips[0] == tips[1] != tips[2]


# --- the chain and its segments -------------------------------------------------------------------


def test_a_chain_goes_on_where_another_stopped() -> None:
    whole, first = ReceiptChain(ROOT, 0), ReceiptChain(ROOT, 0)
    grow(whole, 10)
    grow(first, 6)
    second = ReceiptChain(first.tip, first.update)
    grow(second, 4)
    assert first.pending + second.pending == whole.pending
    assert (
        (second.tip, second.update) == (whole.tip, whole.update) == (whole.pending[-1].digest, 10)
    )


def test_a_segment_holds_what_is_not_published_yet() -> None:
    chain = ReceiptChain(ROOT, 0)
    assert chain.segment("g1-a1", ROOT) is None
    grow(chain, 3)
    first = chain.segment("g1-a1")
    assert first is not None
    assert first.record.path == "receipts/000000000001-000000000003-g1-a1.jsonl"
    assert (first.record.size, first.record.digest) == (len(first.data), digest_of(first.data))
    # That save failed, or is not known yet: the next segment says it all again.
    grow(chain, 2)
    second = chain.segment("g2-a1")
    assert second is not None
    assert (second.record.first, second.record.last) == (1, 5)
    assert second.data.startswith(first.data)
    chain.published(3)
    third = chain.segment("g3-a1")
    assert third is not None
    assert (third.record.first, third.record.last) == (4, 5)
    assert first.data + third.data == second.data
    chain.published(5)
    assert chain.segment("g4-a1") is None
    assert chain.tip == decode(third.data)[-1].digest


def test_a_segment_names_the_state_of_its_generation_alone() -> None:
    chain = ReceiptChain(ROOT, 0)
    grow(chain, 2)
    plain, noted = chain.segment("g1-a1"), chain.segment("g1-a1", digest_of(b"state"))
    assert plain is not None
    assert noted is not None
    states = [[r.state for r in decode(each.data)] for each in (plain, noted)]
    assert states == [[None, None], [None, digest_of(b"state")]]
    # The links are the same, and if that generation fails, the next one says nothing of it.
    assert [r.digest for r in decode(plain.data)] == [r.digest for r in decode(noted.data)]
    assert chain.segment("g1-a1") == plain
    grow(chain, 1)
    later = chain.segment("g2-a1", digest_of(b"later"))
    assert later is not None
    assert [r.state for r in decode(later.data)] == [None, None, digest_of(b"later")]


# --- lines from outside ---------------------------------------------------------------------------


def lines() -> list[bytes]:
    chain = ReceiptChain(ROOT, 0)
    grow(chain, 4)
    return encode(chain.pending).splitlines(keepends=True)


def test_lines_are_json_that_anyone_can_read() -> None:
    values = [json.loads(line) for line in lines()]
    assert [value["update"] for value in values] == [1, 2, 3, 4]
    assert float.fromhex(values[2]["loss"]) == 1 / 3
    assert decode(b"") == []


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    data = b"".join(lines()[:2])
    ends = {0, len(lines()[0]), len(data)}
    for at, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        with pytest.raises(ValueError, match=r"line|torn|utf|receipt"):
            decode(bytes(changed))
    for cut in set(range(len(data))) - ends:
        with pytest.raises(ValueError, match=r"torn"):
            decode(data[:cut])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 2), "line 2 does not follow"),
        ((0, 1, 1), "line 3 does not follow"),
        ((1, 0), "line 2 does not follow"),
    ],
)
def test_missing_repeated_and_swapped_lines_are_refused(order: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(b"".join(lines()[index] for index in order))


def test_another_spelling_is_refused() -> None:
    line = lines()[0]
    with pytest.raises(ValueError, match="not canonical"):
        decode(line.replace(b":", b": ", 1))
    with pytest.raises(ValueError, match=r"extra|nexpected"):
        decode(line.replace(b"{", b'{"aaa":1,', 1))


# --- history --------------------------------------------------------------------------------------


def test_segments_in_a_row(run: Run) -> None:
    assert run.receipts() == []
    chain = run.open(ReceiptChain(ROOT, 0))
    run.publish(chain)
    expected = []
    for updates in (3, 1, 0, 5):
        expected += grow(chain, updates)
        run.publish(chain)
    assert run.receipts() == run.receipts(None) == expected


def test_a_resume_that_fell_back_replaces_what_came_after(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    kept = grow(chain, 3)
    run.publish(chain)
    tip = chain.tip
    grow(chain, 3)
    run.publish(chain)
    grow(chain, 3)
    run.publish(chain)
    chain = run.open(ReceiptChain(tip, 3))
    kept += grow(chain, 4, "other")
    assert len(run.receipts()) == 9
    run.publish(chain)
    assert run.receipts() == kept
    # Inside a segment, too: a save whose fate was not known when the next one was made.
    chain = run.open(ReceiptChain(kept[4].digest, 5))
    kept = kept[:5] + grow(chain, 1, "third")
    run.publish(chain)
    assert run.receipts() == kept


def test_a_generation_without_receipts_ends_what_went_beyond_it(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    first = grow(chain, 3)
    run.publish(chain)
    tip = chain.tip
    grow(chain, 3)
    run.publish(chain)
    run.publish(run.open(ReceiptChain(tip, 3)))
    assert run.receipts() == first
    run.publish(run.open(ReceiptChain(ROOT, 0)))
    assert run.receipts() == []


def test_states_are_found_again(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    for _ in range(3):
        grow(chain, 2)
        run.publish(chain, state=True)
    states = {receipt.update: receipt.state for receipt in run.receipts()}
    assert states == {u: digest_of(str(u).encode()) if u % 2 == 0 else None for u in range(1, 7)}


def three_segments(run: Run) -> list[ReceiptSegment]:
    chain = run.open(ReceiptChain(ROOT, 0))
    result = []
    for _ in range(3):
        grow(chain, 2)
        segment = run.publish(chain)
        assert segment is not None
        result.append(segment)
    return result


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: None, "missing"),
        (lambda data: data[:-1], "bytes, published were"),
        (lambda data: data + b"\n", "bytes, published were"),
        (lambda data: data.replace(b"640", b"641"), "does not hash"),
    ],
)
def test_damage_is_named_and_what_is_before_it_can_be_read(
    run: Run, damage: Any, message: str
) -> None:
    segment = three_segments(run)[1]
    changed = damage(run.storage.read(segment.path))
    run.storage.delete(segment.path)
    if changed is not None:
        run.storage.create(segment.path, changed)
    reader, read = history(run.storage, run.commits, ROOT), []
    with pytest.raises(ReceiptsDamaged, match=message) as caught:
        read.extend(receipt.update for receipt in reader)
    assert caught.value.where == segment.path
    assert caught.value.details == {
        "path": segment.path,
        "first": 3,
        "last": 4,
        "readable_until": 2,
    }
    assert [
        receipt.update for receipt in itertools.islice(history(run.storage, run.commits), 2)
    ] == [
        1,
        2,
    ]


def test_a_history_of_another_plan_is_refused(run: Run) -> None:
    three_segments(run)
    with pytest.raises(ReceiptsDamaged, match="update 1 does not follow update 0"):
        run.receipts(first_link(replace(PLAN, seed=8)))


def test_segments_that_do_not_meet_are_refused(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    grow(chain, 2)
    run.publish(chain)
    foreign = ReceiptChain(ROOT, 0)
    grow(foreign, 2, "other")
    foreign.published(2)
    grow(foreign, 2)
    run.publish(foreign)
    with pytest.raises(ReceiptsDamaged, match="update 3 does not follow update 2"):
        run.receipts()


def test_a_gap_is_refused(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    grow(chain, 2)
    chain.published(1)
    run.publish(chain)
    with pytest.raises(ReceiptsDamaged, match="update 2 does not follow update 0"):
        run.receipts(None)


def test_a_segment_must_hold_the_updates_that_it_names(run: Run) -> None:
    chain = run.open(ReceiptChain(ROOT, 0))
    grow(chain, 3)
    whole = chain.segment("g1-a1")
    assert whole is not None
    run.storage.create(whole.record.path, whole.data)
    where, digest = manifest_path(1, 1), digest_of(b"")
    run.say(PublishBody(1, 1, 2, 0, where, 1, digest, replace(whole.record, last=2)))
    with pytest.raises(ReceiptsDamaged, match="does not hold updates 1 to 2"):
        run.receipts()
    run.overwrite(whole.record.path, b"x" * (len(whole.data) - 1) + b"\n")
    with pytest.raises(ReceiptsDamaged, match="does not hash"):
        run.receipts()


# --- differences ----------------------------------------------------------------------------------


def test_equal_histories_have_no_difference() -> None:
    first, second = ReceiptChain(ROOT, 0), ReceiptChain(ROOT, 0)
    grow(first, 3)
    grow(second, 3)
    named = [*second.pending[:-1], replace(second.pending[-1], state=ROOT)]
    assert first_difference(first.pending, named) is None
    assert first_difference([], []) is None


def test_the_cause_is_named_rather_than_the_link() -> None:
    first, second = ReceiptChain(ROOT, 0), ReceiptChain(ROOT, 0)
    grow(first, 4)
    grow(second, 2)
    grow(second, 2, "other")
    found = first_difference(first.pending, second.pending)
    assert found is not None
    assert (found.update, found.field) == (3, "ids")
    assert (found.first, found.second) == (first.pending[2].ids, second.pending[2].ids)


def test_other_differences() -> None:
    first = ReceiptChain(ROOT, 0)
    grow(first, 2)
    short = first_difference(first.pending, first.pending[:1])
    assert short is not None
    assert (short.update, short.field, short.first, short.second) == (2, "update", 2, None)
    other = ReceiptChain(first_link(replace(PLAN, seed=8)), 0)
    grow(other, 2)
    link = first_difference(first.pending, other.pending)
    assert link is not None
    assert (link.update, link.field) == (1, "previous")
    states = [[replace(r, state=digest_of(s)) for r in first.pending] for s in (b"a", b"b")]
    state = first_difference(*states)
    assert state is not None
    assert (state.update, state.field) == (1, "state")
