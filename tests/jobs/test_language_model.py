"""The language model looks only backwards, weighs every byte alike, and learns."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coherent_ray import config
from coherent_ray.train.task import load_task
from jobs import language_model
from jobs.language_model import LanguageModelTask

SMALL = {"width": 32, "depth": 2, "heads": 2, "context": 16}
ROOT = Path(language_model.__file__).parents[1]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(count, length=17, seed=0):
    """Text that can be learnt: each byte is the one before it plus one, in eights."""
    starts = np.random.default_rng(seed).integers(0, 8, (count, 1))
    return {"text": ((starts + np.arange(length)) % 8 + 65).astype(np.uint8)}


def test_the_quickstart_has_between_one_and_three_million_parameters():
    task = config.load(ROOT / "configs" / "quickstart.yaml").task
    model = load_task(task.factory, task.args).build_model()
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert model.head.weight is model.embedding.weight


def test_the_quickstart_fits_its_data():
    settings = config.load(ROOT / "configs" / "quickstart.yaml")
    assert settings.data.prepare.args["row_bytes"] == settings.task.args["context"] + 1
    assert settings.data.prepare.args["path"] in settings.data.source.paths


def test_it_is_short_enough_to_read():
    assert len(Path(language_model.__file__).read_text().splitlines()) < 100


def test_loss_is_a_sum_over_bytes():
    task = LanguageModelTask(**SMALL, dropout=0.0)
    torch.manual_seed(0)
    model = task.build_model()
    whole, count = task.loss(model, task.collate(rows(6)))
    assert count == 6 * 16
    assert whole.item() / count == pytest.approx(np.log(256), rel=0.2)
    parts = [
        task.loss(model, task.collate({"text": rows(6)["text"][i : i + 2]})) for i in (0, 2, 4)
    ]
    assert sum(c for _, c in parts) == count
    assert sum(p.item() for p, _ in parts) == pytest.approx(whole.item(), rel=1e-5)


def test_no_byte_sees_a_later_one():
    task = LanguageModelTask(**SMALL, dropout=0.0)
    torch.manual_seed(0)
    model = task.build_model()
    for parameter in model.parameters():  # the initial blocks are silent
        torch.nn.init.normal_(parameter, std=0.2)
    text = torch.randint(0, 256, (2, 16))
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_it_learns():
    task = LanguageModelTask(**SMALL, lr=1e-2)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.configure_optimizer(model)
    scheduler = task.configure_scheduler(optimizer, 40)
    losses = []
    for step in range(40):
        summed, count = task.loss(model, task.collate(rows(8, seed=step)))
        (summed / count).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(summed.item() / count)
    assert losses[0] > 4
    assert losses[-1] < 1


def test_every_parameter_is_in_one_group():
    task = LanguageModelTask(**SMALL)
    model = task.build_model()
    groups = task.configure_optimizer(model).param_groups
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.ndim < 2 for p in groups[1]["params"])


def test_the_learning_rate_warms_up_and_falls():
    task = LanguageModelTask(**SMALL, lr=1.0, warmup=10)
    optimizer = task.configure_optimizer(task.build_model())
    scheduler = task.configure_scheduler(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.11)
