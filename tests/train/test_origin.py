"""Fine-tuning: a new run that starts from the weights of another; and never calls it a resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_run import Left, admit, assert_same_state, config_for, coordinating
from test_midway import assert_same_run
from test_precision import stops
from threaded import train_ranks

from coherent_ray import canonical
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.errors import AdmissionRefused, NotARun, StateMismatch
from coherent_ray.train.admission import Expected, judge
from coherent_ray.train.receipts import first_link

pytestmark = pytest.mark.usefixtures("one_process")

TASK: dict[str, Any] = {"task__factory": "session_tasks:Plain", "optimizer__lr": 0.02}


def tuned(folder: Path, name: str = "tuned", **origin: Any) -> Config:
    changes = {f"init_from__{key}": value for key, value in origin.items()}
    return config_for(folder, run__root=str(folder / name), run__run_id=name, **TASK, **changes)


@pytest.fixture
def base(tmp_path: Path) -> Left:
    """A run of three generations, to start from."""
    config = config_for(tmp_path, run__root=str(tmp_path / "base"), run__run_id="base", **TASK)
    train_ranks(config, 2)
    assert Left(config).generations == ["g1-a1", "g2-a1", "g3-a1"]
    return Left(config)


def weights_of(left: Left, name: str | None = None) -> dict[str, torch.Tensor]:
    state = left.state(name)
    return {n.removeprefix("model/"): t for n, t in state.items() if n.startswith("model/")}


def first_receipt(left: Left) -> Any:
    return left.receipts()[0]


@pytest.mark.parametrize("reference", ["", "@g1"])
def test_a_run_that_starts_from_a_generation_is_that_of_its_weights(
    tmp_path: Path, base: Left, reference: str
) -> None:
    """The same updates come of the same weights in a file: neither moments nor position count."""
    config = tuned(tmp_path, source=f"{base.config.run.root}{reference}")
    train_ranks(config, 2)
    left = Left(config)
    assert [receipt.update for receipt in left.receipts()] == [1, 2, 3, 4, 5, 6]
    file = tmp_path / "weights.safetensors"
    save_file(weights_of(base, "g1-a1" if reference else None), file)
    other = tuned(tmp_path, "from-file", source=str(file))
    train_ranks(other, 1)
    assert_same_state(left.state(), Left(other).state())
    plain = tuned(tmp_path, "plain")
    train_ranks(plain, 1)
    assert first_receipt(Left(plain)).loss != first_receipt(left).loss


def test_what_it_came_from_is_in_every_generation_and_in_the_first_link(
    tmp_path: Path, base: Left
) -> None:
    config = tuned(tmp_path, source=f"{base.config.run.root}@g2")
    train_ranks(config, 1)
    left = Left(config)
    digest = next(p for p in base_publishes(base) if p.name == "g2-a1").manifest_digest
    for name in left.generations:
        header = left.manifest(name).header
        found = {
            k: canonical.load(v.encode()) for k, v in header.recipe.items() if "init_from" in k
        }
        assert found == {
            "init_from.source": "base@g2-a1",
            "init_from.digest": digest,
            "init_from.averaged": False,
            "init_from.skip": [],
        }
        assert str(tmp_path) not in canonical.dump(header.recipe).decode()
    header = left.manifest().header
    origin = {k: v for k, v in header.recipe.items() if "init_from" in k}
    assert first_receipt(left).previous == first_link(header.plan, origin)
    assert first_receipt(left).previous != first_link(header.plan)


def base_publishes(left: Left) -> Any:
    from coherent_ray.commit.log import CommitLog

    return CommitLog(left.storage).read().publishes


def test_a_resume_does_not_read_it_again(tmp_path: Path, base: Left) -> None:
    straight = tuned(tmp_path, "straight", source=base.config.run.root)
    train_ranks(straight, 1)
    config = tuned(tmp_path, source=base.config.run.root)
    train_ranks(config, 3, stops(3))
    shutil.rmtree(base.config.run.root)
    train_ranks(config, 2)
    assert_same_run(Left(straight), Left(config))


def test_a_resume_may_leave_it_out_of_the_configuration(tmp_path: Path, base: Left) -> None:
    config = tuned(tmp_path, source=base.config.run.root)
    train_ranks(config, 1, stops(3))
    train_ranks(tuned(tmp_path), 1)
    left = Left(config)
    assert len(left.receipts()) == 6
    assert "init_from.digest" in left.manifest().header.recipe


def test_a_run_that_has_begun_without_is_not_given_other_weights(
    tmp_path: Path, base: Left
) -> None:
    train_ranks(tuned(tmp_path), 1, stops(3))
    config = tuned(tmp_path, source=base.config.run.root)
    error = refused_at(config)
    assert "this run has begun without" in error.what
    assert "start a new run" in error.remedy


def refused_at(config: Config, kind: Any = AdmissionRefused) -> Any:
    with pytest.raises(kind) as caught, coordinating(config) as coordinator:
        admit(config, coordinator)
    return caught.value


def test_other_weights_than_those_whose_digest_is_named_are_refused(
    tmp_path: Path, base: Left
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(weights_of(base), file)
    good = digest_of(file.read_bytes(), "sha256")
    train_ranks(tuned(tmp_path, source=str(file), digest=good), 1)
    error = refused_at(tuned(tmp_path, "other", source=str(file), digest="sha256:" + "0" * 64))
    assert "every rank refused to start: the weights of weights.safetensors have the digest" in (
        error.what
    )
    assert good in error.what
    generation = base_publishes(base)[-1].manifest_digest
    train_ranks(tuned(tmp_path, "third", source=base.config.run.root, digest=generation), 1)


def test_weights_that_do_not_fit_are_refused_before_any_collective(
    tmp_path: Path, base: Left
) -> None:
    changes = {**TASK, "task__args": {"hidden": 6}, "init_from__source": base.config.run.root}
    wide = config_for(tmp_path, run__root=str(tmp_path / "wide"), **changes)
    error = refused_at(wide, StateMismatch)
    assert "0.weight (stored is F32[5, 4], the model has F32[6, 4])" in error.what
    changes["init_from__skip"] = ["0.*", "2.weight"]
    train_ranks(config_for(tmp_path, run__root=str(tmp_path / "part"), **changes), 2)
    assert refused_at(tuned(tmp_path, source=str(tmp_path / "nowhere")), NotARun)


def test_ranks_that_read_other_weights_do_not_start(tmp_path: Path, base: Left) -> None:
    config = tuned(tmp_path, source=base.config.run.root)
    with coordinating(config) as coordinator:
        tickets = admit(config, coordinator, ranks=2)
    assert any("a new run: its weights are those of base@g3-a1" in n for n in tickets[0].notes)
    other = {**tickets[1].origin, "init_from.digest": '"blake3:00"'}
    odd = [tickets[0], replace(tickets[1], origin=other)]
    expected = Expected("tuned", tickets[0].attempt, 2)
    judge(tickets, expected, same_environment=True)
    with pytest.raises(AdmissionRefused, match="rank 1 does not agree on the initial weights"):
        judge(odd, expected, same_environment=True)


def test_the_averaged_weights_of_a_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task__factory": "precision_tasks:Averaged"}
    base = config_for(tmp_path, run__root=str(tmp_path / "base"), **changes)
    train_ranks(base, 1)
    changes |= {"init_from__source": str(tmp_path / "base"), "init_from__averaged": True}
    config = config_for(tmp_path, run__root=str(tmp_path / "tuned"), **changes)
    seen: list[torch.Tensor] = []

    def look(who: Any, number: int, micro: Any) -> None:
        if not seen:
            seen.append(who.session.model[0].weight.detach().clone())

    train_ranks(config, 1, look)
    assert torch.equal(seen[0], Left(base).state()["average/module.0.weight"])
