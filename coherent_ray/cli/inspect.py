"""``ls`` and ``show``: what a run has published, as its log and its manifests tell it.

Neither looks into a shard: that is what ``verify`` is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from coherent_ray import canonical
from coherent_ray.cli.output import (
    Column,
    count_text,
    error_value,
    json_option,
    show_fields,
    show_json,
    show_line,
    show_table,
    size_text,
)
from coherent_ray.cli.place import place_of, run_argument, whole_run, whole_run_argument
from coherent_ray.cli.timings import show_timings
from coherent_ray.commit.findings import Finding, read_findings
from coherent_ray.commit.generations import GenerationInfo, Generations
from coherent_ray.commit.log import record_path
from coherent_ray.commit.manifest import GenerationHeader, Manifest, StateLayout, dump
from coherent_ray.commit.traces import look
from coherent_ray.errors import ManifestDamaged, StorageError
from coherent_ray.storage import Storage
from coherent_ray.storage.base import Dated

GENERATION_COLUMNS = (
    Column("generation"),
    Column("update", right=True),
    Column("epoch", right=True),
    Column("ranks", right=True),
    Column("attempt", right=True),
    Column("size", right=True),
    Column("when"),
    Column("state"),
)
SHARD_COLUMNS = (
    Column("rank", right=True),
    Column("size", right=True),
    Column("blocks", right=True),
    Column("digest"),
)
TENSOR_COLUMNS = (Column("tensor"), Column("dtype"), Column("shape"), Column("size", right=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One generation, as ``ls`` tells it."""

    info: GenerationInfo
    manifest: Manifest | None
    """None where it is retired or damaged."""
    damage: str
    """What is wrong with its manifest; empty where nothing is."""
    published_at: datetime | None
    """When the record was written; None where the storage does not tell."""

    @property
    def state(self) -> str:
        """Some words."""
        if self.damage:
            return "damaged"
        if self.info.retired:
            return "retired"
        words = ["latest" if self.info.latest else "published"]
        words += ["pinned"] if self.info.pinned else []
        words += [f"in update {self.info.publish.update + 1:,}"] if self.mid_update else []
        return ", ".join(words)

    @property
    def mid_update(self) -> bool | None:
        """Whether it lies between two microbatches of an update; None: nobody knows."""
        return self.manifest.header.mid_update if self.manifest else None

    def value(self) -> dict[str, Any]:
        """Return the row as JSON."""
        publish = self.info.publish
        return {
            "generation": self.info.name,
            "number": publish.number,
            "attempt": publish.attempt,
            "update": publish.update,
            "mid_update": self.mid_update,
            "epoch": publish.epoch,
            "ranks": self.manifest.header.ranks if self.manifest else None,
            "size": _size(self) if self.manifest else None,
            "published_at": self.published_at.isoformat() if self.published_at else None,
            "latest": self.info.latest,
            "retired": self.info.retired,
            "pinned": self.info.pinned,
            "damage": self.damage or None,
        }

    def cells(self) -> list[str]:
        """Return the row as a table shows it."""
        publish, at = self.info.publish, self.published_at
        return [
            self.info.name,
            f"{publish.update:,}",
            f"{publish.epoch:,}",
            f"{self.manifest.header.ranks:,}" if self.manifest else "-",
            f"{publish.attempt:,}",
            size_text(_size(self)) if self.manifest else "-",
            f"{at.astimezone():%Y-%m-%d %H:%M:%S}" if at else "-",
            self.state,
        ]


@click.command("ls")
@whole_run_argument
@click.option("--all", "everything", is_flag=True, help="Retired generations too.")
@json_option
def list_generations(run: str, everything: bool, as_json: bool) -> int:
    """List the generations that RUN has published, oldest first.

    Exit code 1 where a manifest is damaged or the log lost its end; `verify` looks at the shards
    too.
    """
    storage = whole_run(run).open()
    generations = Generations(storage)
    traces = look(storage)
    history = generations.history()
    cut = traces.damage(history)
    rows = [
        _row(storage, generations, info)
        for info in generations.list()
        if everything or not info.retired
    ]
    if as_json:
        show_json(
            {
                "root": storage.uri,
                "run_id": history.run_id,
                "attempts": len(history.attempts),
                "generations": [row.value() for row in rows],
                "log": error_value(cut) if cut else None,
            }
        )
    else:
        show_line(
            f"run {history.run_id}: {count_text(len(rows), 'generation')}, "
            f"{count_text(len(history.attempts), 'attempt')}"
        )
        if rows:
            show_table(GENERATION_COLUMNS, (row.cells() for row in rows))
        for row in rows:
            if row.damage:
                show_line(row.damage, style="bad")
        if cut:
            show_line(str(cut), style="bad")
    return 1 if cut or any(row.damage for row in rows) else 0


@click.command()
@run_argument
@click.option("--tensors", is_flag=True, help="List the tensors of the state too.")
@click.option("--timings", is_flag=True, help="Where the time of its save went, and no more.")
@json_option
def show(run: str, tensors: bool, timings: bool, as_json: bool) -> int:
    """Show what one generation of RUN holds.

    The latest, or the one that is named; with --timings every one that is kept, or the one that is
    named. What its last scrub found is a note, and may be old: `verify` looks.
    """
    place = place_of(run)
    if timings:
        return show_timings(place, as_json=as_json)
    storage = place.open_warned()
    generations = Generations(storage)
    publish = generations.find(place.generation or "latest")
    manifest = generations.manifest(publish)
    info = next(info for info in generations.list() if info.publish == publish)
    row = Row(info, manifest, "", _written_at(storage, info))
    scrubbed = _scrubbed(storage, info.name)
    if as_json:
        told = {
            "scrub": scrubbed.to_json() if scrubbed else None,
            "manifest": canonical.load(dump(manifest)),
        }
        show_json({"root": storage.uri, **row.value(), **told})
        return 0
    facts = [*_facts(row, manifest), ("last scrub", _scrub_text(scrubbed))]
    show_fields(f"{info.name} of run {manifest.header.run_id}", facts)
    show_fields("data", _plan_facts(manifest))
    show_fields("environment", sorted(manifest.header.environment.items()))
    show_table(SHARD_COLUMNS, _shard_cells(manifest))
    if tensors:
        show_table(TENSOR_COLUMNS, _tensor_cells(manifest))
    return 0


def _row(storage: Storage, generations: Generations, info: GenerationInfo) -> Row:
    at = _written_at(storage, info)
    if info.retired:
        return Row(info, None, "", at)
    try:
        return Row(info, generations.manifest(info.publish), "", at)
    except ManifestDamaged as damage:
        return Row(info, None, f"{damage.where}: {damage.what}", at)


def _written_at(storage: Storage, info: GenerationInfo) -> datetime | None:
    # Records hold no clock's word: nobody may decide by one. A file's own time serves people.
    if not isinstance(storage, Dated):
        return None
    try:
        return storage.written_at(record_path(info.seq))
    except StorageError:
        return None


def _size(row: Row) -> int:
    shards = row.manifest.shards if row.manifest else ()
    return row.info.publish.manifest_size + sum(shard.size for shard in shards)


def _facts(row: Row, manifest: Manifest) -> list[tuple[str, str]]:
    header, publish = manifest.header, row.info.publish
    at = row.published_at
    return [
        ("state", row.state),
        ("published", f"{at.astimezone():%Y-%m-%d %H:%M:%S}" if at else "-"),
        ("update", f"{header.update:,}{_part(header)}"),
        ("epoch", f"{header.position.epoch:,}, {header.position.position:,} examples into it"),
        ("attempt", f"{header.attempt:,}"),
        ("claim", header.claim),
        ("ranks", f"{header.ranks:,}"),
        ("size", size_text(_size(row))),
        ("refers to", _base_text(manifest)),
        ("state holds", _tensors_text(header.layout)),
        ("fingerprint", manifest.fingerprint),
        ("manifest", f"{publish.manifest} {publish.manifest_digest}"),
        ("log record", record_path(row.info.seq)),
        ("last receipt", header.receipt_tip),
    ]


def _base_text(manifest: Manifest) -> str:
    if manifest.base is None:
        return "-"
    written = sum(shard.own_file.size for shard in manifest.shards)
    files = manifest.files - {shard.path for shard in manifest.shards}
    many = count_text(len(files), "file")
    return f"{manifest.base.name}: {many} of earlier generations; {size_text(written)} were written"


def _part(header: GenerationHeader) -> str:
    return f", and a part of update {header.update + 1:,}" if header.mid_update else ""


def _tensors_text(layout: StateLayout) -> str:
    text = count_text(len(layout.tensors), "tensor")
    sharded = sum(1 for tensor in layout.tensors if tensor.parts)
    return f"{text}, {sharded:,} of them in {layout.parts:,} parts" if sharded else text


def _scrubbed(storage: Storage, name: str) -> Finding | None:
    try:
        return read_findings(storage).get(name)
    except StorageError:
        return None  # only a note


def _scrub_text(finding: Finding | None) -> str:
    return f"{finding.at}: {finding.words()}" if finding else "-"


def _plan_facts(manifest: Manifest) -> list[tuple[str, str]]:
    plan = manifest.header.plan
    return [
        ("dataset", plan.dataset_hash),
        ("examples", f"{plan.examples:,}"),
        ("order", f"{plan.order}, seed {plan.seed}"),
        ("global batch", f"{plan.global_batch:,}"),
        ("lanes", f"{plan.lanes:,}"),
        ("microbatch", f"{plan.microbatch:,}"),
    ]


def _shard_cells(manifest: Manifest) -> list[list[str]]:
    return [
        [f"{shard.rank:,}", size_text(shard.size), f"{len(shard.blocks):,}", shard.digest]
        for shard in manifest.shards
    ]


def _tensor_cells(manifest: Manifest) -> list[list[str]]:
    return [
        [tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)), size_text(tensor.nbytes)]
        for tensor in manifest.header.layout.tensors
    ]


COMMANDS = (list_generations, show)
