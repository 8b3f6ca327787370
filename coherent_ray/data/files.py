"""Which files a list of paths means, and under which names the dataset knows them.

A path is a file, a directory (all files of the format below it) or a glob. The order is the user's,
and sorted within a directory or glob, so that every machine sees the same sequence. Names are
relative to the deepest directory that holds all files: a dataset that was moved is still the same.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coherent_ray.errors import DataError

Format = Literal["parquet", "arrow", "tokens"]

#: What is looked for below a directory.
SUFFIXES: dict[Format, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "tokens": (".bin", ".tokens"),
}


def expand(paths: Sequence[str], kind: Format) -> list[Path]:
    """Return the files that some paths mean, in the order of the dataset.

    Args:
        paths: Files, directories or globs.
        kind: Format of the files; decides what is taken from a directory.

    Raises:
        DataError: A path leads to no file, or one file is there twice.
    """
    if not paths:
        raise DataError("no data files are named", remedy="name at least one in data.source.paths")
    files = [file for path in paths for file in _expand_one(path, kind)]
    seen: dict[str, Path] = {}
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            raise DataError(
                f"the file is named twice (also as {seen[real]})",
                where=str(file),
                remedy="name each file once; each example would be read twice an epoch",
            )
        seen[real] = file
    return files


def relative_names(files: Sequence[Path]) -> list[str]:
    """Return the files' names relative to the deepest directory that holds them all."""
    absolute = [file.absolute() for file in files]
    root = os.path.commonpath([file.parent for file in absolute])
    return [file.relative_to(root).as_posix() for file in absolute]


def _expand_one(path: str, kind: Format) -> list[Path]:
    plain = Path(path).expanduser()
    if plain.is_dir():
        found = sorted(
            file for file in plain.rglob("*") if file.suffix in SUFFIXES[kind] and file.is_file()
        )
        if not found:
            raise DataError(
                f"the directory holds no {' or '.join(SUFFIXES[kind])} file",
                where=path,
                remedy="check data.source.paths and data.source.format",
            )
        return found
    if plain.exists():
        return [plain]
    if glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(plain), recursive=True))  # noqa: PTH207
        found = [match for match in matches if match.is_file()]
        if found:
            return found
        raise DataError("no file matches", where=path, remedy="check data.source.paths")
    raise DataError("the file does not exist", where=path, remedy=_nearest(plain))


def _nearest(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist either; check data.source.paths"
    return "check data.source.paths, or let data.prepare make the file"
