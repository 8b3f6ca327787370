"""``drill`` at the command line: what it refuses, answers and leaves; the drill is a double."""

from __future__ import annotations

from pathlib import Path

import pytest

from coherent_ray.drill import campaign
from coherent_ray.drill.campaign import Drill, Result
from coherent_ray.drill.injections import Injected, Injection
from coherent_ray.drill.stage import Hold
from coherent_ray.drill.verdicts import Promise, Verdict
from coherent_ray.errors import Interrupted


def verdict(*, kept: bool) -> Verdict:
    seen = Injected(
        Injection(Hold("kill", "update", 3), "worker"), "pid 7", 9, 1, 2.0, "g2-a1", 6, 0, 3, 4.25
    )
    return Verdict("driver", (Promise("receipts equal", kept, "update 4"),), (seen,), attempts=2)


@pytest.fixture
def drilled(monkeypatch):
    """Play the drill; hands back what it was asked for."""
    asked: list[Drill] = []

    def play(outcome: Verdict | BaseException):
        def drill(plan, tell):
            asked.append(plan)
            (Path(plan.root) / "reference").mkdir()
            print("Ray says something")
            tell("driver: begins")
            if isinstance(outcome, BaseException):
                raise outcome
            return Result(plan.seed, {"updates": 12}, [outcome])

        monkeypatch.setattr(campaign, "drill", drill)
        return asked

    return play


def test_all_promises_kept(call, drilled, configuration, tmp_path):
    asked = drilled(verdict(kept=True))
    root = tmp_path / "scratch"
    done = call(
        "drill", configuration(), "--scenario", "driver", "--root", str(root), "--seed", "5"
    )
    assert done.code == 0
    (plan,) = asked
    assert (plan.scenarios, plan.seed, plan.address) == (("driver",), 5, None)
    assert Path(plan.root).parent == root
    assert not Path(plan.root).exists(), "what went well is removed"
    lines = done.out.splitlines()
    assert lines[1].split() == ["driver", "kept", "1", "2", "g2-a1", "3", "4.2", "s"]
    assert "all 12 updates equal" in lines[-1]
    assert "driver: begins" in done.err


def test_a_broken_promise_is_named_and_its_runs_are_kept(call, drilled, configuration, tmp_path):
    asked = drilled(verdict(kept=False))
    done = call("drill", configuration(), "--root", str(tmp_path / "scratch"))
    assert done.code == 1
    assert "driver: broken: receipts equal: update 4" in done.out
    assert (Path(asked[0].root) / "reference").is_dir()
    assert asked[0].root in done.out
    assert "equal the run that nothing struck" not in done.out


def test_json_stands_alone_whatever_ray_prints(call, drilled, configuration, tmp_path):
    asked = drilled(verdict(kept=True))
    done = call("drill", configuration(), "--json", "--keep", "--root", str(tmp_path))
    assert done.code == 0
    assert done.json["good"] is True
    assert done.json["root"] == asked[0].root
    assert done.json["scenarios"][0]["injected"][0]["lost"] == 3
    assert Path(asked[0].root).is_dir()


def test_an_interrupted_drill_leaves_nothing(call, drilled, configuration, tmp_path):
    asked = drilled(Interrupted("the drill was interrupted"))
    done = call("drill", configuration(), "--root", str(tmp_path / "scratch"))
    assert done.code == 1
    assert "interrupted" in done.err
    assert not Path(asked[0].root).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "earthquake"], "no scenario 'earthquake'"),
        (["--scenario", "node", "--address", "127.0.0.1:1"], "leave out --address"),
        (["--kills", "0"], "--kills"),
        (["--set", "data.lanes=x"], "data.lanes"),
    ],
)
def test_misuse_is_told_before_anything_starts(call, drilled, configuration, arguments, words):
    asked = drilled(verdict(kept=True))
    done = call("drill", configuration(), *arguments)
    assert done.code == 2
    assert words in done.err
    assert asked == []


def test_a_claim_without_bits_cannot_be_drilled(call, configuration):
    done = call("drill", configuration(), "--set", "run.claim=statistical")
    assert done.code == 2
    assert "compares bits" in done.err


def test_runs_in_an_object_store_are_taken_away_too(call, drilled, configuration, s3, monkeypatch):
    monkeypatch.setattr(campaign, "drill", lambda plan, tell: left_there(plan, s3))
    s3.write("other/file", b"x")
    words = ["--set", f"storage.endpoint={s3.endpoint}", "--set", "storage.allow_http=true"]
    done = call("drill", configuration(), "--root", "s3://bucket/scratch", *words)
    assert done.code == 0, done.err
    assert s3.keys("scratch") == set()
    assert s3.keys("other") == {"file"}


def left_there(plan: Drill, s3) -> Result:
    s3.write(f"{plan.root.removeprefix('s3://bucket/')}/reference/log/1.json", b"x")
    return Result(plan.seed, {"updates": 12}, [verdict(kept=True)])
