"""Every shipped configuration names tasks and data that exist and fit each other."""

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
from coherent_ray.train.task import call_factory, load_task

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = ["quickstart", "digits"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SHIPPED)
def settings(request, tmp_path):
    """The configuration, with its data below the test's own directory."""
    path = str(tmp_path / "data.parquet")
    changes = [f"data.prepare.args.path={path}", f"data.source.paths=[{path}]"]
    return config.load(CONFIGS / f"{request.param}.yaml", changes)


def prepared(settings):
    data = settings.data
    call_factory(data.prepare.factory, data.prepare.args, "data.prepare.factory")
    source = data.source
    return scan(source.paths, source.format, source.columns, data.verify)


def test_the_prepared_file_is_the_one_that_is_read():
    for name in SHIPPED:
        data = config.load(CONFIGS / f"{name}.yaml").data
        assert data.source.paths == [data.prepare.args["path"]]


def test_lanes_allow_what_the_docs_say(settings):
    # From 1 to 4 workers, and each lane of a full update is whole microbatches.
    assert settings.data.lanes == 4
    assert settings.data.global_batch % (settings.data.lanes * settings.data.microbatch) == 0


def test_the_first_and_the_last_update_train_from_the_prepared_data(settings):
    data = settings.data
    dataset = prepared(settings)
    source = open_source(data.source.paths, data.source.format, data.source.columns, dataset)
    identity = PlanIdentity(
        dataset.hash, dataset.rows, data.seed, order.NAME, data.global_batch, data.lanes,
        data.microbatch,
    )  # fmt: skip
    plan = Plan(identity)
    task = load_task(settings.task.factory, settings.task.args)
    model = task.build_model()
    totals = []
    with Loader(source, plan, 0, 1, task.collate) as loader:
        for number in (1, plan.updates_per_epoch):
            (update,) = loader.updates(number, number)
            sums = [task.loss(model, m.batch) for lane in update.lanes for m in lane.microbatches]
            total = torch.stack([loss for loss, _ in sums]).sum()
            total.backward()
            totals.append((total.item(), sum(count for _, count in sums), update.plan.examples))
    each = [count / examples for _, count, examples in totals]
    assert each[0] == each[1] >= 1
    assert all(np.isfinite(loss) and loss > 0 for loss, _, _ in totals)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
