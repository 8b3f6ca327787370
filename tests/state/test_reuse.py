"""What did not change is not written again, and every way to read finds it all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from saved import DIGEST, assert_same, header_for, save
from shardings import rows_at, sharded_layout

from coherent_ray.commit.inspection import shard_damage
from coherent_ray.commit.manifest import REUSING_FORMAT, Manifest, format_of
from coherent_ray.commit.shard_records import reuse_problem
from coherent_ray.digests import ALGORITHMS, Algorithm
from coherent_ray.errors import AlreadyExists, ConfigError, ShardDamaged
from coherent_ray.state import reuse
from coherent_ray.state.difference import compare_states
from coherent_ray.state.digest import state_digest
from coherent_ray.state.export import export
from coherent_ray.state.layout import layout_of
from coherent_ray.state.reuse import Known, previous_of
from coherent_ray.state.shards import load_rows, load_state, read_tensor, write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.faults import flipped
from coherent_ray.storage.testing.memory import MemoryStorage

BLOCK = 4096
BASE = "model/base.weight"
ADAPTER = "model/adapter.weight"


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """An adapter of a hundredth beside a base that stays, and its moments."""
    generator = torch.Generator().manual_seed(seed)
    return {
        BASE: torch.randn(512, 512, generator=generator),
        ADAPTER: torch.randn(4, 256, generator=generator),
        "optimizer/adapter/exp_avg": torch.randn(4, 256, generator=generator),
        "optimizer/step": torch.tensor(1, dtype=torch.int64),
    }


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state after another update of the adapter."""
    return {name: t if name == BASE else t + 1 for name, t in tensors.items()}


def save_more(
    storage: MemoryStorage,
    before: Manifest,
    tensors: dict[str, torch.Tensor],
    *,
    generations: int = 64,
    number: int | None = None,
    algorithm: Algorithm = "xxh3_128",
) -> Manifest:
    """Write the next generation as the ranks of the one before would."""
    ranks, parts = before.header.ranks, before.header.layout.parts
    layout = sharded_layout(tensors, ranks) if parts else layout_of(tensors)
    header = replace(
        before.header, number=number or before.header.number + 1, layout=layout,
        format=format_of(layout),
    )  # fmt: skip
    shards = []
    for rank in range(ranks):
        previous = previous_of(before.header, before.shards[rank])
        known = previous.known(header, algorithm, BLOCK, generations)
        snapshot = Snapshot(layout, rank, ranks)
        here = rows_at(tensors, layout, rank) if parts else {}
        snapshot.take({n: t for n, t in tensors.items() if n not in here}, here)
        shards.append(
            write_shard(
                storage, header.directory, rank, ranks, layout, snapshot.memory, algorithm, BLOCK,
                known=known,
            )
        )  # fmt: skip
    if any(shard.reuse for shard in shards):
        header = replace(header, format=REUSING_FORMAT)
    return Manifest(header, DIGEST, tuple(shards))


def save_sharded(storage: MemoryStorage, tensors: dict[str, torch.Tensor], ranks: int) -> Manifest:
    layout = sharded_layout(tensors, ranks)
    start = replace(header_for(layout_of({}), ranks), layout=layout, format=format_of(layout))
    shards = []
    for rank in range(ranks):
        snapshot = Snapshot(layout, rank, ranks)
        here = rows_at(tensors, layout, rank)
        snapshot.take({n: t for n, t in tensors.items() if n not in here}, here)
        shards.append(
            write_shard(
                storage, start.directory, rank, ranks, layout, snapshot.memory, "xxh3_128", BLOCK
            )
        )
    return Manifest(start, DIGEST, tuple(shards))


def written(manifest: Manifest) -> int:
    return sum(shard.own_file.size for shard in manifest.shards)


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_where_a_hundredth_changed_a_twentieth_is_written_at_most(ranks: int) -> None:
    storage, tensors = MemoryStorage(), state()
    tensors[BASE] = torch.randn(1024, 1024)
    first = save(storage, tensors, ranks)
    second = save_more(storage, first, trained(tensors))
    assert written(second) <= 0.05 * written(first)
    for shard, base in zip(second.shards, first.shards, strict=True):
        assert storage.size(shard.path) == shard.own_file.size
        assert reuse_problem(shard, base) is None
        assert shard.size == base.size


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chain_of_generations_reads_as_if_each_were_whole(ranks: int, sharded: bool) -> None:
    storage, tensors = MemoryStorage(), state()
    maker = save_sharded if sharded and ranks > 1 else save
    manifests, states = [maker(storage, tensors, ranks)], [tensors]
    for turn in range(5):
        tensors = trained(tensors)
        if turn == 2:  # some rows of the base, too
            tensors[BASE] = tensors[BASE].clone()
            tensors[BASE][100:140] = 7.0
        manifests.append(save_more(storage, manifests[-1], tensors))
        states.append(tensors)
    assert all(shard.reuse for manifest in manifests[1:] for shard in manifest.shards)
    for manifest, expected in zip(manifests, states, strict=True):
        assert_same(load_state(storage, manifest), expected)
        live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        assert_same(load_state(storage, manifest, live), expected)
        rows = load_rows(storage, manifest, {BASE: (90, 150)})
        assert torch.equal(rows[BASE], expected[BASE][90:150])
        assert torch.equal(rows[ADAPTER], expected[ADAPTER])
        box = read_tensor(storage, manifest, BASE, [(99, 141), (5, 300)])
        assert torch.equal(box, expected[BASE][99:141, 5:300])
        whole = save(MemoryStorage(), expected, 1)
        other = MemoryStorage()
        whole = save(other, expected, 2, number=90)
        assert state_digest(storage, manifest) == state_digest(other, whole)
        assert compare_states(storage, manifest, other, whole).same
        for shard in manifest.shards:
            assert shard_damage(storage, manifest.header, shard, deep=True) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_are_found_by_any_digest(algorithm: Algorithm) -> None:
    storage, tensors = MemoryStorage(), state()
    first = save(storage, tensors, 1, algorithm=algorithm)
    second = save_more(storage, first, trained(tensors), algorithm=algorithm)
    assert second.shards[0].reuse
    assert_same(load_state(storage, second), trained(tensors))


def test_where_nothing_changed_the_file_is_a_header_and_no_more() -> None:
    storage, tensors = MemoryStorage(), state()
    first = save(storage, tensors, 1)
    second = save_more(storage, first, tensors)
    assert written(second) == 4096
    assert_same(load_state(storage, second), tensors)
    assert second.shards[0].digest == first.shards[0].digest


def test_where_everything_changed_the_file_is_the_ordinary_one_and_each_block_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage, first, hashed = MemoryStorage(), save(MemoryStorage(), state(0), 1), []
    original = reuse.plan

    def counted(known: Known, digest, digests):  # type: ignore[no-untyped-def]
        def count(first: int, last: int) -> str:
            hashed.append(first)
            return digest(first, last)

        return original(known, count, digests)

    monkeypatch.setattr("coherent_ray.state.shards.plan", counted)
    second = save_more(storage, first, state(1))
    alone = MemoryStorage()
    whole = save(alone, state(1), 1, number=2)
    assert second.header == whole.header
    assert second.shards == whole.shards
    assert storage.files == alone.files
    assert len(hashed) == len(set(hashed)) == reuse.SAMPLE, "the rest while it was written"


def test_what_was_hashed_to_look_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(MemoryStorage(), state(0), 1)
    monkeypatch.setattr(reuse, "SAMPLE", 10**6)
    seen: dict[int, str] = {}
    known = Known(previous_of(first.header, first.shards[0]).base, first.shards[0], 0)
    assert reuse.plan(known, lambda first, last: f"{first:032x}", seen) is None
    assert len(seen) == len(first.shards[0].blocks) - 1, "all but the header's"
    seen[0] = first.shards[0].blocks[0]
    for name, value in (("_hash", pytest.fail), ("plan", lambda *a: a[2].update(seen))):
        monkeypatch.setattr(f"coherent_ray.state.shards.{name}", value)
    second = save_more(MemoryStorage(), first, state(1))
    assert list(second.shards[0].blocks) == [seen[block] for block in range(len(seen))]


# --- how long, and how many -----------------------------------------------------------------------


def test_what_never_changes_is_written_again_after_so_many_generations() -> None:
    storage, tensors = MemoryStorage(), state()
    manifests = [save(storage, tensors, 1)]
    for _ in range(9):
        tensors = trained(tensors)
        manifests.append(save_more(storage, manifests[-1], tensors, generations=4))
    whole = [m.header.number for m in manifests if m.shards[0].reuse is None]
    assert whole == [1, 6], "a file of generation 1 serves 2, 3, 4 and 5"
    for manifest in manifests:
        for file in manifest.shards[0].files:
            assert manifest.header.number - file.key[0] <= 4
    assert_same(load_state(storage, manifests[-1]), tensors)


def test_a_generation_that_failed_between_two_counts_as_one() -> None:
    storage, tensors = MemoryStorage(), state()
    first = save(storage, tensors, 1)
    assert save_more(storage, first, tensors, generations=4, number=5).shards[0].reuse
    assert save_more(storage, first, tensors, generations=4, number=6).shards[0].reuse is None


def test_few_old_files_are_needed_and_the_least_used_ones_are_given_up() -> None:
    """Each generation changes other rows, so each leaves something behind in its file."""
    storage, tensors = MemoryStorage(), state()
    manifest = save(storage, tensors, 1)
    for turn in range(3 * reuse.FILES):
        tensors = trained(tensors)
        tensors[BASE] = tensors[BASE].clone()
        tensors[BASE][10 * turn : 10 * turn + 16] = float(turn)
        manifest = save_more(storage, manifest, tensors)
        record = manifest.shards[0].reuse
        assert record is not None
        assert len(record.files) <= reuse.FILES
    assert_same(load_state(storage, manifest), tensors)


def test_of_a_block_that_changes_again_in_a_few_places_only_these_are_written() -> None:
    """Small adapters between large weights: in each block there is one."""
    layers, block = 24, 8 * reuse.GRAIN
    tensors = {f"model/{i:02d}.a_base": torch.randn(block // 4 - 300) for i in range(layers)}
    tensors |= {f"model/{i:02d}.lora": torch.zeros(300) for i in range(layers)}
    tensors["model/0.first"] = torch.zeros(10)
    storage, layout = MemoryStorage(), layout_of(tensors)
    header, found, sizes = header_for(layout, 1), {}, []
    previous = None
    for number in range(1, 9):
        tensors["model/0.first"] = torch.full((10,), float(number))
        for i in range(layers):
            tensors[f"model/{i:02d}.lora"] = torch.full((300,), float(number))
        header = replace(header, number=number, format=1)
        known = previous.known(header, "xxh3_128", block, 5) if previous else None
        snapshot = Snapshot(layout, 0, 1)
        snapshot.take(tensors)
        shard = write_shard(
            storage, header.directory, 0, 1, layout, snapshot.memory, "xxh3_128", block,
            known=known,
        )  # fmt: skip
        sizes.append(shard.own_file.size)
        manifest = Manifest(replace(header, format=3 if shard.reuse else 1), DIGEST, (shard,))
        assert_same(load_state(storage, manifest), tensors)
        assert shard_damage(storage, manifest.header, shard, deep=True) == []
        if previous:
            assert shard.reuse is None or reuse_problem(shard, previous.shard) is None
        found = known.found if known else {}
        previous = previous_of(header, shard, found)
    whole = [size == sizes[0] for size in sizes]
    # Nothing is known of grains; a few are; all are; what generation 2 wrote is too old for 8.
    assert whole == [True, True] + [False] * 6
    assert max(sizes[3:7]) < sizes[0] / 5 < sizes[2]
    assert sizes[6] < sizes[7] < sizes[2]


# --- when it is legal -----------------------------------------------------------------------------


def test_another_layout_rank_count_digest_or_block_is_written_whole() -> None:
    first = save(MemoryStorage(), state(), 2)
    previous = previous_of(first.header, first.shards[0])
    header = replace(first.header, number=2)
    assert previous.known(header, "xxh3_128", BLOCK, 64) is not None
    assert previous.known(header, "blake3", BLOCK, 64) is None
    assert previous.known(header, "xxh3_128", 2 * BLOCK, 64) is None
    assert previous.known(first.header, "xxh3_128", BLOCK, 64) is None, "no later than itself"
    assert previous.known(replace(header, ranks=3), "xxh3_128", BLOCK, 64) is None
    more = layout_of(state() | {"model/late": torch.zeros(3)})
    assert previous.known(replace(header, layout=more), "xxh3_128", BLOCK, 64) is None


# --- damage ---------------------------------------------------------------------------------------


def two() -> tuple[MemoryStorage, Manifest, Manifest]:
    storage, tensors = MemoryStorage(), state()
    first = save(storage, tensors, 1)
    return storage, first, save_more(storage, first, trained(tensors))


def test_damage_is_named_with_the_file_in_which_the_bytes_lie() -> None:
    storage, first, second = two()
    old, new = first.shards[0].path, second.shards[0].path
    storage.files[old] = flipped(storage.files[old], 8 * 300_000)
    (found,) = shard_damage(storage, second.header, second.shards[0], deep=True)
    assert found.where == old
    assert found.details["shard"] == new
    assert found.details["tensors"] == [BASE]
    assert f"of {new}" in found.what
    with pytest.raises(ShardDamaged) as caught:
        load_state(storage, second)
    assert caught.value.where == old
    assert f"of {new}" in caught.value.what
    assert caught.value.details["tensors"] == [BASE]
    assert shard_damage(storage, second.header, second.shards[0], deep=False) == []


def test_damage_of_what_was_written_is_in_its_own_file() -> None:
    storage, first, second = two()
    new = second.shards[0].path
    storage.files[new] = flipped(storage.files[new], -3)
    (found,) = shard_damage(storage, second.header, second.shards[0], deep=True)
    assert found.where == new
    assert shard_damage(storage, first.header, first.shards[0], deep=True) == []


@pytest.mark.parametrize("deep", [True, False])
def test_an_earlier_file_that_is_gone_or_short_is_named(deep: bool) -> None:
    storage, first, second = two()
    old = first.shards[0].path
    storage.files[old] = storage.files[old][:-5000]
    (found,) = shard_damage(storage, second.header, second.shards[0], deep=deep)
    assert (found.where, found.details["kind"]) == (old, "size")
    del storage.files[old]
    (found,) = shard_damage(storage, second.header, second.shards[0], deep=deep)
    assert (found.where, found.details["kind"]) == (old, "missing")
    assert found.details["tensors"] == [BASE]
    assert "to which this generation refers" in found.what
    with pytest.raises(ShardDamaged) as caught:
        load_state(storage, second)
    assert caught.value.where == old


def test_a_flip_in_the_header_of_what_was_written_is_found_too() -> None:
    storage, _, second = two()
    new = second.shards[0].path
    storage.files[new] = flipped(storage.files[new], 8 * 40)
    (found,) = shard_damage(storage, second.header, second.shards[0], deep=True)
    assert (found.where, found.details["kind"]) == (new, "header")


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_export_makes_one_ordinary_file_that_safetensors_reads(
    tmp_path, ranks: int, sharded: bool
) -> None:
    from safetensors.torch import load_file

    storage, tensors = MemoryStorage(), state()
    tensors["model/empty"] = torch.empty(0, 3)
    first = (save_sharded if sharded and ranks > 1 else save)(storage, tensors, ranks)
    second = save_more(storage, first, trained(tensors))
    done = export(storage, second, LocalStorage(tmp_path), "state.safetensors")
    assert (done.tensors, done.size) == (5, (tmp_path / "state.safetensors").stat().st_size)
    assert_same(load_file(tmp_path / "state.safetensors"), trained(tensors))
    export(storage, second, LocalStorage(tmp_path), "model.safetensors", prefix="model/")
    weights = {n[6:]: t for n, t in trained(tensors).items() if n.startswith("model/")}
    assert_same(load_file(tmp_path / "model.safetensors"), weights)


def test_export_writes_nothing_that_was_not_verified(tmp_path) -> None:
    storage, first, second = two()
    old = first.shards[0].path
    storage.files[old] = flipped(storage.files[old], 8 * 300_000)
    with pytest.raises(ShardDamaged) as caught:
        export(storage, second, LocalStorage(tmp_path), "state.safetensors")
    assert caught.value.where == old
    assert list(tmp_path.iterdir()) == []


def test_export_overwrites_nothing_and_says_what_is_not_there(tmp_path) -> None:
    storage, _, second = two()
    (tmp_path / "state.safetensors").write_bytes(b"mine")
    with pytest.raises(AlreadyExists, match="there is such a file already"):
        export(storage, second, LocalStorage(tmp_path), "state.safetensors")
    assert (tmp_path / "state.safetensors").read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="no tensors under average/"):
        export(storage, second, LocalStorage(tmp_path), "model.safetensors", prefix="average/")
