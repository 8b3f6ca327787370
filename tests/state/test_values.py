"""What goes into the manifest comes out of it the same, or is refused with its place."""

import enum
import math
import struct
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import header_for, same_bits

from coherent_ray import canonical
from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import GenerationHeader, StateLayout
from coherent_ray.errors import ManifestDamaged, TaskError
from coherent_ray.state.values import MAX_TENSOR_BYTES, decode, encode


def through_a_manifest(value):
    """Encode, write as part of a header, read as a stranger would, decode."""
    header = header_for(StateLayout(()), 1, {"it": encode(value, "it")})
    return decode(records.load(GenerationHeader, records.dump(header)).values["it"])


def exactly(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(exactly(a[key], b[key]) for key in a)
    return a == b


keys = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("$int")
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(0, 9), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_every_value_comes_back_exactly(value):
    assert exactly(through_a_manifest(value), value)


@pytest.mark.parametrize(
    "value",
    [
        0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, math.nan,
        2**63 - 1, -(2**63), 2**63, -(2**200), True, (), ("a", (1.0, None)),
        {"betas": (0.9, 0.999), "lr": 1e-3}, {1: "one", "1": "text", None: 0, (1, 2): [3]},
        {"$tuple": [1]}, {"$x": math.inf}, Counter({3: 2, 30: 1}), Counter(), [[[]], {}],
        "\N{SNOWMAN} \U0001F600 \x00", torch.float32, torch.bfloat16,
    ],
    ids=repr,
)  # fmt: skip
def test_the_awkward_ones(value):
    assert exactly(through_a_manifest(value), value)


@pytest.mark.parametrize(
    "scalar", [np.float64(0.1), np.float32("nan"), np.int64(-3), np.uint8(7), np.bool_(True)]
)
def test_numpy_scalars_keep_their_type_and_bits(scalar):
    back = through_a_manifest([scalar])[0]
    assert type(back) is type(scalar)
    assert back.tobytes() == scalar.tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1),
        torch.tensor([math.nan, -0.0, math.inf], dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 2, dtype=torch.float64),
        torch.tensor([True, False]),
    ],
)
def test_small_tensors_keep_dtype_shape_and_bits(tensor):
    assert same_bits(through_a_manifest({"lr": tensor})["lr"], tensor)


def test_the_form_is_what_the_docstring_says():
    value = {"a": (1, math.inf), 2: Counter({3: 4})}
    expected = {"$dict": [["a", {"$tuple": [1, {"$float": "inf"}]}], [2, {"$counter": [[3, 4]]}]]}
    assert encode(value, "x") == expected
    assert encode({"plain": [1, 2.5, None, "s", True]}, "x") == {"plain": [1, 2.5, None, "s", True]}
    assert encode(torch.tensor([1.5]), "x") == {"$tensor": ["F32", [1], "0000c03f"]}
    assert encode(2**63, "x") == {"$int": "0x8000000000000000"}


def test_encoding_is_a_copy():
    live = {"best": [1.0]}
    form = encode(live, "x")
    live["best"][0] = 2.0
    assert form == {"best": [1.0]}


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def endless():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, {1, 2}]}, "scheduler.a.1"),
        ({"f": lambda: 0}, "scheduler.f"),
        ({"d": deque([1])}, "scheduler.d"),
        ({"o": OrderedDict(a=1)}, "scheduler.o"),
        ({"e": Colour.RED}, "scheduler.e"),
        ({"t": Text("x")}, "scheduler.t"),
        ({"b": b"bytes"}, "scheduler.b"),
        ({"c": 1j}, "scheduler.c"),
        ({"u": "\ud800"}, "scheduler.u"),
        ({"\ud800": 1}, "scheduler"),
        ({"n": np.zeros(2)}, "scheduler.n"),
        ({"s": np.str_("x")}, "scheduler.s"),
        ({"g": torch.nn.Parameter(torch.ones(1))}, "scheduler.g"),
        ({"big": torch.zeros(MAX_TENSOR_BYTES // 4 + 1)}, "scheduler.big"),
        ({"meta": torch.zeros(1, device="meta")}, "scheduler.meta"),
        ({frozenset(): 1}, "scheduler, key frozenset()"),
        (endless(), "scheduler.0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_has_no_exact_form_is_refused_with_its_place(value, place):
    with pytest.raises(TaskError) as caught:
        encode(value, "scheduler")
    assert caught.value.where.startswith(place)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "form",
    [
        {"$unknown": 1},
        {"$int": "0x1", "more": 2},
        {"$int": "zz"},
        {"$int": 3},
        {"$float": "1e5"},
        {"$numpy": ["<U1", "41000000"]},
        {"$numpy": ["<f8", "00"]},
        {"$numpy": ["|O", "0000000000000000"]},
        {"$tensor": ["F32", [2], "00000000"]},
        {"$tensor": ["F33", [1], "00000000"]},
        {"$tensor": ["F32", [-1], "00000000"]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dtype": "F99"},
        {"$tuple": 3},
    ],
    ids=canonical.dump,
)
def test_forms_that_nobody_writes_are_refused(form):
    with pytest.raises(ManifestDamaged, match="cannot be read"):
        decode(form)
