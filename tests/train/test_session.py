"""A session from admission to its end; stopped and resumed, it is the same run to the bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from session_tasks import Plain
from small_run import (
    EXAMPLES,
    Left,
    admit,
    assert_same_state,
    config_for,
    coordinating,
    flip,
    run_loop,
    stop_at,
    train,
    write_data,
)
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from coherent_ray.commit.manifest import DataPosition
from coherent_ray.data.plan import Plan
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.train import admit as admit_
from coherent_ray.train import hooks, loop
from coherent_ray.train.receipts import first_link
from coherent_ray.train.session import Session, session, total_updates
from coherent_ray.train.wishes import WISH_SAVE

pytestmark = pytest.mark.usefixtures("one_process")


def assert_same_run(one: Left, other: Left) -> None:
    """Check two runs for the same receipts, the same tensors and the same other state."""
    assert one.chain() == other.chain()
    assert_same_state(one.state(), other.state())
    assert one.manifest().header.values == other.manifest().header.values
    assert one.manifest().fingerprint == other.manifest().fingerprint
    # Where both have saved they name the same state.
    for ours, theirs in zip(one.receipts(), other.receipts(), strict=True):
        assert None in {ours.state, theirs.state} or ours.state == theirs.state


# --- one whole run --------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    left = train(config)
    assert (left.generations, left.updates) == (["g1-a1", "g2-a1", "g3-a1"], [2, 4, 6])
    receipts, plan = left.receipts(), Plan(left.manifest().header.plan)
    assert [r.update for r in receipts] == [1, 2, 3, 4, 5, 6]
    assert [(r.epoch, r.start, r.stop) for r in receipts] == [
        (0, 0, 8), (0, 8, 16), (0, 16, 21), (1, 0, 8), (1, 8, 16), (1, 16, 21),
    ]  # fmt: skip
    assert [r.count for r in receipts] == [8, 8, 5, 8, 8, 5]
    assert [r.ids for r in receipts] == [plan.ids_digest(plan.update(n)) for n in range(1, 7)]
    assert receipts[0].previous == first_link(plan.identity)
    assert [r.skipped for r in receipts] == [False] * 6
    assert [float.fromhex(r.lr[0]) for r in receipts] == [3e-4] * 6
    assert [r.state is not None for r in receipts] == [False, True] * 3


def test_what_a_generation_says(tmp_path: Path) -> None:
    config = config_for(tmp_path, run__claim="exact")
    left = train(config)
    header = left.manifest("g2-a1").header
    assert (header.run_id, header.claim, header.ranks) == ("small", "exact", 1)
    assert header.position == DataPosition(epoch=1, position=8, update=4)
    assert header.environment["threads"] == "1"
    assert header.environment["deterministic"] == "True"
    assert header.receipt_tip == left.receipts()[3].digest
    assert header.receipts is not None
    assert (header.receipts.first, header.receipts.last) == (3, 4)
    state = left.state("g2-a1")
    assert fingerprint(layout_of(state), state).digest == left.receipts()[3].state


def test_the_same_run_twice_is_the_same(tmp_path: Path) -> None:
    write_data(tmp_path / "data.parquet")
    config = config_for(tmp_path)
    other = config_for(tmp_path, run__root=str(tmp_path / "other"), run__run_id="another")
    assert_same_run(train(config), train(other))


def test_reading_ahead_and_the_size_of_blocks_change_nothing(tmp_path: Path) -> None:
    one = train(config_for(tmp_path))
    changes: dict[str, Any] = {"data__prefetch": 3, "checkpoint__block_bytes": 8192}
    changes |= {"checkpoint__every_updates": 5, "checkpoint__digest": "sha256"}
    root = str(tmp_path / "other")
    assert_same_run(one, train(config_for(tmp_path, run__root=root, **changes)))


@pytest.mark.parametrize("change", [{"data__seed": 1}, {"optimizer__lr": 0.01}])
def test_another_seed_or_rate_is_another_run(tmp_path: Path, change: dict[str, Any]) -> None:
    one = train(config_for(tmp_path))
    other = train(config_for(tmp_path, run__root=str(tmp_path / "other"), **change))
    assert one.chain() != other.chain()


def test_the_maths_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """A second opinion, by hand: the mean over all accepted examples, clipped, one step."""
    limit = 0.3
    config = config_for(tmp_path, task__factory="session_tasks:Plain", training__clip_norm=limit)
    left = train(config)
    plan = Plan(left.manifest().header.plan)
    table = pq.read_table(tmp_path / "data.parquet").to_pydict()
    x, y = torch.tensor(table["x"]).double(), torch.tensor(table["y"])
    torch.manual_seed(plan.seed_for("model"))
    model = Plain().build_model().double()
    optimizer = SGD(model.parameters(), lr=0.5)
    for receipt in left.receipts():
        ids = torch.from_numpy(plan.example_ids(receipt.start, receipt.stop, receipt.epoch))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        assert float.fromhex(receipt.loss) == pytest.approx(loss.item(), rel=1e-5)
        assert float.fromhex(receipt.grad_norm) == pytest.approx(norm.item(), rel=1e-5)
    assert any(float.fromhex(r.grad_norm) > limit for r in left.receipts())
    for name, parameter in model.named_parameters():
        found = left.state()[f"model/{name}"].double()
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=1e-6)


# --- stopped and resumed --------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw and dropout": {},
    "momentum": {"task__factory": "session_tasks:Momentum"},
    "warm-up, then cosine": {"task__factory": "session_tasks:Warmed"},
    "plateau": {"task__factory": "session_tasks:Plateau"},
    "groups, amsgrad": {"task__factory": "session_tasks:Grouped"},
    "frozen layer": {"task__factory": "session_tasks:Frozen"},
    "tied weights": {"task__factory": "session_tasks:Tied"},
    "batch norm": {"task__factory": "session_tasks:Normed"},
    "layer that some lanes use": {"task__factory": "session_tasks:Sometimes"},
    "clipping": {"training__clip_norm": 0.05},
    "bf16": {"training__precision": "bf16"},
    "fp16": {"training__precision": "fp16"},
    "epochs, empty lanes": {"training__epochs": 3, "data__global_batch": 16, "data__lanes": 8},
    "one lane": {"data__lanes": 1, "data__microbatch": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_stopped_and_resumed_is_the_same_run(tmp_path: Path, variant: str) -> None:
    changes = {"optimizer__lr": 0.02, **VARIANTS[variant]}
    straight = train(config_for(tmp_path, **changes))
    config = config_for(tmp_path, run__root=str(tmp_path / "stopped"), **changes)
    assert train(config, stop_at(1)).updates == [1]
    assert train(config, stop_at(2)).updates == [1, 2, 3]
    stopped = train(config)
    assert stopped.generations == ["g1-a1", "g2-a2", "g3-a2", "g4-a3", "g5-a3"]
    assert_same_run(straight, stopped)


def test_what_the_variants_claim_to_reach(tmp_path: Path) -> None:
    def left(variant: str, folder: str) -> Left:
        changes = {"optimizer__lr": 0.02, **VARIANTS[variant]}
        return train(config_for(tmp_path, run__root=str(tmp_path / folder), **changes))

    plateau = left("plateau", "plateau").receipts()
    assert plateau[-1].lr != plateau[0].lr
    warmed = left("warm-up, then cosine", "warmed").receipts()
    assert len({r.lr for r in warmed}) > 3
    normed = left("batch norm", "normed").state()
    assert float(normed["model/norm.num_batches_tracked"]) > 0
    sometimes = left("layer that some lanes use", "sometimes").state()
    assert "optimizer/sometimes.weight/exp_avg" in sometimes
    assert "optimizer/never/exp_avg" not in sometimes
    assert torch.equal(sometimes["model/never"], torch.ones(3))
    frozen = left("frozen layer", "frozen").state()
    assert not any(name.startswith("optimizer/0.") for name in frozen)
    tied = left("tied weights", "tied").state()
    assert {"model/first.weight", "model/last.bias"} <= tied.keys()
    assert "model/last.weight" not in tied
    epochs = left("epochs, empty lanes", "epochs").receipts()
    assert [r.count for r in epochs] == [16, 5] * 3


def test_a_run_that_died_without_a_word_goes_on_at_its_last_generation(tmp_path: Path) -> None:
    """The process is gone in update 4; what it did after generation 1 is done again."""
    straight = train(config_for(tmp_path))
    config = config_for(tmp_path, run__root=str(tmp_path / "died"))

    class Died(BaseException):
        pass

    def dies(update: int) -> None:
        if update == 4:
            deadline = time.monotonic() + 30
            while not Left(config).updates and time.monotonic() < deadline:
                time.sleep(0.005)
            raise Died

    with coordinating(config) as coordinator:
        admit(config, coordinator)
        with pytest.raises(Died):
            drive(config, coordinator, each=dies)
    assert Left(config).updates == [2]
    died = train(config)
    assert died.generations == ["g1-a1", "g2-a2", "g3-a2"]
    assert_same_run(straight, died)


def test_a_run_that_died_before_its_first_generation_starts_anew(tmp_path: Path) -> None:
    straight = train(config_for(tmp_path))
    config = config_for(tmp_path, run__root=str(tmp_path / "died"))
    with coordinating(config) as coordinator:
        assert admit(config, coordinator)[0].generation is None
        assert admit(config, coordinator)[0].generation is None
        run_loop(config, coordinator)
    assert Left(config).generations[0] == "g1-a2"
    assert_same_run(straight, Left(config))


def test_a_run_whose_latest_generation_is_damaged_is_the_same_run(tmp_path: Path) -> None:
    straight = train(config_for(tmp_path))
    config = config_for(tmp_path, run__root=str(tmp_path / "damaged"))
    train(config, stop_at(4))
    flip(Left(config).shard("g2-a1"))
    resumed = train(config)
    assert resumed.generations == ["g1-a1", "g2-a1", "g3-a2", "g4-a2"]
    assert resumed.updates == [2, 4, 4, 6]
    assert_same_run(straight, resumed)


def test_a_run_that_is_longer_now_goes_on_where_its_claim_allows_it(tmp_path: Path) -> None:
    short = config_for(tmp_path, training__updates=3)
    assert train(short).updates == [2, 3]
    longer = train(config_for(tmp_path, run__claim="statistical"))
    assert longer.updates == [2, 3, 4, 6]
    straight = train(config_for(tmp_path, run__root=str(tmp_path / "straight")))
    assert_same_run(straight, longer)


def test_a_complete_run_does_nothing(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    before = train(config).generations
    assert train(config).generations == before


# --- wishes, reports, hooks -----------------------------------------------------------------------


def test_a_wish_to_save_makes_one_more_generation(tmp_path: Path) -> None:
    left = train(config_for(tmp_path), [WISH_SAVE, 0, WISH_SAVE])
    assert left.updates == [1, 2, 3, 4, 6]
    straight = train(config_for(tmp_path, run__root=str(tmp_path / "straight")))
    assert_same_run(straight, left)


def test_rank_0_reports_every_update(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with coordinating(config) as coordinator:
        admit(config, coordinator)
        run_loop(config, coordinator)
        reports = coordinator.reports
    assert [r["update"] for r in reports] == [1, 2, 3, 4, 5, 6]
    assert [r["ended"] for r in reports] == [False] * 5 + [True]
    last, receipt = reports[-1], Left(config).receipts()[-1]
    assert (last["updates"], last["epoch"], last["resumed_at"], last["attempt"]) == (6, 1, 0, 1)
    assert last["loss"].hex() == receipt.loss
    assert last["grad_norm"].hex() == receipt.grad_norm
    assert (last["receipt"], last["generation"]) == (receipt.digest, "g3-a1")
    assert last["examples_per_s"] > 0
    assert [(s["name"], s["fate"], s["update"]) for s in last["saves"]] == [
        ("g1-a1", "published", 2), ("g2-a1", "published", 4), ("g3-a1", "published", 6),
    ]  # fmt: skip
    assert all(0 < s["stall_s"] <= s["durable_s"] for s in last["saves"])
    assert [s["stall_s"] for s in last["saves"]] == last["stalls_s"]
    # A generation in flight is not yet one to tell of.
    assert reports[1]["generation"] is None
    assert reports[3]["generation"] == "g1-a1"


def test_an_installed_hook_is_told_of_every_point(tmp_path: Path) -> None:
    points: list[str] = []
    config = config_for(tmp_path, training__updates=1)
    with coordinating(config) as coordinator:
        admit(config, coordinator)
        hooks.install(points.append)
        run_loop(config, coordinator)
    assert points == [
        "update@1",
        "save:begin",
        "shard:begun",
        "shard:half-written",
        "shard:unsynced",
        "shard:written",
        "save:acknowledge",
    ]


def test_ray_is_told_at_the_end_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str | None, bool]] = []
    config = config_for(tmp_path)
    with coordinating(config) as coordinator:
        monkeypatch.setattr("coherent_ray.train.session.Line", coordinator.line)
        monkeypatch.setattr(
            "coherent_ray.train.session.report_outcome",
            lambda run: told.append((run.boundaries.published, run.stopped)),
        )
        coordinator.wishes = stop_at(3)
        admit(config, coordinator)
        loop.train(config.model_dump(mode="json"))
        with pytest.raises(ZeroDivisionError), session(config):
            raise ZeroDivisionError
    assert told == [("g2-a1", True)]


# --- precision ------------------------------------------------------------------------------------


def drive(
    config: Any, coordinator: Any, *, each: Any = None, look: Any = None, **parts: Any
) -> Any:
    """A training function of one's own: plain SGD unless `parts` says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coherent_ray.train.session.Line", coordinator.line)
        patch.setattr("coherent_ray.train.session.report_outcome", lambda run: None)
        with session(config) as run:
            task = admit_.current().task
            assert task is not None
            model = loop.take_model(task, run)
            optimizer = loop.make_optimizer(task, model, run.config)
            made = {name: part(optimizer) for name, part in parts.items()}
            run.track(model, optimizer, **made)
            for update in run.updates():
                if each is not None:
                    each(update.number)
                for micro in update.microbatches():
                    if look is not None:
                        look(run, micro)
                    update.backward(*task.loss(run.model, micro.batch))
                update.step()
        return run


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_forward_passes_run_in_the_configured_precision(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    seen: set[torch.dtype] = set()

    def look(run: Session, micro: Any) -> None:
        x: Tensor = micro.batch[0]
        seen.add((x @ x.t()).dtype)

    config = config_for(tmp_path, training__precision=precision, training__updates=2)
    with coordinating(config) as coordinator:
        admit(config, coordinator)
        drive(config, coordinator, look=look)
    assert seen == {dtype}
    assert not torch.is_autocast_enabled("cpu")
    dtypes = {t.dtype for name, t in Left(config).state().items() if "step" not in name}
    assert dtypes == {torch.float32}


def test_a_skipped_step_is_in_the_receipt_and_changes_nothing(tmp_path: Path) -> None:
    """A scale that overflows fp16: the optimizer and the schedule stay where they are."""
    config = config_for(
        tmp_path, training__precision="fp16", checkpoint__every_updates=1, data__seed=3,
        task__factory="session_tasks:Momentum",
    )  # fmt: skip

    def scaler(optimizer: Any) -> GradScaler:
        return GradScaler("cpu", init_scale=2.0**18, growth_interval=3)

    def scheduler(optimizer: Any) -> ConstantLR:
        return ConstantLR(optimizer, 0.5, total_iters=1)

    def go(where: Any, wishes: list[int]) -> None:
        with coordinating(where) as coordinator:
            coordinator.wishes = wishes
            admit(where, coordinator)
            drive(where, coordinator, scaler=scaler, scheduler=scheduler)

    go(config, [])
    left = Left(config)
    receipts = left.receipts()
    skipped = [r.skipped for r in receipts]
    assert skipped[0]
    assert not all(skipped)
    assert not np.isfinite(float.fromhex(receipts[0].grad_norm))
    scales = [
        left.manifest(name).header.values["scaler"]["state"]["scale"] for name in left.generations
    ]
    assert scales[0] == 2.0**17
    # The schedule counts steps that were taken: it halves the rate for the first of these only.
    rates = [float.fromhex(r.lr[0]) for r in receipts]
    first = skipped.index(False)
    assert rates[: first + 1] == [0.05] * (first + 1)
    assert rates[first + 1] == 0.1
    before, after = left.state("g1-a1"), left.state("g2-a1")
    names = [name for name in before if name.startswith("model/")]
    moved = [not torch.equal(before[name], after[name]) for name in names]
    assert any(moved) is not skipped[1]

    other = config_for(
        tmp_path, training__precision="fp16", checkpoint__every_updates=1, data__seed=3,
        task__factory="session_tasks:Momentum", run__root=str(tmp_path / "stopped"),
    )  # fmt: skip
    go(other, stop_at(2))
    go(other, [])
    assert_same_run(left, Left(other))


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({"training__updates": 4}, 4),
        ({"training__epochs": 1}, 3),
        ({"training__epochs": 4}, 12),
        ({"training__epochs": 2, "data__global_batch": EXAMPLES}, 2),
    ],
)
def test_how_long_a_run_is(tmp_path: Path, changes: dict[str, Any], updates: int) -> None:
    config = config_for(tmp_path, **changes)
    per_epoch = -(-EXAMPLES // config.data.global_batch)
    assert total_updates(config, per_epoch) == updates
    assert len(train(config).receipts()) == updates
