"""A snapshot is this rank's bytes as they were, whatever happens to the tensors afterwards."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import bits, every_dtype

from coherent_ray.errors import StateMismatch
from coherent_ray.state.layout import layout_of
from coherent_ray.state.snapshot import Snapshot


def flat_bytes(tensors):
    return b"".join(bits(tensors[spec.name]) for spec in layout_of(tensors).tensors)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40))
def test_parts_of_all_ranks_are_the_flat_state(ranks):
    tensors = every_dtype()
    layout = layout_of(tensors)
    taken = b""
    for rank in range(ranks):
        snapshot = Snapshot(layout, rank, ranks)
        snapshot.take(tensors)
        assert (snapshot.start, snapshot.stop) == (
            layout.cut(rank, ranks),
            layout.cut(rank + 1, ranks),
        )
        taken += bytes(snapshot.memory)
    assert taken == flat_bytes(tensors)


def test_later_changes_do_not_reach_it_and_the_buffer_is_reused():
    tensors = {"w": torch.arange(6.0).view(2, 3), "step": torch.tensor(1.0)}
    snapshot = Snapshot(layout_of(tensors), 0, 1)
    snapshot.take(tensors)
    before = bytes(snapshot.memory)
    address = snapshot.memory.obj.ctypes.data
    assert before == flat_bytes(tensors)
    for tensor in tensors.values():
        tensor.add_(1)
    assert bytes(snapshot.memory) == before
    snapshot.take(tensors)
    assert bytes(snapshot.memory) == flat_bytes(tensors) != before
    assert snapshot.memory.obj.ctypes.data == address


def test_the_buffer_begins_on_a_page():
    snapshot = Snapshot(layout_of({"w": torch.zeros(10000)}), 0, 3)
    assert snapshot.memory.obj.ctypes.data % mmap.PAGESIZE == 0


def test_children_do_not_get_the_buffer():
    """Else each page of it would be copied at the save after a fork, and kept twice."""
    tensors = {"w": torch.ones(2**18)}
    snapshot = Snapshot(layout_of(tensors), 0, 1, pinned=False)
    snapshot.take(tensors)
    address = ctypes.addressof(ctypes.c_char.from_buffer(snapshot.memory))
    flags: dict[int, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if re.match(r"[0-9a-f]+ ", rest):
            mapping = range(int(first, 16), int(rest.split()[0], 16))
        elif line.startswith("VmFlags:") and address in mapping:
            flags[address] = line
    assert " dc" in flags[address]


def test_parameters_that_need_gradients_are_copied():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    snapshot = Snapshot(layout_of({"w": weight}), 0, 1)
    snapshot.take({"w": weight})
    assert bytes(snapshot.memory) == bits(weight)
    assert weight.requires_grad


def test_a_state_without_bytes_has_an_empty_snapshot():
    snapshot = Snapshot(layout_of({}), 0, 2)
    snapshot.take({})
    assert bytes(snapshot.memory) == b""


def test_tensors_of_another_layout_are_refused():
    snapshot = Snapshot(layout_of({"w": torch.zeros(4)}), 0, 1)
    with pytest.raises(StateMismatch, match="w: stored is F32"):
        snapshot.take({"w": torch.zeros(5)})
