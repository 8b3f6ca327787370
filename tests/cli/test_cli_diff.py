"""``diff`` at the command line: words, JSON and exit codes."""

from __future__ import annotations

import pytest

from coherent_ray.commit.manifest import Manifest
from coherent_ray.drill import parting
from coherent_ray.state.difference import StateDifference, TensorDifference

TENSOR = TensorDifference("model/weight", "F32", (64, 64), 4096, 3, 17, "0x1p+0", "0x1p-1", 0.5, 9)


@pytest.fixture
def other(tmp_path, make_run):
    """Make a second run of the same job, or of another: `updates`, at which it published."""

    def make(*updates, seed=0):
        run = make_run(tmp_path / "other", run_id="second")
        run.open_attempt()
        for update in updates:
            run.publish(update, ranks=1, seed=seed)
        return run

    return make


@pytest.fixture(autouse=True)
def states(monkeypatch):
    """What is stored in these runs are no shards: how states differ is told by the test."""
    told = StateDifference((), (), 2)

    def compare(first, one, second, other):
        assert isinstance(one, Manifest)
        return told

    def tell(difference):
        nonlocal told
        told = difference

    monkeypatch.setattr(parting, "compare_states", compare)
    return tell


def test_one_history(call, published, other):
    done = call("diff", published.root, other(7, 30).root)
    assert done.code == 0
    assert done.out.splitlines() == [
        "  terms: ranks: 3 -> 1",
        "the same, update for update, 1 to 30; and every bit of 2 tensors after update 30",
    ]


def test_updates_that_part_are_told_field_by_field(call, published, other):
    run = other(30, seed=1)
    done = call("diff", published.root, run.root)
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[1] == "they part at update 1"
    assert lines[3].split() == [
        "loss", "0x1.0000000000000p+1", "(2)", "0x1.8000000000000p+1", "(3)",
    ]  # fmt: skip
    assert not any("previous" in line or "digest" in line for line in lines)
    value = call("diff", published.root, run.root, "--json").json
    assert (value["same"], value["update"], value["compared"]) == (False, 1, 1)
    assert [each["field"] for each in value["receipts"]] == ["loss", "digest"]
    assert value["runs"][0].endswith("/run")


def test_tensors_that_differ_are_named_first_to_last(call, published, other, states):
    states(StateDifference(("model/x: absent -> F32 [2]",), (TENSOR,), 2))
    done = call("diff", published.root, other(30).root)
    assert done.code == 1
    assert done.out.splitlines()[-3:] == [
        "the states after update 30 (g3-a2, g1-a1) differ: 1 of 2 tensors",
        "  model/x: absent -> F32 [2]",
        "  model/weight (F32 64x64): 3 of 4,096 items differ, first item 17: 0x1p+0 and 0x1p-1; "
        "at most 0.5 apart, 9 ULPs",
    ]


def test_a_shorter_history_is_compared_as_far_as_it_goes(call, published, other):
    done = call("diff", published.root, other(20).root)
    assert done.code == 0
    assert "the first goes on to update 30" in done.out
    assert done.out.splitlines()[-1].startswith("the same, update for update, 1 to 20; and every")


def test_generations_that_are_named(call, published, other):
    run = other(10, 20, 30)
    value = call("diff", f"{published.root}@g2", run.root, "--json").json
    assert (value["lengths"], value["compared"]) == ([20, 30], 20)
    assert value["state"]["updates"] == [20, 20]
    assert (value["state"]["first"], value["state"]["second"]) == ("g2-a1", "g2-a1")


@pytest.mark.parametrize("words", [[], ["--nonsense"]])
def test_misuse(call, published, words):
    assert call("diff", published.root, *words).code == 2


def test_what_is_no_run(call, published, tmp_path):
    done = call("diff", published.root, tmp_path / "nothing")
    assert done.code == 2
    assert "no run lies here" in done.err


def test_a_generation_that_is_not_there(call, published, other):
    done = call("diff", f"{published.root}@g9", other(30).root)
    assert done.code == 1
    assert "g9" in done.err
