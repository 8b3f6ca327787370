"""Arrow IPC files, memory-mapped: both the file format and the stream format.

The stream format has no footer and no index, but is what Hugging Face ``datasets`` writes under the
same suffix. Batches of an uncompressed file are views of the map: opening one reads no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

_FILE_MAGIC = b"ARROW1"


def is_file_format(path: Path) -> bool:
    """Say whether a file begins like the IPC *file* format; the stream format does not."""
    with path.open("rb") as stream:
        return stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC


def read_schema(path: Path) -> pa.Schema:
    """Return a file's schema.

    Raises:
        pyarrow.ArrowInvalid: It is no Arrow file.
        OSError: It cannot be read.
    """
    with _reader(path, None) as reader:
        return reader.schema


def count_rows(path: Path) -> int:
    """Return how many rows a file holds; reads metadata only where it has an index."""
    with _reader(path, []) as reader:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            return int(reader.count_rows())
        return sum(batch.num_rows for batch in reader)


def read_batches(path: Path, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
    """Return a file's batches, as views of a memory map where it is not compressed.

    Args:
        path: The file.
        columns: Which columns, in the order wanted; None: all.
    """
    if columns is None:
        wanted = None
    else:
        schema = read_schema(path)
        wanted = [schema.get_field_index(name) for name in columns]
    reader = _reader(path, wanted)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    else:
        batches = list(reader)
    return batches if columns is None else [batch.select(list(columns)) for batch in batches]


def _reader(
    path: Path, wanted: list[int] | None
) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    source = pa.memory_map(str(path), "r")
    if is_file_format(path):
        return pa.ipc.open_file(source, options=options)
    return pa.ipc.open_stream(source, options=options)
