"""Killed and resumed from memory it is the same run, and no update is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from held_runs import Cluster, Killed, kill_at, running
from small_run import (
    Coordinator,
    Left,
    assert_same_state,
    config_for,
    coordinating,
    flip,
    root_of,
    working,
)
from threaded import Rank, train_ranks

from coherent_ray.commit import manifest as records
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.errors import ClaimRefused, PeerLost, ReplicaDiverged, ShardDamaged
from coherent_ray.train import backend
from coherent_ray.train.backend import FatalErrors
from coherent_ray.train.memory import wiring
from coherent_ray.train.memory.choice import name_of
from coherent_ray.train.memory.offer import Offer, of_entries, offered
from coherent_ray.train.memory.slots import open_slot

FAR = 100
"""No generation comes before the end."""


def configured(folder: Path, root: str, **changes: Any) -> Config:
    values = {"task__factory": "session_tasks:Plain", "checkpoint__memory": {}, **changes}
    return config_for(folder, run__root=str(folder / root), **values)


def straight(folder: Path, ranks: int = 2, **changes: Any) -> Left:
    """The same run, never killed and never kept."""
    config = configured(folder, "straight", checkpoint__memory=None, **changes)
    train_ranks(config, ranks)
    return Left(config)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The plain job, never killed and never kept: with the same bits at every rank count."""
    with working():
        return straight(tmp_path_factory.mktemp("untouched"))


def config_of(config: Config, **checkpoint: Any) -> Config:
    """The same with other settings of its checkpoints."""
    changed = config.checkpoint.model_copy(update=checkpoint)
    return config.model_copy(update={"checkpoint": changed})


def assert_same_run(one: Left, other: Left) -> None:
    assert one.chain() == other.chain()
    assert_same_state(one.state(), other.state())
    assert one.manifest().fingerprint == other.manifest().fingerprint


def notes(cluster: Cluster) -> str:
    return "\n".join(note for ticket in cluster.tickets for note in ticket.notes)


def test_a_killed_rank_loses_no_update(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "killed", checkpoint__every_updates=FAR)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(5, rank=1))
        assert cluster.held() == {0: [3, 4], 1: [3, 4]}
        ranks = cluster.train(coordinator, 2)
    assert notes(cluster).count("from memory: update 4 of attempt 1; durable is nothing yet") == 2
    assert {number for rank in ranks for number, *_ in rank.seen} == {5, 6}
    left = Left(config)
    assert (left.generations, left.updates) == (["g1-a2"], [6])
    assert_same_run(untouched, left)


def test_the_receipts_since_the_newest_generation_come_with_it(
    tmp_path: Path, untouched: Left
) -> None:
    config = configured(tmp_path, "killed", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(4))
        durable = CommitLog(root_of(config)).read().latest
        cluster.train(coordinator, 2)
    # The generation of update 2 was in flight when the rank was killed: it may be there.
    said = "nothing yet" if durable is None else f"update 2 ({durable.name})"
    assert f"from memory: update 3 of attempt 1; durable is {said}" in notes(cluster)
    assert_same_run(untouched, Left(config))


def test_killed_again_and_again_it_is_the_same_run(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "killed", checkpoint__every_updates=FAR)
    with running(config) as (cluster, coordinator):
        for update in range(3, 7):
            with pytest.raises(Killed):
                cluster.train(coordinator, 2, kill_at(update, rank=update % 2))
        cluster.train(coordinator, 2)
    assert [offer and offer.facts.update for offer in cluster.offers] == [None, 2, 3, 4, 5]
    assert_same_run(untouched, Left(config))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (4, 2)])
def test_at_another_rank_count_it_is_the_same_run(
    tmp_path: Path, untouched: Left, before: int, after: int
) -> None:
    config = configured(tmp_path, "killed", checkpoint__every_updates=FAR)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, before, kill_at(5))
        cluster.train(coordinator, after)
    assert cluster.tickets[0].generation == name_of(4, 1)
    assert_same_run(untouched, Left(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"task__factory": "session_tasks:Momentum"},
        {"task__factory": "session_tasks:Warmed"},
        {"task__factory": "precision_tasks:Averaged"},
        {"training__precision": "fp16"},
        {"checkpoint__mid_update": True},
        {"checkpoint__digest": "sha256", "checkpoint__block_bytes": 8192},
        {"run__claim": "exact"},
    ],
)
def test_whatever_the_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    # With one rank: these tasks draw from the process's own random state.
    config = configured(tmp_path, "killed", checkpoint__every_updates=FAR, **changes)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 1, kill_at(4))
        cluster.train(coordinator, 1)
    assert cluster.tickets[0].generation == name_of(3, 1)
    assert_same_run(straight(tmp_path, 1, **changes), Left(config))


# --- what cannot be proved is passed over ---------------------------------------------------------


def spoil(cluster: Cluster, rank: int, update: int, at: int = -1) -> None:
    """Turn a bit of what is held of a rank, as another process that writes there would."""
    entry = next(e for e in cluster.entries() if (e.facts.rank, e.facts.update) == (rank, update))
    slot = open_slot(entry.at.pid, entry.at.file, entry.at.name)
    slot.memory(entry.facts.size)[at] ^= 1
    slot.close()


def killed_after(cluster: Cluster, coordinator: Coordinator, update: int) -> None:
    """Train with two ranks until one of them is killed; the generation of update 2 is published."""

    def look(at: Rank, number: int, micro: Any) -> None:
        if number > 2:
            deadline = time.monotonic() + 60
            while not Left(cluster.config).updates and time.monotonic() < deadline:
                time.sleep(0.005)
        if (at.rank, number) == (1, update + 1):
            raise Killed

    with pytest.raises(Killed):
        cluster.train(coordinator, 2, look)
    assert Left(cluster.config).updates == [2]


@pytest.mark.parametrize("at", [-1, 0, 4096 + 17])
def test_a_bit_that_flipped_in_memory_is_found_and_the_generation_taken(
    tmp_path: Path, untouched: Left, at: int
) -> None:
    config = configured(tmp_path, "spoilt", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        spoil(cluster, 1, 3, at)
        cluster.train(coordinator, 2)
    assert (cluster.offers[1] and cluster.offers[1].name) == name_of(3, 1)
    assert cluster.tickets[0].generation == "g1-a1"
    assert f"passed over {name_of(3, 1)}" in notes(cluster)
    assert Left(config).updates == [2, 4, 6]
    assert_same_run(untouched, Left(config))


def test_where_one_rank_cannot_read_it_none_goes_on_from_it(
    tmp_path: Path, untouched: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, "spoilt", checkpoint__every_updates=2)
    asked: list[int] = []

    def unreadable(
        offer: Offer, damaged: Any, storage: Any, log: Any, history: Any, accept: Any, read: Any
    ) -> Any:
        asked.append(len(damaged))

        def fails(manifest: Any, storage: Any) -> Any:
            raise ShardDamaged("it cannot be read here", where="memory")

        # Of the two ranks, the second.
        way = fails if len(asked) == 2 else read
        return offered(offer, damaged, storage, log, history, accept, way)

    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        monkeypatch.setattr("coherent_ray.train.admit.offered", unreadable)
        cluster.train(coordinator, 2)
    assert asked == [0, 0, 1, 1]
    assert [t.generation for t in cluster.tickets] == ["g1-a1"] * 2
    assert_same_run(untouched, Left(config))


def test_what_was_passed_over_is_not_found_again(tmp_path: Path) -> None:
    config = configured(tmp_path, "spoilt", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        spoil(cluster, 0, 3)
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(3))
        assert cluster.held() == {}
        cluster.train(coordinator, 2)
    assert cluster.offers[2] is None


def test_another_log_under_the_same_run_id_is_another_run(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "one", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        other = configured(tmp_path, "other", checkpoint__every_updates=2)
        with coordinating(other) as second:
            second.open_attempt()
            again = replace(cluster, config=other)
            again.shelves, again.keepers = cluster.shelves, cluster.keepers
            again.train(second, 2)
    assert again.offers[-1] is None
    assert_same_run(untouched, Left(other))


@pytest.mark.parametrize("part", ["receipts", "facts", "manifest"])
def test_an_offer_that_does_not_prove_itself_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    config = configured(tmp_path, "forged", checkpoint__every_updates=2)

    def forged(offer: Offer, *rest: Any) -> Any:
        lines = offer.receipts.splitlines(keepends=True)
        facts, receipts, manifest = offer.facts, offer.receipts, offer.manifest
        if part == "receipts":  # a chain, but not from where the generation ended
            receipts = b"".join(lines[:-1])
            facts = replace(facts, receipts_digest=digest_of(receipts))
        if part == "facts":
            facts = replace(facts, update=facts.update + 1)
        if part == "manifest":
            made = records.load(Manifest, manifest)
            header = replace(made.header, environment={"another": "one"})
            manifest = records.dump(replace(made, header=header))
        changed = replace(offer, facts=facts, receipts=receipts, manifest=manifest)
        return offered(changed, *rest)

    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        monkeypatch.setattr("coherent_ray.train.admit.offered", forged)
        admitted = cluster.admit(coordinator, 2)
    assert [a.kept for a in admitted] == [None, None]
    assert {t.generation for t in cluster.tickets} == {"g1-a1"}


def test_a_generation_that_came_after_it_is_what_counts(tmp_path: Path) -> None:
    config = configured(tmp_path, "later", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        before = cluster.admit(coordinator, 2)[0].kept
        assert before is not None
        held = list(cluster.entries())
        # Another driver, which knows nothing of this memory, takes the run on.
        train_ranks(config_of(config, memory=None), 2, lasting=coordinator)
        coordinator.open_attempt()
        history = CommitLog(root_of(config)).read()
        assert of_entries(held, cluster.words_of, history) is None


def test_a_damaged_generation_does_not_matter_where_memory_is_newer(
    tmp_path: Path, untouched: Left
) -> None:
    config = configured(tmp_path, "damaged", checkpoint__every_updates=2)
    with running(config) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        flip(Left(config).shard("g1-a1"))
        cluster.train(coordinator, 2)
    assert cluster.tickets[0].generation == name_of(3, 1)
    assert_same_run(untouched, Left(config))


def test_a_job_that_changed_is_refused_by_its_claim_as_ever(tmp_path: Path) -> None:
    config = configured(tmp_path, "changed", checkpoint__every_updates=FAR)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(4))
        cluster.config = configured(
            tmp_path, "changed", checkpoint__every_updates=FAR, optimizer__lr=0.5
        )
        with pytest.raises(ClaimRefused, match="optimizer"):
            cluster.train(coordinator, 2)


# --- ranks that diverged --------------------------------------------------------------------------


def test_ranks_that_diverged_have_nothing_in_common(tmp_path: Path, untouched: Left) -> None:
    """One rank's copy of a tensor is another: the fingerprint alone shows it."""
    config = configured(tmp_path, "diverged", checkpoint__every_updates=FAR)

    def look(at: Rank, number: int, micro: Any) -> None:
        if (at.rank, number) == (1, 4):
            with torch.no_grad():
                next(at.session.model.parameters())[0, 0] += 1.0
        if (at.rank, number) == (0, 6):
            raise Killed

    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, look)
        assert cluster.held() == {0: [4, 5], 1: [4, 5]}
        cluster.train(coordinator, 2)
    assert cluster.offers == [None, None]
    assert_same_run(untouched, Left(config))


def test_what_diverged_ranks_have_kept_is_let_go_where_the_run_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(
        tmp_path, "heal", checkpoint__on_divergence="heal", checkpoint__max_divergences=1
    )
    cleared: list[str] = []
    monkeypatch.setattr("coherent_ray.train.memory.wiring.keepers.clear", cleared.append)
    monkeypatch.setattr("coherent_ray.train.backend.coordinators.find", lambda run_id: None)
    monkeypatch.setitem(backend._opened, ("small", config.run.root), 3)
    callback = FatalErrors(config)
    callback.after_exception(None, {0: PeerLost("gone")})
    assert wiring.diverged_of(config, "small") == 0
    callback.after_exception(None, {0: ReplicaDiverged("rank 1 differs")})
    assert (cleared, wiring.diverged_of(config, "small")) == (["small"], 3)


# --- who cannot keep ------------------------------------------------------------------------------


def test_where_one_rank_has_no_memory_none_keeps_and_the_run_goes_on(
    tmp_path: Path, untouched: Left
) -> None:
    config = configured(tmp_path, "poor", checkpoint__every_updates=2)
    with running(config, nodes=2) as (cluster, coordinator):
        cluster.shelves[1]._available = lambda: 1000
        cluster.train(coordinator, 2)
        assert cluster.held() == {}
    assert Left(config).updates == [2, 4, 6]
    assert_same_run(untouched, Left(config))


def test_a_copy_on_its_way_leaves_updates_out_on_all_ranks_alike(tmp_path: Path) -> None:
    config = configured(tmp_path, "slow", checkpoint__every_updates=FAR)
    with running(config, nodes=2) as (cluster, coordinator):
        cluster.keepers[1].answers = 2  # of updates 2 and 3; that of 4 is on its way for ever
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(6))
        homes = [e for e in cluster.entries() if e.keeper == f"keeper-{e.facts.rank}"]
    assert sorted((e.facts.rank, e.facts.update) for e in homes) == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_a_keeper_that_was_started_again_gets_new_slots(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "again", checkpoint__every_updates=FAR)
    with running(config) as (cluster, coordinator):

        def look(at: Rank, number: int, micro: Any) -> None:
            if (at.rank, number, micro.index) == (0, 4, 0):
                cluster.shelves[0].clear()  # as a process leaves it that was killed
            if (at.rank, number) == (0, 6):
                raise Killed

        with pytest.raises(Killed):
            cluster.train(coordinator, 2, look)
        held = cluster.held()
        assert held[0] == held[1] == [5]
        cluster.train(coordinator, 2)
    assert cluster.tickets[0].generation == name_of(5, 1)
    assert_same_run(untouched, Left(config))


def test_every_so_many_updates(tmp_path: Path, untouched: Left) -> None:
    memory = {"every_updates": 2}
    config = configured(tmp_path, "some", checkpoint__every_updates=FAR, checkpoint__memory=memory)
    with running(config) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(6))
        assert set(cluster.held()[0]) == {4}
        cluster.train(coordinator, 2)
    assert cluster.tickets[0].generation == name_of(4, 1)
    assert_same_run(untouched, Left(config))


# --- nodes ----------------------------------------------------------------------------------------


def test_a_lost_node_is_made_up_for_by_the_next_one(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "nodes", checkpoint__every_updates=FAR)
    with running(config, nodes=2) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 4, kill_at(5))
        cluster.shelves[0].clear()
        assert cluster.held() == {rank: [3, 4] for rank in range(4)}
        cluster.train(coordinator, 2)
    assert cluster.tickets[0].generation == name_of(4, 1)
    assert_same_run(untouched, Left(config))


def test_where_both_nodes_are_lost_the_generation_is_taken(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "nodes", checkpoint__every_updates=2)
    with running(config, nodes=2) as (cluster, coordinator):
        killed_after(cluster, coordinator, 3)
        for shelf in cluster.shelves:
            shelf.clear()
        cluster.train(coordinator, 2)
    assert cluster.offers[1] is None
    assert cluster.tickets[0].generation == "g1-a1"
    assert_same_run(untouched, Left(config))


def test_a_copy_is_read_where_the_original_is_spoilt(tmp_path: Path, untouched: Left) -> None:
    config = configured(tmp_path, "nodes", checkpoint__every_updates=FAR)
    with running(config, nodes=2) as (cluster, coordinator):
        with pytest.raises(Killed):
            cluster.train(coordinator, 2, kill_at(5))
        assert len(cluster.entries()) == 8
        spoil(cluster, 0, 4)  # on the first node, which is this process's
        cluster.train(coordinator, 2)
    assert cluster.tickets[0].generation == name_of(4, 1)
    assert_same_run(untouched, Left(config))
