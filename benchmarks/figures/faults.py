"""Figures of what was struck, torn, explored and compared."""

from __future__ import annotations

import statistics
from typing import Any

from figures.words import cell, code


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
        lines.append(f"| {bug['bug']} | {code(bug['weak'])} | {code(bug['ordered'])} |")
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
    lines += [f"| {bug['bug']} | {code(bug['found_by'])} |" for bug in result["bugs"]]
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
        lines.append(f"| {column['name']} | {version} | {cell(column['settings'])} |")
    for row in rows:
        lines += ["", f"**{row['asks'].capitalize()}**", "", "| | | seen |", "|---|---|---|"]
        for key, column in columns.items():
            told = row["cells"].get(key, NOT_THERE)
            lines.append(f"| {column['name']} | {told['verdict']} | {cell(told['seen'])} |")
    return "\n".join(lines) + "\n"
