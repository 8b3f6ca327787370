"""``show --timings``: where the time of a run's saves went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coherent_ray.commit.manifest import FORMAT
from coherent_ray.commit.profiles import Part, Profile, write_profile
from coherent_ray.commit.timings import PARTS, About, Choice, Loss

CHOICE = Choice(140.0, 0.1, 2.0, 98_000.0, 86_400.0, 1, 109_600.0)


@pytest.fixture
def timed(published):
    """The published run, with times of its first two generations."""
    parts = {name: Part(0.25, 0.5, 1) for name in PARTS}
    first = Profile(FORMAT, "g1-a1", 10, 2, parts, 0.1, 0.2, 0.3, 0.75, About("due", 60.0))
    about = About("asked", 90.0, Loss("g1-a1", 1.5, 4), CHOICE)
    write_profile(published.storage, first)
    write_profile(published.storage, replace(first, generation="g2-a1", update=20, about=about))
    return published


def test_a_run_s_saves_stand_one_below_the_other(call, timed):
    done = call("show", timed.root, "--timings")
    assert done.code == 0
    titles, *rows = [" ".join(row) for row in done.rows()]
    assert titles == "generation update why stall lost write hash sync publish"
    same = "500.0 ms 500.0 ms 500.0 ms 750.0 ms"
    assert rows[0] == f"g1-a1 10 due 500.0 ms 1.50 s {same}"
    assert rows[1] == f"g2-a1 20 asked 500.0 ms - {same}"
    assert rows[2] == "g3-a2" + " -" * 8
    text = " ".join(done.out.split())
    assert "saves with times 2 of 3" in text
    assert "stall 1.00 s in all, 500.0 ms median" in text
    assert "lost beside saves 1.50 s in 1 save" in text
    assert f"cadence {CHOICE.in_words()}" in text


def test_one_save_is_told_part_by_part(call, timed):
    done = call("show", f"{timed.root}@g1", "--timings")
    text = " ".join(done.out.split())
    assert "times of g1-a1" in text
    assert "lost beside it 1.50 s" in text
    assert "snapshot 250.0 ms 500.0 ms 1" in text
    assert "first word to published 750.0 ms" in text
    assert CHOICE.in_words() in " ".join(call("show", f"{timed.root}@g2", "--timings").out.split())


def test_a_save_without_times_says_so(call, timed):
    done = call("show", f"{timed.root}@g3", "--timings")
    assert (done.code, done.out) == (0, "g3-a2: no times are stored of it\n")


def test_times_as_json(call, timed):
    value = call("show", timed.root, "--timings", "--json").json
    assert [g["generation"] for g in value["generations"]] == ["g1-a1", "g2-a1", "g3-a2"]
    assert [g["lost_s"] for g in value["generations"]] == [1.5, None, None]
    assert value["generations"][0]["timings"]["parts"]["sync_s"] == {
        "median_s": 0.25, "longest_s": 0.5, "rank": 1,
    }  # fmt: skip
    assert value["generations"][1]["timings"]["about"]["choice"]["failures"] == 1
    assert value["generations"][2]["timings"] is None
