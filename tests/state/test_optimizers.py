"""A fresh process that restores goes on bit for bit, whatever the optimizer and the scheduler keep.

Each case trains without a break, and trains with a break after every number of updates: state
captured, written as shards, read at another rank count, restored into newly built objects. Then
all parameters, moments, learning rates and scheduler values must be the same to the bit.
"""

import copy
import math
from functools import partial

import pytest
import torch
from saved import assert_same, save
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Manifest
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.capture import capture, restore
from coherent_ray.state.shards import load_state
from coherent_ray.storage.testing.memory import MemoryStorage

UPDATES = 4


class Net(nn.Module):
    """Tied, frozen, unused, channels-last, bf16 and 1-D parameters; batch norm."""

    def __init__(self, low=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape, dtype=torch.float32):
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.first = nn.Linear(6, 8)
        self.tied = nn.Linear(6, 8)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm1d(8)
        self.short = weight(8, 4, dtype=low)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.late = weight(4)
        for parameter in [
            self.first.weight,
            self.first.bias,
            self.tied.bias,
            *self.conv.parameters(),
        ]:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x, late):
        y = self.norm(self.first(x) + self.tied(x))
        z = (y.to(self.short.dtype) @ self.short).float()
        if late:  # Before that it has no gradient, and so no optimizer state.
            z = z * self.late
        image = x[:, :4].reshape(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        return z.square().sum() + self.conv(image).sum()


class Job:
    def __init__(
        self, make_optimizer, make_scheduler=None, scaled=False, late=2, low=torch.bfloat16
    ):
        self.model = Net(low)
        self.late = late
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if "weight" in n]},
            {
                "params": [p for n, p in self.model.named_parameters() if "weight" not in n],
                "lr": 3e-3,
            },
        ]
        self.optimizer = make_optimizer(groups)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
        )

    @property
    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.scaler

    def update(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 6, generator=generator), number >= self.late)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            if number == 3:
                loss = loss * math.inf  # A skipped step: the scale backs off.
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if isinstance(self.scheduler, lrs.ReduceLROnPlateau):
            self.scheduler.step(float(number))
        elif self.scheduler is not None:
            self.scheduler.step()


def frozen_state(job):
    """Return what `capture` sees, detached from the job."""
    state = capture(*job.parts, {"update": 1})
    return {n: t.detach().clone() for n, t in state.tensors.items()}, copy.deepcopy(state.values)


def through_storage(job, ranks):
    """Return tensors and values as another process would read them."""
    state, storage = capture(*job.parts, {"update": 1}), MemoryStorage()
    manifest = save(storage, state.tensors, ranks, values=state.values)
    manifest = records.load(Manifest, records.dump(manifest))
    return load_state(storage, manifest), manifest.header.values


def assert_resumes(make):
    """Check every break of a run of `UPDATES` updates against the run without a break."""
    straight, expected = make(), []
    breaks = {}
    for number in range(UPDATES + 1):
        breaks[number] = through_storage(straight, ranks=1 + number % 3)
        expected.append(frozen_state(straight))
        straight.update(number)
    for at, (tensors, values) in breaks.items():
        job = make()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(7)
        assert restore(tensors, values, *job.parts) == {"update": 1}
        for number in range(at, UPDATES):
            now, now_values = frozen_state(job)
            assert_same(now, expected[number][0])
            assert now_values == expected[number][1]
            job.update(number)
        assert_same(frozen_state(job)[0], expected[UPDATES][0])
        assert frozen_state(job)[1] == expected[UPDATES][1]


OPTIMIZERS = {
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw-foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "adamw-for-loop": partial(optim.AdamW, lr=1e-2, foreach=False),
    "adamw-fused": partial(optim.AdamW, lr=1e-2, fused=True),
    "adamw-amsgrad": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False),
    "adam-fused-amsgrad": partial(optim.Adam, lr=1e-2, amsgrad=True, fused=True),
    "sgd": partial(optim.SGD, lr=1e-3),
    "sgd-momentum": partial(optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    "sgd-momentum-fused": partial(optim.SGD, lr=1e-3, momentum=0.9, dampening=0.1, fused=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "nadam": partial(optim.NAdam, lr=1e-3),
    "radam": partial(optim.RAdam, lr=1e-3),
    "adamax": partial(optim.Adamax, lr=1e-3),
    "adadelta": partial(optim.Adadelta, lr=1e-1),
    "asgd": partial(optim.ASGD, lr=1e-3),
    "rprop": partial(optim.Rprop, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(name):
    if name == "sgd-momentum-fused":
        # torch 2.13 cannot have a parameter whose momentum begins later than the others', and reads
        # memory that nobody wrote where a parameter is bf16: not even two straight runs agree.
        assert_resumes(lambda: Job(OPTIMIZERS[name], late=0, low=torch.float32))
    else:
        assert_resumes(lambda: Job(OPTIMIZERS[name]))


def nested(optimizer):
    warm = lrs.LinearLR(optimizer, 0.1, total_iters=2)
    rest = lrs.SequentialLR(
        optimizer, [lrs.ConstantLR(optimizer, 0.5, 1), lrs.CosineAnnealingLR(optimizer, 4)], [1]
    )
    return lrs.ChainedScheduler([warm, rest], optimizer)


def late_start(optimizer):
    return lrs.SequentialLR(
        optimizer,
        [
            lrs.LinearLR(optimizer, 0.1, total_iters=2),
            lrs.CosineAnnealingWarmRestarts(optimizer, 2),
        ],
        [2],
    )


class Half:
    """A callable object: its attributes are scheduler state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.5**self.calls


SCHEDULERS = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "lambda-object": lambda o: lrs.LambdaLR(o, Half()),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, [lambda e: 0.9, lambda e: 0.8]),
    "multi-step": lambda o: lrs.MultiStepLR(o, [1, 3, 3], 0.3),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 3),
    "warm-restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "one-cycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], total_steps=UPDATES + 2),
    "cyclic": lambda o: lrs.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, mode="exp_range", gamma=0.9),
    "sequential": late_start,
    "nested": nested,
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "polynomial": lambda o: lrs.PolynomialLR(o, 4, 2.0),
    "swa": lambda o: optim.swa_utils.SWALR(o, 1e-3, 3),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_bit_for_bit(name):
    assert_resumes(lambda: Job(partial(optim.SGD, lr=1e-2, momentum=0.9), SCHEDULERS[name]))


@pytest.mark.parametrize("name", ["cosine", "sequential", "plateau", "one-cycle"])
def test_a_learning_rate_that_is_a_tensor_goes_on(name):
    def make(groups):
        groups[1]["lr"] = torch.tensor(3e-3)
        return optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False)

    assert_resumes(lambda: Job(make, SCHEDULERS[name]))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", ["adamw-fused", "sgd-momentum", "adafactor"])
def test_a_gradient_scaler_goes_on_through_a_skipped_step(name):
    assert_resumes(lambda: Job(OPTIMIZERS[name], SCHEDULERS["cosine"], scaled=True))


# --- what is stored -------------------------------------------------------------------------------


def test_state_is_named_by_parameter_and_absent_where_it_does_not_exist():
    job = Job(OPTIMIZERS["adamw"])
    assert not any(n.startswith("optimizer/") for n in capture(*job.parts).tensors)
    job.update(0)
    state = capture(*job.parts)
    keys = {"step", "exp_avg", "exp_avg_sq"}
    assert {f"optimizer/first.weight/{key}" for key in keys} <= state.tensors.keys()
    assert not any("late" in name or "frozen" in name for name in state.tensors if "opt" in name)
    moment = job.optimizer.state[job.model.short]["exp_avg"]
    assert state.tensors["optimizer/short/exp_avg"] is moment, "a reference, not a copy"
    stored = state.values["optimizer"]
    assert stored["kind"] == "AdamW"
    assert stored["state"]["short"] == {
        "step": {"$state": "host"},
        "exp_avg": {"$state": "parameter"},
        "exp_avg_sq": {"$state": "parameter"},
    }
    assert stored["groups"][1]["settings"]["lr"] == 3e-3
    assert stored["groups"][1]["settings"]["betas"] == {"$tuple": [0.9, 0.999]}


def test_moments_of_another_dtype_than_their_parameter_are_not_cast():
    job = Job(OPTIMIZERS["adamw"])
    job.update(0)
    entry = job.optimizer.state[job.model.short]
    entry["exp_avg"] = torch.full((8, 4), 1 / 3)
    tensors, values = through_storage(job, 2)
    fresh = Job(OPTIMIZERS["adamw"])
    restore(tensors, values, *fresh.parts)
    back = fresh.optimizer.state[fresh.model.short]["exp_avg"]
    assert back.dtype == torch.float32
    assert torch.equal(back, entry["exp_avg"])


def test_moments_lie_in_memory_as_the_optimizer_would_lay_them():
    job = Job(OPTIMIZERS["adamw"])
    job.update(0)
    fresh = Job(OPTIMIZERS["adamw"])
    restore(*through_storage(job, 3), *fresh.parts)
    for entries in (
        job.optimizer.state[job.model.conv.weight],
        fresh.optimizer.state[fresh.model.conv.weight],
    ):
        assert entries["exp_avg"].stride() == job.model.conv.weight.stride()
        assert not entries["exp_avg"].is_contiguous()


def test_going_back_in_a_live_job_removes_later_state_and_keeps_the_tensors():
    job = Job(OPTIMIZERS["adamw"])
    job.update(0)
    early = through_storage(job, 1)
    kept = job.optimizer.state[job.model.short]["exp_avg"]
    expected = frozen_state(job)
    job.update(1)
    job.update(2)
    assert job.model.late in job.optimizer.state
    restore(*early, *job.parts)
    assert job.model.late not in job.optimizer.state
    assert job.optimizer.state[job.model.short]["exp_avg"] is kept
    assert_same(frozen_state(job)[0], expected[0])
    assert frozen_state(job)[1] == expected[1]


def test_a_tensor_learning_rate_stays_the_same_object():
    def make(groups):
        return optim.Adam(groups[:1], lr=torch.tensor(0.5), foreach=False)

    job, fresh = Job(make), Job(make)
    job.optimizer.param_groups[0]["lr"].fill_(0.25)
    held = fresh.optimizer.param_groups[0]["lr"]
    restore(*through_storage(job, 1), *fresh.parts)
    assert fresh.optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.25


# --- what is refused ------------------------------------------------------------------------------


def other_groups(groups):
    return optim.AdamW([groups[1], groups[0]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(optim.Adam), "optimizer: stored is AdamW, the running job has Adam"),
        (
            lambda groups: optim.AdamW(groups[:1]),
            "stored is 2 groups, the running job has 1 groups",
        ),
        (other_groups, r"param_groups.0: stored is \d parameters"),
        (
            lambda g: optim.AdamW([{"params": g[0]["params"][::-1]}, g[1]]),
            "param_groups.0, parameter 0: stored is first.weight, the running job has",
        ),
    ],
)
def test_another_optimizer_is_refused_and_nothing_is_changed(make, words):
    job = Job(OPTIMIZERS["adamw"])
    job.update(0)
    stored = through_storage(job, 2)
    other = Job(make)
    before = frozen_state(other)
    with pytest.raises(StateMismatch, match=words):
        restore(*stored, *other.parts)
    assert_same(frozen_state(other)[0], before[0])
    assert frozen_state(other)[1] == before[1]


def test_a_parameter_that_the_model_does_not_have_is_refused():
    job = Job(lambda groups: optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(5))]}], lr=1))
    with pytest.raises(TaskError, match=r"shape \[5\] that the model does not have"):
        capture(*job.parts)


def test_state_that_belongs_to_no_parameter_is_refused():
    job = Job(OPTIMIZERS["sgd"])
    job.optimizer.state["ema"] = {"x": 1}
    with pytest.raises(TaskError, match=r"state\['ema'\]"):
        capture(*job.parts)

    class Own(optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"clock": 3}

    with pytest.raises(TaskError, match="clock"):
        capture(*Job(partial(Own, lr=1)).parts)


def test_state_that_has_no_exact_form_is_refused_with_its_place():
    model = Net()
    optimizer = optim.LBFGS([model.late])
    optimizer.step(lambda: model.late.square().sum().backward() or model.late.square().sum())
    optimizer.state[model.late]["old_dirs"] = [torch.zeros(5000)]
    with pytest.raises(TaskError, match=r"optimizer.state.late.old_dirs.0 .* more than 4096 bytes"):
        capture(model, optimizer)


def test_a_scheduler_that_keeps_a_function_is_refused_with_its_place():
    class Odd(lrs.LambdaLR):
        def state_dict(self):
            return super().state_dict() | {"f": [len]}

    job = Job(OPTIMIZERS["sgd"], lambda o: lrs.ChainedScheduler([Odd(o, lambda e: 1.0)]))
    with pytest.raises(TaskError, match=r"scheduler._schedulers.0.f.0 \(builtins"):
        capture(*job.parts)


# --- groups that are added later ------------------------------------------------------------------


def grown(job):
    """Thaw a frozen parameter in the middle of a run, and train it, as a group of its own."""
    job.model.frozen.requires_grad_(True)
    job.optimizer.add_param_group({"params": [job.model.frozen], "lr": 0.5, "betas": (0.5, 0.6)})
    return job


def without_frozen(groups):
    model_groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups]
    return optim.AdamW(model_groups, lr=1e-2)


def stored_grown():
    job = grown(Job(without_frozen))
    job.update(0)
    job.model.frozen.square().sum().backward()
    job.optimizer.step()
    state = capture(*job.parts, first_groups=2)
    return {n: t.clone() for n, t in state.tensors.items()}, state.values


def test_a_group_that_was_added_comes_back_and_its_parameters_train_as_they_did():
    tensors, values = stored_grown()
    assert values["optimizer"]["first_groups"] == 2
    fresh = Job(without_frozen)
    assert not fresh.model.frozen.requires_grad
    restore(tensors, values, *fresh.parts)
    assert fresh.model.frozen.requires_grad
    added = fresh.optimizer.param_groups[2]
    assert (added["lr"], added["betas"]) == (0.5, (0.5, 0.6))
    assert added["params"] == [fresh.model.frozen]
    again = capture(*fresh.parts, first_groups=2)
    assert_same(again.tensors, tensors)
    assert again.values == values


def test_a_job_that_begins_with_other_groups_than_then_is_refused():
    tensors, values = stored_grown()
    with pytest.raises(StateMismatch, match="stored is 2 groups, the running job has 3 groups"):
        restore(tensors, values, *grown(Job(without_frozen)).parts)
    other = Job(lambda groups: optim.AdamW(groups[:1]))
    with pytest.raises(StateMismatch, match="stored is 2 groups, the running job has 1 groups"):
        restore(tensors, values, *other.parts)


def test_a_later_group_whose_parameter_the_job_has_elsewhere_is_refused():
    tensors, values = stored_grown()
    values = copy.deepcopy(values)
    values["optimizer"]["groups"][2]["parameters"] = ["late"]
    job = Job(without_frozen)
    with pytest.raises(StateMismatch, match="late in a later group"):
        restore(tensors, values, *job.parts)
    assert len(job.optimizer.param_groups) == 2
