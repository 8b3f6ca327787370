"""Flat gradients: where things lie, what moves, and the two zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coherent_ray.errors import TaskError
from coherent_ray.train.gradients import (
    ALIGNMENT,
    FlatGradients,
    FlatLayout,
    clear,
    reals,
    touched_now,
)


def parameters() -> list[tuple[str, nn.Parameter]]:
    shapes = {"a": (3, 5), "b": (), "c": (0,), "d": (64,), "e": (2, 3, 2, 2)}
    result = []
    for index, (name, shape) in enumerate(shapes.items()):
        dtype = torch.bfloat16 if index == 3 else torch.float32
        result.append((name, nn.Parameter(torch.zeros(shape, dtype=dtype))))
    result.append(("frozen", nn.Parameter(torch.zeros(9), requires_grad=False)))
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_views_are_disjoint_aligned_and_inside_whole_chunks(ranks: int) -> None:
    layout = FlatLayout(parameters(), ranks)
    assert layout.trainable == (0, 1, 2, 3, 4)
    assert [bucket.dtype for bucket in layout.buckets] == [torch.bfloat16, torch.float32]
    for bucket, flat in zip(layout.buckets, FlatGradients(layout).flats, strict=True):
        assert flat.numel() == bucket.chunk * ranks >= bucket.items
        assert bucket.chunk * flat.element_size() % ALIGNMENT == 0
        ends = [o + p.numel() for o, p in zip(bucket.offsets, bucket.parameters, strict=True)]
        assert all(
            end <= start
            for end, start in zip(ends, (*bucket.offsets[1:], bucket.items), strict=True)
        )
        assert all(offset * flat.element_size() % ALIGNMENT == 0 for offset in bucket.offsets)


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    kib = 256
    sizes = [4000 * kib, 30_000 * kib, 20_000 * kib, 3000 * kib, 2000 * kib, 700 * kib, 300 * kib]
    named = [(f"p{i}", nn.Parameter(torch.empty(n, device="meta"))) for i, n in enumerate(sizes)]
    named.insert(3, ("half", nn.Parameter(torch.empty(8, dtype=torch.half, device="meta"))))
    found = [bucket.names for bucket in FlatLayout(named, 2).buckets]
    assert found == [("p6", "p5"), ("half",), ("p4", "p3", "p2"), ("p1",), ("p0",)]
    small = [bucket.names for bucket in FlatLayout(named, 2, bucket_bytes=1).buckets]
    assert small == [(name,) for name, _ in reversed(named)]


def test_take_moves_adds_and_clears() -> None:
    named = parameters()
    layout = FlatLayout(named, 2)
    flat = FlatGradients(layout)
    for add, expected in ((False, 1.0), (True, 2.0), (True, 3.0), (False, 1.0)):
        for _, p in named[:5]:
            p.grad = torch.ones_like(p)
        assert touched_now(layout) == [3, 4, 2, 1, 0]
        flat.take(add)
        assert touched_now(layout) == []
        flat.give([True] * 6)
        assert all(p.grad is not None and (p.grad == expected).all() for _, p in named[:5])
        assert named[5][1].grad is None
        clear(layout)
    # What lies between the views stays zero.
    assert float(flat.flats[1].sum()) == sum(
        p.numel() for i, (_, p) in enumerate(named[:5]) if i != 3
    )


def test_a_missing_gradient_is_the_zero_that_changes_nothing() -> None:
    named = [("p", nn.Parameter(torch.zeros(4))), ("q", nn.Parameter(torch.zeros(4)))]
    values = torch.tensor([-0.0, 0.0, 1.5, -2.0])
    layout = FlatLayout(named, 1)
    first, second = FlatGradients(layout), FlatGradients(layout)
    named[0][1].grad = values.clone()
    first.take(add=False)
    named[1][1].grad = values.clone()
    second.take(add=False)
    first.add(second)
    first.give([True, True])
    for _, p in named:
        assert p.grad is not None
        assert p.grad.signbit().tolist() == values.signbit().tolist()
        assert p.grad.tolist() == values.tolist()
    named[1][1].grad = None
    first.take(add=True)
    assert not first.flats[0][16:20].signbit()[1]


def test_a_total_leaves_what_it_is_made_of_and_is_the_gradient_where_that_is_all() -> None:
    named = [("p", nn.Parameter(torch.zeros(4))), ("q", nn.Parameter(torch.zeros(4)))]
    layout = FlatLayout(named, 1)
    held, lower, total = (FlatGradients(layout) for _ in range(3))
    for flat, value in ((held, 1.0), (lower, 4.0)):
        for _, p in named:
            p.grad = torch.full_like(p, value)
        flat.take(add=False)
    for under, expected in (([], 0.5), ([held], 1.5), ([held, lower], 5.5)):
        given = [torch.full_like(p, 0.5) for _, p in named]
        for (_, p), gradient in zip(named, given, strict=True):
            p.grad = gradient
        total.total(0, under)
        # Without another sum the gradient is not kept twice.
        assert all((p.grad is g) == bool(under) for (_, p), g in zip(named, given, strict=True))
        assert all(p.grad is not None and (p.grad == 0.5).all() for _, p in named)
        assert total.flats[0].unique().tolist() == [0.0, expected]
    assert (held.flats[0].max(), lower.flats[0].max()) == (1.0, 4.0)
    named[0][1].grad = None
    total.total(0, [held])
    assert total.named([0, 1])["p"].tolist() == [1.0] * 4


def test_what_was_here_before_is_gone_where_a_gradient_is_missing() -> None:
    named = [("p", nn.Parameter(torch.zeros(4))), ("z", nn.Parameter(torch.zeros(2) * 1j))]
    layout = FlatLayout(named, 1)
    flat = FlatGradients(layout)
    for _, p in named:
        p.grad = torch.full_like(p, 7)
    flat.take(add=False)
    flat.take(add=False)
    for tensor in flat.flats:
        assert (tensor == 0).all()
    flat.give([True, True])
    assert all(reals(p.grad).signbit().all() for _, p in named if p.grad is not None)


def test_a_view_is_strided_as_its_parameter() -> None:
    image = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    holes = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    turned = nn.Parameter(torch.zeros(4, 6).t())
    layout = FlatLayout([("image", image), ("holes", holes), ("turned", turned)], 1)
    flat = FlatGradients(layout)
    image.grad = torch.randn(4, 3, 2, 2)
    wanted = image.grad.clone()
    flat.take(add=False)
    flat.give([True] * 3)
    assert image.grad is not None
    assert holes.grad is not None
    assert turned.grad is not None
    assert image.grad.equal(wanted)
    assert image.grad.stride() == image.stride()
    assert turned.grad.stride() == turned.stride()
    assert holes.grad.is_contiguous()


def test_complex_numbers_are_added_as_real_ones() -> None:
    named = [("z", nn.Parameter(torch.zeros(64, dtype=torch.complex64)))]
    flat = FlatGradients(FlatLayout(named, 1))
    for add in (False, True):
        named[0][1].grad = torch.full((64,), complex(float("inf"), 1.0))
        flat.take(add)
    assert reals(flat.flats[0]).isnan().sum() == 0
    assert reals(torch.tensor([1 + 2j]).conj()).tolist() == [[1.0, -2.0]]


def test_facts_tell_layouts_apart() -> None:
    named = parameters()
    facts = FlatLayout(named, 2).facts()
    assert facts == FlatLayout(named, 3).facts()
    named[1][1].requires_grad_(False)
    assert FlatLayout(named, 2).facts() == [fact for fact in facts if fact[0] != "b"]


def test_several_devices_are_refused() -> None:
    named = [
        ("p", nn.Parameter(torch.zeros(1))),
        ("q", nn.Parameter(torch.zeros(1, device="meta"))),
    ]
    with pytest.raises(TaskError, match="several devices: cpu, meta"):
        FlatLayout(named, 1)
