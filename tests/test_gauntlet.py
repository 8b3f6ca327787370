"""Our column of the gauntlet stays true: every row is run again, in small, and holds.

The others' columns are run by hand (``benchmarks/gauntlet.py``). A judge that has never said
"broke" proves nothing, so each kind of judge is shown something broken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from gauntlet import damages, ours, rows  # noqa: E402
from gauntlet.bench import Bench, Outcome, digest_of  # noqa: E402
from gauntlet.damages import Saved  # noqa: E402

ROWS = {row.key: row for row in rows.ROWS}
#: What needs rights or tools that not every machine gives.
MAY_BE_MISSING = {"full": "mounted", "files": "strace", "names": "strace"}


@pytest.mark.parametrize("key", ROWS)
def test_our_column_holds(key: str) -> None:
    with Bench(ours.COLUMN, sys.executable, small=True) as bench:
        verdict = ROWS[key].cell(bench, ours.COLUMN.lacks)
    if verdict.word == "not run" and MAY_BE_MISSING.get(key, "never") in verdict.seen:
        pytest.skip(verdict.seen)
    assert verdict.word == "held", verdict.seen


def test_ours_holds_every_row_of_the_table_on_record() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "gauntlet.json").read_text())
    assert set(result["rows"]) == set(ROWS)
    for key, row in result["rows"].items():
        assert set(row["cells"]) <= set(result["columns"]), key
        assert row["cells"].get("ours", {"verdict": "held"})["verdict"] == "held", key
        for cell in row["cells"].values():
            assert cell["seen"], key


WHOLE = Saved(Path(), [], "newest", Path(), [])


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome("ShardDamaged: block 3"), "held"),
        (Outcome(found="newest", digest=digest_of(2)), "held"),
        (Outcome(found="before", digest=digest_of(1)), "held"),
        (Outcome(found="newest", digest="another"), "broke"),
        (Outcome(found="newest", digest=digest_of(1)), "broke"),
        (Outcome(found="before", digest="another"), "broke"),
        (Outcome(), "broke"),
        (Outcome("the process ended: SIGBUS", died=True), "broke"),
    ],
)
def test_a_load_of_what_is_damaged_is_judged(outcome: Outcome, word: str) -> None:
    assert damages.judged(WHOLE, [("damaged", outcome)]).word == word
