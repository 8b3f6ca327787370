"""What a data file says about itself, without its rows being read: columns, row count, footer.

The footer's digest is the cheap half of a dataset's identity. It finds other files, other row
counts and other statistics; a same-size edit of the rows it does not find: only content does.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coherent_ray.data import arrow_files
from coherent_ray.data.files import Format
from coherent_ray.digests import Digest, digest_of
from coherent_ray.errors import DataError

#: Bytes at both ends of a file that stand for it where the format has no footer.
_EDGE = 4096

#: The one column of token files.
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Window:
    """How token files are cut: into windows that do not overlap; a remainder is not used."""

    length: int
    """Tokens an example."""
    dtype: str
    """numpy's name of the stored type; the bytes are little-endian."""

    @property
    def nbytes(self) -> int:
        """Bytes of one window."""
        return self.length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one file says about itself."""

    columns: tuple[tuple[str, str], ...]
    """Names and Arrow types of the columns that are used."""
    rows: int
    """Examples."""
    footer: Digest
    """Digest of the footer, or of both ends where the format has none."""


def inspect(
    path: Path, kind: Format, columns: Sequence[str] | None, window: Window | None
) -> FileFacts:
    """Return what a file says about itself.

    Args:
        path: The file.
        kind: Its format.
        columns: Columns to use; None: all of them. Not for tokens.
        window: How to cut tokens; for tokens only.

    Raises:
        DataError: Unreadable, not of this format, or a column is missing.
    """
    try:
        if kind == "tokens":
            return _inspect_tokens(path, window)
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                schema, rows = file.schema_arrow, int(file.metadata.num_rows)
            footer = _parquet_footer(path)
        else:
            schema, rows = arrow_files.read_schema(path), arrow_files.count_rows(path)
            footer = _arrow_footer(path)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, kind, error) from error
    return FileFacts(_choose(path, schema, columns), rows, footer)


def unreadable(path: Path, kind: Format, error: Exception) -> DataError:
    """Return the error for a file that cannot be read as what it should be."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return DataError(
        f"the file cannot be read as {kind}: {reason}",
        where=str(path),
        remedy="check data.source.format, the file's permissions, and whether it was written whole",
    )


def _choose(
    path: Path, schema: pa.Schema, columns: Sequence[str] | None
) -> tuple[tuple[str, str], ...]:
    names = list(schema.names)
    chosen = names if columns is None else list(columns)
    for name in chosen:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1) or sorted(
                n for n in names if n.lower() == name.lower()
            )
            raise DataError(
                f"there is no column {name!r}",
                where=str(path),
                remedy=(f"did you mean {close[0]!r}? " if close else "")
                + f"its columns are {', '.join(map(repr, names)) or 'none'}",
                details={"column": name, "columns": names},
            )
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}", where=str(path))
    if not chosen:
        raise DataError("the file has no columns", where=str(path))
    return tuple((name, str(schema.field(name).type)) for name in chosen)


def _inspect_tokens(path: Path, window: Window | None) -> FileFacts:
    if window is None:
        raise DataError(
            "token files need a window and a dtype",
            where=str(path),
            remedy="set data.source.window and data.source.dtype",
        )
    size = path.stat().st_size
    item = np.dtype(window.dtype).itemsize
    if size % item:
        raise DataError(
            f"its {size} bytes are not a whole number of {window.dtype} tokens",
            where=str(path),
            remedy="check data.source.dtype, and whether the file was written whole",
        )
    column = (TOKENS, f"{window.dtype}[{window.length}]")
    return FileFacts((column,), size // window.nbytes, _edges(path))


def _parquet_footer(path: Path) -> Digest:
    with path.open("rb") as stream:
        end = stream.seek(-8, 2)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, end - length))
        return digest_of(stream.read())


def _arrow_footer(path: Path) -> Digest:
    if not arrow_files.is_file_format(path):
        return _edges(path)
    with path.open("rb") as stream:
        end = stream.seek(-10, 2)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, end - length))
        return digest_of(stream.read())


def _edges(path: Path) -> Digest:
    with path.open("rb") as stream:
        first = stream.read(_EDGE)
        size = stream.seek(0, 2)
        stream.seek(max(len(first), size - _EDGE))
        return digest_of(first + stream.read())
