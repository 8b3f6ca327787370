"""What the ranks' words come to: every disagreement is found and named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ranks import LAYOUT, RUN, Ranks

from coherent_ray.commit.ballot import Acknowledged, Sealed, Staged, Verified
from coherent_ray.commit.events import Key
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import Acknowledgement, Manifest, ReadBack, load
from coherent_ray.digests import digest_of

KEY = Key(attempt=1, number=1)
OTHER = digest_of(b"another state")


def outcome(group: Ranks, changes: dict[int, dict[str, Any]]) -> Acknowledged | Fate:
    """Let every rank speak, some of them otherwise, and decide."""
    staged = Staged(KEY, RUN, group.ranks, since=0.0)
    for rank in range(group.ranks):
        contradiction = staged.add(group.ack(rank, **changes.get(rank, {})))
        if contradiction is not None:
            return contradiction
    assert staged.missing == []
    return staged.decide()


def fingerprint(*odd: int) -> dict[str, Any]:
    """A state of which some tensors, by their place in the layout, are another's."""
    prints = [f"{index:016x}" for index in range(len(LAYOUT.tensors))]
    for index in odd:
        prints[index] = "f" * 16
    return {"fingerprint": OTHER, "tensor_fingerprints": tuple(prints)}


def refused(group: Ranks, changes: dict[int, dict[str, Any]], kind: str) -> Fate:
    fate = outcome(group, changes)
    assert isinstance(fate, Fate)
    assert (fate.kind, fate.number, fate.attempt) == (kind, 1, 1)
    return fate


# --- replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", range(5))
def test_one_rank_that_differs_is_named_with_its_first_tensor(odd: int) -> None:
    fate = refused(Ranks(ranks=5), {odd: fingerprint(1, 2)}, "diverged")
    assert fate.details["ranks"] == [odd]
    assert fate.details["tensor"] == LAYOUT.tensors[1].name
    assert fate.reason.startswith(f"rank {odd} has another state than ranks ")
    assert fate.reason.endswith("the first tensor that differs is 'model/weight'")


def test_the_minority_is_named_even_when_it_holds_rank_0() -> None:
    fate = refused(Ranks(ranks=5), {0: fingerprint(0), 3: fingerprint(0)}, "diverged")
    assert fate.details["ranks"] == [0, 3]
    assert fate.details["groups"] == [[1, 2, 4], [0, 3]]
    assert fate.details["fingerprints"] == [Ranks().ack(1).fingerprint, OTHER]
    assert fate.reason.startswith("ranks 0 and 3 have another state than ranks 1, 2 and 4;")


def test_between_two_ranks_nobody_is_called_the_majority() -> None:
    fate = refused(Ranks(ranks=2), {1: fingerprint(2)}, "diverged")
    assert "and neither is a majority" in fate.reason
    assert fate.details["groups"] == [[0], [1]]


def test_the_first_tensor_is_the_first_of_any_rank() -> None:
    fate = refused(Ranks(ranks=5), {1: fingerprint(2), 4: fingerprint(1)}, "diverged")
    assert fate.details["ranks"] == [1, 4]
    assert fate.details["tensor"] == LAYOUT.tensors[1].name


def test_a_tensor_that_differs_under_one_whole_fingerprint_is_found() -> None:
    changed = fingerprint(1) | {"fingerprint": Ranks().ack(0).fingerprint}
    fate = refused(Ranks(ranks=3), {2: changed}, "diverged")
    assert (fate.details["ranks"], fate.details["tensor"]) == ([2], "model/weight")


def test_a_whole_fingerprint_that_differs_alone_is_found() -> None:
    fate = refused(Ranks(ranks=3), {2: {"fingerprint": OTHER}}, "diverged")
    assert fate.details["tensor"] is None
    assert "no tensor differs" in fate.reason


def test_another_header_is_named() -> None:
    fate = refused(Ranks(ranks=3), {1: {"header_digest": OTHER}}, "diverged")
    assert fate.details["ranks"] == [1]
    assert fate.details["header_digests"] == [Ranks().ack(0).header_digest, OTHER]
    assert "rank 1 has another header than ranks 0 and 2" in fate.reason


def test_state_is_looked_at_before_the_header() -> None:
    """A state that differs makes receipts differ too, and is the cause."""
    fate = refused(Ranks(ranks=3), {1: {"header_digest": OTHER} | fingerprint(0)}, "diverged")
    assert fate.details["tensor"] == "model/bias"


# --- words that make no sense ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "changes", "reason"),
    [
        (0, {"header": None}, "rank 0 acknowledged without the generation's header"),
        (0, {"header_digest": OTHER}, "rank 0's header is not the one whose digest it sent"),
        (1, {"ranks": 4}, "rank 1 says that there are 4 ranks, others say 3"),
        (1, {"rank": 3}, "rank 3 cannot be one of 3 ranks"),
        (1, {"shard": Ranks().shard(2)}, "rank 1 acknowledged rank 2's shard"),
        (2, {"header": Ranks().header}, "rank 2 sent a header; only rank 0 may"),
        (2, {"tensor_fingerprints": ()}, "rank 2 did not send one fingerprint for each of 3"),
    ],
)
def test_a_word_that_makes_no_sense_is_refused(
    rank: int, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refused(Ranks(ranks=3), {rank: changes}, "failed").reason


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ({"run_id": "run-2"}, "run run-2, g1-a1, 3 ranks"),
        ({"number": 2}, "run run-1, g2-a1, 3 ranks"),
        ({"attempt": 2}, "run run-1, g1-a2, 3 ranks"),
        ({"ranks": 4}, "run run-1, g1-a1, 4 ranks"),
    ],
)
def test_a_header_of_something_else_is_refused(wrong: dict[str, Any], seen: str) -> None:
    other = dataclasses.replace(Ranks(), **wrong)
    changes = {rank: {"header_digest": other.ack(0).header_digest} for rank in range(3)}
    changes[0]["header"] = other.header
    assert f"the header describes {seen}" in refused(Ranks(), changes, "failed").reason


def shard_of(rank: int, **changes: Any) -> dict[str, Any]:
    return {"shard": dataclasses.replace(Ranks().shard(rank), **changes)}


def test_two_ranks_that_wrote_one_file_are_refused() -> None:
    same = Ranks().shard(1).path
    assert "the same shard file" in refused(Ranks(), {2: shard_of(2, path=same)}, "failed").reason


def test_a_shard_outside_its_generation_is_refused() -> None:
    elsewhere = Ranks(attempt=2).shard(1).path
    fate = refused(Ranks(), {1: shard_of(1, path=elsewhere)}, "failed")
    assert "lies outside its generation" in fate.reason


def test_shards_that_leave_a_gap_are_refused() -> None:
    shard = Ranks().shard(1)
    shifted = shard_of(1, start=shard.start + 16, stop=shard.stop + 16)
    assert "does not begin where" in refused(Ranks(), {1: shifted}, "failed").reason


# --- stages ---------------------------------------------------------------------------------------


def test_each_stage_has_what_it_has_earned() -> None:
    acknowledged = outcome(Ranks(), {})
    assert isinstance(acknowledged, Acknowledged)
    verified = acknowledged.verified()
    assert isinstance(verified, Verified)
    assert load(Manifest, verified.data) == acknowledged.manifest
    sealed = verified.sealed()
    assert isinstance(sealed, Sealed)
    assert sealed.publish.manifest == verified.path == "generations/g1-a1/manifest.json"
    assert sealed.publish.manifest_digest == digest_of(verified.data)
    checked = acknowledged.checked(0.0)
    assert checked.decide() is None
    for rank in range(3):
        assert not hasattr(checked, "verified"), "only what was read makes it so"
        shard = checked.shard_for(rank)
        checked.read[rank] = ReadBack(shard.rank, shard.digest, ())
    assert checked.decide() == verified
    for stage in (Staged(KEY, RUN, 3, 0.0), acknowledged, checked, verified):
        assert not hasattr(stage, "publish")


def test_a_manifest_s_bytes_do_not_depend_on_the_order_of_words() -> None:
    """So two coordinators of one attempt write the same bytes."""
    seen = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        staged = Staged(KEY, RUN, 3, since=float(order[0]))
        for rank in order:
            staged.add(Ranks().ack(rank))
        decided = staged.decide()
        assert isinstance(decided, Acknowledged)
        seen.add(decided.verified().data)
    assert len(seen) == 1


def test_equal_fingerprints_are_kept_once() -> None:
    """Thousands of ranks times thousands of tensors would not fit otherwise."""
    staged = Staged(KEY, RUN, 3, since=0.0)
    words = [Ranks().ack(rank) for rank in range(3)]
    copies: list[Acknowledgement] = [
        dataclasses.replace(word, tensor_fingerprints=(*word.tensor_fingerprints,))
        for word in words
    ]
    for word in copies:
        staged.add(word)
    assert len({id(vote.tensors) for vote in staged.votes.values()}) == 1
