"""Two stored states: equal to the bit, or where not, and by how much."""

from __future__ import annotations

import math

import pytest
import torch
from saved import every_dtype, save

from coherent_ray.errors import ShardDamaged
from coherent_ray.state import difference
from coherent_ray.state.difference import compare_states
from coherent_ray.storage import LocalStorage


@pytest.fixture
def two(tmp_path):
    """Compare two states, each stored at a rank count of its own."""

    def compare(one, other, ranks=(1, 3)):
        storages = [LocalStorage(tmp_path / name) for name in ("one", "other")]
        manifests = [
            save(storage, tensors, count)
            for storage, tensors, count in zip(storages, (one, other), ranks, strict=True)
        ]
        return compare_states(storages[0], manifests[0], storages[1], manifests[1])

    return compare


def test_equal_bits_at_other_rank_counts(two):
    found = two(every_dtype(), every_dtype())
    assert found.same
    assert found.compared == len(every_dtype())


@pytest.mark.parametrize("name", [n for n, t in every_dtype().items() if t.numel()])
def test_one_bit_of_any_dtype_is_found(two, name):
    other = {key: tensor.contiguous().clone() for key, tensor in every_dtype().items()}
    other[name].reshape(-1).view(torch.uint8)[-1] ^= 1
    found = two(every_dtype(), other)
    (tensor,) = found.tensors
    assert (tensor.name, tensor.differing) == (name, 1)
    assert tensor.first_item == tensor.items - 1
    assert not found.same
    assert name in str(tensor)


def test_the_first_tensor_in_layout_order_comes_first(two):
    one = {"b": torch.zeros(4), "a": torch.zeros(4), "c": torch.zeros(4, dtype=torch.int64)}
    other = {"b": torch.ones(4), "a": torch.zeros(4), "c": torch.ones(4, dtype=torch.int64)}
    found = two(one, other)
    # Larger items lie first.
    assert [tensor.name for tensor in found.tensors] == ["c", "b"]
    assert [tensor.max_abs for tensor in found.tensors] == [1.0, 1.0]
    assert [tensor.max_ulps for tensor in found.tensors] == [None, 0x3F800000]


def test_by_how_much(two):
    one = torch.tensor([1.0, -2.0, 0.0, math.inf, math.nan])
    other = one.clone()
    other[0] = torch.nextafter(one[0], torch.tensor(2.0))
    other[1] = torch.nextafter(torch.nextafter(one[1], torch.tensor(-9.0)), torch.tensor(-9.0))
    (tensor,) = two({"x": one}, {"x": other}).tensors
    assert (tensor.differing, tensor.first_item, tensor.max_ulps) == (2, 0, 2)
    assert tensor.max_abs == 4 * 2**-23
    assert (tensor.first, tensor.second) == ("0x1.0000000000000p+0", "0x1.0000020000000p+0")


def test_zeros_of_both_signs_are_other_bits(two):
    (tensor,) = two({"x": torch.tensor([0.0, 0.0])}, {"x": torch.tensor([0.0, -0.0])}).tensors
    assert (tensor.first_item, tensor.max_abs, tensor.max_ulps) == (1, 0.0, 1)


def test_a_distance_to_what_is_not_finite_is_no_number(two):
    (tensor,) = two({"x": torch.tensor([1.0])}, {"x": torch.tensor([math.nan])}).tensors
    assert tensor.max_abs is None
    assert tensor.second == "nan"


def test_large_unsigned_integers_do_not_wrap(two):
    one = torch.tensor([0, 0], dtype=torch.uint64)
    other = torch.tensor([0, 2**64 - 1], dtype=torch.uint64)
    (tensor,) = two({"x": one}, {"x": other}).tensors
    assert tensor.max_abs == float(2**64 - 1)


def test_tensors_that_only_one_has_and_other_shapes(two):
    one = {"a": torch.zeros(3), "b": torch.zeros(2)}
    other = {"a": torch.zeros(4), "c": torch.zeros(2)}
    found = two(one, other)
    assert found.layout == (
        "a: F32 [3] -> F32 [4]", "b: F32 [2] -> absent", "c: absent -> F32 [2]",
    )  # fmt: skip
    assert (found.compared, found.same) == (0, False)


def test_a_tensor_that_is_longer_than_a_step(two, monkeypatch):
    monkeypatch.setattr(difference, "STEP_BYTES", 64)
    one = torch.arange(1000, dtype=torch.float32)
    other = one.clone()
    other[[17, 18, 999]] += 1
    (tensor,) = two({"w": torch.zeros(5), "x": one}, {"w": torch.zeros(5), "x": other}).tensors
    assert (tensor.differing, tensor.first_item, tensor.max_abs) == (3, 17, 1.0)


def test_damage_is_no_difference(two, tmp_path):
    storages = [LocalStorage(tmp_path / name) for name in ("one", "other")]
    manifests = [save(storage, {"x": torch.zeros(64)}, 1) for storage in storages]
    path = tmp_path / "other" / manifests[1].shards[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardDamaged):
        compare_states(storages[0], manifests[0], storages[1], manifests[1])
