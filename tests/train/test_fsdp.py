"""FSDP2: 4 -> 2 -> 3 ranks and back to one process, exact at one rank count, right at each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from sharded_ranks import Desk, run_ranks
from small_run import (
    Left,
    assert_same_state,
    config_for,
    flip,
    open_attempt,
    stop_at,
    ticket_of,
    train,
    working,
    write_data,
)

from coherent_ray.cli import main
from coherent_ray.config import Config, build
from coherent_ray.data.plan import Plan
from coherent_ray.errors import ConfigError, TaskError
from coherent_ray.state.digest import state_digest
from coherent_ray.state.layout import FlatState
from coherent_ray.train.admission import Expected, judge
from coherent_ray.train.backend import tickets_for
from coherent_ray.train.fsdp import passes, require_sharded

#: A tail of two examples over four lanes: two lanes, and at four ranks two ranks, have none.
EXAMPLES = 18
#: Small enough to cut some values of every gradient.
CLIP_VALUE = 0.05


def configured(
    folder: Path,
    task: str = "Rebuilding",
    *,
    claim: str = "statistical",
    strategy: str = "fsdp2",
    lr: float = 0.05,
    mid_update: bool = False,
    source: str | None = None,
) -> Config:
    folder.mkdir(exist_ok=True)
    if not (folder / "data.parquet").exists():
        write_data(folder / "data.parquet", examples=EXAMPLES)
    return config_for(
        folder,
        run__claim=claim,
        task__factory=f"sharded_ranks:{task}",
        optimizer__lr=lr,
        checkpoint__mid_update=mid_update,
        **({"init_from__source": source} if source else {}),
        training__updates=6,
        training__clip_norm=0.5,
        training__clip_value=CLIP_VALUE,
        training__strategy=strategy,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The run of one process, which holds the whole model."""
    return train(configured(tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Left, list[Desk]]:
    """A run of 4 ranks, then 2, then 3, then of one process with a whole model again."""
    folder = tmp_path_factory.mktemp("resharded")
    config = configured(folder)
    desks = [
        run_ranks(config, 4, stop_at(2), folder),
        run_ranks(config, 2, stop_at(2), folder),
        run_ranks(config, 3, stop_at(1), folder),
    ]
    left = train(configured(folder, strategy="replicated"))
    return left, desks


def assert_close(one: Left, other: Left) -> None:
    """Check that two runs consumed the same, and came out the same but for rounding."""
    pairs = list(zip(one.receipts(), other.receipts(), strict=True))
    assert len(pairs) == 6
    for a, b in pairs:
        assert (a.ids, a.count, a.start, a.stop) == (b.ids, b.count, b.start, b.stop)
        for mine, theirs in ((a.loss, b.loss), (a.grad_norm, b.grad_norm)):
            assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), rel=1e-4)
    state, reference = one.state(), other.state()
    assert state.keys() == reference.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-4)


def test_every_rank_count_does_what_one_process_does(alone, resharded):
    assert_close(resharded[0], alone)


def test_the_state_goes_through_every_rank_count_bit_for_bit(resharded):
    left, desks = resharded
    names = ["g1-a1", "g2-a2", "g3-a3"]
    manifests = [left.manifest(name) for name in names]
    assert [m.header.ranks for m in manifests] == [4, 2, 3]
    assert [m.header.format for m in manifests] == [2, 2, 2]
    assert left.manifest().header.format == 1
    # What each attempt started with is what was saved before it.
    for before, desk, ranks in zip(manifests, desks[1:], (2, 3), strict=False):
        saved = state_digest(left.storage, before)
        assert sorted(desk.starts) == [(rank, saved) for rank in range(ranks)]


def test_parameters_and_moments_are_sharded_and_nothing_else_is(resharded):
    layout = resharded[0].manifest("g1-a1").header.layout
    whole = {spec.name for spec in layout.tensors if not spec.parts}
    assert {name for name in whole if not name.endswith("/step")} == {"model/seen"}
    assert "model/tied.weight" not in {spec.name for spec in layout.tensors}
    tiny = next(spec for spec in layout.tensors if spec.name == "model/gain")
    assert [tiny.rows(rank) for rank in range(4)] == [(0, 1), (1, 1), (1, 1), (1, 1)]


def test_at_the_same_rank_count_a_resume_is_exact(tmp_path):
    straight = configured(tmp_path / "straight", "InBlocks", claim="exact")
    run_ranks(straight, 2, [], tmp_path / "straight")
    broken = configured(tmp_path / "broken", "InBlocks", claim="exact")
    run_ranks(broken, 2, stop_at(3), tmp_path / "broken")
    run_ranks(broken, 2, [], tmp_path / "broken")
    assert Left(broken).chain() == Left(straight).chain()
    assert_same_state(Left(broken).state(), Left(straight).state())


def test_replicated_goes_on_sharded_and_without_memory_of_its_own_weights(tmp_path):
    whole = configured(tmp_path, "FromNothing", strategy="replicated")
    before = train(whole, stop_at(3))
    desk = run_ranks(configured(tmp_path, "FromNothing"), 2, stop_at(1), tmp_path)
    saved = state_digest(before.storage, before.manifest("g2-a1"))
    assert {digest for _, digest in desk.starts} == {saved}
    reference = train(configured(tmp_path / "reference", "FromNothing"))
    left = train(configured(tmp_path, "FromNothing"))
    assert_close(left, reference)


def test_a_generation_in_mid_update_is_taken_from_the_start_of_that_update(alone, tmp_path):
    whole = configured(tmp_path, strategy="replicated", mid_update=True)
    left = train(whole, stop_at(12))
    assert left.updates == [1]
    assert "partial" in left.manifest().header.values
    run_ranks(configured(tmp_path), 2, [], tmp_path)
    assert_close(left, alone)


def test_weights_that_are_made_in_rows_are_other_ones_on_each_rank(tmp_path):
    config = configured(tmp_path, "FromNothing", lr=1e-9)
    run_ranks(config, 2, stop_at(1), tmp_path)
    weight = Left(config).state()["model/blocks.0.weight"]
    assert weight.shape == (7, 7)
    assert not torch.isclose(weight[:3], weight[4:]).any()


def test_a_model_that_is_only_half_sharded_is_refused(tmp_path):
    desk = run_ranks(configured(tmp_path, "HalfSharded"), 2, [], tmp_path, fails=True)
    assert desk.codes == [1, 1]
    for words in desk.errors.values():
        assert "parameter 'gain' is not sharded over all 2 ranks" in words


def test_a_rank_that_is_gone_is_lost_to_the_others_and_not_their_failure(tmp_path):
    desk = run_ranks(configured(tmp_path, "Dying"), 2, [], tmp_path, fails=True)
    assert desk.codes == [1, 1]
    assert list(desk.errors) == [0]
    assert "PeerLost: a collective of FSDP2 failed" in desk.errors[0]


def test_a_rank_that_fails_says_why(tmp_path):
    desk = run_ranks(configured(tmp_path, "Failing"), 2, [], tmp_path, fails=True)
    assert "update 2 failed on rank 1: KeyError: 'no such word' (in loss, " in desk.errors[1]
    # Its process ended, and so did its side of the collective that rank 0 waited in.
    assert "PeerLost" in desk.errors[0]


def test_damage_that_one_rank_finds_is_passed_over_by_all(tmp_path):
    changes = {"task__args": {"hidden": 2000}, "run__claim": "statistical"}
    left = train(config_for(tmp_path, **changes), stop_at(4))
    # In the rows that rank 1 of 2 would hold.
    flat = FlatState(left.manifest().header.layout)
    piece = flat.find("optimizer/0.weight/exp_avg")
    flip(left.shard(), left.manifest().shards[0].header_bytes + piece.start + piece.nbytes * 3 // 4)
    request = open_attempt(config_for(tmp_path, training__strategy="fsdp2", **changes))
    asked = []

    def ask(asked_now):
        asked.append([ticket_of(asked_now, rank, 2) for rank in range(2)])
        return asked[-1]

    with working():
        tickets = tickets_for(request, ask)
    assert [ticket.generation for ticket in asked[0]] == ["g2-a1", "g1-a1"]
    assert [ticket.generation for ticket in tickets] == ["g1-a1", "g1-a1"]
    assert len(asked) == 2
    judge(tickets, Expected("small", request.attempt, 2), same_environment=False)
    assert all("another rank found it damaged" in note for note in tickets[0].notes[:1])


@pytest.mark.parametrize(
    ("section", "change", "why"),
    [
        ("run", {"claim": "invariant"}, "invariant cannot be kept with training.strategy: fsdp2"),
        ("training", {"precision": "fp16"}, "fp16 needs strategy: replicated"),
        ("checkpoint", {"mid_update": True}, "needs training.strategy: replicated"),
    ],
)
def test_what_fsdp2_cannot_do_is_refused_by_name(tmp_path, section, change, why):
    values = configured(tmp_path).model_dump(mode="json")
    values[section] |= change
    with pytest.raises(ConfigError, match=why):
        build(values)


def test_every_rank_takes_as_many_passes_as_the_one_with_most(alone):
    plan = Plan(alone.manifest().header.plan)
    assert [passes(plan.update(3), ranks) for ranks in (1, 2, 3, 4)] == [2, 2, 1, 1]
    assert [passes(plan.update(1), ranks) for ranks in (1, 2, 3, 4)] == [8, 4, 4, 2]


def test_the_commands_read_generations_of_every_strategy(resharded):
    root = resharded[0].config.run.root
    asked = CliRunner().invoke(main, ["verify", root, "--all"])
    assert asked.exit_code == 0, asked.output
    shown = json.loads(CliRunner().invoke(main, ["show", f"{root}@g3-a3", "--json"]).output)
    tensors = shown["manifest"]["header"]["layout"]["tensors"]
    assert {t.get("parts") for t in tensors if t["name"] != "model/seen"} == {3, None}
    assert "of them in 3 parts" in CliRunner().invoke(main, ["show", f"{root}@g3-a3"]).output
    told = CliRunner().invoke(main, ["diff", f"{root}@g3-a3", f"{root}@g4-a4"]).output
    assert 'training.strategy: "fsdp2" -> absent' in told
    assert "ranks: 3 -> 1" in told


def test_a_sharded_run_starts_from_the_weights_of_any_other(resharded, tmp_path):
    source = resharded[0]
    config = configured(tmp_path, lr=1e-12, source=source.config.run.root)
    run_ranks(config, 2, stop_at(1), tmp_path)
    state = Left(config).state()
    for name, tensor in source.state().items():
        if name.startswith("model/") and name != "model/seen":
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


def test_weights_that_are_averaged_need_a_model_that_is_whole():
    with pytest.raises(TaskError, match="averaged, which needs"):
        require_sharded(torch.nn.Linear(2, 2), 2, torch.nn.Linear(2, 2))
