"""The dataset manifest: what the data is, as anyone who sees the files can compute it again.

Two levels. ``content`` hashes every byte. ``structure`` hashes names, sizes, row counts and
footers: fast enough for every rank before every start, but blind to an edit that keeps all of
these. The level is part of the hash, so one never passes for the other. Modification times never
enter: a copy of the data is the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.data.content import DigestCache, file_digest
from coherent_ray.data.files import Format, expand, relative_names
from coherent_ray.data.footers import FileFacts, Window, inspect, unreadable
from coherent_ray.digests import Digest
from coherent_ray.errors import DataError

Level = Literal["content", "structure"]

_STRICT = ConfigDict(strict=True, extra="forbid")
_Count = Annotated[int, Field(ge=0, lt=2**63)]
#: Hashing releases the GIL; more threads than this only fight over the disk.
_THREADS = 4


@dataclass(frozen=True, slots=True, config=_STRICT)
class DatasetFile:
    """One file of a dataset."""

    path: str
    """Name relative to the directory that holds all files."""
    size: _Count
    """Bytes."""
    rows: _Count
    """Examples."""
    digest: Digest | None
    """Of its bytes; None where only the structure was looked at."""
    footer: Digest
    """Of its footer."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class DatasetManifest:
    """Every file of a dataset, in the order that numbers its examples."""

    format: Format
    level: Level
    files: tuple[DatasetFile, ...]
    columns: tuple[tuple[str, str], ...]
    """Names and types of the columns that are used."""

    def __post_init__(self) -> None:
        if self.level == "content" and any(f.digest is None for f in self.files):
            raise ValueError("a file has no content digest")

    @property
    def rows(self) -> int:
        """Examples of all files."""
        return sum(f.rows for f in self.files)

    @property
    def hash(self) -> Digest:
        """Identity of the dataset at the level that it was scanned with."""
        return self.content_hash if self.level == "content" else self.structure_hash

    @property
    def content_hash(self) -> Digest:
        """Identity by every byte.

        Raises:
            ValueError: Only the structure was looked at.
        """
        if any(f.digest is None for f in self.files):
            raise ValueError("only the dataset's structure was looked at")
        return self._hash("content", [[f.path, f.size, f.rows, f.digest] for f in self.files])

    @property
    def structure_hash(self) -> Digest:
        """Identity by names, sizes, row counts and footers."""
        return self._hash("structure", [[f.path, f.size, f.rows, f.footer] for f in self.files])

    def _hash(self, level: Level, files: list[Any]) -> Digest:
        return canonical.digest(
            {
                "dataset": 1,
                "format": self.format,
                "level": level,
                "columns": [list(c) for c in self.columns],
                "files": files,
            }
        )


def scan(
    paths: Sequence[str],
    format: Format,  # noqa: A002 - the configuration's word
    columns: Sequence[str] | None = None,
    level: Level = "content",
    *,
    window: int | None = None,
    dtype: str | None = None,
    cache: DigestCache | None = None,
) -> DatasetManifest:
    """Return what the data is now.

    Args:
        paths: Files, directories or globs; their order numbers the examples.
        format: Format of every file.
        columns: Columns that the run uses, of Parquet and Arrow files; None: all.
        level: ``content`` reads every byte, ``structure`` only footers.
        window: Tokens an example, for tokens.
        dtype: Type of a stored token, for tokens.
        cache: Remembers content digests; None: every byte is read.

    Raises:
        DataError: No files, a file is missing, unreadable, lacks a column or has another type in
            it than the first file, or there is no example at all.
    """
    files = expand(paths, format)
    cut = Window(window, dtype) if window is not None and dtype is not None else None
    facts = [inspect(file, format, columns, cut) for file in files]
    for file, found in zip(files, facts, strict=True):
        _check_same_columns(files[0], facts[0], file, found)
    if not sum(found.rows for found in facts):
        raise DataError(
            "the dataset is empty: " + _count(len(files), "file") + " without an example",
            where=str(files[0]),
            remedy="check data.source.paths"
            + (", or use a smaller data.source.window" if format == "tokens" else ""),
        )
    digests: list[Digest | None] = [None] * len(files)
    if level == "content":
        with ThreadPoolExecutor(_THREADS, "coherent-ray-hash") as pool:
            digests = list(pool.map(lambda file: _digest(file, format, cache), files))
    sizes = [file.stat().st_size for file in files]
    rows = zip(relative_names(files), sizes, facts, digests, strict=True)
    return DatasetManifest(
        format,
        level,
        tuple(DatasetFile(name, size, f.rows, digest, f.footer) for name, size, f, digest in rows),
        facts[0].columns,
    )


def differences(stored: DatasetManifest, now: DatasetManifest) -> list[str]:
    """Return in plain sentences what changed between two scans; empty: nothing that they show.

    Args:
        stored: The dataset that the run has consumed.
        now: The dataset as it is.
    """
    found = []
    for what, before, after in (
        ("the format", stored.format, now.format),
        ("the columns", _columns(stored), _columns(now)),
        ("the number of examples", stored.rows, now.rows),
    ):
        if before != after:
            found.append(f"{what} changed from {before} to {after}")
    before_files = {f.path: f for f in stored.files}
    now_files = {f.path: f for f in now.files}
    found += [f"{name} is gone" for name in before_files if name not in now_files]
    found += [f"{name} is new" for name in now_files if name not in before_files]
    for name, old in before_files.items():
        if name in now_files:
            found += _file_differences(old, now_files[name])
    if not found and [f.path for f in stored.files] != [f.path for f in now.files]:
        found.append("the files are the same, in another order")
    if not found and stored.level != now.level:
        found.append(f"the data was compared by {stored.level}, and now by {now.level}")
    return found


def _file_differences(old: DatasetFile, new: DatasetFile) -> list[str]:
    if old.size != new.size:
        return [f"{old.path} changed its size from {old.size} to {new.size} bytes"]
    if old.rows != new.rows:
        return [f"{old.path} changed from {old.rows} to {new.rows} examples"]
    if old.digest and new.digest and old.digest != new.digest:
        return [f"{old.path} has the same size and other bytes ({old.digest} is now {new.digest})"]
    if old.footer != new.footer:
        return [f"{old.path} has the same size and another footer"]
    return []


def _columns(manifest: DatasetManifest) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in manifest.columns)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _digest(file: Path, kind: Format, cache: DigestCache | None) -> Digest:
    try:
        return cache.digest(file) if cache else file_digest(file)
    except OSError as error:
        raise unreadable(file, kind, error) from error


def _check_same_columns(first: Path, expected: FileFacts, file: Path, found: FileFacts) -> None:
    if found.columns != expected.columns:
        wrong = next(
            (b for a, b in zip(expected.columns, found.columns, strict=False) if a != b),
            ("", ""),
        )
        raise DataError(
            f"its columns differ from those of the first file, {first}"
            + (f": {wrong[0]!r} is {wrong[1]} here" if wrong[0] else ""),
            where=str(file),
            remedy="write all files with the same columns and types, or choose data.source.columns",
        )
