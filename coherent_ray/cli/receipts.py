"""``receipts``: what each update consumed and what came out, and whether two runs are the same."""

from __future__ import annotations

from collections.abc import Iterator
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
from coherent_ray.digests import Digest
from coherent_ray.errors import ManifestDamaged, StorageError
from coherent_ray.storage import Storage
from coherent_ray.train.receipts import (
    Difference,
    Receipt,
    first_difference,
    first_link,
    history,
    last_update,
)

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


@click.command()
@whole_run_argument
@click.option("--from", "first", type=click.IntRange(1), default=1, help="First update to show.")
@click.option("--last", type=click.IntRange(1), help="Show only this many, the last ones.")
@click.option("--against", metavar="RUN", help="Compare with this run; exit code 1 if they differ.")
@json_option
def receipts(run: str, first: int, last: int | None, against: str | None, as_json: bool) -> int:
    """Show one line an update, and check their chain.

    What is shown is checked; `verify --all` checks what was before it. A published update's loss,
    gradient norm and learning rates are exact: JSON, one object a line, has them as hexadecimal
    floats.
    """
    storage = whole_run(run).open()
    if against is not None:
        return _compare(storage, whole_run(against).open(), as_json=as_json)
    if last is not None:
        first = max(first, last_update(Generations(storage).history()) - last + 1)
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
            first = first_link(generations.manifest(publish).header.plan)
        except (ManifestDamaged, StorageError):
            continue  # any other one tells the plan as well
        break
    return history(storage, commits, first, since)


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
