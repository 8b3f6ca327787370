"""How a job makes its Parquet file: once, whole or not at all, and never over something else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from coherent_ray.errors import DataError

_KEY = b"coherent_ray.made_from"


def keep_or_write(path: Path, made_from: Mapping[str, object], make: Callable[[], Any]) -> None:
    """Write a table to a Parquet file, unless the file is there and was made from the same.

    Safe when several processes do it at once: the first to finish wins, and all see its file.

    Args:
        path: The file.
        made_from: JSON values that say what the table is made from; stored in the file.
        make: Returns the table.

    Raises:
        DataError: The file holds something else, or cannot be written.
    """
    told = json.dumps(dict(made_from), sort_keys=True).encode()
    if path.exists():
        _check(path, told)
        return
    table = make()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: told})
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            pq.write_table(table, stream, compression="zstd", row_group_size=65_536)
            stream.flush()
            os.fsync(stream.fileno())
        # link, not rename: a file that another process has just made must not change under it.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    except OSError as error:
        raise DataError(
            f"the data cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="make space there, or name another path in data.prepare and data.source",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    _check(path, told)


def _check(path: Path, told: bytes) -> None:
    try:
        found = (pq.read_schema(path).metadata or {}).get(_KEY)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the file cannot be read: {error}",
            where=str(path),
            remedy="delete it and start again, or name another path",
        ) from error
    if found != told:
        raise DataError(
            f"the file was made from {(found or b'something else').decode()}, not from "
            f"{told.decode()}",
            where=str(path),
            remedy="delete it, or name another path in data.prepare and data.source",
        )
