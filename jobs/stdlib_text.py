"""The source text of the installed Python standard library, as Parquet: real text, no download."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from coherent_ray.errors import DataError
from jobs.parquet import keep_or_write

#: Not text that people wrote to be read: installed packages, tests and generated tables.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED |= {"encodings", "pydoc_data", "lib2to3"}


def prepare(path: str, row_bytes: int = 129, max_bytes: int = 16_000_000) -> None:
    """Make a Parquet file with a column ``text`` of fixed-size pieces, where it is not there yet.

    Args:
        path: The file to make.
        row_bytes: Bytes of one row: a context, and the byte after it.
        max_bytes: Text to take at most.

    Raises:
        DataError: The standard library's source is not installed, or `path` holds something else.
    """
    made_from = {"text": "Python standard library", "row_bytes": row_bytes, "max_bytes": max_bytes}
    keep_or_write(Path(path), made_from, lambda: _table(row_bytes, max_bytes))


def _table(row_bytes: int, max_bytes: int) -> Any:
    import pyarrow as pa

    text = _text(Path(sysconfig.get_path("stdlib")), max_bytes)
    rows = len(text) // row_bytes
    column = pa.Array.from_buffers(pa.binary(row_bytes), rows, [None, pa.py_buffer(text)])
    return pa.table({"text": column})


def _text(root: Path, max_bytes: int) -> bytes:
    """Return the source files' bytes in order of their paths, one after the other."""
    parts: list[bytes] = []
    size = 0
    for file in sorted(root.rglob("*.py")):
        if size >= max_bytes:
            break
        if not _SKIPPED & set(file.relative_to(root).parts):
            parts.append(file.read_bytes().rstrip() + b"\n\n")
            size += len(parts[-1])
    if not parts:
        raise DataError(
            "the Python standard library's source is not installed",
            where=str(root),
            remedy="use a Python that has it, or name own text in data.source",
        )
    return b"".join(parts)[:max_bytes]
