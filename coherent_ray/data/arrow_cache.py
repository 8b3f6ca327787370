"""Parquet, transcoded once into one memory-mapped Arrow file that gives any row at once.

Parquet decodes a whole page to give one row. Where the data is too large to be held decoded in
every rank's memory, the first rank of a machine writes it out as Arrow, under a name made of the
dataset's hash and the columns; the others wait for a lock and map the same file. The file has its
name only when it is whole and synced, so a rank that was killed leaves nothing that another could
read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from coherent_ray import canonical
from coherent_ray.data import arrow_files
from coherent_ray.digests import Digest
from coherent_ray.errors import DataError

_BATCH_ROWS = 8192


def transcoded(
    files: Sequence[Path],
    columns: Sequence[str],
    identity: Digest,
    rows: int,
    directory: Path,
) -> Path:
    """Return the Arrow file of some Parquet files, written now where it is not there yet.

    Args:
        files: The Parquet files, in order.
        columns: Columns, in order.
        identity: What names the files' content.
        rows: Rows of all files.
        directory: Where such files are kept; made where it is missing.

    Raises:
        DataError: No space, or no permission.
    """
    name = canonical.digest(["arrow-cache", 1, identity, list(columns)]).partition(":")[2]
    target = directory / f"{name}.arrow"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{name}.lock"):
            if not _is_whole(target, rows):
                _write(files, columns, target)
    except OSError as error:
        raise DataError(
            f"the data's Arrow copy cannot be written: {error.strerror or error}",
            where=str(target),
            remedy="make space there, or name another directory in XDG_CACHE_HOME",
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released with the descriptor, even by SIGKILL
        yield


def _is_whole(target: Path, rows: int) -> bool:
    try:
        return arrow_files.count_rows(target) == rows
    except (OSError, pa.ArrowException):
        return False


def _write(files: Sequence[Path], columns: Sequence[str], target: Path) -> None:
    # We hold the lock, so what lies here under the temporary name was left by a dead process.
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("wb") as stream:
            with pq.ParquetFile(files[0]) as first:
                full = first.schema_arrow
            schema = pa.schema([full.field(name) for name in columns])
            with pa.ipc.new_file(stream, schema) as writer:
                for file in files:
                    for batch in _batches(file, columns):
                        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _batches(file: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False):
            yield batch.select(list(columns))
