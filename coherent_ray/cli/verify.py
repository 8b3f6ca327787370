"""``verify``: does what was published still hold, byte for byte, what its digests say?"""

from __future__ import annotations

from typing import Any

import click

from coherent_ray.cli.output import (
    count_text,
    error_value,
    json_option,
    named,
    show_json,
    show_line,
)
from coherent_ray.cli.place import Place, place_of, run_argument
from coherent_ray.cli.surroundings import look_round
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.traces import look
from coherent_ray.errors import CoherentRayError, Damage, NoGeneration
from coherent_ray.storage.base import Entry


@click.command()
@run_argument
@click.option("--all", "everything", is_flag=True, help="Every generation that is not retired.")
@click.option(
    "--deep/--quick",
    "deep",
    default=True,
    help="Read every byte, which is the default; or compare sizes only, and read no shard.",
)
@json_option
def verify(run: str, everything: bool, deep: bool, as_json: bool) -> int:
    """Compare every digest of a generation with its files.

    The latest generation of RUN, or the one that is named. Each shard, block and tensor that is not
    what was published is named, and the exit code is 1. The commit log is always checked whole;
    with --all, so are the chain of receipts and the manifests of the data, and files that no record
    leads to are named.
    """
    place = place_of(run)
    if everything and place.generation is not None:
        raise click.UsageError(f"--all means every generation, not {place.generation}")
    storage = place.open()
    generations = Generations(storage)
    traces = look(storage)
    cut = traces.damage(generations.history())
    found: list[tuple[PublishBody, list[Damage]]] = []
    for publish in _wanted(generations, place, everything=everything):
        damages = generations.verify(publish, deep=deep)
        if damages and _is_retired(generations, publish):
            # Pruned while it was read: what is missing is not missed.
            if not as_json:
                show_line(f"{publish.name} (update {publish.update:,}): retired meanwhile")
            continue
        found.append((publish, damages))
        if not as_json:
            _show(publish, damages, deep=deep)
            if not everything:  # else they are told with all others
                _show_unnamed(generations.unnamed(publish))
    value: dict[str, Any] = {
        "generations": [_value(*pair) for pair in found],
        "log": error_value(cut) if cut else None,
    }
    faults: list[CoherentRayError] = [damage for _, damages in found for damage in damages]
    if cut:
        faults.append(cut)
        if not as_json:
            show_line(str(cut), style="bad")
    if everything:
        round_about = look_round(storage, generations)
        value |= round_about.value()
        faults += round_about.faults
        if not as_json:
            round_about.show()
    if as_json:
        show_json({"whole": not faults, **value})
    return 1 if faults else 0


def _is_retired(generations: Generations, publish: PublishBody) -> bool:
    return (publish.number, publish.attempt) in generations.history().retired


def _wanted(generations: Generations, place: Place, *, everything: bool) -> list[PublishBody]:
    if not everything:
        return [generations.find(place.generation or "latest")]
    live = list(generations.history().live)
    if not live:
        raise NoGeneration("the run has no published generation", where=place.root)
    return live


def _show(publish: PublishBody, damages: list[Damage], *, deep: bool) -> None:
    if not damages:
        how = "whole" if deep else "every size is right"
        show_line(f"{publish.name} (update {publish.update:,}): {how}", style="good")
        return
    show_line(
        f"{publish.name} (update {publish.update:,}): {count_text(len(damages), 'fault')}",
        style="bad",
    )
    for damage in damages:
        show_line(f"  {damage.where}: {damage.what}")
    for remedy in dict.fromkeys(damage.remedy for damage in damages if damage.remedy):
        show_line(f"  What to do: {remedy}", style="faint")


def _show_unnamed(entries: list[Entry]) -> None:
    for entry in entries:
        show_line(f"  {named(entry.path)}: not of this generation; nothing reads or deletes it")


def _value(publish: PublishBody, damages: list[Damage]) -> dict[str, Any]:
    return {
        "generation": publish.name,
        "update": publish.update,
        "whole": not damages,
        "damages": [error_value(damage) for damage in damages],
    }


COMMANDS = (verify,)
