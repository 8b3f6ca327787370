"""Writes figures from the benchmarks' JSON into the documents, between markers.

A figure is never typed in. ``python benchmarks/render.py`` rewrites the marked places, and
``--check`` (a test runs it) says whether they are current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "benchmarks"))

from figures import costs, faults, sameness  # noqa: E402

RESULTS = PROJECT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/claims.md",
    "docs/formats.md",
    "docs/gauntlet.md",
    "docs/operations.md",
    "docs/performance.md",
    "docs/protocol.md",
    "docs/scale.md",
)
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES = {
    "chaos": faults.chaos,
    "coordinator": costs.coordinator,
    "fuzz": faults.fuzz,
    "gauntlet": faults.gauntlet,
    "loading": costs.loading,
    "prove": sameness.prove,
    "replay": sameness.replay,
    "reduction": sameness.reduction,
    "restart": costs.restart,
    "crash_states": faults.crash_states,
    "memory_tier": costs.memory_tier,
    "model": faults.model,
    "power_cuts": faults.power_cuts,
    "state_plane": costs.state_plane,
    "storm": faults.storm,
    "storm_s3": faults.storm,
}


def rendered(text: str) -> str:
    """Return a document with every marked place filled from the JSON."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        result = json.loads((RESULTS / f"{name}.json").read_text())
        return f"{match[1]}{FIGURES[name](result)}{match[3]}"

    return MARKED.sub(fill, text)


def main() -> int:
    """Rewrite the documents, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1: not current")
    check = parser.parse_args().check
    stale = []
    for name in DOCUMENTS:
        path = PROJECT / name
        before = path.read_text()
        after = rendered(before)
        if before != after:
            stale.append(name)
            if not check:
                path.write_text(after)
    print(f"{'stale' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
