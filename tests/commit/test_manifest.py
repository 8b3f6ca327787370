"""The records of the protocol: one canonical form, and nothing impossible gets in."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ranks import LAYOUT, Ranks

from coherent_ray import canonical
from coherent_ray.commit.manifest import (
    CUT_ALIGNMENT,
    ITEM_BYTES,
    Acknowledgement,
    GenerationHeader,
    Manifest,
    ShardRecord,
    StateLayout,
    TensorSpec,
    dump,
    generation_name,
    load,
    manifest_path,
)
from coherent_ray.digests import digest_of

GROUP = Ranks(ranks=3, number=12, attempt=4)
MANIFEST = Manifest(GROUP.header, digest_of(b"state"), tuple(GROUP.shard(r) for r in range(3)))


def changed(record: object, **changes: Any) -> bytes:
    """A record's JSON with other top-level fields; `...` leaves one out."""
    value = json.loads(dump(record)) | changes
    return canonical.dump({key: item for key, item in value.items() if item is not ...})


# --- the trip through bytes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "record", [MANIFEST, GROUP.header, GROUP.shard(1), GROUP.ack(0), GROUP.ack(2), LAYOUT]
)
def test_a_record_survives_the_trip(record: Any) -> None:
    data = dump(record)
    again = load(type(record), data)
    assert again == record
    assert dump(again) == data


def test_names_and_places() -> None:
    assert generation_name(12, 4) == "g12-a4"
    assert manifest_path(12, 4) == "generations/g12-a4/manifest.json"
    assert GROUP.header.directory == "generations/g12-a4"
    assert GROUP.header.update == GROUP.update


def test_floats_in_values_are_exact() -> None:
    values = {"lr": [0.1, 1e-300, 5e-324, 1 / 3, -0.0, 1e22, 2.0**53 + 2]}
    header = dataclasses.replace(GROUP.header, values=values)
    again = load(GenerationHeader, dump(header)).values["lr"]
    assert [x.hex() for x in again] == [x.hex() for x in values["lr"]]


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), [-float("inf")], object(), {1, 2}, b"x"]
)
def test_what_is_not_json_is_not_written(bad: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        dump(dataclasses.replace(GROUP.header, values={"x": bad}))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b'{"header":NaN}', b'{"a":1,"a":2}', b"[" * 10**5]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        load(Manifest, data)


def test_every_field_must_be_there_and_no_other() -> None:
    for field in dataclasses.fields(Manifest):
        with pytest.raises(ValueError, match=field.name):
            load(Manifest, changed(MANIFEST, **{field.name: ...}))
    for field in dataclasses.fields(GenerationHeader):
        with pytest.raises(ValueError, match=field.name):
            load(GenerationHeader, changed(GROUP.header, **{field.name: ...}))
    with pytest.raises(ValueError, match="surplus"):
        load(Manifest, changed(MANIFEST, surplus=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2), ("format", "1"), ("run_id", ""), ("run_id", "A b"), ("run_id", "../x"),
        ("number", 0), ("number", "12"), ("number", 12.0), ("number", True), ("number", 2**63),
        ("attempt", 0), ("claim", "roughly"), ("ranks", 0), ("receipt_tip", "blake3:00"),
        ("values", []), ("environment", {"torch": 2}), ("position", None), ("layout", {}),
    ],
)  # fmt: skip
def test_impossible_headers_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        load(GenerationHeader, changed(GROUP.header, **{field: value}))


@pytest.mark.parametrize("field", ["rank", "start", "stop", "size", "header_bytes", "block_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None])
def test_impossible_shards_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        load(ShardRecord, changed(GROUP.shard(1), **{field: value}))


# --- what must fit together -----------------------------------------------------------------------


def test_a_shards_numbers_must_add_up() -> None:
    shard = GROUP.shard(1)
    with pytest.raises(ValidationError, match="do not add up"):
        dataclasses.replace(shard, size=shard.size + 1)
    for blocks in (shard.blocks[:-1], (*shard.blocks, shard.blocks[0]), ()):
        with pytest.raises(ValidationError, match="wrong number of block digests"):
            dataclasses.replace(shard, blocks=blocks)


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        (lambda s: (), "exactly one shard"),
        (lambda s: s[:2], "exactly one shard"),
        (lambda s: (s[0], s[2], s[1]), "exactly one shard"),
        (lambda s: (s[0], s[1], s[1]), "exactly one shard"),
        (lambda s: (s[0], s[1], Ranks(4, 12, 4).shard(2)), "does not begin where"),
        (lambda s: (s[0], s[1], _moved(s[2], start=s[2].start - 4)), "does not begin where"),
        (lambda s: (s[0], s[1], _shortened(s[2])), "do not cover"),
        (lambda s: (s[0], s[1], _in(s[2], "generations/g12-a3/shard")), "outside"),
        (lambda s: (s[0], s[1], _in(s[2], "generations/g12-a44/shard")), "outside"),
    ],
)
def test_the_shards_must_be_the_whole_state_and_nothing_else(shards: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        dataclasses.replace(MANIFEST, shards=shards(MANIFEST.shards))


def _moved(shard: ShardRecord, start: int) -> ShardRecord:
    return dataclasses.replace(shard, start=start, stop=start + shard.stop - shard.start)


def _shortened(shard: ShardRecord) -> ShardRecord:
    return dataclasses.replace(shard, size=shard.size - 4, stop=shard.stop - 4)


def _in(shard: ShardRecord, path: str) -> ShardRecord:
    return dataclasses.replace(shard, path=path)


# --- the layout -----------------------------------------------------------------------------------


def test_sizes_and_offsets() -> None:
    layout = StateLayout(
        (TensorSpec("b", "F64", (2, 3)), TensorSpec("a", "F32", ()), TensorSpec("z", "BF16", (0,)))
    )
    assert [tensor.nbytes for tensor in layout.tensors] == [48, 4, 0]
    assert layout.offsets() == [0, 48, 52]
    assert layout.nbytes == 52
    assert StateLayout(()).offsets() == []


@pytest.mark.parametrize(
    "tensors",
    [
        [("b", "F32"), ("a", "F32")],
        [("a", "F32"), ("a", "F32")],
        [("a", "F32"), ("a", "F16")],
        [("a", "F16"), ("b", "F32")],
    ],
)
def test_tensors_out_of_order_or_twice_are_refused(tensors: list[tuple[str, str]]) -> None:
    with pytest.raises(ValidationError, match="layout order"):
        StateLayout(tuple(TensorSpec(name, dtype, (1,)) for name, dtype in tensors))


@pytest.mark.parametrize("dtype", ["f32", "float32", "", "F4"])
def test_unknown_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ValidationError, match="unknown dtype"):
        TensorSpec("a", dtype, (1,))


layouts = st.builds(
    lambda tensors: StateLayout(
        tuple(
            TensorSpec(name, dtype, (items,))
            for name, (dtype, items) in sorted(
                tensors.items(), key=lambda item: (-ITEM_BYTES[item[1][0]], item[0])
            )
        )
    ),
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(0, 100)),
        max_size=8,
    ),
)


@given(layouts, st.integers(1, 20))
def test_cuts_divide_the_whole_state_evenly_and_never_an_item(
    layout: StateLayout, ranks: int
) -> None:
    cuts = [layout.cut(rank, ranks) for rank in range(ranks + 1)]
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, layout.nbytes)
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert max(sizes) - min(sizes) <= 2 * CUT_ALIGNMENT
    for cut in cuts[:-1]:
        for tensor, offset in zip(layout.tensors, layout.offsets(), strict=True):
            if offset < cut < offset + tensor.nbytes:
                assert (cut - offset) % ITEM_BYTES[tensor.dtype] == 0


@given(layouts)
def test_layouts_survive_the_trip(layout: StateLayout) -> None:
    assert load(StateLayout, dump(layout)) == layout


def test_an_acknowledgement_has_fingerprints_of_16_hex_digits() -> None:
    for bad in ("", "0" * 15, "0" * 17, "G" * 16, "A" * 16):
        with pytest.raises(ValidationError):
            GROUP.ack(0, tensor_fingerprints=(bad,))
    assert load(Acknowledgement, dump(GROUP.ack(1))).header is None
