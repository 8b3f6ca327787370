"""``drill``: failures on purpose, and whether every promise was kept."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coherent_ray.cli.output import Column, json_option, show_json, show_line, show_table
from coherent_ray.cli.validate import config_argument, load_job, set_option
from coherent_ray.config import Config
from coherent_ray.errors import StorageError
from coherent_ray.storage import open_storage

if TYPE_CHECKING:
    from coherent_ray.drill.campaign import Result
    from coherent_ray.drill.verdicts import Verdict

_COLUMNS = (
    Column("scenario"),
    Column("verdict"),
    Column("strikes", right=True),
    Column("attempts", right=True),
    Column("selected"),
    Column("lost, replayed", right=True),
    Column("next update", right=True),
)


@click.command()
@config_argument
@click.option(
    "--scenario", "names", multiple=True, metavar="NAME", help="One of them; many times; or all."
)
@click.option("--kills", type=click.IntRange(1, 10_000), default=10, help="Kills of a storm.")
@click.option("--seed", type=int, default=0, help="Decides a storm.")
@click.option("--root", metavar="DIR", help="Where the drilled runs lie; without it, a new place.")
@set_option
@click.option("--address", metavar="ADDR", help="Ray cluster to use; without it, one is started.")
@click.option("--keep", is_flag=True, help="Keep the runs, whatever the verdict.")
@json_option
def drill(
    *,
    path: str,
    names: tuple[str, ...],
    kills: int,
    seed: int,
    root: str | None,
    overrides: tuple[str, ...],
    address: str | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Run CONFIG while things fail on purpose, and judge the run.

    Each scenario is a whole run under a scratch root. CONFIG's own run is not touched. Exit code 1:
    a promise was broken, or a strike found no moment; the runs are then kept.
    """
    settings = load_job(path, overrides)
    from coherent_ray.drill.campaign import Drill, chosen
    from coherent_ray.drill.campaign import drill as carry_out

    scenarios = chosen(names, address, settings)
    scratch = _scratch(root)
    try:
        plan = Drill(settings, scratch, scenarios, address, kills, seed)
        # Ray writes of deaths wherever it likes; what the command answers stands alone.
        with contextlib.redirect_stdout(sys.stderr):
            result = carry_out(plan, lambda text: click.echo(text, err=True))
    except BaseException:
        if not keep:
            _remove(scratch, settings)
        raise
    kept = keep or not result.good
    if not kept:
        _remove(scratch, settings)
    if as_json:
        show_json({**result.as_json(), "root": scratch if kept else None})
    else:
        _show(result)
        if kept:
            show_line(f"the runs lie in {scratch}")
    return 0 if result.good else 1


def _scratch(root: str | None) -> str:
    """Return a new place for the runs, below the one that was named."""
    if root is not None and "://" in root:
        from uuid import uuid4

        return f"{root.rstrip('/')}/drill-{uuid4().hex[:8]}"
    below = None if root is None else Path(root).expanduser().absolute()
    if below is not None:
        below.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix="drill-", dir=below)


def _remove(scratch: str, settings: Config) -> None:
    """Take away the runs; nothing else lies in this place."""
    if "://" not in scratch:
        shutil.rmtree(scratch, ignore_errors=True)
        return
    storage = open_storage(scratch, settings.storage.options)
    with contextlib.suppress(StorageError):  # it is litter, not a verdict
        for entry in list(storage.list()):
            storage.delete(entry.path)


def _show(result: Result) -> None:
    show_table(_COLUMNS, [_row(verdict) for verdict in result.verdicts])
    for verdict in result.verdicts:
        for promise in verdict.promises:
            if not promise.kept:
                show_line(
                    f"{verdict.scenario}: broken: {promise.name}: {promise.says}", style="bad"
                )
    if result.good:
        updates = result.reference["updates"]
        text = f"receipts and state of all {updates:,} updates equal the run that nothing struck"
        show_line(text, style="good")


def _row(verdict: Verdict) -> list[str]:
    seconds = [s.next_update_s for s in verdict.injected if s.next_update_s is not None]
    selected: dict[Any, None] = dict.fromkeys(seen.selected or "none" for seen in verdict.injected)
    shown = list(selected)
    return [
        verdict.scenario,
        "kept" if verdict.good else "broken",
        str(len(verdict.injected)),
        str(verdict.attempts),
        ", ".join(shown[:2]) + (", ..." if len(shown) > 2 else ""),
        str(verdict.lost),
        f"{max(seconds):.1f} s" if seconds else "",
    ]


COMMANDS = (drill,)
