"""Canonical JSON: one sequence of bytes for one value, so that a digest of it means something.

Sorted keys, no spaces, ASCII, no NaN or infinity, no duplicate keys. Python's
``repr`` of a float is exact, so a float survives the trip bit for bit.

Bytes from outside cost no more than their length to refuse: nothing here is quadratic, and every
refusal is a ValueError.
"""

from __future__ import annotations

import json
import math
from typing import Any

from coherent_ray.digests import Digest, digest_of

#: No number that this project writes is longer; 64 bits have 20 digits.
_MOST_DIGITS = 400

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
        ValueError: Cut off or otherwise no JSON, a duplicate key, a NaN or infinity, a number that
            no double holds, or nested too deeply.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise ValueError("it is no JSON: it is no UTF-8") from error
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        how = "it is cut off, or no JSON" if at_end else f"it is no JSON, from byte {error.pos}"
        raise ValueError(how if error.doc.strip() else "it is empty") from error
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def digest(value: Json) -> Digest:
    """Return the digest of a JSON value's canonical bytes."""
    return digest_of(dump(value))


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key {shown(name)}")
            seen.add(name)
    return result


def shown(value: Json) -> str:
    """Return a value from outside as a message may show it: escaped, and not longer than a line."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is more than a double holds")
    return number


def _integer(text: str) -> int:
    # Python's own limit can be switched off, and its conversion is quadratic.
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON number")
