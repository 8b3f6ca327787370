"""Every accepted token weighs the same, wherever it lies: against one process that sees it all.

The reference knows no lanes, ranks or microbatches: it takes all examples of an update at once, and
divides the sum of the loss by the number of tokens that are not ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from counting_tasks import IGNORED, DoubleWords, tokens
from small_run import Left, assert_same_state, config_for, write_data
from threaded import Rank, train_ranks
from torch import Tensor, nn

from coherent_ray.config import Config
from coherent_ray.data.plan import Plan
from coherent_ray.train.receipts import Receipt

pytestmark = pytest.mark.usefixtures("one_process")

#: Lanes of 4 examples in microbatches of 3 and 1; the tail of 3 examples leaves a lane empty.
EXAMPLES = 35
SHAPE: dict[str, Any] = {
    "data__global_batch": 16,
    "data__microbatch": 3,
    "training__updates": 6,
    "training__clip_norm": 0.6,
}


def configured(folder: Path, name: str, task: str, **changes: Any) -> Config:
    if not (data := folder / "data.parquet").exists():
        write_data(data, examples=EXAMPLES)
    task = f"counting_tasks:{task}"
    root = str(folder / name)
    return config_for(folder, run__root=root, task__factory=task, **{**SHAPE, **changes})


def examples(folder: Path) -> Tensor:
    return torch.tensor(pq.read_table(folder / "data.parquet").to_pydict()["x"])


class Whole:
    """The reference: each update's examples at once."""

    def __init__(self, folder: Path, config: Config, plan: Plan) -> None:
        task = DoubleWords()
        torch.manual_seed(plan.seed_for("model"))
        self.model = task.build_model()
        self.optimizer = task.configure_optimizer(self.model)
        self._limit = config.training.clip_norm or 0.0
        self._x, self._plan = examples(folder).double(), plan

    def update(self, number: int) -> tuple[int, float, float]:
        """Take a step, and return the count, the loss and the norm of the gradient."""
        update = self._plan.update(number)
        ids = self._plan.example_ids(update.start, update.stop, update.epoch)
        x, targets = tokens(self._x[torch.from_numpy(ids)])
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x).transpose(1, 2), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._limit)
        self.optimizer.step()
        return int((targets != IGNORED).sum()), loss.item(), norm.item()


def said(receipt: Receipt) -> tuple[int, float, float]:
    return receipt.count, float.fromhex(receipt.loss), float.fromhex(receipt.grad_norm)


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_float64_it_is_the_mean_over_the_whole_batch(tmp_path: Path, ranks: int) -> None:
    config = configured(tmp_path, "run", "DoubleWords")
    train_ranks(config, ranks)
    left = Left(config)
    whole = Whole(tmp_path, config, Plan(left.manifest().header.plan))
    norms = []
    for receipt in left.receipts():
        count, loss, norm = whole.update(receipt.update)
        assert said(receipt) == (
            count,
            pytest.approx(loss, rel=1e-12),
            pytest.approx(norm, rel=1e-12),
        )
        norms.append(norm)
    assert min(norms) < SHAPE["training__clip_norm"] < max(norms), "some are clipped, some not"
    for name, parameter in whole.model.named_parameters():
        found = left.state()[f"model/{name}"]
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_what_the_data_claims_to_reach(tmp_path: Path) -> None:
    config = configured(tmp_path, "run", "Words")
    train_ranks(config, 1)
    plan = Plan(Left(config).manifest().header.plan)
    x = examples(tmp_path)
    empty, silent, per_lane, sizes = 0, 0, set(), set()
    for number in range(1, SHAPE["training__updates"] + 1):
        update = plan.update(number)
        for lane in update.lanes:
            empty += not lane.microbatches
            counts = []
            for micro in lane.microbatches:
                ids = plan.example_ids(micro.start, micro.stop, update.epoch)
                counts.append(int((tokens(x[torch.from_numpy(ids)])[1] != IGNORED).sum()))
                sizes.add(micro.stop - micro.start)
            silent += bool(counts) and not any(counts)
            per_lane.add(sum(counts))
    assert empty, "a lane without examples"
    assert silent, "a lane with examples of which none is accepted"
    assert sizes >= {1, 3}, "uneven microbatches"
    assert len(per_lane) > 4, "lanes that weigh differently"


@pytest.mark.parametrize(("task", "ranks"), [("Words", 2), ("DoubleWords", 3), ("Words", 4)])
def test_at_any_rank_count_it_is_the_one_rank_run_bit_for_bit(
    tmp_path: Path, task: str, ranks: int
) -> None:
    alone, group = (configured(tmp_path, name, task) for name in ("alone", "group"))
    train_ranks(alone, 1)
    train_ranks(group, ranks)
    assert Left(alone).chain() == Left(group).chain()
    assert_same_state(Left(alone).state(), Left(group).state())


def test_every_rank_and_the_display_have_the_loss_of_all(tmp_path: Path) -> None:
    config = configured(tmp_path, "run", "Words")
    ranks: list[Rank] = train_ranks(config, 3)
    receipts = Left(config).receipts()
    # A rank's receipts are chained from what it was told: one loss that is local breaks its tip.
    assert {rank.session.chain.tip for rank in ranks} == {receipts[-1].digest}
    reports = ranks[0].line.coordinator.reports
    assert [report["loss"].hex() for report in reports] == [receipt.loss for receipt in receipts]
