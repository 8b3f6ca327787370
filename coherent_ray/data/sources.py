"""Sources: rows by number, in exactly the order asked for, from any process at the same cost.

A source knows nothing of epochs, updates or ranks. Files are opened where they are used: a source
is made in the process that reads it, and is safe to call from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from coherent_ray import canonical
from coherent_ray.data import arrow_files
from coherent_ray.data.arrow_cache import transcoded
from coherent_ray.data.columns import Column, ColumnBatches, Rows
from coherent_ray.data.content import cache_directory
from coherent_ray.data.dataset import DatasetManifest
from coherent_ray.data.files import Format, expand
from coherent_ray.data.footers import TOKENS, Window, unreadable
from coherent_ray.data.order import Positions
from coherent_ray.digests import Digest
from coherent_ray.errors import DataError

#: Decoded bytes up to which every rank holds a Parquet dataset in its own memory.
MEMORY_LIMIT = 256 << 20


class Source(Protocol):
    """Examples by number."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what `rows` returns; empty where only the rows themselves tell."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def rows(self, ids: Positions) -> Rows:
        """Return examples by number, in exactly this order, repeats allowed.

        Args:
            ids: int64, shape ``[n]``, each in ``[0, len)``.

        Returns:
            One entry a column: an array of shape ``[n, ...]`` for values of a fixed size, a
            list of ``n`` Python values for anything else.
        """


class ArrowSource:
    """Arrow IPC files, memory-mapped. Compressed ones are decompressed into memory."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        """Map the files.

        Raises:
            DataError: A file is not Arrow.
        """
        batches: list[pa.RecordBatch] = []
        for file in files:
            try:
                batches += arrow_files.read_batches(file, columns)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(file, "arrow", error) from error
        if not batches:
            raise DataError("the dataset is empty", where=", ".join(map(str, files)))
        self._rows = ColumnBatches(batches)
        self.columns = self._rows.columns

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: Positions) -> dict[str, Column]:
        """Return examples by number; see `Source.rows`."""
        return self._rows.rows(ids)


class ParquetSource:
    """Parquet files: small ones decoded into memory, large ones through one mapped Arrow copy."""

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str],
        manifest: DatasetManifest,
        *,
        memory_limit: int = MEMORY_LIMIT,
        cache: Path | None = None,
    ) -> None:
        """Decode or map the files.

        Args:
            files: The files, in order.
            columns: Columns, in order.
            manifest: The same files, scanned: names the Arrow copy.
            memory_limit: Bytes up to which the decoded data is held in memory.
            cache: Directory of the Arrow copies; None: the user's.

        Raises:
            DataError: A file is unreadable, or the copy cannot be written.
        """
        try:
            if sum(_decoded_bytes(file, columns) for file in files) <= memory_limit:
                batches = _read(files, columns)
            else:
                directory = cache or cache_directory() / "arrow"
                identity = _cache_identity(files, manifest)
                copy = transcoded(files, columns, identity, manifest.rows, directory)
                batches = arrow_files.read_batches(copy)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(files[0], "parquet", error) from error
        self._rows = ColumnBatches(batches)
        self.columns = self._rows.columns

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: Positions) -> dict[str, Column]:
        """Return examples by number; see `Source.rows`."""
        return self._rows.rows(ids)


class TokenSource:
    """Raw token files, memory-mapped and cut into windows that do not overlap.

    A window never crosses from one file into the next; what is left at a file's end is not used.
    """

    columns = (TOKENS,)

    def __init__(self, files: Sequence[Path], window: Window) -> None:
        """Map the files."""
        dtype = np.dtype(window.dtype).newbyteorder("<")
        self._maps: list[npt.NDArray[Any]] = []
        for file in files:
            count = file.stat().st_size // window.nbytes
            if count:
                shape = (count, window.length)
                self._maps.append(np.memmap(file, dtype, "r", shape=shape))
        self._starts = np.cumsum([0] + [len(m) for m in self._maps])
        self._empty = np.empty((0, window.length), np.dtype(window.dtype))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, ids: Positions) -> dict[str, Column]:
        """Return windows by number: ``{"tokens": [n, window]}``; see `Source.rows`."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"a row number lies outside [0, {len(self)})")
        file_of = np.searchsorted(self._starts, ids, side="right") - 1
        local = ids - self._starts[file_of]
        result = np.empty((len(ids), *self._empty.shape[1:]), self._empty.dtype)
        for file in np.unique(file_of):
            places = np.flatnonzero(file_of == file)
            result[places] = self._maps[file][local[places]]
        return {TOKENS: result}


class MapStyleSource:
    """Any object with ``len()`` and ``[index]``, such as a ``torch.utils.data.Dataset``.

    It must give the same item for the same index in every process and at every time: what is random
    belongs into the task's ``collate``, which is handed a seed for each example.
    """

    def __init__(self, dataset: Any, identity: str) -> None:
        """Wrap a dataset.

        Args:
            dataset: Has ``__len__`` and ``__getitem__``.
            identity: Names its content; must change when the content does.

        Raises:
            DataError: It has no items, or no identity.
        """
        if not identity:
            raise DataError(
                "a dataset object needs an identity",
                remedy="pass a text that names its content, such as a version or a digest",
            )
        if len(dataset) < 1:
            raise DataError("the dataset is empty", where=type(dataset).__name__)
        self._dataset = dataset
        self.columns: tuple[str, ...] = ()
        self.dataset_hash: Digest = canonical.digest(["map-style", 1, identity, len(dataset)])

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, ids: Positions) -> dict[str, Column]:
        """Return items by number: lists under the items' keys, or under ``item``."""
        items = [self._dataset[index] for index in ids.tolist()]
        if items and all(isinstance(item, Mapping) for item in items):
            return {str(key): [item[key] for item in items] for key in items[0]}
        return {"item": items}


def open_source(
    paths: Sequence[str],
    format: Format,  # noqa: A002 - the configuration's word
    columns: Sequence[str] | None,
    manifest: DatasetManifest,
    *,
    window: int | None = None,
    dtype: str | None = None,
    cache: Path | None = None,
) -> Source:
    """Return the source of some files that have been scanned.

    Args:
        paths: As handed to `coherent_ray.data.dataset.scan`.
        format: As handed to it.
        columns: As handed to it.
        manifest: What it returned.
        window: As handed to it.
        dtype: As handed to it.
        cache: Directory of Arrow copies of large Parquet data; None: the user's.

    Raises:
        DataError: The files are unreadable, or no longer have the rows that were scanned.
    """
    files = expand(paths, format)
    names = list(columns) if columns is not None else [name for name, _ in manifest.columns]
    source: Source
    if format == "tokens":
        if window is None or dtype is None:
            raise DataError(
                "token files need a window and a dtype",
                remedy="set data.source.window and data.source.dtype",
            )
        source = TokenSource(files, Window(window, dtype))
    elif format == "arrow":
        source = ArrowSource(files, names)
    else:
        source = ParquetSource(files, names, manifest, cache=cache)
    if len(source) != manifest.rows:
        raise DataError(
            f"the files held {manifest.rows} examples when they were scanned, now {len(source)}",
            where=str(files[0]),
            remedy="do not change the data while a run reads it; restore it and start again",
        )
    return source


def first_rows(
    paths: Sequence[str],
    format: Format,  # noqa: A002 - the configuration's word
    manifest: DatasetManifest,
    count: int,
    *,
    window: int | None = None,
    dtype: str | None = None,
) -> Rows:
    """Return the first examples of some scanned files, fewer where there are fewer; keeps no copy.

    Args:
        paths: As for `open_source`, like all others.
        format: Of Parquet, no more than the beginning of the first file is read.
        manifest: Names the columns.
        count: How many.
        window: Of token files.
        dtype: Of token files.

    Raises:
        DataError: The files are unreadable.
    """
    names = [name for name, _ in manifest.columns]
    ids = np.arange(min(count, manifest.rows), dtype=np.int64)
    if format != "parquet":
        source = open_source(paths, format, names, manifest, window=window, dtype=dtype)
        return source.rows(ids)
    file = next(f for f in expand(paths, format))
    try:
        with pq.ParquetFile(file) as parquet:
            batch = next(parquet.iter_batches(len(ids), columns=names, use_threads=False))
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise unreadable(file, "parquet", error) from error
    return ColumnBatches([batch.select(names)]).rows(ids[: batch.num_rows])


def _decoded_bytes(file: Path, columns: Sequence[str]) -> int:
    with pq.ParquetFile(file) as parquet:
        facts, schema = parquet.metadata, parquet.schema_arrow
        total = 0
        for group in range(facts.num_row_groups):
            rows = facts.row_group(group)
            for at in range(rows.num_columns):
                chunk = rows.column(at)
                if chunk.path_in_schema.split(".")[0] in columns:
                    total += chunk.total_uncompressed_size
        # Dictionary and run-length encoding hide the decoded size; fixed widths tell it.
        fixed = sum(_width(schema.field(name).type) for name in columns) * facts.num_rows
        return int(max(total, fixed))


def _width(kind: pa.DataType) -> int:
    """Return bytes of one value of a fixed width, 0 for any other."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return 0


def _read(files: Sequence[Path], columns: Sequence[str]) -> list[pa.RecordBatch]:
    tables = []
    for file in files:
        with pq.ParquetFile(file) as parquet:
            tables.append(parquet.read(columns=list(columns), use_threads=False))
    table = pa.concat_tables(tables).select(list(columns)).combine_chunks()
    batches: list[pa.RecordBatch] = table.to_batches()
    return batches or [pa.RecordBatch.from_pylist([], schema=table.schema)]


def _cache_identity(files: Sequence[Path], manifest: DatasetManifest) -> Digest:
    if manifest.level == "content":
        return manifest.hash
    # The structure misses an edit in place, so the copy must not outlive the files' last change.
    facts = [file.stat() for file in files]
    return canonical.digest(
        [manifest.hash, [[f.st_ino, f.st_mtime_ns, f.st_ctime_ns, f.st_size] for f in facts]]
    )
