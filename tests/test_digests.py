"""Digests: against the algorithms' own test values, and never under another's name."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from coherent_ray import digests
from coherent_ray.digests import ALGORITHMS, Digest, algorithm_of, digest_of, new_hasher

# Published by the algorithms' authors (xxHash's sanity tests, BLAKE3's test vectors, FIPS 180-4).
EMPTY = {
    "xxh3_128": "99aa06d3014798d86001c324468d497f",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}
ABC = {
    "blake3": "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
    "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
}
each = pytest.mark.parametrize("algorithm", ALGORITHMS)


@each
def test_of_nothing(algorithm):
    assert digest_of(b"", algorithm) == f"{algorithm}:{EMPTY[algorithm]}"


@pytest.mark.parametrize("algorithm", ABC)
def test_of_abc(algorithm):
    assert digest_of(b"abc", algorithm) == f"{algorithm}:{ABC[algorithm]}"


@each
@given(pieces=st.lists(st.binary(max_size=300), max_size=5))
def test_pieces_hash_as_the_whole(algorithm, pieces):
    hasher = new_hasher(algorithm)
    for piece in pieces:
        hasher.update(piece)
    whole = b"".join(pieces)
    assert f"{algorithm}:{hasher.hexdigest()}" == digest_of(whole, algorithm)


@each
@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: memoryview(bytearray(b))])
def test_takes_every_buffer(algorithm, kind):
    assert digest_of(kind(b"some bytes"), algorithm) == digest_of(b"some bytes", algorithm)


@each
def test_every_flipped_bit_changes_it(algorithm):
    data = bytearray(range(64))
    original = digest_of(data, algorithm)
    seen = {original}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest_of(data, algorithm))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(data)
    assert digest_of(data, algorithm) == original


@each
def test_names_its_algorithm(algorithm):
    digest = digest_of(b"x", algorithm)
    assert algorithm_of(digest) == algorithm
    assert re.fullmatch(digests.DIGEST_PATTERN, digest)
    assert TypeAdapter(Digest).validate_python(digest) == digest


def test_records_are_hashed_with_a_cryptographic_one():
    assert digests.RECORD_ALGORITHM == "blake3"
    assert digest_of(b"x").startswith("blake3:")
    assert digests.SHARD_ALGORITHM in ALGORITHMS


def test_sha256_is_the_standard_library_s():
    assert digest_of(b"x" * 1000, "sha256") == "sha256:" + hashlib.sha256(b"x" * 1000).hexdigest()


@pytest.mark.parametrize("text", ["", "sha256", "md5:00", "SHA256:00", ":", "sha256:ff", "blake3"])
def test_algorithm_of_refuses_what_is_no_digest(text):
    with pytest.raises(ValueError, match="not a digest"):
        algorithm_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 65,
        "sha256:" + "A" * 64,
        "xxh3_128:" + "0" * 64,
        "blake3:" + "0" * 32,
        "blake3:" + "0" * 64 + "\n",
        " blake3:" + "0" * 64,
    ],
)
def test_pattern_refuses(text):
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(text)
