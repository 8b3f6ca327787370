"""A manifest's bytes: plain for few ranks, with its shards as one table for many.

A shard's record says much that follows from its rank: path, range, size, and its digest from its
blocks'. Of a few ranks that is convenient for people; of sixteen thousand it is most of the
manifest. So from `RANKS` ranks on the records are stored as a table of what does not follow, a
column a key. A value that is the same in all of them is there once, block digests are one string.
Whatever is read is unpacked to the records that it stands for, which are then validated as ever.

| form of a column | holds |
|---|---|
| ``{"all": V}`` | every row's value is V |
| ``{"each": [V, ...]}`` | one value a row: a rank's, or a tensor's |
| ``{"some": {"R": V, ...}}`` | the value of row R; others have no such key |
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.manifest import (
    TABLE_FORMAT,
    Manifest,
    StateLayout,
    generation_directory,
    load,
    reason_of,
    shard_path,
)
from coherent_ray.digests import digest_of, hex_digits

#: Ranks from which on a manifest's shards are a table.
RANKS = 256
#: More ranks are in no manifest; a table could claim any number.
_MOST_RANKS = 2**22

_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)
_DERIVED = {"rank", "path", "start", "stop", "size", "digest"}


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes that a manifest is stored as; equal manifests, equal bytes."""
    plain = _ADAPTER.dump_python(manifest)
    tensors = manifest.header.layout.tensors
    if (
        tensors
        and len(manifest.shards) >= RANKS
        and (table := _packed(plain, manifest.header.layout))
    ):
        header = plain["header"]
        table["format"] = header["format"]
        header["format"] = TABLE_FORMAT
        header["layout"] = {"columns": _columns(header["layout"]["tensors"])}
        plain["shards"] = table
    return canonical.dump(plain)


def load_manifest(data: bytes) -> Manifest:
    """Return the manifest of some bytes from outside.

    Raises:
        LaterFormat: A later version of this software wrote them, as far as they say.
        ValueError: They are not what `dump_manifest` makes; the message says why.
    """
    value = canonical.load(data)
    header = value.get("header") if isinstance(value, dict) else None
    if not isinstance(header, dict) or header.get("format") != TABLE_FORMAT:
        return load(Manifest, data)
    if canonical.dump(value) != data:
        raise ValueError("it is not canonical JSON")
    try:
        plain = canonical.dump(_unpacked(value))
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"shards: the table is wrong: {type(error).__name__}: {error}") from error
    try:
        manifest = _ADAPTER.validate_json(plain)
    except ValidationError as error:
        raise ValueError(reason_of(error, "Manifest")) from error
    return manifest


def _packed(plain: dict[str, Any], layout: StateLayout) -> dict[str, Any] | None:
    """Return the table; None: the records say something that does not follow from it."""
    shards: list[dict[str, Any]] = plain["shards"]
    derived = _derived(plain["header"], layout, shards)
    follows = zip(shards, derived, strict=True)
    if any(shard[key] != row[key] for shard, row in follows for key in _DERIVED):
        return None
    columns = _columns(shards, without=_DERIVED | {"blocks"})
    columns["blocks"] = {"each": ["".join(shard["blocks"]) for shard in shards]}
    return {"columns": columns}


def _columns(rows: Sequence[dict[str, Any]], without: Set[str] = frozenset()) -> dict[str, Any]:
    names = sorted({name for row in rows for name in row} - without)
    return {name: _column(name, rows) for name in names}


def _column(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = {str(place): row[name] for place, row in enumerate(rows) if name in row}
    if len(values) < len(rows):
        return {"some": values}
    first, *others = values.values()
    if all(value == first for value in others):
        return {"all": first}
    return {"each": list(values.values())}


def _unpacked(value: dict[str, Json]) -> dict[str, Json]:
    """Return the plain form of a manifest with a table, which nobody has validated."""
    header, table = dict(value["header"]), value["shards"]
    ranks, columns = header["ranks"], dict(table["columns"])
    if table.keys() != {"columns", "format"} or type(ranks) is not int:
        raise ValueError("shards: the table has other keys than its own")
    joined = columns.pop("blocks")["each"]
    if not RANKS <= ranks <= _MOST_RANKS or len(joined) != ranks:
        raise ValueError("shards: the table has not one row for each rank")
    header["format"] = table["format"]
    tensors = header["layout"]["columns"]
    header["layout"] = {"tensors": _rows(tensors, len(tensors["name"]["each"]))}
    layout = TypeAdapter(StateLayout).validate_json(canonical.dump(header["layout"]))
    shards = _rows(columns, ranks)
    for shard, hexes in zip(shards, joined, strict=True):
        digits = hex_digits(shard["algorithm"])
        shard["blocks"] = [hexes[at : at + digits] for at in range(0, len(hexes), digits)]
    for shard, derived in zip(shards, _derived(header, layout, shards), strict=True):
        shard.update(derived)
    return {**value, "header": header, "shards": shards}


def _rows(columns: dict[str, Json], count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in columns.items():
        for place, content in _values(column, count):
            rows[place][name] = content
    return rows


def _values(column: dict[str, Json], count: int) -> list[tuple[int, Json]]:
    ((form, content),) = column.items()
    match form:
        case "all":
            return [(place, content) for place in range(count)]
        case "each" if len(content) == count:
            return list(enumerate(content))
        case "some":
            return [(int(place), value) for place, value in content.items()]
    raise ValueError(f"{canonical.shown(form)} is no form of a column of {count} rows")


def _derived(
    header: dict[str, Any], layout: StateLayout, shards: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what follows from each shard's rank and blocks."""
    ranks = len(shards)
    directory = generation_directory(header["number"], header["attempt"])
    cuts = layout.cuts(ranks)
    return [
        {
            "rank": rank,
            "path": shard_path(directory, rank, ranks),
            "start": cuts[rank],
            "stop": cuts[rank + 1],
            "size": shard["header_bytes"] + cuts[rank + 1] - cuts[rank],
            "digest": digest_of(b"".join(map(bytes.fromhex, shard["blocks"])), shard["algorithm"]),
        }
        for rank, shard in enumerate(shards)
    ]
