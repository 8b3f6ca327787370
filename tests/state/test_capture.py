"""What belongs to the state and what does not; a refusal names the first difference."""

import pytest
import torch
from saved import assert_same, same_bits, save
from torch import nn
from torch.optim import lr_scheduler as lrs

from coherent_ray import canonical
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.capture import capture, check_spec, restore, spec_digest, state_spec
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_state
from coherent_ray.storage.testing.memory import MemoryStorage


class Counter(nn.Module):
    """Keeps state of its own, as `get_extra_state` allows."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("derived", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)

    def get_extra_state(self):
        return {"calls": self.calls, "best": float("inf")}

    def set_extra_state(self, state):
        self.calls, self.best = state["calls"], state["best"]


class Model(nn.Module):
    def __init__(self, width=4, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(width)
        self.again = self.norm
        self.counter = Counter()


def test_names_of_parameters_and_persistent_buffers_tied_ones_once():
    state = capture(Model())
    assert list(state.tensors) == [
        "model/embed.weight",
        "model/norm.weight",
        "model/norm.bias",
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
        "model/counter.kept",
    ]
    assert state.values["model"] == {"counter": {"calls": 0, "best": {"$float": "inf"}}}
    assert state.values["optimizer"] is None
    assert state.values["scheduler"] is None
    assert state.values["scaler"] is None
    canonical.dump(state.values)


def test_nothing_is_copied_at_capture():
    model = Model()
    state = capture(model)
    assert state.tensors["model/embed.weight"] is model.embed.weight
    assert state.tensors["model/norm.running_mean"] is model.norm.running_mean


def test_restoring_gives_back_everything_and_keeps_every_tensor_s_place():
    model, other = Model(), Model()
    model.counter.calls = 9
    model.norm(torch.randn(8, 4))
    state, storage = capture(model, extra={"note": (1, 2)}), MemoryStorage()
    tensors = load_state(storage, save(storage, state.tensors, 3))
    places = {n: t.data_ptr() for n, t in capture(other).tensors.items()}
    assert restore(tensors, state.values, other) == {"note": (1, 2)}
    assert_same(capture(other).tensors, state.tensors)
    assert {n: t.data_ptr() for n, t in capture(other).tensors.items()} == places
    assert other.head.weight is other.embed.weight
    assert (other.counter.calls, other.counter.best) == (9, float("inf"))
    assert other.norm.num_batches_tracked.item() == 1


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = Model()
    compiled = torch.compile(model)
    assert capture(compiled).tensors.keys() == capture(model).tensors.keys()
    assert state_spec(compiled) == state_spec(model)


def test_a_dtype_is_kept_bit_for_bit():
    model = Model().to(torch.bfloat16)
    state = capture(model)
    other = Model().to(torch.bfloat16)
    restore({n: t.detach().clone() for n, t in state.tensors.items()}, state.values, other)
    assert same_bits(other.embed.weight, model.embed.weight)


@pytest.mark.parametrize(
    ("make", "name", "stored", "live"),
    [
        (lambda: Model(width=3), "model/embed.weight", "F32[5, 4]", "F32[5, 3]"),
        (lambda: Model(tied=False), "model/head.weight", "missing", "F32[5, 4]"),
        (lambda: Model().double(), "model/embed.weight", "F32[5, 4]", "F64[5, 4]"),
        (lambda: nn.Sequential(), "model/counter.kept", "F32[2]", "missing"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_left_alone(make, name, stored, live):
    state, other = capture(Model()), make()
    before = {n: t.detach().clone() for n, t in capture(other).tensors.items()}
    with pytest.raises(StateMismatch) as caught:
        restore(state.tensors, state.values, other)
    assert caught.value.where == name
    assert (caught.value.details["stored"], caught.value.details["live"]) == (stored, live)
    assert stored in caught.value.what
    assert live in caught.value.what
    assert_same(capture(other).tensors, before)


def test_stored_tensors_that_the_values_do_not_speak_of_are_refused():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = capture(model, optimizer)
    lost = dict(state.tensors)
    del lost["optimizer/norm.bias/momentum_buffer"]
    with pytest.raises(StateMismatch, match=r"norm.bias/momentum_buffer: stored is missing"):
        restore(lost, state.values, model, optimizer)
    more = state.tensors | {"optimizer/norm.bias/other": torch.ones(1)}
    with pytest.raises(StateMismatch, match=r"norm.bias/other: stored is F32"):
        restore(more, state.values, model, optimizer)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1)


def scaler(enabled=True):
    return torch.amp.GradScaler("cpu", enabled=enabled)


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler"])
def test_a_part_that_is_there_on_one_side_only_is_refused(part):
    model = Model()
    optimizer = sgd(model)
    parts = {"optimizer": optimizer, "scheduler": lrs.StepLR(optimizer, 1), "scaler": scaler()}
    less = parts | {part: None}
    if part == "optimizer":
        less["scheduler"] = parts["scheduler"] = None
    state = capture(model, **less)
    with pytest.raises(StateMismatch, match=f"{part}: stored is none, the running job has"):
        restore(state.tensors, state.values, model, **parts)
    state = capture(model, **parts)
    with pytest.raises(StateMismatch, match=f"{part}: stored is .*, the running job has none"):
        restore(state.tensors, state.values, model, **less)


def test_another_kind_of_scheduler_is_refused():
    model = Model()
    optimizer = sgd(model)
    state = capture(model, optimizer, lrs.StepLR(optimizer, 1))
    with pytest.raises(StateMismatch, match="stored is StepLR, the running job has ConstantLR"):
        restore(state.tensors, state.values, model, optimizer, lrs.ConstantLR(optimizer))


@pytest.mark.parametrize("stored", [True, False])
def test_a_scaler_must_be_enabled_as_it_was(stored):
    model = Model()
    state = capture(model, scaler=scaler(stored))
    restore(state.tensors, state.values, model, scaler=scaler(stored))
    with pytest.raises(StateMismatch, match="the gradient scaler was"):
        restore(state.tensors, state.values, model, scaler=scaler(not stored))


def test_the_caller_s_values_are_stored_exactly_or_refused():
    state = capture(Model(), extra={"a": float("-inf"), "b": {1: (2,)}})
    assert restore(state.tensors, state.values, Model()) == {"a": float("-inf"), "b": {1: (2,)}}
    with pytest.raises(TaskError, match=r"extra.a \(builtins.object\)"):
        capture(Model(), extra={"a": object()})


def test_a_module_s_own_state_that_is_no_value_is_refused():
    model = Model()
    model.counter.calls = {1, 2}
    with pytest.raises(TaskError, match=r"model.counter.get_extra_state\(\).calls"):
        capture(model)


def test_a_lazy_module_is_refused_with_the_remedy():
    with pytest.raises(TaskError, match="run the lazy module once"):
        state_spec(nn.Sequential(nn.LazyLinear(3)))


def test_the_spec_is_dtype_and_shape_of_every_tensor():
    spec = state_spec(Model())
    assert spec["model/embed.weight"] == ("F32", (5, 4))
    assert spec["model/norm.num_batches_tracked"] == ("I64", ())
    assert spec_digest(spec) == spec_digest(state_spec(Model()))
    others = [Model(width=3), Model(tied=False), Model().half()]
    assert len({spec_digest(spec), *(spec_digest(state_spec(m)) for m in others)}) == 4


def test_a_spec_is_checked_against_a_stored_layout_moments_left_out():
    model = Model()
    layout = layout_of(capture(model).tensors | {"optimizer/x/step": torch.ones(())})
    check_spec(layout, state_spec(model))
    with pytest.raises(StateMismatch, match=r"num_batches_tracked: stored is I64\[\]"):
        check_spec(layout, {})
    with pytest.raises(StateMismatch, match=r"model/embed.weight: stored is F32\[5, 4\]"):
        check_spec(layout, state_spec(Model(width=3)))
    with pytest.raises(StateMismatch, match=r"model/head.weight: stored is missing"):
        check_spec(layout, state_spec(Model(tied=False)))
