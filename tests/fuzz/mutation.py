"""Mutations of valid documents: most stay JSON, so that what is behind the parser is reached."""

from __future__ import annotations

import json
import random
from typing import Any

from coherent_ray import canonical

#: What has broken readers of JSON before.
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.0, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**400, "", "..", "/", "/etc/passwd", "../../x", "a\0b", "a\\b", "a//b", ".",
    "\ud800", "é", "\u202e", "a\n", "A" * 300, "NaN", "$int", "$tensor", [], {}, [[]], [None] * 70,
    {"$tensor": ["F32", [2**62, 2**62], ""]}, {"$numpy": ["<f8", "00"]}, {"$dict": [[[], 1]]},
    {"$int": "-0x" + "f" * 600}, "__metadata__", "a[0:1]", "blake3:" + "0" * 64, "0" * 32,
)  # fmt: skip
TOKENS = (
    b"[" * 2000, b'{"a":' * 2000, b"1e400", b"9" * 5000, b"NaN", b"-Infinity", b"\xff", b"\\ud800",
    b"\x00", b"\xef\xbb\xbf", b'"format":1,', b"true", b"null", b"\n", b"\r\n", b" ", b"..", b"/",
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a neighbour of a document; one that is JSON, line by line, mostly stays so."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _mutate_json(data, rng) if rng.random() < 0.7 else _mutate_bytes(data, rng)
    return data


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n") if data.endswith(b"\n") else [data]
    index = rng.randrange(len(lines))
    try:
        value = json.loads(lines[index])
    except (ValueError, RecursionError):
        return _mutate_bytes(data, rng)
    value = _changed(value, rng)
    try:
        lines[index] = canonical.dump(value)
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list) and len(found) < 5000:
            _places(item, found)
    return found


def _changed(value: Any, rng: random.Random) -> Any:
    places = _places(value, []) if isinstance(value, dict | list) else []
    if not places:
        return rng.choice(NASTY)
    parent, key = rng.choice(places)
    old = parent[key]
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(["", "format", "$x", str(key) + "x"])] = old
        case 1 | 2 if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), old)
        case 3:
            other, name = rng.choice(places)
            parent[key] = json.loads(
                json.dumps(other.get(name) if isinstance(other, dict) else old)
            )
        case 4 if isinstance(old, int):
            parent[key] = old + rng.choice((-1, 1, 16, -16, 2**32, 2**62))
        case 4 if isinstance(old, str) and old:
            at = rng.randrange(len(old))
            parent[key] = (
                old[:at] + rng.choice(("", "0", "f", "/", "..", "\0", "g")) + old[at + 1 :]
            )
        case _:
            parent[key] = rng.choice(NASTY)
    return value


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0 if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + rng.randrange(1, 9) :]
        case 3:
            return data[:at] + data[at : at + rng.randrange(1, 99)] + data[at:]
        case _:
            return data[:at] + rng.choice(TOKENS) + data[at:]
