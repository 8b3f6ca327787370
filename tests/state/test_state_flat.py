"""Ranges of tensors in logical order, however they lie in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import bits, every_dtype, random_tensor, same_bits

from coherent_ray.state.flat import bits_of, carrier_of, from_bytes, items_of, put_items
from coherent_ray.state.layout import TORCH_DTYPES

ODD = {
    "plain": random_tensor(torch.float32, (4, 6)),
    "transposed": random_tensor(torch.float32, (4, 6)).t(),
    "channels_last": random_tensor(torch.float32, (2, 3, 4, 5)).to(
        memory_format=torch.channels_last
    ),
    "strided": random_tensor(torch.int16, (9, 8))[1::2, ::3],
    "offset": random_tensor(torch.uint8, (33,))[5:],
    "scalar": random_tensor(torch.float64, ()),
}


def test_a_single_item_far_from_its_neighbours_is_one_item():
    for dtype in (torch.float64, torch.bfloat16):
        tensor = torch.arange(12, dtype=dtype).view(3, 4)[1:2, 2:3].t()
        items = items_of(tensor, 0, 1)
        assert items.stride() == (1,)
        assert bits(items) == bits(torch.tensor([6], dtype=dtype))
        assert items.view(torch.uint8).numel() == dtype.itemsize


@pytest.mark.parametrize("name", ODD)
def test_any_range_is_that_of_the_contiguous_tensor(name):
    tensor = ODD[name]
    size, raw = tensor.element_size(), bits(tensor)
    for first in range(0, tensor.numel(), 3):
        for last in range(first, tensor.numel() + 1, 5):
            items = items_of(tensor, first, last)
            assert items.is_contiguous()
            assert bits(items) == raw[first * size : last * size]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_is_carried_bit_for_bit(name):
    tensor = every_dtype()[f"model/{name}"]
    assert bits(items_of(tensor, 0, 15)) == bits(tensor)
    target = torch.zeros_like(tensor)
    put_items(target, 0, items_of(tensor, 0, 15))
    assert same_bits(target, tensor)


def test_contiguous_ranges_share_memory_and_others_do_not():
    plain = torch.zeros(8)
    items_of(plain, 2, 4).fill_(1)
    assert plain.tolist() == [0, 0, 1, 1, 0, 0, 0, 0] or plain.view(torch.int32)[2] == 1
    turned = torch.zeros(4, 2).t()
    items_of(turned, 0, 8).fill_(1)
    assert not turned.any()


@pytest.mark.parametrize("name", ODD)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_putting_is_the_inverse_of_taking(name, data):
    source = ODD[name]
    first = data.draw(st.integers(0, source.numel()))
    last = data.draw(st.integers(first, source.numel()))
    target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).zero_()
    put_items(target, first, items_of(source, first, last))
    size = source.element_size()
    expected = bytearray(source.numel() * size)
    expected[first * size : last * size] = bits(source)[first * size : last * size]
    assert bits(target) == bytes(expected)


def test_a_lazy_conjugate_gives_the_conjugated_bits():
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    lazy = tensor.conj()
    assert lazy.is_conj()
    assert bits(bits_of(lazy)) == bits(lazy.resolve_conj())
    assert bits(items_of(lazy, 1, 2)) == bits(lazy.resolve_conj())[8:]


def test_parameters_lose_their_gradient_but_not_their_memory():
    parameter = torch.nn.Parameter(torch.ones(3))
    items = bits_of(parameter)
    assert not items.requires_grad
    assert items.data_ptr() == parameter.data_ptr()


def test_bytes_become_items_without_a_copy():
    raw = bytearray(8)
    tensor = from_bytes(memoryview(raw), torch.int32)
    raw[4] = 7
    assert tensor.tolist() == [0, 7]
    assert from_bytes(memoryview(b""), torch.bfloat16).shape == (0,)


def test_carriers_have_the_size_of_what_they_carry():
    assert all(carrier_of(d).itemsize == d.itemsize for d in TORCH_DTYPES.values())
