"""Canonical JSON: one sequence of bytes for one value, so that a digest of it means something.

Sorted keys, no spaces, ASCII, no NaN or infinity, no duplicate keys. Python's
``repr`` of a float is exact, so a float survives the trip bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

from coherent_ray.digests import Digest, digest_of

Json = Any
"""``None | bool | int | float | str | list[Json] | dict[str, Json]``."""


def dump(value: Json) -> bytes:
    """Return the canonical bytes of a JSON value.

    Raises:
        ValueError: The value holds a NaN or an infinity.
        TypeError: The value is not JSON.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def load(data: bytes) -> Json:
    """Return the JSON value of some bytes from outside.

    Raises:
        ValueError: Not JSON, a duplicate key, a NaN or infinity, or nested too deeply.
    """
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def digest(value: Json) -> Digest:
    """Return the digest of a JSON value's canonical bytes."""
    return digest_of(dump(value))


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON number")
