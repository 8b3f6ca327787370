"""Canonical JSON: one value, one sequence of bytes; and bytes from outside are not trusted."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coherent_ray import canonical
from coherent_ray.digests import digest_of

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def bits(value: object) -> object:
    """A form in which 1, 1.0 and True differ, and -0.0 and 0.0 too."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bits(item) for item in value]
    return (type(value), value.hex() if isinstance(value, float) else value)


@given(values)
def test_load_gives_back_exactly_what_was_dumped(value):
    assert bits(canonical.load(canonical.dump(value))) == bits(value)


@given(values)
def test_dump_is_a_fixed_point(value):
    data = canonical.dump(value)
    assert canonical.dump(canonical.load(data)) == data
    assert data.isascii()


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_insertion_changes_nothing(value):
    backwards = dict(reversed(value.items()))
    assert canonical.dump(backwards) == canonical.dump(value)
    assert canonical.digest(backwards) == canonical.digest(value)


def test_known_bytes():
    value = {"b": [1, 2.5, None, True], "a": "é\n", "ä": {}}
    assert canonical.dump(value) == rb'{"a":"\u00e9\n","b":[1,2.5,null,true],"\u00e4":{}}'


def test_digest_is_of_the_canonical_bytes():
    assert canonical.digest({"a": 1}) == digest_of(b'{"a":1}')
    assert canonical.digest({"a": 1}) != canonical.digest({"a": 1.0})
    assert canonical.digest([]) != canonical.digest({})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": {"b": x}}])
def test_dump_refuses_what_json_has_not(number, wrap):
    with pytest.raises(ValueError, match="JSON"):
        canonical.dump(wrap(number))


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), 1j])
def test_dump_refuses_other_types(value):
    with pytest.raises(TypeError):
        canonical.dump({"a": value})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":1}', "duplicate key 'a'"),
        (b'{"x":{"b":1,"c":2,"b":3}}', "duplicate key 'b'"),
        (b"NaN", "NaN is not a JSON number"),
        (b'{"a":Infinity}', "Infinity is not"),
        (b"[-Infinity]", "-Infinity is not"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"", "it is empty"),
        (b'{"a":1', "it is cut off, or no JSON"),
        (b'{"a":{"b":1}', "it is cut off, or no JSON"),
        (b'{"a":"b', "it is cut off, or no JSON"),
        (b'{"a":}', "it is no JSON, from byte 5"),
        (b'{"a":1}{', "it is no JSON, from byte 7"),
        (b"{'a':1}", "it is no JSON, from byte 1"),
        (b"\xff\xfe", "it is no JSON: it is no UTF-8"),
        (b"[01]", "it is no JSON, from byte 2"),
    ],
)
def test_load_refuses(data, reason):
    with pytest.raises(ValueError, match=reason):
        canonical.load(data)


@given(values)
def test_every_truncation_is_refused_or_another_value(value):
    data = canonical.dump({"value": value})
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            canonical.load(data[:cut])


@given(st.binary(max_size=40))
def test_load_of_noise_raises_value_error_or_agrees_with_json(data):
    try:
        value = canonical.load(data)
    except ValueError:
        return
    assert value == json.loads(data)
