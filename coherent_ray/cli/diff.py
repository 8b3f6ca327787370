"""``diff``: are two histories one, and if not, where do they part?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from coherent_ray.cli.output import (
    Column,
    count_text,
    json_option,
    show_json,
    show_line,
    show_table,
)
from coherent_ray.cli.place import place_of

if TYPE_CHECKING:
    from coherent_ray.drill.parting import Parting
    from coherent_ray.train.receipts import Difference

#: Lines of a kind that are shown; JSON has all.
_SHOWN = 12


@click.command()
@click.argument("first", metavar="RUN_A[@GENERATION]")
@click.argument("second", metavar="RUN_B[@GENERATION]")
@json_option
def diff(first: str, second: str, as_json: bool) -> int:
    """Compare two histories, bit for bit.

    First what makes them other jobs (data, seed, settings, source, environment), then their
    receipts update by update as far as both go, then every tensor of the newest generations that
    are of one update. A named generation is compared with the other run's of the same update, or
    with the other one that is named. Exit code 1: they differ.
    """
    places = place_of(first), place_of(second)
    from coherent_ray.drill.parting import Side, compare

    sides = [Side(place.open_warned(), place.generation) for place in places]
    found = compare(*sides)
    if as_json:
        show_json({"runs": [side.storage.uri for side in sides], **found.as_json()})
    else:
        show_parting(found)
    return 0 if found.same else 1


def show_parting(found: Parting) -> None:
    """Print where two histories part."""
    _show_lines(found.job.lines, "faint")
    for note in found.notes:
        show_line(note, style="faint")
    if found.receipts:
        show_line(f"they part at update {found.update:,}", style="bad")
        columns = [Column("field"), Column("first"), Column("second")]
        show_table(columns, [_cells(each) for each in _causes(found.receipts)])
    stored = found.stored
    if stored is not None and not stored.same:
        tensors = stored.tensors
        at = " and ".join(f"{n:,}" for n in dict.fromkeys(stored.updates))
        show_line(
            f"the states after update {at} ({stored.first}, {stored.second}) differ: "
            f"{len(tensors.tensors):,} of {count_text(tensors.compared, 'tensor')}",
            style="bad",
        )
        _show_lines([*tensors.layout, *stored.values, *map(str, tensors.tensors)], "")
    if found.same:
        show_line(_same_in_words(found), style="good")


def _show_lines(lines: list[str], style: str) -> None:
    for line in lines[:_SHOWN]:
        show_line(f"  {line}", style=style)
    if len(lines) > _SHOWN:
        show_line(f"  and {len(lines) - _SHOWN:,} more; --json has all", style="faint")


def _causes(found: tuple[Difference, ...]) -> list[Difference]:
    """Leave out links that differ because something else does."""
    links = {"previous", "digest"}
    return [each for each in found if each.field not in links] or list(found)


def _cells(each: Difference) -> list[str]:
    return [each.field, _value(each.first), _value(each.second)]


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_value, value))
    if isinstance(value, str) and "0x" in value:
        return f"{value} ({float.fromhex(value):.9g})"
    return str(value)


def _same_in_words(found: Parting) -> str:
    text = f"the same, update for update, 1 to {found.compared:,}"
    if found.stored is not None:
        tensors = count_text(found.stored.tensors.compared, "tensor")
        text += f"; and every bit of {tensors} after update {found.stored.updates[0]:,}"
    return text


COMMANDS = (diff,)
