"""``receipts``: what each update consumed and what came out, and whether two runs are the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict

import click

from coherent_ray.cli.output import (
    Column,
    count_text,
    json_option,
    show_json,
    show_line,
    show_table,
)
from coherent_ray.cli.place import whole_run, whole_run_argument
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import Digest
from coherent_ray.errors import ManifestDamaged, StorageError
from coherent_ray.storage import LocalStorage, Storage
from coherent_ray.train.receipts import (
    Difference,
    Receipt,
    first_difference,
    first_link_of,
    history,
    last_update,
)
from coherent_ray.train.recipe import length_of

COLUMNS = (
    Column("update", right=True),
    Column("epoch", right=True),
    Column("examples"),
    Column("count", right=True),
    Column("loss", right=True),
    Column("grad norm", right=True),
    Column("lr"),
    Column("receipt"),
    Column("state"),
)
_SHOWN_HEX = 12
#: What is followed has no last line yet, so its columns are as wide as they will need to be.
_WIDTHS = tuple(
    zip((column.title for column in COLUMNS), (9, 5, 16, 7, 10, 10, 9, 12, 12), strict=True)
)
#: Seconds between two looks at the log: in a directory, in an object store.
_LOOK_S, _FAR_LOOK_S = 0.5, 2.0


@click.command()
@whole_run_argument
@click.option("--from", "first", type=click.IntRange(1), default=1, help="First update to show.")
@click.option("--last", type=click.IntRange(1), help="Show only this many, the last ones.")
@click.option("--against", metavar="RUN", help="Compare with this run; exit code 1 if they differ.")
@click.option("--follow", "-f", is_flag=True, help="Go on as they are published, to the run's end.")
@json_option
def receipts(
    *, run: str, first: int, last: int | None, against: str | None, follow: bool, as_json: bool
) -> int:
    """Show one line an update, and check their chain.

    What is shown is checked; `verify --all` checks what was before it. A published update's loss,
    gradient norm and learning rates are exact: JSON, one object a line, has them as hexadecimal
    floats. What is followed after a resume from an older generation is told again from there.
    Ctrl-C ends it, with exit code 0.
    """
    if follow and against is not None:
        raise click.UsageError("--follow and --against exclude each other")
    storage = whole_run(run).open_warned()
    if against is not None:
        return _compare(storage, whole_run(against).open_warned(), as_json=as_json)
    if last is not None:
        first = max(first, last_update(Generations(storage).history()) - last + 1)
    if follow:
        return _follow(storage, first, as_json=as_json)
    chosen = read_receipts(storage, first)
    if as_json:
        for receipt in chosen:
            show_json(asdict(receipt), lines=True)
        return 0
    show_table(COLUMNS, (_cells(receipt) for receipt in chosen))
    if first > 1:
        show_line(f"what was before update {first:,} was not looked at; `verify --all` does")
    return 0


def read_receipts(storage: Storage, since: int = 1) -> Iterator[Receipt]:
    """Yield a run's receipts, checked from the plan's digest on, where a manifest tells the plan.

    Args:
        storage: The run's root.
        since: The first update to yield; what ends before it is not looked at.

    Raises:
        ReceiptsDamaged: A segment is missing or damaged, or the chain has a gap.
        LogDamaged: The log cannot be trusted.
        StorageError: The storage failed.
    """
    generations = Generations(storage)
    commits = generations.history()
    first: Digest | None = None
    for publish in reversed(commits.live):
        try:
            first = first_link_of(generations.manifest(publish).header)
        except (ManifestDamaged, StorageError):
            continue  # any other one tells the plan as well
        break
    return history(storage, commits, first, since)


def _follow(storage: Storage, first: int, *, as_json: bool) -> int:
    """Print receipts as generations publish them, until the run is complete or Ctrl-C."""
    if not as_json:
        show_line("  ".join(title.rjust(width) for title, width in _WIDTHS))
    pause = _LOOK_S if isinstance(storage, LocalStorage) else _FAR_LOOK_S
    with suppress(KeyboardInterrupt):
        for receipt in followed(storage, first, lambda: time.sleep(pause)):
            if as_json:
                show_json(asdict(receipt), lines=True)
                continue
            cells = zip(_cells(receipt), _WIDTHS, strict=True)
            show_line("  ".join(cell.rjust(width) for cell, (_, width) in cells).rstrip())
            sys.stdout.flush()
    return 0


def followed(storage: Storage, since: int, wait: Callable[[], None]) -> Iterator[Receipt]:
    """Yield a run's receipts from an update on, as they are published, until it is complete.

    Args:
        storage: The run's root.
        since: The first update to yield. Where a resume went back, the updates that were done
            again are yielded again.
        wait: Called where nothing new is there.

    Raises:
        ReceiptsDamaged: A segment is missing or damaged, or the chain has a gap.
        LogDamaged: The log cannot be trusted.
        StorageError: The storage failed.
    """
    generations = Generations(storage)
    seen, first = 0, since
    while True:
        commits = generations.history()
        publishes = commits.publishes
        for publish in publishes[seen:] if seen else ():
            segment = publish.receipts
            begins = publish.update + 1 if segment is None else segment.first
            since = max(first, min(since, begins))
        if len(publishes) > seen:
            seen = len(publishes)
            for receipt in history(storage, commits, None, since):
                yield receipt
                since = receipt.update + 1
        if commits.latest is not None and _is_complete(generations, commits.latest):
            return
        wait()


def _is_complete(generations: Generations, latest: PublishBody) -> bool:
    try:
        total = length_of(generations.manifest(latest).header)
    except ManifestDamaged:
        return False
    return total is not None and latest.update >= total


def _compare(one: Storage, other: Storage, *, as_json: bool) -> int:
    difference = first_difference(read_receipts(one), read_receipts(other))
    publishes = Generations(one).history().publishes
    updates = publishes[-1].update if publishes else 0
    if as_json:
        show_json(
            {
                "same": difference is None,
                "updates": updates,
                "difference": asdict(difference) if difference else None,
            }
        )
    elif difference is None:
        show_line(f"the same, all {count_text(updates, 'update')}", style="good")
    else:
        show_line(_in_words(difference), style="bad")
    return 0 if difference is None else 1


def _in_words(difference: Difference) -> str:
    at, here, there = difference.update, difference.first, difference.second
    if difference.field == "update" and None in {here, there}:
        ended, other = ("this run", "the other") if here is None else ("the other", "this run")
        return f"{ended} ends before update {at:,}, which {other} has"
    return f"they part at update {at:,}: {difference.field} is {here} here and {there} there"


def _cells(receipt: Receipt) -> list[str]:
    rates = dict.fromkeys(f"{float.fromhex(rate):.3g}" for rate in receipt.lr)
    norm = f"{float.fromhex(receipt.grad_norm):.4g}"
    return [
        f"{receipt.update:,}",
        f"{receipt.epoch:,}",
        f"{receipt.start:,} to {receipt.stop:,}",
        f"{receipt.count:,}",
        f"{float.fromhex(receipt.loss):.6f}",
        f"{norm}, skipped" if receipt.skipped else norm,
        " ".join(rates),
        _short(receipt.digest),
        _short(receipt.state) if receipt.state else "-",
    ]


def _short(digest: Digest) -> str:
    return digest.partition(":")[2][:_SHOWN_HEX]


COMMANDS = (receipts,)
