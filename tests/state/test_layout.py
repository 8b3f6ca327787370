"""Every byte of the flat state belongs to exactly one rank, and every piece says which."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import every_dtype

from coherent_ray.commit.manifest import ITEM_BYTES, StateLayout, TensorSpec
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.layout import (
    TORCH_DTYPES,
    FlatState,
    check_tensors,
    layout_of,
    pieces,
    spec_of,
)

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
layouts = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=8).map(
    lambda kinds: StateLayout(
        tuple(
            sorted(
                (TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)),
                key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name),
            )
        )
    )
)


def test_every_storable_dtype_has_a_torch_dtype_of_its_size():
    assert set(TORCH_DTYPES) == set(ITEM_BYTES)
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEM_BYTES


def test_the_layout_does_not_depend_on_the_order_of_the_tensors():
    tensors = every_dtype()
    backwards = dict(reversed(tensors.items()))
    assert layout_of(tensors) == layout_of(backwards)
    sizes = [ITEM_BYTES[spec.dtype] for spec in layout_of(tensors).tensors]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=150, deadline=None)
@given(layouts, st.integers(1, 9))
def test_ranks_share_all_items_out_and_none_twice(layout, ranks):
    seen: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in layout.tensors}
    for rank in range(ranks):
        start, stop = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
        found = pieces(layout, start, stop)
        assert sum(piece.nbytes for piece in found) == stop - start
        at = start
        for piece in found:
            assert piece.start == at
            assert piece.start % ITEM_BYTES[piece.dtype] == 0
            at += piece.nbytes
            seen[piece.name].append((piece.first_item, piece.first_item + piece.items))
            assert piece.whole == (piece.items == math.prod(piece.shape))
    for spec in layout.tensors:
        covered = [item for first, last in seen[spec.name] for item in range(first, last)]
        assert covered == list(range(math.prod(spec.shape)))
        if 0 in spec.shape and layout.nbytes:
            assert len(seen[spec.name]) == 1, "an empty tensor lies in exactly one shard"


@settings(max_examples=100, deadline=None)
@given(layouts, st.data())
def test_pieces_of_any_aligned_range_agree_with_a_search_through_all_tensors(layout, data):
    unit = 8
    start = data.draw(st.integers(0, layout.nbytes // unit)) * unit
    units = data.draw(st.integers(start // unit, layout.nbytes // unit + 1))
    stop = min(units * unit, layout.nbytes)
    expected = {}
    for spec, offset in zip(layout.tensors, layout.offsets(), strict=True):
        overlap = min(offset + spec.nbytes, stop) - max(offset, start)
        if overlap > 0:
            expected[spec.name] = overlap
    found = {piece.name: piece.nbytes for piece in pieces(layout, start, stop) if piece.items}
    assert found == expected


def test_a_range_that_cuts_an_item_holds_the_item():
    layout = layout_of({"a": torch.zeros(4, dtype=torch.float64)})
    (piece,) = pieces(layout, 4, 12)
    assert (piece.first_item, piece.items) == (0, 2)


def test_many_empty_tensors_at_one_byte_are_all_found_once():
    tensors = {f"e{i}": torch.empty(0) for i in range(3)}
    tensors |= {"m": torch.ones(8), "z1": torch.empty(0), "z2": torch.empty(0)}
    layout = layout_of(tensors)
    first, second = pieces(layout, 0, 16), pieces(layout, 16, 32)
    assert [p.name for p in first] == ["e0", "e1", "e2", "m"]
    assert [p.name for p in second] == ["m", "z1", "z2"]


def test_finding_a_tensor_by_name():
    flat = FlatState(layout_of(every_dtype()))
    piece = flat.find("model/F64")
    assert (piece.whole, piece.items, piece.shape) == (True, 15, (3, 5))
    with pytest.raises(KeyError):
        flat.find("model/nothing")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex128), "dtype torch.complex128"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nn.UninitializedParameter(), "has no shape yet"),
        (torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor, reason):
    with pytest.raises(TaskError, match=reason) as caught:
        layout_of({"model/odd": tensor})
    assert caught.value.where == "model/odd"


@pytest.mark.parametrize("name", ["__metadata__", "model/w[0:5]", "a\nb[10:12]"])
def test_names_that_shard_files_keep_are_refused(name):
    with pytest.raises(TaskError, match="keep for themselves"):
        spec_of(name, torch.ones(1))


def test_names_with_other_brackets_are_fine():
    assert spec_of("model/w[0:5].x", torch.ones(1)).name == "model/w[0:5].x"
    assert spec_of("model/w[a]", torch.ones(1)).name == "model/w[a]"


@pytest.mark.parametrize(
    ("change", "name", "stored", "live"),
    [
        (lambda t: t.pop("b"), "b", "F32[2, 3]", "missing"),
        (lambda t: t.update(c=torch.ones(1)), "c", "missing", "F32[1]"),
        (lambda t: t.update(b=torch.ones(3, 2)), "b", "F32[2, 3]", "F32[3, 2]"),
        (lambda t: t.update(a=torch.ones(4).half()), "a", "F32[4]", "F16[4]"),
        (lambda t: t.update(a=torch.ones(4).to(torch.complex128)), "a", "F32[4]", "complex128"),
    ],
)
def test_a_mismatch_names_the_first_tensor_and_both_values(change, name, stored, live):
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    layout = layout_of(tensors)
    check_tensors(layout, tensors)
    change(tensors)
    with pytest.raises(StateMismatch) as caught:
        check_tensors(layout, tensors)
    assert caught.value.where == name
    assert caught.value.details["stored"] == stored
    assert live in str(caught.value.details["live"])
    assert stored in caught.value.what
