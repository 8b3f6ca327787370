"""A run whose state hardly changes: what it writes, what it keeps, and that it is the same run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_ranks import run_ranks
from small_run import (
    Left,
    admit,
    assert_same_state,
    config_for,
    coordinating,
    flip,
    found,
    run_loop,
    stop_at,
    train,
    working,
    write_data,
)
from test_saving import ScriptedLine, boundary, save, saver

from coherent_ray.commit.findings import finding_of, write_findings
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest
from coherent_ray.commit.retention import Policy
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.errors import ShardDamaged
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.shards import load_state
from coherent_ray.storage.testing.memory import MemoryStorage

pytestmark = pytest.mark.usefixtures("one_process")


# --- one rank's saves -----------------------------------------------------------------------------


def frozen(seed: int) -> State:
    """The state of a job of which only a few values change."""
    base = torch.arange(40_000, dtype=torch.float32)
    return State({"model/base": base, "model/head": torch.full((8,), float(seed))}, {})


def test_the_next_save_writes_what_has_changed() -> None:
    line = ScriptedLine()
    one = saver(line, block_bytes=4096, keep=1)
    sizes = [save(one, number, now=frozen(number)).shard_bytes for number in (1, 2, 3)]
    one.close()
    assert sizes[0] == line.words[0].shard.size > 160_000
    assert sizes[1] == sizes[2] <= 0.06 * sizes[0]
    bases = [word.shard.reuse and word.shard.reuse.base.name for word in line.words]
    assert bases == [None, "g1-a1", "g2-a1"]
    (file,) = line.words[2].shard.files[1:]
    assert file.path == line.words[0].shard.path, "not the reference to it"


@pytest.mark.parametrize("keep", [None, 2, 5])
def test_where_two_generations_are_kept_the_newest_two_share_no_file(keep: int | None) -> None:
    """So a damaged file takes one of them and not both."""
    line = ScriptedLine()
    one = saver(line, block_bytes=4096, keep=keep)
    for number in range(1, 7):
        save(one, number, now=frozen(number))
    one.close()
    bases = [word.shard.reuse and word.shard.reuse.base.name for word in line.words]
    assert bases == [None, None, "g1-a1", "g2-a1", "g3-a1", "g4-a1"]
    needed = [{file.path for file in word.shard.files} for word in line.words]
    for mine, next_one in pairwise(needed):
        assert not mine & next_one


def test_where_the_user_wants_whole_generations_they_are_whole() -> None:
    line = ScriptedLine()
    one = saver(line, block_bytes=4096, reuse_generations=0)
    for number in (1, 2):
        save(one, number, now=frozen(number))
    one.close()
    assert [word.shard.reuse for word in line.words] == [None, None]


@pytest.mark.parametrize("trouble", ["failed", "lost"])
def test_after_a_save_that_failed_nothing_is_referred_to(trouble: str) -> None:
    """Whether the last one is in the log is not sure, nor what it refers to."""
    line = ScriptedLine(["published", "failed"] if trouble == "failed" else [])
    storage = MemoryStorage()
    one = saver(line, storage, block_bytes=4096, keep=1)
    save(one, 1, now=frozen(1))
    line.lost = trouble == "lost"
    assert save(one, 2, now=frozen(2)).fate.kind == "failed"
    line.lost = False
    save(one, 3, now=frozen(3))
    save(one, 4, now=frozen(4))
    one.close()
    bases = {w.number: w.shard.reuse and w.shard.reuse.base.name for w in line.words}
    assert bases[3] is None
    assert bases[4] == "g3-a1"


def test_another_layout_is_written_whole_as_in_the_middle_of_an_update() -> None:
    line = ScriptedLine()
    one = saver(line, block_bytes=4096, keep=1)
    more = State({**frozen(2).tensors, "partial/node-0-1/head": torch.ones(8)}, {})
    for number, now in ((1, frozen(1)), (2, more), (3, frozen(3))):
        save(one, number, now=now)
    one.close()
    assert [word.shard.reuse for word in line.words] == [None] * 3


def test_what_a_scrub_has_found_damaged_is_not_referred_to() -> None:
    storage, line = MemoryStorage(), ScriptedLine()
    one = saver(line, storage, block_bytes=4096, scrub_every_s=60.0, keep=1)
    save(one, 1, now=frozen(1))
    save(one, 2, now=frozen(2))
    damage = ShardDamaged("a bit", where=line.words[0].shard.path, details={"kind": "block"})
    now = datetime.now(UTC)
    write_findings(storage, [finding_of("g1-a1", [damage], now), finding_of("g2-a1", [], now)])
    save(one, 3, now=frozen(3))
    save(one, 4, now=frozen(4))
    one.close()
    bases = [word.shard.reuse and word.shard.reuse.base.name for word in line.words]
    assert bases == [None, "g1-a1", None, "g3-a1"]


def test_the_snapshot_of_a_save_that_refers_is_of_its_boundary() -> None:
    """Values change while it is hashed and written."""
    storage, line = MemoryStorage(), ScriptedLine()
    one = saver(line, storage, block_bytes=4096, keep=1)
    save(one, 1, now=frozen(1))
    now = frozen(2)
    one.begin(now, boundary(now, 2), since=0.0)
    now.tensors["model/base"].fill_(-1.0)
    one.settle()
    one.close()
    header = replace(boundary(frozen(2), 2).header, format=3)
    manifest = Manifest(header, digest_of(b"state"), (line.words[1].shard,))
    assert_same_state(load_state(storage, manifest), frozen(2).tensors)


# --- whole runs -----------------------------------------------------------------------------------


def configured(folder: Path, **changes: Any) -> Config:
    folder.mkdir(exist_ok=True)
    if not (folder / "data.parquet").exists():
        write_data(folder / "data.parquet")
    settings: dict[str, Any] = {
        "task__factory": "adapter_tasks:Adapter",
        "checkpoint__every_updates": 1,
        "checkpoint__keep": 1,
        "training__updates": 6,
    }
    return config_for(folder, **(settings | changes))


def bases(left: Left) -> dict[str, str | None]:
    publishes = CommitLog(left.storage).read().publishes
    return {publish.name: publish.base and publish.base.name for publish in publishes}


def test_a_run_that_refers_is_the_same_run_and_writes_a_part_of_it(tmp_path: Path) -> None:
    """Stopped in the middle, resumed, and pruned behind itself."""
    reference = train(configured(tmp_path / "whole", checkpoint__reuse_generations=0))
    config = configured(tmp_path / "refers")
    for wishes in (stop_at(3), []):
        with working(), coordinating(config, retention=Policy(1)) as coordinator:
            coordinator.wishes = list(wishes)
            admit(config, coordinator)
            run_loop(config, coordinator)
            assert coordinator.service.upkeep is not None
            coordinator.call(coordinator.service.upkeep.settled())
    left = Left(config)
    assert left.chain() == reference.chain()
    assert_same_state(left.state(), reference.state())
    assert set(bases(reference).values()) == {None}
    names = list(bases(left))
    assert list(bases(left).values()) == [None, *names[:-1]], "each refers to the one before"
    assert names[-1].endswith("a2"), "across the attempts too"
    # Retired, and needed: its shard and its manifest. Of all between there is nothing.
    directories = {path.name for path in (Path(config.run.root) / "generations").iterdir()}
    assert directories == {names[0], names[-1]}
    whole, part = (Path(config.run.root) / f.path for f in left.manifest().shards[0].files[::-1])
    assert part.stat().st_size < 0.6 * whole.stat().st_size
    (verified,) = CommitLog(left.storage).read().live
    assert Generations(left.storage).verify(verified) == []


def test_two_that_are_kept_share_nothing_across_a_resume_either(tmp_path: Path) -> None:
    """One bit in what all odd ones rest on: the newest even one is whole, and is gone on from."""
    config = configured(tmp_path, checkpoint__keep=2)
    for wishes in (stop_at(3), []):
        with working(), coordinating(config, retention=Policy(2)) as coordinator:
            coordinator.wishes = list(wishes)
            admit(config, coordinator)
            run_loop(config, coordinator)
            assert coordinator.service.upkeep is not None
            coordinator.call(coordinator.service.upkeep.settled())
    left = Left(config)
    expected = {
        "g1-a1": None, "g2-a1": None, "g3-a1": "g1-a1",
        "g4-a2": None, "g5-a2": "g3-a1", "g6-a2": "g4-a2",
    }  # fmt: skip
    assert bases(left) == expected
    directories = {path.name for path in (Path(config.run.root) / "generations").iterdir()}
    assert directories == {"g1-a1", "g4-a2", "g5-a2", "g6-a2"}
    flip(left.shard("g4-a2"), 9_000)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g5-a2"


def test_damage_in_an_old_file_is_passed_over_like_any_other(tmp_path: Path) -> None:
    """Both newest generations refer to it: what is left is what does not."""
    config = configured(tmp_path, checkpoint__reuse_generations=2, training__updates=5)
    left = train(config)
    assert list(bases(left).values()) == [None, "g1-a1", "g2-a1", None, "g4-a1"]
    flip(left.shard("g4-a1"), 9_000)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g3-a1"
    assert all("g4-a1/shard" in damage.where for damage in admitted.selected.skipped)
    assert len(admitted.selected.skipped) == 2


def test_two_ranks_refer_each_to_their_own(tmp_path: Path) -> None:
    config, whole = (
        configured(tmp_path / "two"),
        configured(tmp_path / "whole", checkpoint__reuse_generations=0),
    )
    assert rehearse(whole, Life(2))
    for life in (Life(2, stops_after=2), Life(2, stops_after=4), Life(3, stops_after=5), Life(2)):
        assert rehearse(config, life)
    left = Left(config)
    # Other rank counts have other shards.
    assert [base is None for base in bases(left).values()] == [
        True, False, False, False, True, True,
    ]  # fmt: skip
    assert left.chain() == Left(whole).chain()
    for name in bases(left):
        assert load_state(left.storage, left.manifest(name))
    assert_same_state(left.state(), Left(whole).state())


def test_sharded_ranks_refer_each_to_their_own_rows(tmp_path: Path) -> None:
    """Stopped and resumed; what is put together is what the ranks had in memory."""
    config = configured(
        tmp_path, training__strategy="fsdp2", run__claim="statistical", training__updates=4
    )
    run_ranks(config, 2, stop_at(2), tmp_path)
    run_ranks(config, 2, [], tmp_path)
    left = Left(config)
    names = list(bases(left))
    assert list(bases(left).values()) == [None, *names[:-1]]
    for name in names:
        manifest = left.manifest(name)
        state = load_state(left.storage, manifest)
        # As sharded, but all rows are here, so there is nobody's sums to add.
        found = fingerprint(manifest.header.layout, state, lambda sums: None)
        assert found.digest == manifest.fingerprint
    assert manifest.header.layout.parts == 2
    assert len({file.path for shard in manifest.shards for file in shard.files}) == 4
