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
    "docs/performance.md",
    "docs/protocol.md",
    "docs/scale.md",
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


ROWS = (
    ("stall of a save, copies of the rank's share (CPU)", "stall_copies", "1.15"),
    ("of it the fingerprint of the whole replica", "fingerprint_copies", ""),
    ("the stall by the clock", "stall_wall_copies", ""),
    ("whole save, copies (CPU, all threads and children)", "cpu_copies", "1.9"),
    ("snapshot to published, raw write + fsync = 1", "durable_to_write", "0.85"),
    ("the same, raw O_DIRECT write + fsync = 1", "durable_to_direct", "1.25"),
    ("training lost during a save, copies", "lost_copies", "1.5"),
    ("updates/s during a save, without = 1", "pace_during", ""),
    ("load into live tensors, cold, raw read = 1", "load_cold", "1.25"),
    ("the same, warm", "load_warm", "1.6"),
    ("bytes written, the state = 1", "written_to_state", "1.00"),
    ("peak memory over training, shares", "memory_shares", "1 + 64 MiB"),
    ("save after a change of 1 %, time, full save = 1", "changed_time", "0.05"),
    ("the same, processor time", "changed_cpu", ""),
    ("the same, bytes", "changed_bytes", ""),
)


RAW = (
    ("copy of a rank's share into touched memory", "copy_s"),
    ("write of all shares and fsync", "write_s"),
    ("the same, the write-back begun after each 8 MiB", "write_behind_s"),
    ("O_DIRECT, 16 MiB a call, and fsync", "write_direct_s"),
    ("the same, 1 MiB a call", "write_direct_small_s"),
    ("the same, 64 MiB a call", "write_direct_large_s"),
    ("the same, 16 MiB, two calls at once", "write_direct_two_s"),
    ("read of all shares, cold", "read_cold_s"),
    ("read of all shares, warm", "read_warm_s"),
)


def state_plane(result: dict[str, Any]) -> str:
    """Return the state plane as tables: products beside each other, and the raw limits."""
    lines = []
    names = result["names"]
    for at in result["at"]:
        found = at["products"]
        keys = [key for key in names if key in found]
        ranks = "1 rank" if at["ranks"] == 1 else f"{at['ranks']} ranks"
        lines += [
            f"**{ranks}, {result['state_mib']} MiB, medians of {result['rounds']} rounds**",
            "",
            f"| | target | {' | '.join(names[key] for key in keys)} |",
            f"|---|---|{'---|' * len(keys)}",
        ]
        for row, name, target in ROWS:
            cells = [_figure(found[key].get(name)) for key in keys]
            if any(cells):
                lines.append(f"| {row} | {target} | {' | '.join(cells)} |")
        lines += [
            f"| {names[key]} | | {_cell(found[key]['fails'])} |"
            for key in keys
            if "fails" in found[key]
        ]
        lines += ["", "| raw | seconds, median (least to most) |", "|---|---|"]
        raw = at["raw"]
        lines += [f"| {row} | {_spread(raw[name])} |" for row, name in RAW if name in raw]
        lines.append("")
    machine = result["machine"]
    load = " to ".join(map(str, machine["load_average"]))
    lines.append(f"{machine['cores']} cores, load average {load}, {machine['seconds']} s.")
    return "\n".join(lines) + "\n"


def _spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.3f} ({figure['least']:.3f} to {figure['most']:.3f})"


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f}"
    return "" if value is None else f"{value:.2f}"


def coordinator(result: dict[str, Any]) -> str:
    """Return the coordinator at scale as three tables: the machine, the log, the real actor."""
    lines = [
        "| ranks | tensors | a word, KB | words a second | last word to publish, s | manifest, MiB "
        "| read and check it, s | peak memory, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']:,} | {row['tensors']:,} | {row['ack_bytes'] / 1000:.1f} | "
        f"{row['acks_per_s']:,.0f} | {row['last_ack_to_publish_s']:.2f} | "
        f"{row['manifest_bytes'] / 2**20:.2f} | {row['open_manifest_s']:.2f} | "
        f"{row['peak_mib']:,.0f} |"
        for row in result["machine"]
    ]
    lines += [
        "",
        "| generations | records | open `latest`, ms | read all, s | open an attempt, s "
        "| append, s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['generations']:,} | {row['records']:,} | {row['open_latest_ms']:.1f} | "
        + (
            f"{row['read_whole_s']:.1f} | {row['open_attempt_s']:.3f} | {row['append_s']:.3f} |"
            if "read_whole_s" in row
            else "not read | | |"
        )
        for row in result["log"]
    ]
    lines += [
        "",
        "| calls that wait in the actor | words a second | last word to its answer, s "
        "| to the answer of all, s | peak memory, MiB |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']:,} | {row['acks_per_s']:,.0f} | {row['last_ack_to_publish_s']:.2f} | "
        f"{row['all_answered_s']:.2f} | {row['peak_mib']:,.0f} |"
        for row in result["actor"]
    ]
    return "\n".join(lines) + "\n"


def loading(result: dict[str, Any]) -> str:
    """Return verified loading as two tables: against raw reads, and against an exchange."""
    lines = [
        "| state, MiB | shards | into live tensors, cold / warm | into new memory, cold / warm |",
        "|---|---|---|---|",
    ]
    for row in result["loads"]:
        cold, warm = row["ratios"]["cold"], row["ratios"]["warm"]
        lines.append(
            f"| {row['bytes'] // 2**20:,} | {row['shards']} | {cold['live']:.2f} / "
            f"{warm['live']:.2f} | {cold['fresh']:.2f} / {warm['fresh']:.2f} |"
        )
    lines += [
        "",
        "| state, MiB | ranks | each reads all, s, cold / warm "
        "| each reads a share, exchanged, s |",
        "|---|---|---|---|",
    ]
    for row in result["exchanges"]:
        cold, warm = row["seconds"]["cold"], row["seconds"]["warm"]
        lines.append(
            f"| {row['bytes'] // 2**20:,} | {row['ranks']} | {cold['read']:.2f} / "
            f"{warm['read']:.2f} | {cold['exchange']:.2f} / {warm['exchange']:.2f} |"
        )
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
    "coordinator": coordinator,
    "fuzz": fuzz,
    "gauntlet": gauntlet,
    "loading": loading,
    "replay": replay,
    "reduction": reduction,
    "crash_states": crash_states,
    "model": model,
    "power_cuts": power_cuts,
    "state_plane": state_plane,
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
