"""``prune``, ``pin`` and ``unpin``: what a run keeps, and what may go.

These may be called while the run trains: the commit log puts them and the coordinator in one order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from coherent_ray.cli.output import (
    Column,
    count_text,
    error_value,
    json_option,
    named,
    show_json,
    show_line,
    show_table,
    size_text,
)
from coherent_ray.cli.place import (
    checkpoint_of,
    place_of,
    run_argument,
    whole_run,
    whole_run_argument,
)
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import Held
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import generation_name
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.records import PinBody
from coherent_ray.commit.retention import Kept, Policy
from coherent_ray.commit.traces import read_whole
from coherent_ray.errors import Fenced
from coherent_ray.storage.base import Entry

GENERATION_COLUMNS = (
    Column("generation"),
    Column("update", right=True),
    Column("state"),
    Column("why"),
)
_WHY = {
    "all": "nothing is given up",
    "recent": "among the newest",
    "every": "last of its updates",
    "pinned": "pinned",
    "held": "a reader holds it",
}
#: Files that are listed by name before they are only counted.
_SHOWN = 10
#: Seconds between two looks at the holds that are in the way.
_LOOK_EVERY_S = 1.0
#: How often another attempt may open while a pin is being written.
_PATIENCE = 5

_Positive = click.IntRange(min=1)


@click.command()
@whole_run_argument
@click.option(
    "--keep", type=_Positive, help="Keep the newest so many whole generations, and give up others."
)
@click.option(
    "--keep-every", type=_Positive, help="Besides, keep the last one of each so many updates."
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--no-wait", is_flag=True, help="Do not find out whether readers still live.")
@json_option
def prune(  # noqa: PLR0917 - click passes options by name
    run: str,
    keep: int | None,
    keep_every: int | None,
    dry_run: bool,
    no_wait: bool,
    as_json: bool,
) -> int:
    """Delete what RUN need not keep, and what is left over.

    What to keep is what the options say, or the configuration file; without either all generations
    are kept, and only what dead attempts left over is deleted. Generations that are kept are read
    in full, because only whole ones count. Pinned ones stay, and those that a reader holds; files
    that are not the run's are listed and never deleted.

    A reader that was killed leaves a hold behind. If one is in the way, this command watches it for
    up to a minute to see whether its reader lives.

    Exit code 1 where a file could not be deleted.
    """
    storage = whole_run(run).open()
    pruner = Pruner(storage, _policy(run, keep, keep_every))
    pruned = pruner.prune(dry_run=dry_run, whole_root=True)
    if pruned.held and not dry_run and not no_wait:
        if not as_json:
            show_line(f"waiting to see whether these readers live: {_readers(pruned.held)}")
        _watch(pruner, {hold.path for hold in pruned.held})
        pruned = _joined(pruned, pruner.prune(whole_root=True))
    if as_json:
        show_json({"root": storage.uri, "dry_run": dry_run, **_value(pruned)})
    else:
        _show(pruned, run, dry_run=dry_run)
    return 1 if pruned.problems else 0


@click.command()
@run_argument
@json_option
def pin(run: str, as_json: bool) -> int:
    """Keep a generation of RUN whatever retention says: RUN@g12.

    The latest, where none is named.
    """
    return _mark(run, pinned=True, as_json=as_json)


@click.command()
@run_argument
@json_option
def unpin(run: str, as_json: bool) -> int:
    """Let retention decide about a generation of RUN again: RUN@g12.

    The latest, where none is named.
    """
    return _mark(run, pinned=False, as_json=as_json)


def _mark(run: str, *, pinned: bool, as_json: bool) -> int:
    place = place_of(run)
    storage = place.open()
    read_whole(storage)  # what was written behind lost records could not be undone
    log = CommitLog(storage)
    publish = Generations(storage, log).find(place.generation or "latest")
    body = PinBody(publish.number, publish.attempt, pinned)
    changed = ((publish.number, publish.attempt) in log.read_on().pinned) != pinned
    if changed:
        _append(log, body)
    if as_json:
        value = {"generation": publish.name, "pinned": pinned, "changed": changed}
        show_json({"root": storage.uri, **value})
    else:
        word = "pinned" if pinned else "not pinned"
        show_line(f"{publish.name} (update {publish.update:,}) is {word}")
    return 0


def _append(log: CommitLog, body: PinBody) -> None:
    for last_try in [False] * (_PATIENCE - 1) + [True]:
        try:
            log.append(body, log.read_on().attempt)
        except Fenced:
            # Not this command's attempt: another one opened between two calls. Ask again.
            if last_try:
                raise
        else:
            return


def _policy(run: str, keep: int | None, keep_every: int | None) -> Policy:
    if configured := checkpoint_of(run):
        # Each option replaces its own setting: what the other one keeps is not lost with it.
        keep = configured.keep if keep is None else keep
        keep_every = configured.keep_every if keep_every is None else keep_every
    if keep is None and keep_every is not None:
        raise click.UsageError("--keep-every needs --keep: without it all generations are kept")
    return Policy(keep, keep_every)


def _watch(pruner: Pruner, paths: set[str]) -> None:
    """Watch holds until each has given a sign of life, is gone, or has expired."""
    while True:
        # What nobody can read never expires: no use in waiting for it.
        undecided = [
            hold
            for hold in pruner.watch.look()
            if hold.path in paths and not hold.seen_alive and 0 < hold.expires_in_s < float("inf")
        ]
        if not undecided:
            return
        time.sleep(min(_LOOK_EVERY_S, *(hold.expires_in_s for hold in undecided)))


def _joined(first: Pruned, second: Pruned) -> Pruned:
    return Pruned(
        retired=first.retired + second.retired,
        kept=second.kept,
        deleted=first.deleted + second.deleted,
        held=second.held,
        foreign=second.foreign,
        problems=second.problems,
        shared=second.shared,
        damaged=second.damaged,
    )


def _readers(held: Sequence[Held]) -> str:
    return ", ".join(f"{hold.who} ({generation_name(*hold.generation)})" for hold in held)


def _show(pruned: Pruned, run: str, *, dry_run: bool) -> None:
    gone = "would go" if dry_run else "retired"
    rows = [[p.name, f"{p.update:,}", gone, ""] for p in pruned.retired]
    rows += [
        [k.publish.name, f"{k.publish.update:,}", _state(k), _WHY[k.reason]] for k in pruned.kept
    ]
    if rows:
        show_table(GENERATION_COLUMNS, rows)
    for name, damage in pruned.damaged.items():
        show_line(f"{name} is not whole, and counts for nothing:", style="bad")
        show_line(f"  {named(damage.where)}: {damage.what}")
        told = f"`coherent-ray verify {run}@{name}` names all that is wrong"
        show_line(f"  What to do: {told}; put the files back from a copy.", style="faint")
    verb = "would delete" if dry_run else "deleted"
    show_line(f"{verb} {count_text(len(pruned.deleted), 'file')}, {size_text(pruned.freed)}")
    if pruned.held:
        show_line(f"in the way: {_readers(pruned.held)}; prune again when they are done")
    if pruned.shared:
        size = size_text(sum(entry.size for entry in pruned.shared))
        many = count_text(len(pruned.shared), "file")
        show_line(f"{many} of retired generations, {size}, stay: kept ones refer to them")
    _show_foreign(pruned.foreign)
    for problem in pruned.problems:
        show_line(f"could not be deleted: {problem}", style="bad")


def _show_foreign(foreign: Sequence[Entry]) -> None:
    if not foreign:
        return
    show_line(f"{count_text(len(foreign), 'file')} not of this run, left as found:")
    for entry in foreign[:_SHOWN]:
        show_line(f"  {named(entry.path)} ({size_text(entry.size)})")
    if len(foreign) > _SHOWN:
        show_line(f"  and {len(foreign) - _SHOWN:,} more")


def _state(kept: Kept) -> str:
    """Return what was found out; a plan does not look at what it does not depend on."""
    return {True: "whole", False: "damaged", None: "kept"}[kept.whole]


def _value(pruned: Pruned) -> dict[str, Any]:
    return {
        "retired": [publish.name for publish in pruned.retired],
        "kept": [
            {"generation": k.publish.name, "reason": k.reason, "whole": k.whole}
            for k in pruned.kept
        ],
        "damaged": {name: error_value(damage) for name, damage in pruned.damaged.items()},
        "deleted": [_file(entry) for entry in pruned.deleted],
        "freed": pruned.freed,
        "held": [
            {"generation": generation_name(*hold.generation), "by": hold.who, "path": hold.path}
            for hold in pruned.held
        ],
        "shared": [_file(entry) for entry in pruned.shared],
        "foreign": [_file(entry) for entry in pruned.foreign],
        "problems": list(pruned.problems),
    }


def _file(entry: Entry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size}


COMMANDS = (prune, pin, unpin)
