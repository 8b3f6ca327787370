"""How a run ended: what ``run`` answers, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import click

from coherent_ray.cli.output import (
    count_text,
    show_error,
    show_fields,
    show_json,
    show_line,
    size_text,
)
from coherent_ray.errors import (
    AdmissionRefused,
    CoherentRayError,
    ConfigError,
    Damage,
    LogDamaged,
    NewerFormat,
    NoGeneration,
    OwnedElsewhere,
    WrongRun,
)
from coherent_ray.train.supervisor import Outcome

#: After these the same command meets the same again, whatever is published.
_LASTING = (
    ConfigError,
    AdmissionRefused,
    OwnedElsewhere,
    Damage,
    LogDamaged,
    NewerFormat,
    NoGeneration,
    WrongRun,
)


def show_outcome(outcome: Outcome, root: str, *, as_json: bool) -> None:
    """Print how a run ended.

    Args:
        outcome: It.
        root: Where the run lies.
        as_json: Print JSON.
    """
    if as_json:
        show_json({"root": root, **value_of(outcome)})
        return
    facts = outcome.facts
    show_line(headline(outcome), style="" if outcome.stopped else "good")
    of = f" of {facts['updates']:,}" if facts["updates"] is not None else ""
    show_fields("", [("updates", f"{facts['done']:,}{of}"), *_saves(outcome)])
    show_fields("next", _next(outcome, root))


def show_failure(error: CoherentRayError, *, as_json: bool) -> None:
    """Print the error that a run ended with, then what is published and where more is to be read.

    Args:
        error: With the supervisor's facts in its details.
        as_json: Print JSON.
    """
    show_error(error, as_json=as_json)
    if not as_json:
        for line in closing(error):
            click.echo(line, err=True)


def closing(error: CoherentRayError) -> list[str]:
    """Return the lines that follow an error: what is published, the log, and its last words."""
    lines = []
    if "latest" in error.details and not isinstance(error, _LASTING):
        latest = error.details["latest"]
        lines.append(
            f"Published: {latest}; the same command resumes there."
            if latest
            else "Published: nothing yet; the same command begins at the beginning."
        )
    words = error.details.get("last_words")
    if isinstance(words, list) and words:
        lines += ["The driver's last words:", *(f"  {word}" for word in words)]
    if log := error.details.get("log"):
        lines.append(f"The driver's log: {log}")
    return lines


def headline(outcome: Outcome) -> str:
    """Return in one line how a run ended."""
    facts = outcome.facts
    if outcome.stopped:
        at = f"resumes at {facts['latest']}" if facts["latest"] else "begins at the beginning"
        return f"run {facts['run_id']} was stopped; it {at} by the same command"
    return f"run {facts['run_id']} is complete: {count_text(facts['done'], 'update')}"


def value_of(outcome: Outcome) -> dict[str, Any]:
    """Return how a run ended as JSON."""
    return {
        "stopped": outcome.stopped,
        "restarts": outcome.restarts,
        "restarted": outcome.restarted,
        "log": str(outcome.log),
        **outcome.facts,
    }


def _saves(outcome: Outcome) -> list[tuple[str, str]]:
    saves = outcome.facts.get("saves", [])
    good = [save for save in saves if save["fate"] == "published"]
    rows = [("latest", outcome.facts["latest"] or "none")]
    if saves:
        rows.append(("generations", f"{len(good):,} published by this command"))
    if good:
        stalls = [1000 * save["stall_s"] for save in good]
        rows += [
            ("stall per save", f"{median(stalls):.1f} ms median, {max(stalls):.1f} ms longest"),
            ("time to durable", f"{median(save['durable_s'] for save in good):.2f} s median"),
            ("shard of rank 0", size_text(good[-1]["shard_bytes"])),
            *_totals(good),
        ]
    if len(good) < len(saves):
        reasons = dict.fromkeys(s["reason"] for s in saves if s["fate"] != "published")
        rows.append(("failed saves", f"{len(saves) - len(good):,}: {'; '.join(reasons)}"))
    if skipped := outcome.facts.get("skipped"):
        rows.append(("skipped saves", f"{skipped:,}: one was still in flight (on_busy: skip)"))
    if cadence := outcome.facts.get("cadence"):
        rows.append(("cadence", cadence["text"]))
    counts = {"driver": outcome.restarts, **outcome.restarted}
    if any(counts.values()):
        log = f"; log {outcome.log}" if outcome.restarts and outcome.log.exists() else ""
        words = ", ".join(count_text(count, what) for what, count in counts.items() if count)
        rows.append(("restarts", words + log))
    return rows


def _totals(saves: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return where the time of rank 0's saves went, all together."""
    if not any("times" in save for save in saves):
        return []

    def total(name: str) -> str:
        return f"{sum(save.get('times', {}).get(name, 0.0) for save in saves):.2f} s"

    standing = [f"{what} {total(f'{what}_s')}" for what in ("wait", "fingerprint", "snapshot")]
    behind = [f"{what} {total(f'{what}_s')}" for what in ("write", "hash", "sync", "acknowledge")]
    rows = [
        ("stall in all", f"{total('stall_s')}: {', '.join(standing)}"),
        ("behind training", ", ".join(behind)),
    ]
    lost = [save["lost_s"] for save in saves if save.get("lost_s") is not None]
    if lost:
        of = f"measured beside {len(lost):,} of {count_text(len(saves), 'save')}"
        rows.append(("updates slowed by", f"{sum(lost):.2f} s, {of}"))
    return rows


def _next(outcome: Outcome, root: str) -> list[tuple[str, str]]:
    if outcome.facts["latest"] is None:
        return [("the run lies in", root)]
    return [
        ("the run lies in", root),
        ("its generations", f"coherent-ray ls {root}"),
        ("are they whole", f"coherent-ray verify {root} --all"),
        ("every update", f"coherent-ray receipts {root} --last 10"),
    ]
