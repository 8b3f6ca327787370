"""Equal replicas have equal fingerprints, and any accident changes the right tensor's."""

from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import bits, every_dtype, random_tensor

from coherent_ray.errors import StateMismatch
from coherent_ray.state import chunks
from coherent_ray.state import fingerprint as room
from coherent_ray.state.chunks import CHUNK_BYTES
from coherent_ray.state.fingerprint import SMALL_BYTES, Fingerprint, begin, fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.multilinear import hash_of_sum, sum_of
from coherent_ray.state.snapshot import Snapshot

#: Of the numbers 0 to 999 as float32, and of 0 to 2^20 (two chunks).
PINNED = ("25c94b83c294d8f8", "bd8e6d1ded6a7e73")
#: Small enough that a few kilobytes are many of them.
CHUNK = 4096


def print_of(tensor: torch.Tensor) -> str:
    tensors = {"t": tensor}
    return fingerprint(layout_of(tensors), tensors).tensors[0]


def by_the_book(raw: bytes) -> str:
    """The docstring's definition."""
    step = chunks.CHUNK_BYTES
    if len(raw) <= step:
        return xxhash.xxh3_64_hexdigest(raw, len(raw))
    parts = [xxhash.xxh3_64_digest(raw[at : at + step]) for at in range(0, len(raw), step)]
    return xxhash.xxh3_64_hexdigest(b"".join(parts), len(raw))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(chunks, "_SCATTERED_BYTES", CHUNK // 4)


@pytest.fixture
def elsewhere(monkeypatch):
    """Take every tensor for one on an accelerator."""
    monkeypatch.setattr(room, "_is_on_host", lambda tensor: False)


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


SIZES = [0, 1, 2, 3, 4, 5, 127, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7]


@pytest.mark.parametrize("nbytes", SIZES)
def test_it_is_what_the_docstring_says(nbytes, small_chunks):
    tensor = random_tensor(torch.uint8, (nbytes,), seed=nbytes)
    assert print_of(tensor) == by_the_book(bytes(tensor.tolist()))


def test_it_is_pinned():
    """Ranks of one job may run different versions: the value must not drift."""
    short = torch.arange(1000, dtype=torch.float32)
    long = torch.arange(CHUNK_BYTES // 4 + 1, dtype=torch.float32)
    assert (print_of(short), print_of(long)) == PINNED


@pytest.mark.parametrize("shape", [(3, 5), (70, 101)])
def test_every_dtype_and_stride_is_hashed_by_its_logical_bytes(shape, small_chunks):
    tensors = every_dtype(shape)
    layout = layout_of(tensors)
    expected = tuple(by_the_book(bits(tensors[spec.name])) for spec in layout.tensors)
    assert fingerprint(layout, tensors).tensors == expected
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert fingerprint(layout, contiguous) == fingerprint(layout, tensors)


def test_what_lies_scattered_over_many_chunks(small_chunks):
    images = random_tensor(torch.float32, (5, 33, 8, 9), 1)
    assert print_of(images.to(memory_format=torch.channels_last)) == print_of(images)
    rows = random_tensor(torch.bfloat16, (4 * CHUNK, 3), 2)
    assert print_of(rows[:, 1]) == print_of(rows[:, 1].contiguous())
    base = random_tensor(torch.uint8, (3 * CHUNK,), seed=1)
    assert print_of(base[1:]) == print_of(base[1:].clone())


def test_zeros_of_different_length_differ(small_chunks):
    values = {print_of(torch.zeros(n, dtype=torch.uint8)) for n in SIZES}
    assert len(values) == len(SIZES)


@settings(max_examples=60, deadline=None)
@given(where=st.integers(0, 3 * CHUNK + 6), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_changes_it(where, bit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        tensor = random_tensor(torch.uint8, (3 * CHUNK + 7,), seed=9)
        before = print_of(tensor)
        tensor[where] ^= 1 << bit
        assert print_of(tensor) != before


def test_chunks_that_changed_places_change_it(small_chunks):
    base = random_tensor(torch.uint8, (3 * CHUNK,), seed=3)
    seen = {print_of(base), print_of(base.roll(CHUNK)), print_of(base.flip(0))}
    assert len(seen | {print_of(base[: 2 * CHUNK])}) == 4


# --- what will be in a copy -----------------------------------------------------------------------


def copied(layout, tensors, rank, ranks) -> memoryview:
    snapshot = Snapshot(layout, rank, ranks, pinned=False)
    snapshot.take(tensors)
    return snapshot.memory


def in_two(layout, tensors, rank, ranks) -> tuple[Fingerprint, int]:
    """Return the fingerprint that is completed from a copy, and how many bytes were read live.

    The live tensors are other ones by then.
    """
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    own = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
    begun = begin(layout, tensors, copied=own)
    memory = bytearray(copied(layout, tensors, rank, ranks))
    for tensor in tensors.values():
        tensor.zero_()
    read = 0
    for index, spec in enumerate(layout.tensors):
        for first, last in chunks.spans(spec.nbytes):
            if begun.hashes[index] or first in begun.chunks.get(index, {}):
                read += last - first
    return begun.finish(memoryview(memory)), read


DTYPES = st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.complex64, torch.bool])
STATES = st.lists(st.tuples(DTYPES, st.integers(0, 3 * CHUNK)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(chosen=STATES, ranks=st.integers(1, 6), seed=st.integers(0, 99))
def test_behind_training_or_at_once_it_is_one_value(chosen, ranks, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        tensors = {
            f"t{i}": random_tensor(dtype, (items,), seed + i)
            for i, (dtype, items) in enumerate(chosen)
        }
        layout = layout_of(tensors)
        expected = fingerprint(layout, tensors)
        for rank in range(ranks):
            found, read = in_two(layout, tensors, rank, ranks)
            assert found == expected
            # What is read while training stands still: others' parts, and chunks across two edges.
            own = layout.cut(rank + 1, ranks) - layout.cut(rank, ranks)
            assert layout.nbytes - own <= read <= layout.nbytes - own + 2 * CHUNK
            assert ranks > 1 or read == 0


def test_every_dtype_and_stride_from_a_copy(small_chunks):
    tensors = every_dtype((70, 101))
    layout = layout_of(tensors)
    expected = fingerprint(layout, tensors)
    for ranks in (1, 2, 5):
        for rank in range(ranks):
            own = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
            begun = begin(layout, tensors, copied=own)
            assert begun.finish(copied(layout, tensors, rank, ranks)) == expected


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_bit_that_flipped_anywhere_is_told_by_every_rank(rank, small_chunks):
    """In its own part, in another's, and in a chunk that lies across the edge of two."""
    tensors = {"a": random_tensor(torch.uint8, (9 * CHUNK,), 1), "b": torch.ones(CHUNK)}
    layout = layout_of(tensors)
    expected = fingerprint(layout, tensors)
    edges = [layout.cut(at, 3) - layout.tensors[0].nbytes for at in (1, 2)]
    assert all(edge % CHUNK for edge in edges)
    within = [0, 4 * CHUNK, 9 * CHUNK - 1, *edges, *(edge - 1 for edge in edges)]
    for where in within:
        other = {name: tensor.clone() for name, tensor in tensors.items()}
        other["a"][where] ^= 64
        found, _ = in_two(layout, other, rank, 3)
        assert found.tensors[0] == expected.tensors[0]  # of b, whose items are larger
        assert found.tensors[1] != expected.tensors[1]
        assert found.digest != expected.digest


def test_of_a_sharded_state_nothing_is_left_for_the_copy():
    tensors = {"a": torch.ones(8, 4), "b": torch.ones(3)}
    whole = layout_of(tensors)
    layout = replace(whole, tensors=(replace(whole.tensors[0], parts=2), whole.tensors[1]))
    begun = begin(layout, tensors, lambda sums: None, (0, layout.nbytes))
    assert all(begun.hashes)


# --- accelerators ---------------------------------------------------------------------------------


def test_on_accelerators_it_is_sums_but_for_what_is_small(elsewhere):
    tensors = {
        f"t{i:03}": random_tensor(torch.uint8, (i * 97 % (SMALL_BYTES + 99),), i) for i in range(90)
    }
    tensors |= every_dtype((9, 7)) | under("large", every_dtype((70, 101)))
    layout = layout_of(tensors)
    kinds = set()
    for spec, found in zip(layout.tensors, fingerprint(layout, tensors).tensors, strict=True):
        small = spec.nbytes <= SMALL_BYTES
        kinds.add(small)
        tensor = tensors[spec.name]
        if small:
            assert found == by_the_book(bits(tensor))
        else:
            [value] = sum_of(tensor).tolist()
            assert found == hash_of_sum(value, spec.nbytes)
    assert kinds == {True, False}


def test_small_ones_have_the_same_value_in_whatever_pack(elsewhere, monkeypatch):
    tensors = {f"t{i:03}": random_tensor(torch.uint8, (i * 97 % 1300,), i) for i in range(60)}
    layout = layout_of(tensors)
    expected = fingerprint(layout, tensors)
    monkeypatch.setattr(chunks, "_PACK_BYTES", 500)
    assert fingerprint(layout, tensors) == expected


def test_nothing_on_an_accelerator_is_left_for_the_copy(elsewhere):
    tensors = {"a": torch.ones(SMALL_BYTES), "b": torch.ones(3)}
    layout = layout_of(tensors)
    assert all(begin(layout, tensors, copied=(0, layout.nbytes)).hashes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_it_is_what_an_accelerator_s_is(monkeypatch):
    tensors = every_dtype((70, 1001)) | under("small", every_dtype())
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    layout = layout_of(tensors)
    found = fingerprint(layout, there)
    monkeypatch.setattr(room, "_is_on_host", lambda tensor: False)
    assert fingerprint(layout, tensors) == found


# --- the whole ------------------------------------------------------------------------------------


def test_the_digest_covers_names_and_layout_and_says_which_tensor_differs():
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    layout = layout_of(tensors)
    ours = fingerprint(layout, tensors)
    assert ours.tensors[0] == ours.tensors[1]
    theirs = fingerprint(layout, {"a": torch.ones(4), "b": torch.full((4,), 1.0000001)})
    assert [x == y for x, y in zip(ours.tensors, theirs.tensors, strict=True)] == [True, False]
    assert ours.digest != theirs.digest
    renamed = {"a": torch.ones(4), "c": torch.ones(4)}
    assert fingerprint(layout_of(renamed), renamed).digest != ours.digest


def test_a_negative_zero_and_a_nan_s_payload_count():
    assert print_of(torch.tensor([0.0])) != print_of(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert print_of(quiet[:1]) != print_of(quiet[1:])


def test_other_tensors_than_the_layout_s_are_refused():
    with pytest.raises(StateMismatch):
        fingerprint(layout_of({"a": torch.ones(4)}), {"a": torch.ones(5)})
