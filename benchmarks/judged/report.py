"""What ckpt-chaos said, counted; and whether that is what a sceptic would call a pass.

Its exit code alone is not: a point at which it killed nothing counts as passed, with a remark.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

MODES = ("before", "torn", "unsynced", "term")
BAD = ("HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")

_ROW = re.compile(r"^#\d+ .*?\b([A-Z_]+)((?:  \[[A-Z ]+\])*)$", re.MULTILINE)
_CONTROL = re.compile(r"^no crash \(control\).*?\b([A-Z_]+)$", re.MULTILINE)


def read(said: str, work: Path) -> dict[str, Any]:
    """Return what the judge said.

    Args:
        said: Its output.
        work: Its working directory.

    Raises:
        ValueError: It has not come to judge; the message has the end of what it said.
    """
    rows = _ROW.findall(said)
    control = _CONTROL.search(said)
    points = [json.loads(path.read_text()) for path in work.glob("pt_[0-9]*/result.json")]
    if not points or len(points) != len(rows) or control is None:
        raise ValueError(f"the judge did not judge:\n{said[-4000:]}")
    verdicts = collections.Counter(verdict for verdict, _ in rows)
    modes = collections.Counter(point["point"][1] for point in points)
    return {
        "judge": json.loads((work / "meta.json").read_text())["versions"]["ckpt-chaos"],
        "control": control[1],
        "points": {mode: modes[mode] for mode in MODES},
        "verdicts": {verdict: verdicts[verdict] for verdict in ("PASS", *BAD)},
        "did_not_crash": sum("[DID NOT CRASH]" in flags for _, flags in rows),
        "crashed_elsewhere": sum("[PLAN DRIFT]" in flags for _, flags in rows),
        "examples": [line for line in said.splitlines() if _is_bad(line)][:3],
    }


def kept(row: dict[str, Any]) -> bool:
    """Return whether the judge struck in every mode, at each point as planned, and all passed."""
    all_passed = row["verdicts"]["PASS"] == sum(row["points"].values())
    struck = all(row["points"].values()) and not row["did_not_crash"]
    return all_passed and struck and not row["crashed_elsewhere"] and row["control"] == "PASS"


def found(row: dict[str, Any]) -> bool:
    """Return whether the judge found a bug: not because the job cannot even run with it."""
    return row["control"] == "PASS" and any(row["verdicts"][verdict] for verdict in BAD)


def _is_bad(line: str) -> bool:
    row = _ROW.match(line)
    return row is not None and row[1] in BAD
