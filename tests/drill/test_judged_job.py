"""The job that an external judge strikes: whatever is killed, the next run ends as if nothing was.

The judge itself need not be installed: a stand-in of a dozen lines kills where it is told to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

STAND_IN = """
import builtins, itertools, os

def arm_from_env(rank, lazy):
    real, numbers = builtins.open, itertools.count(1)
    def kill(path, mode="r", *arguments, **options):
        file = real(path, mode, *arguments, **options)
        if mode == "xb" and next(numbers) == int(os.environ["CKPT_CHAOS_CRASH_AT"]):
            os._exit(137)
        return file
    builtins.open = kill
"""

STORY = """
import json, os, sys
from pathlib import Path
from judged import job

def run(name, struck, plant=()):
    out = Path(sys.argv[1]) / name
    return job.main(["--out", str(out), "--ranks", "2", "--struck", struck, *plant]), out

_, whole = run("whole", "rank 0")
results = []
for struck, at in json.loads(sys.argv[2]):
    name = f"{struck} {at}"
    os.environ |= {"CKPT_CHAOS_WATCH": "armed", "CKPT_CHAOS_CRASH_AT": str(at)}
    died, _ = run(name, struck)
    del os.environ["CKPT_CHAOS_WATCH"]
    resumed, out = run(name, struck)
    same = (out / "final.bin").read_bytes() == (whole / "final.bin").read_bytes()
    results.append([died, resumed, same])
print(json.dumps(results))
"""

#: Opened files are, for the coordinator: record, hint, and for each generation manifest, record,
#: hint, timings; for rank 0: shard, receipts; for rank 1: shard.
STRIKES = [
    ["coordinator", 1],
    ["coordinator", 4],
    ["coordinator", 13],
    ["rank 0", 3],
    ["rank 1", 3],
]


def test_whoever_dies_at_whatever_file_the_next_run_ends_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "stand-in" / "ckpt_chaos" / "targets"
    folder.mkdir(parents=True)
    (folder / "common.py").write_text(STAND_IN)
    done = subprocess.run(
        [sys.executable, "-c", STORY, str(tmp_path), json.dumps(STRIKES)],
        env=_environment(tmp_path / "stand-in"),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *steps, results = done.stdout.splitlines()
    assert json.loads(results) == [[137, 0, True]] * len(STRIKES)
    resumed = [line for line in steps if line.startswith("resumed from record ")]
    # The first run, and then each that was struck and the one after it: what had a record counts.
    after = [int(line.split()[-1]) for line in resumed]
    assert after[-1] == 3, "rank 1 died in its third shard: two generations had a record"
    assert max(after) == 4, "the coordinator died in the last hint: all three had one"


def _environment(*folders: Path) -> dict[str, str]:
    path = [str(BENCHMARKS), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


# --- what the judge said --------------------------------------------------------------------------

SAID = """1/3 fault-free reference run (records every file event under {out}) ...
crash point                newest ok  resume result            weights diff  verdict
no crash (control)                 0  resumed from step None      0.00e+00  PASS
#1 open:.tmp-00 [before]           0  resumed from step 0         0.00e+00  PASS
#1 open:.tmp-00 [torn]             2  resumed from step 2         0.00e+00  PASS
#1 open:.tmp-00 [unsynced]         2  resumed from step 2         0.00e+00  PASS
#2 os.rename:.tmp-00 [term]        2  resumed from step 2         0.00e+00  PASS

PASS: 5
"""
LAST = "resumed from step 2         0.00e+00  PASS\n\n"
CONTROL = "resumed from step None      0.00e+00  PASS"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from judged import report

    return report


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for at, mode in enumerate(("before", "torn", "unsynced", "term"), 1):
        (tmp_path / f"pt_{at:03d}").mkdir()
        (tmp_path / f"pt_{at:03d}" / "result.json").write_text(json.dumps({"point": [1, mode]}))
    (tmp_path / "meta.json").write_text(json.dumps({"versions": {"ckpt-chaos": "0.1.8"}}))
    return tmp_path


def test_a_clean_report_is_a_pass(report: Any, work: Path) -> None:
    row = report.read(SAID, work)
    assert row["points"] == {"before": 1, "torn": 1, "unsynced": 1, "term": 1}
    assert row["verdicts"]["PASS"] == 4
    assert report.kept(row)
    assert not report.found(row)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LAST, "resumed from step 0         0.00e+00  LOST_WORK\n\n"),
        (LAST, "RAISED ExitCode1                   -  HARD_FAIL\n\n"),
        (LAST, f"{LAST.rstrip()}  [DID NOT CRASH]\n\n"),
        (LAST, f"{LAST.rstrip()}  [DID NOT CRASH]  [PLAN DRIFT]\n\n"),
        (LAST, f"{LAST.rstrip()}  [PLAN DRIFT]\n\n"),
        (CONTROL, "RAISED ExitCode1                   -  CONTROL_FAIL"),
    ],
)
def test_anything_else_is_none(report: Any, work: Path, old: str, new: str) -> None:
    assert old in SAID
    row = report.read(SAID.replace(old, new), work)
    assert not report.kept(row)
    assert report.found(row) == ("LOST_WORK" in new or "HARD_FAIL" in new)


def test_a_mode_without_a_point_is_none(report: Any, work: Path) -> None:
    row = report.read(SAID, work)
    assert not report.kept(row | {"points": row["points"] | {"torn": 0, "before": 2}})


def test_a_judge_that_never_judged_is_an_error(report: Any, work: Path) -> None:
    with pytest.raises(ValueError, match="your command failed on its own"):
        report.read("your command failed on its own (exit 1)", work)
