"""Figures of what saves, restarts and many ranks cost."""

from __future__ import annotations

from typing import Any

from figures.words import cell

ROWS = (
    ("stall of a save, copies of the rank's share (CPU)", "stall_copies", "1.15"),
    ("of it the fingerprint", "fingerprint_copies", ""),
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
            f"| {names[key]} | | {cell(found[key]['fails'])} |"
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


#: Column of the restart benchmark: what it is called.
RESTARTED = {
    "ray_train": "Ray Train, `report` and `get_checkpoint`",
    "ray_train_tuned": "the same, deaths seen as fast as ours",
    "coherent_ray": "Coherent Ray",
    "coherent_ray_spares": "Coherent Ray, `cluster.spare_workers`",
}


def restart(result: dict[str, Any]) -> str:
    """Return the time from a death to the next update as a table: a row for each column."""
    found = result["columns"]
    base = found["ray_train"]["median_s"]["whole"]
    lines = [
        "| | death to new processes, s | to their function | to their state | to the first update "
        "| whole, s | Ray Train = 1 | restarts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, name in RESTARTED.items():
        if key not in found:
            continue
        part = found[key]["median_s"]
        cells = " | ".join(f"{part[p]:.2f}" for p in ("processes", "function", "state", "update"))
        lines.append(
            f"| {name} | {cells} | {part['whole']:.1f} | {part['whole'] / base:.2f} | "
            f"{len(found[key]['restarts'])} |"
        )
    machine = result["machine"]
    lines += [
        "",
        f"Medians; {result['workers']} workers, {machine['cpus']} cores, Ray "
        f"{result['versions']['ray']}, torch {result['versions']['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def memory_tier(result: dict[str, Any]) -> str:
    """Return the memory tier's costs as a table: a row for each rank count."""
    lines = [
        "| ranks | a copy, copies of the rank's share (target: none) | of it processor time "
        "| taken back and verified, copies of the state (target: 2) |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {at['ranks']} | {at['keep_copies']:.2f} | {at['keep_cpu_copies']:.2f} | "
        f"{at['take_back_copies']:.2f} |"
        for at in result["at"]
    ]
    facts = f"{result['state_mib']} MiB, medians of {result['rounds']} rounds"
    lines += ["", f"{facts}, {result['cores']} cores."]
    return "\n".join(lines) + "\n"
