"""Random rows out of Arrow batches, fast: views of the columns, gathered batch by batch.

``Table.take`` on chunked data copies whole chunks and is hundreds of times slower than this (see
``docs/data.md``); nothing here calls it. A column of a fixed width without nulls becomes an array
that stacks its rows; any other column becomes a list with one Python value a row. Which of the two
is decided once, for the whole dataset, so a batch never changes its type with what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coherent_ray.data.order import Positions

Column = npt.NDArray[Any] | list[Any]
"""Fixed width: shape ``[rows, ...]``. Anything else: one value a row."""
Rows = Mapping[str, Column]


class ColumnBatches:
    """The rows of a sequence of record batches, by number."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Index the batches; reads no row.

        Args:
            batches: At least one, all of one schema.
        """
        self._batches = [batch for batch in batches if batch.num_rows] or list(batches[:1])
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self.columns: tuple[str, ...] = tuple(self._batches[0].schema.names)
        self._fixed = {
            name: all(_is_dense(batch.column(name)) for batch in self._batches)
            for name in self.columns
        }
        self._views: dict[tuple[str, int], npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, ids: Positions) -> dict[str, Column]:
        """Return rows by number, in exactly the order asked for, repeats allowed.

        Args:
            ids: int64, shape ``[n]``, each in ``[0, len)``.

        Raises:
            IndexError: There is no such row.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"a row number lies outside [0, {len(self)})")
        batch_of = np.searchsorted(self._starts, ids, side="right") - 1
        by_batch = np.argsort(batch_of, kind="stable")
        cuts = np.flatnonzero(np.diff(batch_of[by_batch])) + 1
        groups = [(int(batch_of[g[0]]), g) for g in np.split(by_batch, cuts) if g.size]
        local = ids - self._starts[batch_of]
        return {
            name: self._fixed_rows(name, groups, local)
            if self._fixed[name]
            else self._listed_rows(name, groups, local)
            for name in self.columns
        }

    def _fixed_rows(
        self, name: str, groups: list[tuple[int, Positions]], local: Positions
    ) -> npt.NDArray[Any]:
        example = self._view(name, groups[0][0] if groups else 0)
        result = np.empty((len(local), *example.shape[1:]), example.dtype)
        for batch, places in groups:
            result[places] = self._view(name, batch)[local[places]]
        return result

    def _listed_rows(
        self, name: str, groups: list[tuple[int, Positions]], local: Positions
    ) -> list[Any]:
        result: list[Any] = [None] * len(local)
        for batch, places in groups:
            taken = self._batches[batch].column(name).take(pa.array(local[places]))
            for place, value in zip(places.tolist(), _values(taken), strict=True):
                result[place] = value
        return result

    def _view(self, name: str, batch: int) -> npt.NDArray[Any]:
        key = (name, batch)
        if key not in self._views:
            self._views[key] = _dense(self._batches[batch].column(name))
        return self._views[key]


def _is_dense(array: pa.Array) -> bool:
    """Say whether an array has a fixed width and no null at any depth."""
    if array.null_count:
        return False
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _is_dense(array.storage)
    if pa.types.is_fixed_size_list(kind):
        return _is_dense(array.flatten())
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _dense(array: pa.Array) -> npt.NDArray[Any]:
    """Return a fixed-width array as numpy, a view wherever Arrow's bytes allow one."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _dense(array.storage)
    if pa.types.is_fixed_size_list(kind):
        inner = _dense(array.flatten())
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8)
        return data[array.offset * width : (array.offset + len(array)) * width].reshape(-1, width)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=not pa.types.is_boolean(kind))
    return values


def _values(array: pa.Array) -> list[Any]:
    """Return one Python value a row; lists of numbers become arrays."""
    kind = array.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not array.null_count:
        inner = array.flatten()
        if _is_dense(inner):
            offsets = array.offsets.to_numpy()
            return np.split(_dense(inner), (offsets - offsets[0])[1:-1])
    return list(array.to_pylist())
