"""``prove``: is the claim true of this job, and if not, where does it break?"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coherent_ray.cli.output import Column, json_option, show_json, show_line, show_table
from coherent_ray.cli.validate import config_argument, load_job, set_option
from coherent_ray.storage import open_storage

if TYPE_CHECKING:
    from coherent_ray.drill.lives import Way
    from coherent_ray.drill.proof import Proof

_COLUMNS = (
    Column("run"),
    Column("ranks"),
    Column("attempts", right=True),
    Column("updates", right=True),
    Column("verdict"),
    Column("seconds", right=True),
)


def _numbers(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...]:
    """Return the numbers of a text, which have commas between."""
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of rank counts, as 1,2,3") from None


@click.command()
@config_argument
@click.option(
    "--ranks", callback=_numbers, metavar="N,N,...",
    help="Rank counts; without it, all that the claim allows. The reference runs at the first.",
)  # fmt: skip
@click.option("--kills", type=click.IntRange(0, 1000), default=4, help="Kills of each run.")
@click.option("--updates", type=click.IntRange(2), help="Length of each run; 40 at most by itself.")
@click.option("--seed", type=int, default=0, help="Decides which updates kills fall behind.")
@click.option("--out", metavar="DIR", default="proof", help="Where proof.json and proof.md go.")
@set_option
@click.option("--address", metavar="ADDR", help="Ray cluster to use; without it, one is started.")
@click.option("--in-process", is_flag=True, help="Without Ray: ranks are threads. Takes seconds.")
@click.option("--keep", is_flag=True, help="Keep the runs, whatever the verdict.")
@json_option
def prove(
    *,
    path: str,
    ranks: tuple[int, ...],
    kills: int,
    updates: int | None,
    seed: int,
    out: str,
    overrides: tuple[str, ...],
    address: str | None,
    in_process: bool,
    keep: bool,
    as_json: bool,
) -> int:
    """Prove that CONFIG's claim is true of it, or find where it breaks.

    Runs the job once undisturbed, then as the claim covers it: at each rank count, killed at each
    point of a save and between saves, and resized in mid-epoch. Compares receipts update by update
    and the final state bit for bit. The first run that differs ends it with exit code 1: the report
    names the first update, the first tensor, and, where that update can be run again here, the
    first lane and operation. CONFIG's own run is not touched.
    """
    settings = load_job(path, overrides)
    from coherent_ray.drill import cases, proof, proving

    if in_process and address is not None:
        raise click.UsageError("--in-process and --address exclude each other")
    if in_process and settings.training.strategy == "fsdp2":
        raise click.UsageError(
            "--in-process has no processes, and training.strategy: fsdp2 needs one for each rank"
        )
    place = Path(out).expanduser().absolute()
    job = cases.prepared(settings, updates)
    counts = cases.rank_counts(job, ranks)
    place.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="runs-", dir=place)
    plan = proving.Plan(job, scratch, counts, kills, seed)
    try:
        # Ray writes of deaths wherever it likes; what the command answers stands alone.
        with contextlib.redirect_stdout(sys.stderr), _way(plan.ranks, address, in_process) as way:
            result = proving.prove(plan, way, _tell)
    except BaseException:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    kept = keep or not result.good
    if not kept:
        shutil.rmtree(scratch, ignore_errors=True)
    proof.write(result, open_storage(str(place)))
    if as_json:
        show_json({**result.as_json(), "root": scratch if kept else None})
    else:
        _show(result, place)
        if kept:
            show_line(f"the runs lie in {scratch}; `coherent-ray diff` compares two of them")
    return 0 if result.good else 1


@contextlib.contextmanager
def _way(ranks: tuple[int, ...], address: str | None, in_process: bool) -> Iterator[Way]:
    """Give the way in which runs are run; a cluster that was started for them ends with it."""
    from coherent_ray.drill.lives import InProcess, OnRay

    if in_process:
        yield InProcess()
        return
    from coherent_ray.drill.clusters import ground

    with ground(max(ranks), address) as place:
        yield OnRay(place, _tell)


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _show(result: Proof, place: Path) -> None:
    rows = [
        [
            run.name,
            ", ".join(map(str, run.ranks)),
            str(run.attempts),
            f"{run.updates:,}",
            "the same" if run.good else "differs",
            f"{run.seconds:.1f}",
        ]
        for run in result.runs
    ]
    show_table(_COLUMNS, rows)
    for run in result.runs:
        for fault in run.faults:
            show_line(f"{run.name}: {fault}", style="bad")
        if run.cause:
            show_line(f"cause: {run.cause}", style="bad")
    if result.good:
        show_line(f"proved: the claim {result.claim} holds in all of them", style="good")
    show_line(f"see {place / 'proof.md'}")


COMMANDS = (prove,)
