"""Digests: how bytes are named by their content.

A digest is the string ``algorithm:hex``, so that no stored digest is ever compared under another
algorithm than the one that made it. Nothing else in the project calls a hash library.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Literal, Protocol

import blake3 as _blake3
import xxhash
from pydantic import StringConstraints

Algorithm = Literal["xxh3_128", "blake3", "sha256"]
ALGORITHMS: tuple[Algorithm, ...] = ("xxh3_128", "blake3", "sha256")

#: What shards are hashed with unless the user chooses: detects damage, not forgery.
SHARD_ALGORITHM: Algorithm = "xxh3_128"
#: What the commit log, manifests and identities are hashed with: small inputs, cryptographic.
RECORD_ALGORITHM: Algorithm = "blake3"

DIGEST_PATTERN = r"^(xxh3_128:[0-9a-f]{32}|blake3:[0-9a-f]{64}|sha256:[0-9a-f]{64})$"
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    """The part of ``hashlib``'s interface that is used here."""

    def update(self, data: Buffer, /) -> object:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Return the digest so far, in lower-case hex."""


def new_hasher(algorithm: Algorithm) -> Hasher:
    """Return an empty hasher.

    Args:
        algorithm: One of `ALGORITHMS`.

    Returns:
        A hasher that releases the GIL on large inputs.
    """
    match algorithm:
        case "xxh3_128":
            return xxhash.xxh3_128()
        case "blake3":
            return _blake3.blake3()
        case "sha256":
            return hashlib.sha256()


def digest_of(data: Buffer, algorithm: Algorithm = RECORD_ALGORITHM) -> Digest:
    """Return the digest of some bytes, as ``algorithm:hex``."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return f"{algorithm}:{hasher.hexdigest()}"


def quick_hash(pieces: Iterable[Buffer], seed: int = 0) -> bytes:
    """Return 8 bytes of XXH3 of some bytes: what is compared at once, and never stored by itself.

    Args:
        pieces: The bytes, in order; the GIL is released for each that is large.
        seed: Bytes that are hashed under another one have another hash; below 2^64.
    """
    hasher = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def hex_digits(algorithm: Algorithm) -> int:
    """Return how many hex digits an algorithm's digest has."""
    return 32 if algorithm == "xxh3_128" else 64


def algorithm_of(digest: Digest) -> Algorithm:
    """Return the algorithm that made a digest.

    Raises:
        ValueError: The string is not a digest.
    """
    if re.fullmatch(DIGEST_PATTERN, digest):
        for algorithm in ALGORITHMS:
            if digest.startswith(f"{algorithm}:"):
                return algorithm
    raise ValueError(f"not a digest: {digest[:80]!r}")
