"""The judge: one error names the rank that does not agree, both values, and what to do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from coherent_ray.commit.manifest import DataPosition, PlanIdentity
from coherent_ray.data.plan import Plan
from coherent_ray.digests import digest_of
from coherent_ray.errors import (
    AdmissionRefused,
    ClaimRefused,
    CoherentRayError,
    DataError,
    ShardDamaged,
    StateMismatch,
    TrainingFailed,
)
from coherent_ray.train.admission import Expected, Ticket, damaged_for_some, judge

IDENTITY = PlanIdentity(digest_of(b"data"), 1000, 7, "feistel-v1", 32, 8, 4)
POSITION = DataPosition(epoch=0, position=320, update=10)
EXPECTED = Expected("run-1", 3, 3)


def ticket(at: int, of: int = 3, **changes: Any) -> Ticket:
    """What a rank that agrees hands in; `changes` make it say something else."""
    words: dict[str, Any] = {
        "rank": at,
        "ranks": of,
        "node": f"10.0.0.{at}",
        "run_id": "run-1",
        "attempt": 3,
        "generation": "g5-a2",
        "manifest_digest": "blake3:aa",
        "dataset_hash": IDENTITY.dataset_hash,
        "sampler_digest": Plan(IDENTITY).sampler_digest(POSITION, at, of),
        "state_spec": "blake3:bb",
        "environment": {"torch": "2.13.0", "threads": "1"},
        "next_number": 6,
        "position": POSITION,
        "plan": IDENTITY,
    }
    return Ticket(**(words | changes))


def group(changes: dict[int, dict[str, Any]] | None = None, ranks: int = 3) -> list[Ticket]:
    """All ranks' tickets; some say something else."""
    return [ticket(rank, ranks, **(changes or {}).get(rank, {})) for rank in range(ranks)]


def refusal(tickets: list[Ticket], *, same_environment: bool = True) -> AdmissionRefused:
    with pytest.raises(AdmissionRefused) as caught:
        judge(tickets, EXPECTED, same_environment=same_environment)
    return caught.value


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_that_agree_are_admitted(ranks: int) -> None:
    judge(group(ranks=ranks), Expected("run-1", 3, ranks), same_environment=True)


def test_a_new_run_has_no_generation_yet() -> None:
    beginning = DataPosition(0, 0, 0)
    fresh = [
        ticket(
            rank,
            generation=None,
            manifest_digest=None,
            position=beginning,
            next_number=1,
            sampler_digest=Plan(IDENTITY).sampler_digest(beginning, rank, 3),
        )
        for rank in range(3)
    ]
    judge(fresh, EXPECTED, same_environment=True)


OTHER_PLAN = replace(IDENTITY, seed=8)
DISAGREEMENTS = [
    ("run id", {"run_id": "run-2"}, "run-2", "the coordinator has run-1"),
    ("run id", {"run_id": None}, "None", "the coordinator has run-1"),
    ("attempt", {"attempt": 2}, "2", "the coordinator has 3"),
    ("attempt", {"attempt": 4}, "4", "the coordinator has 3"),
    ("rank count", {"ranks": 4}, "4", "the coordinator has 3"),
    ("rank", {"rank": 3}, "3", "every rank from 0 on must be there once"),
    ("generation", {"generation": "g6-a2"}, "g6-a2", "ranks 0 and 2 have g5-a2"),
    ("generation", {"generation": None}, "none", "ranks 0 and 2 have g5-a2"),
    ("manifest", {"manifest_digest": "blake3:cc"}, "blake3:cc", "have blake3:aa"),
    ("next generation", {"next_number": 7}, "7", "ranks 0 and 2 have 6"),
    ("dataset", {"dataset_hash": "blake3:dd"}, "blake3:dd", f"have {IDENTITY.dataset_hash}"),
    ("data position", {"position": DataPosition(0, 288, 9)}, "update=9", "update=10"),
    ("data position", {"plan": OTHER_PLAN}, "seed=8", "seed=7"),
    ("data position", {"position": None}, "None", "update=10"),
    ("sampler", {"sampler_digest": "blake3:ee"}, "blake3:ee", "the controller derives blake3:"),
    ("sampler", {"sampler_digest": ""}, "it has ,", "the controller derives blake3:"),
    ("model", {"state_spec": "blake3:ff"}, "blake3:ff", "ranks 0 and 2 have blake3:bb"),
    ("model", {"state_spec": ""}, "it has none", "ranks 0 and 2 have blake3:bb"),
    (
        "environment",
        {"environment": {"torch": "2.13.0", "threads": "4"}},
        "threads=4",
        "ranks 0 and 2 have threads=1",
    ),
    (
        "initial weights",
        {"origin": {"init_from.digest": '"blake3:aa"'}},
        'init_from.digest="blake3:aa"',
        "ranks 0 and 2 have init_from.digest=absent",
    ),
    ("code", {"code": {"task": "blake3:cc"}}, "task=blake3:cc", "ranks 0 and 2 have task=absent"),
    (
        "environment",
        {"environment": {"torch": "2.13.0"}},
        "threads=absent",
        "ranks 0 and 2 have threads=1",
    ),
    (
        "environment",
        {"environment": {"torch": "2.13.0", "threads": "1", "env:MKL_CBWR": "AVX2"}},
        "env:MKL_CBWR=AVX2",
        "ranks 0 and 2 have env:MKL_CBWR=absent",
    ),
]


@pytest.mark.parametrize(("what", "change", "value", "other"), DISAGREEMENTS)
def test_a_disagreement_names_the_rank_and_both_values(
    what: str, change: dict[str, Any], value: str, other: str
) -> None:
    error = refusal(group({1: change}))
    rank = change.get("rank", 1)
    assert type(error) is AdmissionRefused
    assert error.what.startswith(f"rank {rank} does not agree on the {what}: ")
    assert value in error.what
    assert other in error.what
    assert error.where == f"rank {rank} on 10.0.0.1"
    assert error.remedy
    assert (error.details["rank"], error.details["what"]) == (rank, what)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.details) == (str(error), error.details)


def test_every_field_of_a_ticket_is_compared() -> None:
    told = {"node", "node_id", "notes", "refusal", "damaged"}
    changed = {name for _, change, _, _ in DISAGREEMENTS for name in change}
    assert changed == set(Ticket.__dataclass_fields__) - told


def test_damage_that_some_ranks_found_is_told_to_the_others() -> None:
    older = {"generation": "g4-a2", "damaged": ("g5-a2",)}
    assert damaged_for_some(group({1: older})) == ("g5-a2",)
    lone = {"generation": "g3-a1", "damaged": ("g4-a2", "g5-a2")}
    assert damaged_for_some(group({1: older, 2: lone})) == ("g4-a2", "g5-a2")


def test_damage_is_no_reason_to_ask_again_where_all_go_on_from_one_generation() -> None:
    older = {"generation": "g4-a2", "damaged": ("g5-a2",)}
    assert damaged_for_some(group(dict.fromkeys(range(3), older))) == ()
    assert damaged_for_some(group({1: {"generation": "g4-a2"}})) == ()
    assert damaged_for_some(group({0: older, 2: {"refusal": AdmissionRefused("no")}})) == ()


def test_two_processes_that_are_the_same_rank_are_refused() -> None:
    tickets = [ticket(0), ticket(1), ticket(1)]
    assert refusal(tickets).details == {"rank": 1, "what": "rank", "value": "1"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_odd_one_is_named_whoever_it_is(rank: int) -> None:
    error = refusal(group({rank: {"dataset_hash": "blake3:dd"}}))
    assert error.details["rank"] == rank


def test_in_a_tie_the_side_of_rank_0_is_believed() -> None:
    tickets = group({1: {"generation": "g4-a2"}}, ranks=2)
    with pytest.raises(AdmissionRefused) as caught:
        judge(tickets, Expected("run-1", 3, 2), same_environment=True)
    assert caught.value.details["rank"] == 1
    assert "rank 0 has g5-a2" in caught.value.what


def test_what_is_decided_by_the_log_is_named_before_what_follows_from_it() -> None:
    old_view = {
        "generation": "g4-a2",
        "manifest_digest": "blake3:cc",
        "next_number": 5,
        "position": DataPosition(0, 288, 9),
        "sampler_digest": "blake3:ee",
    }
    assert refusal(group({2: old_view})).details["what"] == "generation"
    assert refusal(group({2: {**old_view, "attempt": 2}})).details["what"] == "attempt"


def test_a_sampler_that_all_ranks_derive_wrongly_alike_is_still_refused() -> None:
    tickets = [replace(t, sampler_digest="blake3:same") for t in group()]
    error = refusal(tickets)
    assert (error.details["what"], error.details["rank"]) == ("sampler", 0)


def test_a_sampler_of_another_rank_is_refused() -> None:
    tickets = group()
    tickets[2] = replace(tickets[2], sampler_digest=tickets[1].sampler_digest)
    details = refusal(tickets).details
    assert details == {"rank": 2, "what": "sampler", "value": tickets[1].sampler_digest}


def test_a_position_that_the_plan_never_passes_is_refused_not_raised() -> None:
    between = DataPosition(0, 5, 10)
    tickets = [replace(t, position=between) for t in group()]
    error = refusal(tickets)
    assert "position 5" in error.what


def test_without_a_position_nobody_is_admitted() -> None:
    tickets = [replace(t, position=None) for t in group()]
    assert refusal(tickets).details["what"] == "data position"


def test_environments_may_differ_where_the_claim_allows_it() -> None:
    tickets = group({1: {"environment": {"torch": "2.12.0"}}})
    judge(tickets, EXPECTED, same_environment=False)
    assert "torch=2.12.0" in refusal(tickets).what or "threads" in refusal(tickets).what


# --- ranks that refuse by themselves --------------------------------------------------------------


def refused(rank: int, error: CoherentRayError) -> Ticket:
    return Ticket(rank, 3, f"10.0.0.{rank}", refusal=error)


def test_the_refusal_of_one_rank_keeps_its_type_and_its_words() -> None:
    damage = ShardDamaged("block 3 is wrong", where="shard-1", remedy="copy", details={"block": 3})
    tickets = [ticket(0), refused(1, damage), ticket(2)]
    with pytest.raises(ShardDamaged) as caught:
        judge(tickets, EXPECTED, same_environment=True)
    error = caught.value
    assert error.what == "rank 1 (on 10.0.0.1) refused to start: block 3 is wrong"
    assert (error.where, error.remedy) == ("shard-1", "copy")
    assert error.details == {"block": 3, "ranks": [1]}


@pytest.mark.parametrize(
    "kind", [AdmissionRefused, ClaimRefused, StateMismatch, DataError, TrainingFailed]
)
def test_what_every_rank_refuses_is_said_once(kind: type[CoherentRayError]) -> None:
    tickets = [refused(rank, kind("no", where="run.claim", remedy="yes")) for rank in range(3)]
    with pytest.raises(kind) as caught:
        judge(tickets, EXPECTED, same_environment=True)
    assert type(caught.value) is kind
    assert caught.value.what == "every rank refused to start: no"
    assert caught.value.where == "run.claim"
    assert caught.value.exit_code == kind.exit_code


def test_two_reasons_are_not_mixed() -> None:
    one, other = DataError("gone", where="a.parquet"), DataError("gone", where="b.parquet")
    tickets = [refused(0, one), refused(1, other), refused(2, one)]
    with pytest.raises(DataError) as caught:
        judge(tickets, EXPECTED, same_environment=True)
    assert caught.value.what.startswith("ranks 0 and 2 (on 10.0.0.0) refused to start")
    assert caught.value.where == "a.parquet"
    assert caught.value.details["ranks"] == [0, 2]


def test_a_refusal_speaks_before_any_disagreement() -> None:
    tickets = [ticket(0, attempt=9), ticket(1, run_id="x"), refused(2, DataError("gone"))]
    with pytest.raises(DataError):
        judge(tickets, EXPECTED, same_environment=True)
