"""``prove`` at the command line: what it refuses, answers and leaves; whole proofs without Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from coherent_ray.drill import proving
from coherent_ray.drill.causes import Cause
from coherent_ray.drill.proof import Proof, Proved
from coherent_ray.drill.spots import Spot
from coherent_ray.errors import Interrupted, TrainingFailed

sys.path.insert(0, str(Path(__file__).parent.parent / "drill"))

import parity_jobs


def run(name: str, *faults: str, cause: Cause | None = None) -> Proved:
    return Proved(
        name, f"/{name}", (1,), ("nothing much",), 2, 7, "blake3:ab12cd34ef", "blake3:0123456789",
        1.25, faults, cause=cause,
    )  # fmt: skip


def proof(*runs: Proved, planned: int = 2) -> Proof:
    names = [f"run {n}" for n in range(planned)]
    return Proof("invariant", "blake3:00", "in words", {"torch": "1"}, 0, 7, names, {}, [*runs])


@pytest.fixture
def proved(monkeypatch):
    """Play the proof; hands back what it was asked for."""
    asked: list[proving.Plan] = []

    def play(outcome: Proof | BaseException):
        def prove(plan, way, tell):
            asked.append(plan)
            (Path(plan.root) / "reference").mkdir()
            print("somebody says something")
            tell("reference: begins")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(proving, "prove", prove)
        return asked

    return play


@pytest.fixture
def words(tmp_path, configuration):
    return ["prove", configuration(), "--in-process", "--out", tmp_path / "out"]


def test_what_is_proved(call, proved, words, tmp_path):
    asked = proved(proof(run("one"), run("two")))
    done = call(*words, "--ranks", "3,1", "--kills", "2", "--seed", "5")
    assert done.code == 0, done.err
    (plan,) = asked
    assert (plan.ranks, plan.kills, plan.seed) == ((3, 1), 2, 5)
    assert not Path(plan.root).exists(), "what went well is removed"
    assert "proved: the claim invariant holds" in done.out
    assert "reference: begins" in done.err
    written = json.loads((tmp_path / "out" / "proof.json").read_text())
    assert (written["good"], written["format"]) == (True, 1)
    assert (tmp_path / "out" / "proof.md").read_text().startswith("# The claim `invariant` holds")


def test_what_differs_is_named_and_kept(call, proved, words, tmp_path):
    spot = Spot("lane", "aten.mul", "forward, task.py:3", 2, 1, 9)
    cause = Cause("not deterministic", 4, "update 4 is not deterministic", spot)
    asked = proved(proof(run("one"), run("two", "update 4 is the first", cause=cause), planned=5))
    done = call(*words)
    assert done.code == 1
    assert "two: update 4 is the first" in done.out
    said = "update 4 is not deterministic: lane 2, microbatch 1: aten.mul (forward, task.py:3)"
    assert f"cause: {said}" in done.out
    assert (Path(asked[0].root) / "reference").is_dir()
    assert asked[0].root in done.out
    page = (tmp_path / "out" / "proof.md").read_text()
    assert page.startswith("# The claim `invariant` does NOT hold")
    assert said in page
    assert "2 of 5 runs" in page


def test_a_proof_that_did_not_run_to_its_end_is_none(call, proved, words):
    proved(proof(run("one"), planned=2))
    done = call(*words)
    assert done.code == 1
    assert "proved" not in done.out


def test_json_stands_alone(call, proved, words):
    asked = proved(proof(run("one"), run("two")))
    done = call(*words, "--json", "--keep")
    assert done.json["good"] is True
    assert done.json["root"] == asked[0].root
    assert [each["name"] for each in done.json["runs"]] == ["one", "two"]


def test_an_earlier_proof_is_replaced(call, proved, words, tmp_path):
    proved(proof(run("one", "a fault"), run("two")))
    assert call(*words).code == 1
    proved(proof(run("one"), run("two")))
    assert call(*words).code == 0
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["good"] is True


@pytest.mark.parametrize("error", [Interrupted("stopped"), TrainingFailed("it broke")])
def test_a_proof_that_cannot_be_had_leaves_nothing(call, proved, words, error):
    asked = proved(error)
    done = call(*words)
    assert done.code == 1
    assert error.what in done.err
    assert not Path(asked[0].root).exists()


@pytest.mark.parametrize(
    ("arguments", "words_"),
    [
        (["--ranks", "1,x"], "no list of rank counts"),
        (["--ranks", "9"], "9 ranks cannot carry 4 lanes"),
        (["--updates", "1"], "--updates"),
        (["--address", "127.0.0.1:1"], "exclude each other"),
        (["--set", "run.claim=exact", "--ranks", "1,2"], "promises nothing at another rank count"),
    ],
)
def test_misuse_is_told_before_anything_starts(call, proved, words, arguments, words_):
    asked = proved(proof())
    done = call(*words, *arguments)
    assert done.code == 2
    assert words_ in done.err
    assert asked == []


# --- whole proofs ---------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write a job's configuration, which trains in a second."""
    monkeypatch.setattr(os, "fsync", lambda file: None)

    def write(**changes):
        parity_jobs.job(tmp_path)
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(parity_jobs.values(tmp_path, **changes)))
        return ["prove", path, "--in-process", "--out", tmp_path / "out", "--json"]

    return write


@pytest.mark.parametrize("claim", ["exact", "invariant", "statistical"])
def test_a_claim_is_proved_without_ray(call, job, claim):
    done = call(*job(run__claim=claim), "--kills", "4", *(["--ranks", "1,3"] * (claim != "exact")))
    assert done.code == 0, done.out
    value = done.json
    names = [each["name"] for each in value["runs"]]
    if claim == "exact":
        assert names == ["reference", "1 rank, killed"]
    else:
        assert names == ["reference", "1 rank, killed", "3 ranks, killed", "resized"]
    # Of four kills two are the coordinator's, which is none here.
    assert value["runs"][1]["attempts"] == 3
    assert value["runs"][1]["done"][0].startswith("all ranks killed: worker in mid-shard")
    assert len({each["receipts"] for each in value["runs"]}) == 1
    assert value["facts"]["data"] == "2.38 epochs of 21 examples"
    assert value["facts"]["environment"]["threads"] == "1"


def test_a_task_that_is_not_deterministic_is_caught_and_its_operation_named(call, job, tmp_path):
    done = call(*job(task__factory="parity_jobs:Unkeyed"), "--ranks", "1", "--kills", "1")
    assert done.code == 1
    struck = done.json["runs"][-1]
    assert struck["parting"]["update"] == 1
    cause = struck["cause"]
    assert (cause["kind"], cause["update"]) == ("not deterministic", 1)
    assert (cause["spot"]["lane"], cause["spot"]["microbatch"]) == (0, 0)
    assert "parity_jobs.py" in cause["spot"]["where"]
    assert cause["says"] in (tmp_path / "out" / "proof.md").read_text()


def test_under_a_statistical_claim_sums_may_differ_and_it_is_told(call, job):
    unkeyed = job(task__factory="parity_jobs:Unkeyed", run__claim="statistical")
    done = call(*unkeyed, "--ranks", "1,2", "--kills", "0")
    assert done.code == 0, done.out
    last = done.json["runs"][-1]
    assert last["faults"] == []
    assert last["parting"]["same"] is False
    assert any("updates have sums with other bits" in note for note in last["notes"])
