"""A tensor's sum: the same wherever and however it is computed, and changed by any accident."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import bits, every_dtype, random_tensor

from coherent_ray.state.multilinear import (
    CHUNK_WORDS,
    _hash_words,
    _keys,
    _mix,
    hash_of_sum,
    sum_of,
)

CHUNK = CHUNK_WORDS * 4
MASK = 2**64 - 1
#: Of the numbers 0 to 999 as float32.
PINNED = "31e32d90ae4c5103"


def print_of(tensor: torch.Tensor) -> str:
    [value] = sum_of(tensor).tolist()
    return hash_of_sum(value, tensor.nbytes)


def by_the_book(raw: bytes) -> str:
    """The docstring's definition, in Python integers."""
    keys = [key & MASK for key in _keys(torch.device("cpu")).tolist()]
    nbytes = len(raw)
    while True:
        raw += b"\0" * (-len(raw) % 4)
        words = [
            int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)
        ]
        chunks = [words[i : i + CHUNK_WORDS] for i in range(0, len(words), CHUNK_WORDS)] or [[]]
        sums = [sum(w * k for w, k in zip(c, keys, strict=False)) & MASK for c in chunks]
        if len(sums) == 1:
            return f"{_mix(sums[0] ^ _mix(nbytes)):016x}"
        raw = b"".join(value.to_bytes(8, "little") for value in sums)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 2, 3, 4, 5, 127, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]
)
def test_it_is_what_the_docstring_says(nbytes):
    tensor = random_tensor(torch.uint8, (nbytes,), seed=nbytes)
    assert print_of(tensor) == by_the_book(bytes(tensor.tolist()))


def test_it_is_pinned():
    """Ranks of one job may run different versions: the value must not drift."""
    assert print_of(torch.arange(1000, dtype=torch.float32)) == PINNED
    assert _keys(torch.device("cpu"))[:2].tolist() == [-2152535657050944081, 7960286522194355701]


def test_every_dtype_and_stride_is_hashed_by_its_logical_bytes():
    for tensor in every_dtype().values():
        assert print_of(tensor) == print_of(tensor.contiguous()) == by_the_book(bits(tensor))


def test_an_unaligned_view_of_bytes_has_the_value_of_its_copy():
    base = random_tensor(torch.uint8, (3 * CHUNK,), seed=1)
    for offset in (1, 2, 3):
        view = base[offset : offset + 2 * CHUNK]
        assert print_of(view) == print_of(view.clone())


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_an_accelerator_s_many_chunks_at_once_are_the_same_sums(rows):
    """Accelerators take the two-dimensional path; run it here on the CPU's own numbers."""
    words = random_tensor(torch.int32, (rows * CHUNK_WORDS,), seed=rows)
    keys = _keys(torch.device("cpu"))
    at_once = (words.view(-1, CHUNK_WORDS) * keys).sum(1)
    one_by_one = [_hash_words(words[i * CHUNK_WORDS :][:CHUNK_WORDS], keys) for i in range(rows)]
    assert torch.equal(at_once, torch.cat(one_by_one))
    few = words[:1000]
    assert torch.equal((few * keys[:1000]).sum().view(1), _hash_words(few, keys))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3 * CHUNK - 1), st.integers(0, 7))
def test_one_flipped_bit_anywhere_changes_it(where, bit):
    tensor = random_tensor(torch.uint8, (3 * CHUNK,), seed=9)
    before = print_of(tensor)
    tensor[where] ^= 1 << bit
    assert print_of(tensor) != before


def test_flipped_signs_swaps_and_moves_change_it():
    base = random_tensor(torch.int32, (2 * CHUNK_WORDS,), seed=3)
    seen = {print_of(base)}

    def new(tensor):
        value = print_of(tensor)
        assert value not in seen
        seen.add(value)

    for pair in ((0, 1), (1, 3), (5, CHUNK_WORDS + 5), (7, 2 * CHUNK_WORDS - 1)):
        flipped = base.clone()
        flipped[list(pair)] ^= -(2**31)
        new(flipped)
        swapped = base.clone()
        swapped[list(pair)] = base[list(reversed(pair))]
        new(swapped)
    new(base.roll(1))
    new(base.roll(CHUNK_WORDS))
    new(base.flip(0))
    new(torch.cat([base, torch.zeros(1, dtype=torch.int32)]))
    new(torch.zeros_like(base))


def test_zeros_of_different_length_differ():
    values = {
        print_of(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 2, 3, 4, 8, CHUNK, 2 * CHUNK)
    }
    assert len(values) == 8


def test_threads_do_not_change_it():
    tensor = random_tensor(torch.float32, (5 * CHUNK_WORDS + 3,), seed=4)
    threads, values = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            values.add(print_of(tensor))
    finally:
        torch.set_num_threads(threads)
    assert len(values) == 1


def test_a_negative_zero_and_a_nan_s_payload_count():
    assert print_of(torch.tensor([0.0])) != print_of(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert print_of(quiet[:1]) != print_of(quiet[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_device_does_not_change_it():
    for tensor in every_dtype((70, 1001)).values():
        assert print_of(tensor.cuda()) == print_of(tensor)
