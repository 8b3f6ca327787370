"""Writes figures from the benchmarks' JSON into the documents, between markers.

A figure is never typed in. ``python benchmarks/render.py`` rewrites the marked places, and
``--check`` (a test runs it) says whether they are current.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/claims.md",
    "docs/formats.md",
    "docs/gauntlet.md",
    "docs/operations.md",
    "docs/protocol.md",
)
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def replay(result: dict[str, Any]) -> str:
    """Return the replay campaign as a table: a row for each job and rank count."""
    lines = [
        "| job | workers | killed by SIGKILL or ray.kill | attempts | receipts, final state |",
        "|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        kills = run["kills"]
        workers, coordinators = kills.count("worker"), kills.count("coordinator")
        killed = f"{workers} workers, {coordinators} coordinator" if kills else "nothing"
        digests = f"`{_short(run['receipts'])}` `{_short(run['state'])}`"
        lines.append(
            f"| {run['job']} | {run['workers']} | {killed} | {run['attempts']} | {digests} |"
        )
    return "\n".join(lines) + "\n"


def reduction(result: dict[str, Any]) -> str:
    """Return the reduction benchmark as a table: step time against DistributedDataParallel."""
    lines = [
        "| model | workers | lanes | step time, DDP = 1 (median of pairs) "
        "| processor time, DDP = 1 | bytes sent, ring = 1 |",
        "|---|---|---|---|---|---|",
    ]
    for scene in result["scenes"]:
        ring = scene["ring_bytes_per_update"]
        sent = f"{scene['rank0_sent_bytes_per_update'] / ring:.2f}" if ring else "none"
        busy = scene.get("processor_ratio_median")
        lines.append(
            f"| {scene['model']} | {scene['ranks']} | {scene['lanes']} | "
            f"{scene['ratio_median']:.2f} | {f'{busy:.2f}' if busy else 'not measured'} | {sent} |"
        )
    return "\n".join(lines) + "\n"


def crash_states(result: dict[str, Any]) -> str:
    """Return the power cuts and the planted bugs as two tables."""
    lines = [
        "| the disk | power cuts | outcomes | deaths before | different states | broken |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['cuts']:,} | {row['outcomes']:,} | {row['deaths']:,} | "
        f"{row['states']:,} | {sum(row['broken'].values())} |"
        for row in result["models"]
    ]
    if note := result.get("note"):
        lines += ["", note]
    lines += ["", "| planted bug | found by | on an ordered disk |", "|---|---|---|"]
    for bug in result["bugs"]:
        lines.append(f"| {bug['bug']} | {_code(bug['weak'])} | {_code(bug['ordered'])} |")
    return "\n".join(lines) + "\n"


def model(result: dict[str, Any]) -> str:
    """Return the explored worlds and the rules that were left out as two tables."""
    bounds = ("ranks", "attempts", "crashes", "losses", "doubles", "timeouts", "flips", "prunes")
    lines = [
        "| ranks | attempts | deaths | losses | doubled words | time-outs | turned bits | "
        "given up | read back | refers | worlds | moves | all | broken |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        counts = " | ".join(str(run[name]) for name in bounds)
        counts += "".join(f" | {'yes' if run[how] else 'no'}" for how in ("reads_back", "refers"))
        whole = "yes" if run["complete"] else "the nearest"
        broken = run["broken"] or "none"
        lines.append(f"| {counts} | {run['worlds']:,} | {run['moves']:,} | {whole} | {broken} |")
    lines += ["", "| rule that is left out | found by |", "|---|---|"]
    lines += [f"| {bug['bug']} | {_code(bug['found_by'])} |" for bug in result["bugs"]]
    return "\n".join(lines) + "\n"


def power_cuts(result: dict[str, Any]) -> str:
    """Return the real power cuts as a table: a row for each file system, cut and control."""
    lines = [
        "| file system | journal's end | syncs left out | cuts | promises broken after |",
        "|---|---|---|---|---|",
    ]
    for row in result["campaigns"]:
        journal = "lost" if row["shutdown"] == "nologflush" else "written"
        left_out = "none" if row["forgets"] == "nothing" else f"of {row['forgets']} (control)"
        lines.append(
            f"| {row['file_system']} | {journal} | {left_out} | {row['cuts']} | {row['failures']} |"
        )
    return "\n".join(lines) + "\n"


def fuzz(result: dict[str, Any]) -> str:
    """Return the fuzzing campaign as a table: a row for each reader, and the sum."""
    lines = ["| reader | inputs | crashes | seconds | peak memory, MiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {run['reader']} | {run['inputs']:,} | {run['crashes']} | "
        f"{run['seconds']:.0f} | {run['peak_mib']} |"
        for run in result["readers"]
    ]
    inputs, crashes = (
        sum(run[name] for run in result["readers"]) for name in ("inputs", "crashes")
    )
    how = "guided by coverage" if result["guided"] else "not guided"
    lines.append(f"| all, {how}, seed {result['seed']} | {inputs:,} | {crashes} | | |")
    return "\n".join(lines) + "\n"


def storm(result: dict[str, Any]) -> str:
    """Return a storm as a table: a row for each kind of process that was killed."""
    (scenario,) = result["scenarios"]
    strikes = scenario["injected"]
    whole = "equal to" if result["good"] else "NOT equal to"
    torn = scenario["torn_selected"] or "no"
    lines = [
        f"{len(strikes)} kills in one run of {scenario['updates']} updates on "
        f"{result['reference']['workers']} workers ({result['storage']}): {scenario['attempts']} "
        f"attempts, {scenario['lost_and_replayed']} updates lost and done again, {torn} torn "
        f"generation selected, receipts and final state {whole} the run that nothing struck.",
        "",
        "| killed | times | seconds to the next update, median / longest |",
        "|---|---|---|",
    ]
    for target in ("worker", "coordinator", "controller", "driver"):
        own = [strike["next_update_s"] for strike in strikes if strike["target"] == target]
        seconds = sorted(s for s in own if s is not None)
        spread = f"{statistics.median(seconds):.1f} / {seconds[-1]:.1f}" if seconds else ""
        lines.append(f"| {target} | {len(own)} | {spread} |")
    return "\n".join(lines) + "\n"


def chaos(result: dict[str, Any]) -> str:
    """Return the external judge's verdicts as two tables: who was struck, and what was planted."""
    bad = ("HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")
    shown = ("before", "torn", "unsynced", "term")
    lines = [
        f"{result['judge']}, {result['points']} points:",
        "",
        f"| ranks | struck | {' | '.join(shown)} | passed | {' | '.join(bad)} | did not crash |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["cells"]:
        points = " | ".join(str(row["points"][mode]) for mode in shown)
        verdicts = " | ".join(str(row["verdicts"][verdict]) for verdict in ("PASS", *bad))
        who = f"{row['ranks']} | {row['struck']}"
        lines.append(f"| {who} | {points} | {verdicts} | {row['did_not_crash']} |")
    lines += [
        "",
        f"| planted bug | struck | points | {' | '.join(bad)} |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["planted"]:
        verdicts = " | ".join(str(row["verdicts"][verdict]) for verdict in bad)
        points = sum(row["points"].values())
        lines.append(f"| {row['bug']} | {row['struck']} | {points} | {verdicts} |")
    return "\n".join(lines) + "\n"


MARKS = {"held": "held", "broke": "**broke**", "not applicable": "n/a", "not run": "not run"}
NOT_THERE = {"verdict": "not run", "seen": "not run yet"}


def gauntlet(result: dict[str, Any]) -> str:
    """Return the gauntlet: the table of verdicts, then what was seen in each cell."""
    columns = result["columns"]
    names = [column["name"] for column in columns.values()]
    lines = [
        f"| what holds | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    rows = result["rows"].values()
    for row in rows:
        cells = [MARKS[row["cells"].get(key, NOT_THERE)["verdict"]] for key in columns]
        report = f" ({row['report']})" if row["report"] else ""
        lines.append(f"| {row['asks']}{report} | {' | '.join(cells)} |")
    lines += ["", "| column | version | how it was driven |", "|---|---|---|"]
    for column in columns.values():
        version = f"{column['distribution']} {column['version'] or ''}"
        lines.append(f"| {column['name']} | {version} | {_cell(column['settings'])} |")
    for row in rows:
        lines += ["", f"**{row['asks'].capitalize()}**", "", "| | | seen |", "|---|---|---|"]
        for key, column in columns.items():
            cell = row["cells"].get(key, NOT_THERE)
            lines.append(f"| {column['name']} | {cell['verdict']} | {_cell(cell['seen'])} |")
    return "\n".join(lines) + "\n"


FIGURES = {
    "chaos": chaos,
    "fuzz": fuzz,
    "gauntlet": gauntlet,
    "replay": replay,
    "reduction": reduction,
    "crash_states": crash_states,
    "model": model,
    "power_cuts": power_cuts,
    "storm": storm,
    "storm_s3": storm,
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


def _code(name: str | None) -> str:
    return f"`{name}`" if name else "hidden"


def _cell(words: str) -> str:
    """Return words as they fit into a table's cell."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _short(digest: str) -> str:
    return digest.partition(":")[2][:8]


if __name__ == "__main__":
    sys.exit(main())
