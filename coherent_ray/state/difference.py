"""Where two stored states part: which tensors, how many of their items, and by how much.

Compared is bit for bit, tensor by tensor in layout order, some megabytes at a time: a state need
not fit into memory, and the two may lie in shards of different rank counts. Two numbers that are
equal and have other bits (0.0 and -0.0, two NaNs) differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coherent_ray.commit.manifest import ITEM_BYTES, Manifest, TensorSpec
from coherent_ray.state.blocks import FlatReader
from coherent_ray.state.flat import from_bytes
from coherent_ray.state.layout import TORCH_DTYPES
from coherent_ray.storage.base import Storage

#: Bytes of each state that are compared at once.
STEP_BYTES = 16 * 2**20
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that both states have, with other bits."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    items: int
    """Of the whole tensor."""
    differing: int
    first_item: int
    """The first item that differs, counted in row-major order from 0."""
    first: str
    """Its value in the first state."""
    second: str
    max_abs: float | None
    """Largest absolute difference of two finite numbers; None: there are no such two."""
    max_ulps: int | None
    """Largest number of representable numbers between two; None: no floating-point numbers."""

    def __str__(self) -> str:
        kind = f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"
        text = f"{self.name} ({kind}): {self.differing:,} of {self.items:,} items differ"
        text += f", first item {self.first_item:,}: {self.first} and {self.second}"
        if self.max_abs is not None:
            text += f"; at most {self.max_abs:.3g} apart"
        if self.max_ulps is not None:
            text += f", {self.max_ulps:,} ULP{'' if self.max_ulps == 1 else 's'}"
        return text


@dataclass(frozen=True, slots=True)
class StateDifference:
    """What two states have not in common."""

    layout: tuple[str, ...]
    """One line for each tensor that only one state has, or that has another dtype or shape."""
    tensors: tuple[TensorDifference, ...]
    """In layout order."""
    compared: int
    """Tensors that both have."""

    @property
    def same(self) -> bool:
        """Whether the states are one, bit for bit."""
        return not self.layout and not self.tensors

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"same": self.same, **asdict(self)}


def compare_states(
    first: Storage, one: Manifest, second: Storage, other: Manifest
) -> StateDifference:
    """Return where two stored states part; every block that is read is verified.

    Args:
        first: The root of the first generation's run.
        one: The first generation.
        second: The root of the second generation's run.
        other: The second generation.

    Raises:
        ShardDamaged: A shard is missing or wrong.
        StorageError: A storage failed.
    """
    specs = [{t.name: t.whole for t in m.header.layout.tensors} for m in (one, other)]
    layout = [
        f"{name}: {_described(specs[0].get(name))} -> {_described(specs[1].get(name))}"
        for name in sorted(specs[0].keys() | specs[1].keys())
        if specs[0].get(name) != specs[1].get(name)
    ]
    common = [t for name, t in specs[0].items() if specs[1].get(name) == t]
    readers = FlatReader(first, one), FlatReader(second, other)
    found = (_tensor(spec, *readers) for spec in common)
    return StateDifference(tuple(layout), tuple(filter(None, found)), len(common))


def _tensor(spec: TensorSpec, one: FlatReader, other: FlatReader) -> TensorDifference | None:
    """Return how a tensor differs, or None."""
    size = ITEM_BYTES[spec.dtype]
    differing, first_item, values = 0, 0, ("", "")
    largest: list[float] = []
    ulps: list[int] = []
    for at in range(0, spec.nbytes, STEP_BYTES):
        length = min(STEP_BYTES, spec.nbytes - at)
        raw = [r.items(spec.name, at // size, (at + length) // size) for r in (one, other)]
        if raw[0] == raw[1]:
            continue
        bits = [np.frombuffer(part, _UNSIGNED[size]) for part in raw]
        where = np.flatnonzero(bits[0] != bits[1])
        parted = bits[0][where], bits[1][where]
        if not differing:
            first_item = at // size + int(where[0])
            values = _shown(parted[0][:1], spec.dtype), _shown(parted[1][:1], spec.dtype)
        differing += len(where)
        largest += _apart(*parted, spec.dtype)
        ulps += _ulps(*parted, spec.dtype)
    if not differing:
        return None
    return TensorDifference(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        items=spec.nbytes // size,
        differing=differing,
        first_item=first_item,
        first=values[0],
        second=values[1],
        max_abs=max(largest, default=None),
        max_ulps=max(ulps, default=None),
    )


def _described(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _numbers(bits: Bits, dtype: str) -> torch.Tensor:
    return from_bytes(memoryview(bytearray(bits.tobytes())), TORCH_DTYPES[dtype])


def _shown(bits: Bits, dtype: str) -> str:
    value = _numbers(bits, dtype).tolist()[0] if not dtype.startswith("F8") else None
    if value is None:
        value = float(_numbers(bits, dtype).float()[0])
    return value.hex() if isinstance(value, float) else str(value)


def _apart(one: Bits, other: Bits, dtype: str) -> Iterator[float]:
    """Yield the largest absolute difference of two finite numbers, if there are two."""
    if dtype == "BOOL":
        return
    if not _is_float(dtype):
        signed = dtype.startswith("I")
        kind = np.dtype(f"{'i' if signed else 'u'}{one.itemsize}")
        pairs = zip(one.view(kind).tolist(), other.view(kind).tolist(), strict=True)
        yield float(max(abs(a - b) for a, b in pairs))
        return
    difference = (_reals(one, dtype) - _reals(other, dtype)).abs()
    finite = difference[torch.isfinite(difference)]
    if len(finite):
        yield float(finite.max())


def _ulps(one: Bits, other: Bits, dtype: str) -> Iterator[int]:
    """Yield the largest distance in representable numbers, where these are floating-point."""
    if not _is_float(dtype):
        return
    if dtype == "C64":
        one, other = one.view(np.uint32), other.view(np.uint32)
    left, right = _ordered(one), _ordered(other)
    yield int((np.maximum(left, right) - np.minimum(left, right)).max())


def _ordered(bits: Bits) -> Bits:
    """Return unsigned integers in the order of the floating-point numbers that bits are."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    ordered: Bits = np.where(bits & sign, ~bits, bits | sign)
    return ordered


def _reals(bits: Bits, dtype: str) -> torch.Tensor:
    if dtype == "C64":
        return _numbers(bits.view(np.uint32), "F32").double()
    numbers = _numbers(bits, dtype)
    return numbers.float().double() if dtype.startswith("F8") else numbers.double()


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF", "C"))
