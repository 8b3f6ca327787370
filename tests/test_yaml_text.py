"""YAML as people mean it, and every way in which a text is refused."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coherent_ray.errors import ConfigError
from coherent_ray.yaml_text import dotted, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E6", 1e6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000_000", 1_000_000),
        ("1_0.5", 10.5),
        ("+7", 7),
        ("-7", -7),
        ("007", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # What YAML 1.1 would make of these surprises everyone.
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1.2.3", "1.2.3"),
        ("0b11", "0b11"),
        ("=", "="),
        ("_1", "_1"),
        ("e5", "e5"),
        ("'7'", "7"),
        ('"true"', "true"),
        ("g12-a3", "g12-a3"),
        ("a: b:c", {"a": "b:c"}),
    ],
)
def test_scalars(text, value):
    made = parse(text, "t").value
    assert made == value
    assert type(made) is type(value)


def test_infinities_and_nan():
    assert parse("[.inf, -.inf]", "t").value == [math.inf, -math.inf]
    assert math.isnan(parse(".nan", "t").value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_exactly(number):
    made = parse(repr(number), "t").value
    assert isinstance(made, float)
    assert made.hex() == number.hex()


@given(st.integers())
def test_integers_survive(number):
    assert parse(str(number), "t").value == number


def test_anchors_and_merge_keys():
    text = "base: &b {x: 1, y: 2}\nother: {<<: *b, y: 3}\n"
    assert parse(text, "t").value == {"base": {"x": 1, "y": 2}, "other": {"x": 1, "y": 3}}


def test_lines_of_keys_and_items():
    lines = parse("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "t").lines
    assert lines == {"a": 1, "a.b": 2, "a.c": 3, "a.c[0]": 4, "a.c[1]": 5, "a.c[1].y": 5}


def test_dotted():
    assert dotted(("a", 0, "b", 1, 2)) == "a[0].b[1][2]"
    assert dotted(()) == ""


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("a: [1, 2", "not YAML", "job.yaml, line 1, column 9"),
        ("a: b: c", "not YAML: mapping values are not allowed here", "job.yaml, line 1, column 5"),
        ("a: 1\n\tb: 2", "not YAML", "job.yaml, line 2, column 1"),
        ("a: 'x", "not YAML", "job.yaml, line 1"),
        ("a: *x", "not YAML: found undefined alias", "job.yaml, line 1, column 4"),
        ("a: 1\n---\nb: 2", "not YAML: but found another document", "job.yaml, line 2"),
        (
            "a: !!python/object:os.system {}",
            "not YAML: could not determine a constructor",
            "line 1",
        ),
        ("a: !mine 3", "not YAML: could not determine a constructor", "line 1, column 4"),
        ("a: 1\nb: 2\na: 3", "the key a is there twice: in line 1 and in line 3", "line 3"),
        ("a: {b: {c: 1, c: 1}}", "the key a.b.c is there twice", "line 1"),
        ("- {a: 1, a: 2}", "the key [0].a is there twice", "line 1"),
        ("1: x", "the key 1 is not a string", "line 1"),
        ("a: {true: x}", "the key true is not a string", "line 1"),
        ("? [a, b]\n: c", "the key a list or mapping is not a string", "line 1"),
        ("a: &x [*x]", "an alias contains itself", "line 1"),
        ("a: \x00", "not YAML: special characters are not allowed", "job.yaml"),
        ("a: !!int x", "a value cannot be read", "job.yaml"),
        ("[" * 5000, "nested too deeply", "job.yaml"),
    ],
)
def test_refused(text, message, where):
    with pytest.raises(ConfigError) as caught:
        parse(text, "job.yaml")
    assert message in caught.value.what
    assert where in caught.value.where
    assert caught.value.exit_code == 2


def test_aliases_cannot_multiply_without_end():
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match=re.escape("expand to more than 100000 values")):
        parse("\n".join(rows), "t")


@given(st.text(max_size=30))
def test_noise_is_a_value_or_a_config_error(text):
    try:
        made = parse(text, "t")
    except ConfigError:
        return
    assert isinstance(made.value, dict | list | str | int | float | None)
