"""Rows come out of Arrow batches in the order asked for, and with the same type every time."""

import numpy as np
import pyarrow as pa
import pytest

from coherent_ray.data.columns import ColumnBatches

N = 23
FIXED = {
    "int": (pa.array(range(N), pa.int32()), np.arange(N, dtype=np.int32)),
    "float": (pa.array(np.arange(N) / 3), np.arange(N) / 3),
    "half": (pa.array(np.arange(N).astype(np.float16)), np.arange(N).astype(np.float16)),
    "bool": (pa.array([i % 3 == 0 for i in range(N)]), np.arange(N) % 3 == 0),
    "bytes": (
        pa.array([bytes([i, i + 1, i + 2]) for i in range(N)], pa.binary(3)),
        (np.arange(N)[:, None] + np.arange(3)).astype(np.uint8),
    ),
    "vector": (
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * N)), 4),
        np.arange(4.0 * N).reshape(N, 4),
    ),
    "matrix": (
        pa.FixedSizeListArray.from_arrays(
            pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6 * N)), 3), 2
        ),
        np.arange(6 * N).reshape(N, 2, 3),
    ),
}
LISTED = {
    "text": (pa.array([f"row {i}" for i in range(N)]), [f"row {i}" for i in range(N)]),
    "blob": (pa.array([bytes(i) for i in range(N)]), [bytes(i) for i in range(N)]),
    "nulls": (
        pa.array([None if i == 4 else i for i in range(N)]),
        [None if i == 4 else i for i in range(N)],
    ),
    "words": (
        pa.array([["a"] * (i % 3) for i in range(N)]),
        [["a"] * (i % 3) for i in range(N)],
    ),
    "coded": (
        pa.array([f"c{i % 4}" for i in range(N)]).dictionary_encode(),
        [f"c{i % 4}" for i in range(N)],
    ),
}
CUTS = [[N], [5, 1, 10, 7], [1] * N, [0, 20, 0, 3]]


def cut(table, sizes):
    """The table as batches of given sizes; each batch begins inside a larger buffer."""
    batches, at = [], 0
    whole = table.combine_chunks().to_batches()[0]
    for size in sizes:
        batches.append(whole.slice(at, size))
        at += size
    return batches


@pytest.fixture(params=CUTS, ids=str)
def batches(request):
    arrays = {name: array for name, (array, _) in {**FIXED, **LISTED}.items()}
    return ColumnBatches(cut(pa.table(arrays), request.param))


IDS = [
    np.arange(N),
    np.arange(N)[::-1],
    np.random.default_rng(0).permutation(N),
    np.array([3, 3, 22, 0, 3]),
    np.array([7]),
]


@pytest.mark.parametrize("ids", IDS, ids=len)
def test_rows_are_those_asked_for_in_their_order(batches, ids):
    rows = batches.rows(ids)
    assert tuple(rows) == batches.columns
    for name, (_, expected) in FIXED.items():
        assert isinstance(rows[name], np.ndarray)
        assert rows[name].dtype == expected.dtype
        assert np.array_equal(rows[name], expected[ids]), name
    for name, (_, expected) in LISTED.items():
        assert rows[name] == [expected[i] for i in ids], name


def test_a_batch_may_be_changed_without_changing_the_data(batches):
    ids = np.arange(N)
    batches.rows(ids)["vector"][:] = -1
    assert np.array_equal(batches.rows(ids)["vector"], FIXED["vector"][1])


def test_lists_of_numbers_become_arrays():
    values = [list(range(i % 4)) for i in range(N)]
    rows = ColumnBatches(
        cut(pa.table({"v": pa.array(values, pa.list_(pa.int32()))}), [10, 13])
    ).rows(np.array([3, 22, 4, 0]))
    assert [v.tolist() for v in rows["v"]] == [values[i] for i in (3, 22, 4, 0)]
    assert all(v.dtype == np.int32 for v in rows["v"])


def test_large_lists_and_null_lists():
    values = [[1, 2], None, [3]]
    rows = ColumnBatches(pa.table({"v": pa.array(values, pa.list_(pa.int8()))}).to_batches())
    assert rows.rows(np.array([2, 1]))["v"] == [[3], None]
    large = pa.table({"v": pa.array([[1, 2], [], [3]], pa.large_list(pa.int8()))})
    found = ColumnBatches(large.to_batches()).rows(np.array([2, 1, 0]))["v"]
    assert [v.tolist() for v in found] == [[3], [], [1, 2]]


def test_a_null_anywhere_makes_the_whole_column_a_list():
    # Otherwise a batch would change its type with what it holds.
    table = pa.table({"x": pa.array([1, 2, None, 4])})
    rows = ColumnBatches(table.to_batches(max_chunksize=1)).rows(np.array([0, 1]))
    assert rows["x"] == [1, 2]
    nested = pa.FixedSizeListArray.from_arrays(pa.array([1, None, 3, 4]), 2)
    rows = ColumnBatches(pa.table({"x": nested}).to_batches()).rows(np.array([1]))
    assert rows["x"] == [[3, 4]]


def test_tensors_of_a_fixed_shape():
    tensors = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    rows = ColumnBatches(pa.table({"t": array}).to_batches()).rows(np.array([2, 0]))
    assert np.array_equal(rows["t"].reshape(2, 2, 3), tensors[[2, 0]])


def test_no_rows_have_the_right_shape(batches):
    rows = batches.rows(np.empty(0, np.int64))
    assert rows["matrix"].shape == (0, 2, 3)
    assert rows["text"] == []


@pytest.mark.parametrize("ids", [[-1], [N], [0, N]])
def test_rows_that_do_not_exist_are_refused(batches, ids):
    assert len(batches) == N
    with pytest.raises(IndexError, match=rf"\[0, {N}\)"):
        batches.rows(np.array(ids))
