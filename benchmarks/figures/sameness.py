"""Figures of what a run computes: replays and the reduction."""

from __future__ import annotations

from typing import Any

from figures.words import short


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
        digests = f"`{short(run['receipts'])}` `{short(run['state'])}`"
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


def prove(result: dict[str, Any]) -> str:
    """Return the proofs on Ray as a table: a row for each kind of job and number of lanes."""
    lines = [
        "| job | lanes | workers | runs | attempts | struck | receipts, final state of all |",
        "|---|---|---|---|---|---|---|",
    ]
    for proof in result["proofs"]:
        ranks = ", ".join(map(str, proof["ranks"]))
        kills = sum("killed" in line for line in proof["done"])
        same = f"`{short(proof['receipts'])}` `{short(proof['state'])}`"
        verdict = same if proof["good"] and proof["equal"] else "**differ**"
        lines.append(
            f"| {proof['job']} | {proof['lanes']} | {ranks} | {proof['runs']} | "
            f"{proof['attempts']} | {kills} times | {verdict} |"
        )
    return "\n".join(lines) + "\n"
