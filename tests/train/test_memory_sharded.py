"""FSDP2 and the memory tier: a sharded state is kept as it lies, and read at any rank count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sharded_ranks import offer_of, run_ranks
from small_run import (
    Left,
    assert_same_state,
    config_for,
    coordinating,
    request_for,
    ticket_of,
    working,
    write_data,
)

from coherent_ray.config import Config
from coherent_ray.train.memory.choice import name_of
from coherent_ray.train.memory.shelf import Shelf

#: The pass of one rank that is in update 5.
DIES_AT = 15


def configured(folder: Path, claim: str, **changes: Any) -> Config:
    folder.mkdir(exist_ok=True)
    if not (folder / "data.parquet").exists():
        write_data(folder / "data.parquet", examples=18)
    return config_for(
        folder,
        run__claim=claim,
        task__factory="sharded_ranks:Dying",
        optimizer__lr=0.05,
        checkpoint__every_updates=100,
        training__updates=6,
        training__strategy="fsdp2",
        **changes,
    )


def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    config = configured(folder, "exact", task__args={"at": DIES_AT}, checkpoint__memory={})
    shelf = Shelf("small")
    dead = run_ranks(config, 2, [], folder, fails=True, shelf=shelf)
    assert dead.codes[1] == 1
    kept = {(e.facts.rank, e.facts.update) for e in shelf.entries()}
    assert kept == {(rank, update) for rank in range(2) for update in (3, 4)}
    desk = run_ranks(config, 2, [], folder, shelf=shelf)
    assert desk.resumes == dict.fromkeys(range(2), name_of(4, 1))
    straight = configured(tmp_path / "straight", "exact", task__args={"at": 10**6})
    run_ranks(straight, 2, [], tmp_path / "straight")
    one, other = Left(straight), Left(config)
    assert one.chain() == other.chain()
    assert_same_state(one.state(), other.state())
    shelf.clear()


def test_one_process_takes_up_what_sharded_ranks_have_kept(tmp_path: Path) -> None:
    config = configured(tmp_path, "statistical", task__args={"at": DIES_AT}, checkpoint__memory={})
    shelf = Shelf("small")
    run_ranks(config, 2, [], tmp_path, fails=True, shelf=shelf)
    with working(), coordinating(config) as coordinator:
        request = request_for(config, coordinator.open_attempt())
        offer = offer_of(config, shelf)
        assert offer is not None
        ticket = ticket_of(replace(request, offer=offer))
    assert (ticket.refusal, ticket.generation) == (None, name_of(4, 1))
    shelf.clear()
