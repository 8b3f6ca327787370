"""The classifier augments by example, weighs every image alike, and learns the real digits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coherent_ray import config
from coherent_ray.commit.manifest import PlanIdentity
from coherent_ray.data import order
from coherent_ray.data.dataset import scan
from coherent_ray.data.loader import Loader
from coherent_ray.data.plan import Plan
from coherent_ray.data.sources import open_source
from coherent_ray.train.task import load_task
from jobs import digits, image_classifier
from jobs.image_classifier import ImageClassifierTask

ROOT = Path(image_classifier.__file__).parents[1]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(count, seed=0):
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(0, 17, (count, 64), dtype=np.uint8),
        "label": random.integers(0, 10, count),
        "_seed": random.integers(0, 2**63, count).astype(np.uint64),
    }


def part(data, start, stop):
    return {name: column[start:stop] for name, column in data.items()}


def test_it_is_short_enough_to_read():
    assert len(Path(image_classifier.__file__).read_text().splitlines()) < 100


def test_it_has_buffers_and_dropout():
    model = ImageClassifierTask().build_model()
    kinds = {type(module) for module in model.modules()}
    assert {torch.nn.BatchNorm2d, torch.nn.Dropout} <= kinds
    assert any(name.endswith("running_mean") for name, _ in model.named_buffers())


def test_an_image_moves_the_same_way_in_any_batch():
    task = ImageClassifierTask(shift=2)
    data = rows(12)
    whole = task.collate(data)["images"]
    parts = [task.collate(part(data, i, i + 3))["images"] for i in range(0, 12, 3)]
    assert torch.equal(torch.cat(parts), whole)
    still = ImageClassifierTask(shift=0).collate(data)["images"]
    assert still.shape == (12, 1, 8, 8)
    assert np.array_equal(still.reshape(12, 64).numpy() * 16, data["image"])
    moved = [not torch.equal(a, b) for a, b in zip(whole, still, strict=True)]
    assert 6 < sum(moved) <= 12
    assert torch.allclose(whole.sum((1, 2, 3)), still.sum((1, 2, 3)))


def test_collate_leaves_rows_and_random_state_alone():
    data = rows(4)
    before = data["image"].copy()
    states = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ImageClassifierTask().collate(data)
    assert np.array_equal(data["image"], before)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_loss_is_a_sum_over_images():
    task = ImageClassifierTask(dropout=0.0)
    model = task.build_model().eval()
    data = rows(9)
    whole, count = task.loss(model, task.collate(data))
    parts = [task.loss(model, task.collate(part(data, i, i + 3)))[0].item() for i in (0, 3, 6)]
    assert count == 9
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-5)


def test_the_shipped_configuration_learns_the_digits(tmp_path):
    settings = config.load(ROOT / "configs" / "digits.yaml")
    path = str(tmp_path / "digits.parquet")
    digits.prepare(path)
    manifest = scan([path], "parquet", settings.data.source.columns)
    source = open_source([path], "parquet", settings.data.source.columns, manifest)
    data = settings.data
    plan = Plan(
        PlanIdentity(manifest.hash, manifest.rows, 0, order.NAME, data.global_batch, data.lanes, 16)
    )
    task = load_task(settings.task.factory, settings.task.args)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.configure_optimizer(model)
    updates = plan.updates_per_epoch
    scheduler = task.configure_scheduler(optimizer, updates)
    losses = []
    with Loader(source, plan, 0, 1, task.collate) as loader:
        for update in loader.updates(1, updates):
            batches = [m.batch for lane in update.lanes for m in lane.microbatches]
            sums = [task.loss(model, batch) for batch in batches]
            count = sum(c for _, c in sums)
            assert count == update.plan.examples
            loss = sum(s for s, _ in sums) / count
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0] > 2
    assert sum(losses[-5:]) / 5 < 1.2
