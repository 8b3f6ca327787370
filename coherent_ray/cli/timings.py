"""``show --timings``: where the time of a run's saves went, as their profiles tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from coherent_ray.cli.output import (
    Column,
    count_text,
    show_fields,
    show_json,
    show_line,
    show_table,
)
from coherent_ray.cli.place import Place
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.profiles import Profile, read_profile
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.timings import PARTS
from coherent_ray.storage.base import Storage

COLUMNS = (
    Column("generation"),
    Column("update", right=True),
    Column("why"),
    Column("stall", right=True),
    Column("lost", right=True),
    Column("write", right=True),
    Column("hash", right=True),
    Column("sync", right=True),
    Column("publish", right=True),
)
PART_COLUMNS = (
    Column("part"),
    Column("median", right=True),
    Column("longest", right=True),
    Column("rank", right=True),
)
_COORDINATOR = {
    "acknowledged_s": "first to last word",
    "checked_s": "shards looked at",
    "appended_s": "record appended",
    "published_s": "first word to published",
}
_UNTOLD = "no times are stored of it"


def show_timings(place: Place, *, as_json: bool) -> int:
    """Show the times of one generation, or of every live one where none is named.

    Args:
        place: The run, perhaps with a generation.
        as_json: Print JSON.
    """
    storage = place.open_warned()
    generations = Generations(storage)
    if place.generation is not None:
        chosen = [generations.find(place.generation)]
    else:
        chosen = list(generations.history().live)
    lost = _losses(storage, generations.history().publishes, chosen)
    found = [(publish.name, read_profile(storage, publish.name)) for publish in chosen]
    if as_json:
        show_json({"root": storage.uri, "generations": [_value(*each, lost) for each in found]})
    elif place.generation is not None:
        _show_one(*found[0], lost)
    else:
        _show_all(found, lost)
    return 0


def _losses(
    storage: Storage, publishes: Sequence[PublishBody], chosen: Sequence[PublishBody]
) -> dict[str, float]:
    """Return the seconds lost beside each save; the save after it tells, in the same attempt."""
    losses = {}
    for before, after in pairwise(publishes):
        if before in chosen and before.attempt == after.attempt:
            profile = read_profile(storage, after.name)
            told = profile.about.before if profile and profile.about else None
            if told is not None and told.generation == before.name:
                losses[before.name] = told.lost_s
    return losses


def _value(name: str, profile: Profile | None, lost: Mapping[str, float]) -> dict[str, Any]:
    times = asdict(profile) if profile else None
    return {"generation": name, "lost_s": lost.get(name), "timings": times}


def _show_one(name: str, profile: Profile | None, lost: Mapping[str, float]) -> None:
    if profile is None:
        show_line(f"{name}: {_UNTOLD}")
        return
    about = profile.about
    facts = [("update", f"{profile.update:,}"), ("ranks", f"{profile.ranks:,}")]
    if about is not None:
        facts += [("saved", about.why), ("trained before", _text(about.trained_s))]
    facts += [("lost beside it", _text(lost.get(name)))]
    if about is not None and about.choice is not None:
        facts += [("cadence", about.choice.in_words())]
    show_fields(f"times of {name}", facts)
    if profile.parts:
        show_table(
            PART_COLUMNS,
            (
                [label_of(part), _text(told.median_s), _text(told.longest_s), f"{told.rank:,}"]
                for part in PARTS
                if (told := profile.parts.get(part))
            ),
        )
    times = asdict(profile)
    show_fields("coordinator", [(text, _text(times[key])) for key, text in _COORDINATOR.items()])


def _show_all(found: Sequence[tuple[str, Profile | None]], lost: Mapping[str, float]) -> None:
    show_table(COLUMNS, (_cells(name, profile, lost.get(name)) for name, profile in found))
    told = [profile for _, profile in found if profile is not None and profile.parts]
    if not told:
        return
    stalls = [profile.parts["stall_s"].longest_s for profile in told]
    rows = [
        ("saves with times", f"{len(told):,} of {len(found):,}"),
        ("stall", f"{_text(sum(stalls))} in all, {_text(median(stalls))} median"),
    ]
    if lost:
        rows += [
            ("lost beside saves", f"{_text(sum(lost.values()))} in {count_text(len(lost), 'save')}")
        ]
    choices = [p.about.choice for p in told if p.about and p.about.choice]
    if choices:
        rows += [("cadence", choices[-1].in_words())]
    show_fields("together", rows)


def _cells(name: str, profile: Profile | None, lost_s: float | None) -> list[str]:
    if profile is None or not profile.parts:
        return [name, *["-"] * (len(COLUMNS) - 1)]
    parts = [_text(profile.parts[p].longest_s) for p in ("write_s", "hash_s", "sync_s")]
    return [
        name,
        f"{profile.update:,}",
        profile.about.why if profile.about else "-",
        _text(profile.parts["stall_s"].longest_s),
        _text(lost_s),
        *parts,
        _text(profile.published_s),
    ]


def label_of(part: str) -> str:
    """Return a time's name in words: ``stall_s`` is ``stall``."""
    return part.removesuffix("_s").replace("_", " ")


def _text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.1f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"
