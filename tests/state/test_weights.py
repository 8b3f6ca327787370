"""Weights of a generation or a file, in one process: verified, named, put into a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved import save
from torch import nn
from torch.optim.swa_utils import AveragedModel

import coherent_ray
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import dump
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import digest_of
from coherent_ray.errors import (
    ConfigError,
    NoGeneration,
    NotARun,
    NotFound,
    ShardDamaged,
    StateMismatch,
)
from coherent_ray.state.capture import capture
from coherent_ray.state.layout import FlatState
from coherent_ray.state.weights import Weights, fitted, load_weights, put_weights, read_weights
from coherent_ray.storage import LocalStorage

RUN_ID = "first"


class Net(nn.Module):
    """Tied and frozen weights, a buffer that is stored, and an integer one."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, out)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.head.bias.requires_grad_(False)


def names_of(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters()}
    return names | {name for name, _ in model.named_buffers()}


def trained(seed: int = 0) -> Net:
    return job(seed)[0]


def job(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.head(model.norm(model.back(model.embed(torch.randn(5, 4))))).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two generations, on 3 and on 2 ranks, with averaged weights in the second."""
    root = tmp_path / "run"
    storage = LocalStorage(root)
    log = CommitLog(storage)
    attempt = log.open_attempt(RUN_ID, "token").body.attempt
    for number, ranks in ((1, 3), (2, 2)):
        average = AveragedModel(trained(10)) if number == 2 else None
        state = capture(*job(number), average=average)
        told = {"number": number, "attempt": attempt, "run_id": RUN_ID, "values": state.values}
        manifest = save(storage, state.tensors, ranks, 16, **told)
        data, header = dump(manifest), manifest.header
        path = f"{header.directory}/manifest.json"
        storage.create(path, data)
        log.append(
            PublishBody(
                number=number,
                attempt=attempt,
                update=header.update,
                epoch=header.position.epoch,
                manifest=path,
                manifest_size=len(data),
                manifest_digest=digest_of(data),
                receipts=None,
            ),
            attempt,
        )
    return root


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(("reference", "seed"), [("", 2), ("@latest", 2), ("@g1", 1), ("@2", 2)])
def test_the_weights_of_a_generation(run: Path, reference: str, seed: int) -> None:
    expected, model = trained(seed), Net()
    found = coherent_ray.load_weights(f"{run}{reference}", model)
    assert_same(model, expected)
    assert found.keys() == names_of(expected)
    assert all(torch.equal(found[n], t) for n, t in expected.state_dict().items() if n in found)


def test_they_are_read_without_a_model_and_say_what_they_are(run: Path) -> None:
    weights = read_weights(f"{run}@g1")
    assert weights.source == "first@g1-a1"
    assert weights.digest == CommitLog(LocalStorage(run)).read().publishes[0].manifest_digest
    assert load_weights(run).keys() == names_of(trained())


def test_averaged_weights(run: Path) -> None:
    model = Net()
    load_weights(run, model, averaged=True)
    assert_same(model, trained(10))
    with pytest.raises(ConfigError, match="g1-a1 has no tensors under average/module"):
        load_weights(f"{run}@g1", averaged=True)


def test_a_model_on_the_meta_device_gets_memory_and_keeps_its_ties(run: Path) -> None:
    with torch.device("meta"):
        model = Net()
    model.head.bias.requires_grad_(False)
    load_weights(run, model)
    assert_same(model, trained(2))
    assert model.back.weight is model.embed.weight
    assert not model.head.bias.requires_grad
    assert model.head.weight.requires_grad
    assert isinstance(model.head.weight, nn.Parameter)
    model.head(model.norm(model.back(model.embed(torch.randn(5, 4))))).sum().backward()


def test_what_would_stay_on_the_meta_device_is_named(run: Path) -> None:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("mask", torch.ones(3), persistent=False)
    with pytest.raises(StateMismatch, match="mask would stay on the meta device"):
        load_weights(run, model)
    assert model.embed.weight.is_meta, "nothing was changed"


# --- what does not fit ----------------------------------------------------------------------------


def test_all_that_does_not_fit_is_named_and_nothing_is_changed(run: Path) -> None:
    model = Net(out=5)
    model.extra = nn.Linear(2, 2)
    del model.norm
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(StateMismatch) as caught:
        load_weights(run, model)
    assert caught.value.what.startswith("the weights of first@g2-a1 are not those of the model: ")
    for words in (
        "head.bias (stored is F32[3], the model has F32[5])",
        "head.weight (stored is F32[3, 4], the model has F32[5, 4]) do not fit",
        "extra.bias, extra.weight are missing",
        "norm.running_mean, norm.running_var and 1 more are not the model's",
    ):
        assert words in caught.value.what, words
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_subset_is_taken_where_it_is_asked_for(run: Path) -> None:
    model = Net(out=5)
    model.extra = nn.Linear(2, 2)
    head, expected = model.head.weight.clone(), trained(2)
    load_weights(run, model, skip=["head.*", "extra.*"])
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.back.weight, expected.back.weight)
    other = Net()
    del other.norm
    load_weights(run, other, strict=False)
    assert torch.equal(other.head.weight, expected.head.weight)
    with pytest.raises(StateMismatch, match=r"head.weight .* do not fit"):
        load_weights(run, model, strict=False)
    with pytest.raises(StateMismatch, match="none of them is the model's"):
        load_weights(run, nn.Sequential(nn.Linear(2, 2)), strict=False)


def test_floating_point_weights_may_have_another_precision_and_integers_not() -> None:
    weights = by_hand({"weight": torch.tensor([[1.5]], dtype=torch.bfloat16)})
    model = nn.Linear(1, 1, bias=False)
    put_weights(model, fitted(weights, model))
    assert (model.weight.item(), model.weight.dtype) == (1.5, torch.float32)
    whole = by_hand({"weight": torch.tensor([[1]])})
    with pytest.raises(StateMismatch, match=r"stored is I64\[1, 1\], the model has F32"):
        fitted(whole, model)


def by_hand(tensors: dict[str, torch.Tensor]) -> Weights:
    return Weights(tensors, "by hand", digest_of(b""))


# --- files, and what is wrong ---------------------------------------------------------------------


def test_a_file_of_weights_and_its_digest(tmp_path: Path) -> None:
    model, expected = Net(), trained(7)
    tensors = {n: t.clone() for n, t in expected.state_dict().items() if n != "embed.weight"}
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)  # the tied one under its other name
    load_weights(path, model)
    assert_same(model, expected)
    assert model.back.weight is model.embed.weight
    weights = read_weights(str(path))
    assert (weights.source, weights.digest) == (
        "weights.safetensors",
        digest_of(path.read_bytes(), "sha256"),
    )


def test_places_with_nothing_to_read(tmp_path: Path, run: Path) -> None:
    with pytest.raises(NotFound, match="no such file of weights"):
        load_weights(tmp_path / "none.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x09" * 40)
    with pytest.raises(ConfigError, match=r"no whole .safetensors file"):
        load_weights(tmp_path / "torn.safetensors")
    with pytest.raises(NotARun):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(NoGeneration, match="7"):
        load_weights(f"{run}@g7")


def flip(run: Path, tensor: str) -> None:
    """Turn a bit of a tensor in the latest generation, as a disk would."""
    storage = LocalStorage(run)
    manifest = Generations(storage).manifest(Generations(storage).find("latest"))
    at = FlatState(manifest.header.layout).find(tensor).start
    shard = next(s for s in manifest.shards if s.start <= at < s.stop)
    data = bytearray((run / shard.path).read_bytes())
    data[shard.header_bytes + at - shard.start] ^= 1
    (run / shard.path).write_bytes(data)


@pytest.mark.parametrize("tensor", ["model/embed.weight", "model/norm.num_batches_tracked"])
def test_a_flipped_bit_in_the_weights_is_refused(run: Path, tensor: str) -> None:
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    flip(run, tensor)
    with pytest.raises(ShardDamaged):
        load_weights(run, model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    load_weights(f"{run}@g1", model)


def test_what_is_no_weight_is_not_read(run: Path) -> None:
    model = Net()
    flip(run, "optimizer/head.weight/exp_avg_sq")
    flip(run, "average/module.head.weight")
    load_weights(run, model)
    assert_same(model, trained(2))
