"""The order of one epoch: a keyed permutation of ``[0, examples)`` that is computed, never stored.

Any position can be asked for at once, at the same cost, so the sampler has no state but three
integers. The key is derived from (dataset hash, seed, epoch, examples) by a cryptographic digest
and never by adding numbers: seed 0 epoch 1 must not be seed 1 epoch 0.

Two constructions, chosen by size alone:

- up to `SORTED_UP_TO` examples: a stable sort of keyed 64-bit hashes. No Feistel network reaches
  all orders of a tiny set evenly, and a sort does; its table is at most half a mebibyte.
- above: a Feistel network on ``Z_rows x Z_2^bits`` with ``bits = bit_length(examples) // 2`` and
  ``rows = ceil(examples / 2^bits)``. Eight rounds alternate an exclusive-or on the low half and an
  addition modulo ``rows`` on the high half, both exact bijections for every ``rows``. The domain
  exceeds ``examples`` by less than ``2^bits``, so walking a cycle until it re-enters the range
  (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) touches about one position in
  ``sqrt(examples)``.

The stored histories rest on these exact bits. Whoever changes one changes `NAME` as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coherent_ray import canonical
from coherent_ray.digests import Digest

#: Name and version of the permutation, as the plan's identity stores it.
NAME = "feistel-v1"

#: Largest number of examples that is ordered by sorting.
SORTED_UP_TO = 1 << 16
#: Four rounds leave neighbours correlated by up to 0.55; eight passed every test that ours has.
ROUNDS = 8

Positions = npt.NDArray[np.int64]
_U32 = np.uint32
_U64 = np.uint64


class EpochOrder:
    """The permutation of one epoch."""

    __slots__ = ("_bits", "_keys", "_rows", "_table", "examples")

    def __init__(self, examples: int, dataset_hash: Digest, seed: int, epoch: int) -> None:
        """Derive the keys; costs microseconds above `SORTED_UP_TO`, milliseconds below.

        Args:
            examples: Size of the dataset, in ``[1, 2^62]``.
            dataset_hash: Identity of the dataset.
            seed: The user's seed, in ``[0, 2^64)``.
            epoch: Epoch, from 0.

        Raises:
            ValueError: A number is out of its range.
        """
        if not 1 <= examples <= 1 << 62:
            raise ValueError(f"an epoch has from 1 to 2^62 examples, not {examples}")
        if epoch < 0 or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed {seed} or epoch {epoch} is out of range")
        self.examples = examples
        self._keys = _round_keys([NAME, dataset_hash, seed, epoch, examples])
        self._bits = examples.bit_length() // 2
        self._rows = -((-examples) >> self._bits)
        self._table = _sorted_table(examples, self._keys) if examples <= SORTED_UP_TO else None

    def at(self, positions: Positions) -> Positions:
        """Return the examples at some positions of the epoch.

        Args:
            positions: Any shape, int64, each in ``[0, examples)``; in any order, repeats allowed.

        Returns:
            The example ids, int64, same shape. Distinct positions have distinct ids.

        Raises:
            IndexError: A position lies outside the epoch.
        """
        self._check(positions)
        if self._table is not None:
            ids: Positions = self._table[positions]
            return ids
        return self._walk(positions, forward=True)

    def positions_of(self, ids: Positions) -> Positions:
        """Return where in the epoch some examples are consumed: the inverse of `at`.

        Args:
            ids: Any shape, int64, each in ``[0, examples)``.

        Returns:
            Positions, int64, same shape.

        Raises:
            IndexError: There is no such example.
        """
        self._check(ids)
        if self._table is not None:
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.examples, dtype=np.int64)
            positions: Positions = inverse[ids]
            return positions
        return self._walk(ids, forward=False)

    def _check(self, numbers: Positions) -> None:
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.examples:
            raise IndexError(
                f"positions {int(numbers.min())} to {int(numbers.max())} do not lie in an epoch of "
                f"{self.examples} examples"
            )

    def _walk(self, numbers: Positions, *, forward: bool) -> Positions:
        network = self._encrypt if forward else self._decrypt
        flat = network(numbers.astype(_U64).ravel())
        outside = np.flatnonzero(flat >= _U64(self.examples))
        while outside.size:
            again = network(flat[outside])
            flat[outside] = again
            outside = outside[again >= _U64(self.examples)]
        return flat.astype(np.int64).reshape(numbers.shape)

    def _encrypt(self, numbers: npt.NDArray[_U64]) -> npt.NDArray[_U64]:
        high, low = self._split(numbers)
        for index in range(0, ROUNDS, 2):
            low = low ^ self._low_part(high, index)
            high = high + self._high_part(low, index + 1)
            high = np.where(high >= _U64(self._rows), high - _U64(self._rows), high)
        return (high << _U64(self._bits)) | low

    def _decrypt(self, numbers: npt.NDArray[_U64]) -> npt.NDArray[_U64]:
        high, low = self._split(numbers)
        for index in range(ROUNDS - 2, -1, -2):
            high = high + (_U64(self._rows) - self._high_part(low, index + 1))
            high = np.where(high >= _U64(self._rows), high - _U64(self._rows), high)
            low = low ^ self._low_part(high, index)
        return (high << _U64(self._bits)) | low

    def _split(self, numbers: npt.NDArray[_U64]) -> tuple[npt.NDArray[_U64], npt.NDArray[_U64]]:
        return numbers >> _U64(self._bits), numbers & _U64((1 << self._bits) - 1)

    def _low_part(self, high: npt.NDArray[_U64], index: int) -> npt.NDArray[_U64]:
        """Return ``bits`` pseudorandom bits for each high half."""
        return _mix32(high, self._keys[index]) >> _U64(32 - self._bits)

    def _high_part(self, low: npt.NDArray[_U64], index: int) -> npt.NDArray[_U64]:
        """Return a pseudorandom number in ``[0, rows)`` for each low half (Lemire's reduction)."""
        return (_mix32(low, self._keys[index]) * _U64(self._rows)) >> _U64(32)


def mix64(numbers: npt.NDArray[_U64]) -> npt.NDArray[_U64]:
    """Return a bijective mix of 64-bit words: the finalizer of SplitMix64 (Steele et al., 2014).

    Args:
        numbers: uint64, any shape.

    Returns:
        uint64, same shape.
    """
    mixed = numbers + _U64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> _U64(27))) * _U64(0x94D049BB133111EB)
    return mixed ^ (mixed >> _U64(31))


def _mix32(numbers: npt.NDArray[_U64], key: tuple[int, int]) -> npt.NDArray[_U64]:
    """Return 32-bit hashes of numbers below 2^32 (Wellons' lowbias32, keyed twice)."""
    word = numbers.astype(_U32) + _U32(key[0])
    word ^= word >> _U32(16)
    word *= _U32(0x7FEB352D)
    word ^= (word >> _U32(15)) ^ _U32(key[1])
    word *= _U32(0x846CA68B)
    word ^= word >> _U32(16)
    return word.astype(_U64)


def _round_keys(identity: list[object]) -> tuple[tuple[int, int], ...]:
    """Return two 32-bit keys a round, from digests of the identity."""
    words: list[int] = []
    block = 0
    while len(words) < 2 * ROUNDS:
        text = canonical.digest([*identity, block]).partition(":")[2]
        words += [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
        block += 1
    return tuple(zip(words[0 : 2 * ROUNDS : 2], words[1 : 2 * ROUNDS : 2], strict=True))


def _sorted_table(examples: int, keys: tuple[tuple[int, int], ...]) -> Positions:
    """Return the whole permutation: example ids in the order of their keyed hashes."""
    (a, b), (c, d) = keys[:2]
    words = np.arange(examples, dtype=_U64) + _U64(a << 32 | b)
    hashes = mix64(mix64(words) ^ _U64(c << 32 | d))
    table: Positions = np.argsort(hashes, kind="stable").astype(np.int64)
    table.setflags(write=False)
    return table
