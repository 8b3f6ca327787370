"""Sharded states: any rank count writes them, any reads them, by rows, and nothing unverified."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import assert_same, every_dtype, header_for, random_tensor, same_bits, save
from shardings import rows_at, save_sharded, sharded_layout

from coherent_ray.commit import manifest as records
from coherent_ray.commit.inspection import tensors_between
from coherent_ray.commit.manifest import (
    LaterFormat,
    Manifest,
    StateLayout,
    TensorSpec,
    rows_of,
)
from coherent_ray.errors import ShardDamaged
from coherent_ray.state.chunks import from_tensor, tensor_hash
from coherent_ray.state.difference import compare_states
from coherent_ray.state.digest import state_digest, tensors_digest
from coherent_ray.state.fingerprint import combined, fingerprint
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, layout_of
from coherent_ray.state.multilinear import CHUNK_WORDS, hash_of_sum, sum_of
from coherent_ray.state.shards import load_rows, load_state, read_tensor
from coherent_ray.storage.local import LocalStorage
from coherent_ray.storage.testing.memory import MemoryStorage

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
STATES = st.dictionaries(
    st.sampled_from([f"model/{letter}" for letter in "abcdefgh"]),
    st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), SHAPES),
    max_size=7,
).map(
    lambda kinds: {
        name: random_tensor(TORCH_DTYPES[dtype], shape, seed)
        for seed, (name, (dtype, shape)) in enumerate(kinds.items())
    }
)
CHOSEN = st.none() | st.sets(st.sampled_from([f"model/{letter}" for letter in "abcdefgh"]))


# --- where everything lies ------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts_them(rows, parts):
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(parts)] if rows else []
    ours = [last - first for first, last in (rows_of(rows, r, parts) for r in range(parts))]
    assert ours == chunks + [0] * (parts - len(chunks))
    assert [rows_of(rows, r, parts)[0] for r in range(1, parts)] == [
        rows_of(rows, r, parts)[1] for r in range(parts - 1)
    ]


@settings(max_examples=100, deadline=None)
@given(STATES, st.integers(2, 6), CHOSEN)
def test_every_item_lies_in_one_place_and_aligned(tensors, ranks, chosen):
    layout = sharded_layout(tensors, ranks, chosen)
    cuts = [layout.cut(rank, ranks) for rank in range(ranks + 1)]
    assert layout.cuts(ranks) == cuts
    assert (cuts[0], cuts[-1]) == (0, layout.nbytes)
    flat = FlatState(layout)
    seen = {spec.name: [] for spec in layout.tensors}
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        at = start
        for piece in flat.pieces(start, stop):
            assert piece.start == at
            assert (at - start) % records.ITEM_BYTES[piece.dtype] == 0
            at += piece.nbytes
            seen[piece.name] += [
                (rank, item) for item in range(piece.first_item, piece.first_item + piece.items)
            ]
        assert at == stop
    for spec in layout.tensors:
        items = spec.nbytes // records.ITEM_BYTES[spec.dtype]
        assert [item for _, item in seen[spec.name]] == list(range(items))
        if spec.parts:
            each = items // spec.shape[0]
            holders = [
                next(r for r in range(ranks) if spec.rows(r)[0] <= i // each < spec.rows(r)[1])
                for i in range(items)
            ]
            assert [rank for rank, _ in seen[spec.name]] == holders


@settings(max_examples=60, deadline=None)
@given(STATES, st.integers(2, 5), CHOSEN, st.data())
def test_a_run_of_items_is_found_wherever_it_lies(tensors, ranks, chosen, data):
    flat = FlatState(sharded_layout(tensors, ranks, chosen))
    for spec in flat.layout.tensors:
        items = spec.nbytes // records.ITEM_BYTES[spec.dtype]
        first = data.draw(st.integers(0, items))
        last = data.draw(st.integers(first, items))
        found = flat.locate(spec.name, first, last)
        covered = [i for p in found for i in range(p.first_item, p.first_item + p.items)]
        assert covered == list(range(first, last))
        for piece in found:
            inside = flat.pieces(piece.start, piece.start + piece.nbytes)
            assert [(p.name, p.first_item, p.items) for p in inside if p.items] == [
                (piece.name, piece.first_item, piece.items)
            ]


# --- round trips ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(STATES, st.integers(1, 6), CHOSEN, st.sampled_from([16, 4096, 4112]), st.data())
def test_any_state_comes_back_whole_and_in_any_rows(tensors, ranks, chosen, block_bytes, data):
    storage = MemoryStorage()
    manifest = save_sharded(storage, tensors, ranks, chosen, block_bytes)
    assert records.load(Manifest, records.dump(manifest)) == manifest
    assert_same(load_state(storage, manifest), tensors)
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert_same(load_state(storage, manifest, live), tensors)
    assert state_digest(storage, manifest) == tensors_digest(layout_of(tensors), tensors)
    rows = {}
    for name, tensor in tensors.items():
        if tensor.dim() and data.draw(st.booleans()):
            first = data.draw(st.integers(0, tensor.shape[0]))
            rows[name] = first, data.draw(st.integers(first, tensor.shape[0]))
    wanted = {n: t[slice(*rows[n])] if n in rows else t for n, t in tensors.items()}
    assert_same(load_rows(storage, manifest, rows), wanted)
    for name, tensor in tensors.items():
        assert same_bits(read_tensor(storage, manifest, name), tensor)


@pytest.mark.parametrize("now", [1, 2, 3, 7])
def test_sharded_replicated_and_sharded_again_at_other_rank_counts(now):
    tensors = every_dtype((11, 5)) | {"model/row": random_tensor(torch.float32, (1, 3), 7)}
    first, second, third = MemoryStorage(), MemoryStorage(), MemoryStorage()
    one = save_sharded(first, tensors, 4)
    two = save(second, load_state(first, one), now)
    layout = sharded_layout(tensors, now)
    pieces = {}
    for rank in range(now):
        rows = {spec.name: spec.rows(rank) for spec in layout.tensors if spec.parts}
        for name, tensor in load_rows(second, two, rows).items():
            pieces.setdefault(name, []).append(tensor)
    back = {
        spec.name: torch.cat(pieces[spec.name]) if spec.parts else pieces[spec.name][0]
        for spec in layout.tensors
    }
    three = save_sharded(third, back, now)
    assert_same(load_state(third, three), tensors)
    assert compare_states(first, one, third, three).same
    assert compare_states(first, one, second, two).same
    assert len({state_digest(*pair) for pair in ((first, one), (second, two), (third, three))}) == 1


def test_a_difference_is_found_across_strategies():
    tensors = {
        "model/w": random_tensor(torch.float32, (50, 7), 1).nan_to_num(),
        "model/b": torch.ones(9),
    }
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["model/w"][33, 4] += 1
    first, second = MemoryStorage(), MemoryStorage()
    found = compare_states(first, save_sharded(first, tensors, 3), second, save(second, other, 2))
    assert not found.layout
    assert [(t.name, t.differing, t.first_item) for t in found.tensors] == [
        ("model/w", 1, 33 * 7 + 4)
    ]


def test_rows_that_are_not_there_are_refused():
    storage = MemoryStorage()
    manifest = save_sharded(storage, {"model/w": torch.ones(4, 2), "model/s": torch.ones(())}, 2)
    with pytest.raises(KeyError):
        load_rows(storage, manifest, {"model/none": (0, 1)})
    for name, rows in (("model/w", (0, 5)), ("model/w", (3, 2)), ("model/s", (0, 1))):
        with pytest.raises(ValueError, match="has no rows"):
            load_rows(storage, manifest, {name: rows})


# --- the files ------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_what_each_rank_wrote(tmp_path):
    tensors = every_dtype((7, 3))
    manifest = save_sharded(LocalStorage(tmp_path), tensors, 3)
    for shard in manifest.shards:
        parts = rows_at(tensors, manifest.header.layout, shard.rank)
        with safetensors.safe_open(tmp_path / shard.path, "pt") as file:
            about = json.loads(file.metadata()["coherent_ray"])
            assert (about["start"], about["stop"]) == (shard.start, shard.stop)
            names = set(file.keys())
            for name, part in parts.items():
                items = part.items.numel()
                key = (
                    name
                    if items == tensors[name].numel()
                    else f"{name}[{part.first}:{part.first + items}]"
                )
                assert (key in names) == (items > 0)


def test_only_the_blocks_of_a_box_are_read_and_each_is_verified():
    tensors = {f"model/{i}": random_tensor(torch.float32, (64, 40), i) for i in range(4)}
    storage = MemoryStorage()
    manifest = save_sharded(storage, tensors, 4, block_bytes=4096)
    shard = manifest.shards[2]
    # Rows 32 to 48 of each tensor lie with rank 2; of model/1 those behind the first 2560 bytes.
    at = shard.header_bytes + 2560 + 100
    data = bytearray(storage.read(shard.path, 0, shard.size))
    data[at] ^= 1
    storage.delete(shard.path)
    storage.create(shard.path, bytes(data))
    with pytest.raises(ShardDamaged, match="model/1") as caught:
        load_rows(storage, manifest, dict.fromkeys(tensors, (32, 48)))
    block = caught.value.details["block"]
    assert caught.value.details["shard"] == shard.path
    named = tensors_between(manifest.header, shard, block * 4096, (block + 1) * 4096)
    assert caught.value.details["tensors"] == named
    with pytest.raises(ShardDamaged, match="model/1"):
        load_state(storage, manifest)
    for rows in ((0, 32), (48, 64)):
        found = load_rows(storage, manifest, dict.fromkeys(tensors, rows))
        assert_same(found, {name: tensor[slice(*rows)] for name, tensor in tensors.items()})
    # In the same shard, but for model/2 alone: the damaged block is not read.
    rows = dict.fromkeys(tensors, (0, 0)) | {"model/2": (32, 48)}
    assert same_bits(load_rows(storage, manifest, rows)["model/2"], tensors["model/2"][32:48])
    storage.delete(shard.path)
    with pytest.raises(ShardDamaged, match="missing"):
        load_rows(storage, manifest, dict.fromkeys(tensors, (0, 1)))


@settings(max_examples=60, deadline=None)
@given(STATES, st.integers(2, 5), CHOSEN, st.data())
def test_the_tensors_of_a_byte_range_are_named(tensors, ranks, chosen, data):
    manifest = save_sharded(MemoryStorage(), tensors, ranks, chosen)
    flat = FlatState(manifest.header.layout)
    for shard in manifest.shards:
        start = data.draw(st.integers(0, shard.size - 1))
        stop = data.draw(st.integers(start + 1, shard.size))
        first = max(start - shard.header_bytes, 0) + shard.start
        last = max(stop - shard.header_bytes, 0) + shard.start
        wanted = {
            p.name
            for p in flat.pieces(shard.start, shard.stop)
            if p.items and p.start < last and p.start + p.nbytes > first
        }
        found = tensors_between(manifest.header, shard, start, stop)
        assert set(found) == wanted
        assert len(found) == len(wanted)


# --- manifests ------------------------------------------------------------------------------------


def manifest_json(ranks=3):
    storage = MemoryStorage()
    tensors = {"model/w": torch.ones(7, 3), "model/b": torch.ones(5, dtype=torch.float64)}
    return json.loads(records.dump(save_sharded(storage, tensors, ranks, {"model/w"})))


def loaded(value):
    return records.load(Manifest, json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def spec_of(value, name):
    return next(t for t in value["header"]["layout"]["tensors"] if t["name"] == name)


def test_only_sharded_tensors_say_so_and_only_their_manifest_has_another_format():
    value = manifest_json()
    assert value["header"]["format"] == 2
    assert spec_of(value, "model/w")["parts"] == 3
    assert "parts" not in spec_of(value, "model/b")
    plain = json.loads(records.dump(save(MemoryStorage(), {"model/w": torch.ones(7, 3)}, 3)))
    assert plain["header"]["format"] == 1
    assert "parts" not in spec_of(plain, "model/w")
    assert loaded(value)


def hostile(change):
    value = manifest_json()
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m["header"].update(format=1), "format 1 is not that"),
        (lambda m: spec_of(m, "model/w").pop("parts"), "format 2 is not that"),
        (lambda m: spec_of(m, "model/w").update(parts=4), "another number of ranks"),
        (lambda m: spec_of(m, "model/w").update(parts=2**62), "another number of ranks"),
        (lambda m: spec_of(m, "model/w").update(parts=1), "greater than or equal to 2"),
        (lambda m: spec_of(m, "model/w").update(parts=0), "greater than or equal to 2"),
        (lambda m: spec_of(m, "model/w").update(parts=None), "valid integer"),
        (lambda m: spec_of(m, "model/w").update(parts=True), "valid integer"),
        (lambda m: spec_of(m, "model/w").update(shape=[]), "has no rows"),
        (lambda m: spec_of(m, "model/w").update(shape=[7, 0]), "nothing in it"),
        (lambda m: spec_of(m, "model/w").update(shape=[3, 7]), "does not end where"),
        (lambda m: spec_of(m, "model/b").update(parts=2), "different numbers of ranks"),
        (lambda m: spec_of(m, "model/b").update(parts=3), "does not end where"),
        (
            lambda m: (
                m["shards"][0].update(stop=100, size=4196),
                m["shards"][1].update(start=100),
            ),
            "shard",
        ),
        (lambda m: m["header"].update(ranks=2), "another number of ranks"),
        (lambda m: m["shards"].pop(), "exactly one shard"),
    ],
)
def test_a_hostile_manifest_is_refused(change, why):
    assert loaded(manifest_json())
    with pytest.raises(ValueError, match=why):
        loaded(hostile(change))


def test_a_later_format_is_told_from_damage():
    value = manifest_json()
    value["header"]["format"] = 5
    with pytest.raises(LaterFormat, match="has format 5, this version reads 4"):
        loaded(value)


def test_a_manifest_grows_with_tensors_plus_ranks():
    tensors = {f"model/{i}": torch.ones(64, 2) for i in range(64)}
    sizes = {
        ranks: len(records.dump(save_sharded(MemoryStorage(), tensors, ranks))) for ranks in (2, 64)
    }
    assert sizes[64] - sizes[2] < 62 * 600


def test_a_layout_of_many_ranks_and_tensors_takes_no_time_for_their_product():
    many = 20_000
    specs = tuple(TensorSpec(f"model/{i:06d}", "F32", (many, 1), many) for i in range(many // 10))
    layout = StateLayout(specs)
    cuts = layout.cuts(many)
    assert cuts[-1] == layout.nbytes
    assert cuts[1] == 4 * len(specs)


# --- the fingerprint ------------------------------------------------------------------------------


def shared_fingerprint(tensors, ranks, chosen=None):
    """The fingerprint as ranks find it that have their own rows each."""
    layout = sharded_layout(tensors, ranks, chosen)
    sums = []
    for again in (False, True):
        found = []
        for rank in range(ranks):

            def add(mine, rank=rank, again=again):
                if again:
                    mine.copy_(torch.stack(sums).sum(0))
                else:
                    sums.append(mine.clone())

            found.append(_fingerprint_at(layout, tensors, rank, add))
    assert len({f.digest for f in found}) == 1
    return found[0]


def _fingerprint_at(layout, tensors, rank, add):
    from unittest import mock

    from coherent_ray.state import fingerprint as room

    def rows(tensor):
        name = next(n for n, t in tensors.items() if t is tensor)
        spec = next(s for s in layout.tensors if s.name == name)
        return spec.rows(rank) if spec.parts else None

    def here(tensor):
        found = rows(tensor)
        return tensor if found is None else tensor[slice(*found)]

    def first(tensor):
        found = rows(tensor)
        return 0 if found is None else found[0] * (tensor.numel() // tensor.shape[0])

    with mock.patch.multiple(room, here=here, first_item_here=first):
        return fingerprint(layout, tensors, add)


def by_the_book(layout, tensors):
    """What it must be: of sharded tensors the sums of the whole, else the chunks' hashes."""
    hexes = []
    for spec in layout.tensors:
        tensor = tensors[spec.name]
        if spec.parts:
            [value] = sum_of(tensor).tolist()
            hexes.append(hash_of_sum(value, spec.nbytes))
        else:
            hexes.append(tensor_hash(spec.nbytes, from_tensor(tensor)))
    return combined(layout, tuple(hexes))


@settings(max_examples=40, deadline=None)
@given(STATES, st.integers(2, 5), CHOSEN)
def test_the_fingerprint_is_the_same_at_any_rank_count(tensors, ranks, chosen):
    layout = sharded_layout(tensors, ranks, chosen)
    if layout.parts:
        assert shared_fingerprint(tensors, ranks, chosen) == by_the_book(layout, tensors)


def test_the_fingerprint_of_tensors_of_many_chunks():
    words = CHUNK_WORDS
    tensors = {
        "model/long": random_tensor(torch.float32, (7, words), 1),
        "model/odd": random_tensor(torch.bfloat16, (5, words + 3), 2),
        "model/bytes": random_tensor(torch.uint8, (6, words * 2 + 1), 3),
        "model/cut": random_tensor(torch.int64, (11, words // 4), 4).t().contiguous().t(),
    }
    expected = by_the_book(sharded_layout(tensors, 2), tensors)
    for ranks in (2, 3, 8):
        assert shared_fingerprint(tensors, ranks) == expected
    tensors["model/odd"].view(torch.int16)[4, words] ^= 1
    found = shared_fingerprint(tensors, 3)
    assert found == by_the_book(sharded_layout(tensors, 3), tensors)
    same = [one == other for one, other in zip(found.tensors, expected.tensors, strict=True)]
    assert same.count(False) == 1


def test_sharded_tensors_need_somebody_to_add_their_ranks_sums():
    tensors = {"model/w": torch.ones(4, 2)}
    with pytest.raises(ValueError, match="nothing adds"):
        fingerprint(sharded_layout(tensors, 2), tensors)


def test_a_header_without_sharded_tensors_is_what_it_was():
    header = header_for(layout_of(every_dtype()), 2)
    with pytest.raises(ValueError, match="format 2 is not that"):
        replace(header, format=2)
