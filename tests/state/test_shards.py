"""Shards load with the safetensors library, load at any rank count, and show every flipped bit."""

import json
import random
import threading
import time

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import assert_same, every_dtype, random_tensor, same_bits, save

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Manifest
from coherent_ray.digests import ALGORITHMS, digest_of
from coherent_ray.errors import (
    AlreadyExists,
    ConfigError,
    ShardDamaged,
    StateMismatch,
    StorageError,
)
from coherent_ray.state.digest import state_digest, tensors_digest
from coherent_ray.state.header import HEADER_ALIGNMENT
from coherent_ray.state.layout import TORCH_DTYPES, layout_of
from coherent_ray.state.shards import load_state, read_tensor, shard_path, write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage.local import LocalStorage
from coherent_ray.storage.testing.memory import MemoryStorage

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
STATES = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).map(
        lambda name: f"model/{name}/x"
    ),
    st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), SHAPES),
    max_size=7,
).map(
    lambda kinds: {
        name: random_tensor(TORCH_DTYPES[dtype], shape, seed)
        for seed, (name, (dtype, shape)) in enumerate(kinds.items())
    }
)


def large_state() -> dict[str, torch.Tensor]:
    return every_dtype((23, 41)) | {"model/big": random_tensor(torch.float32, (50, 60), 99)}


# --- round trips ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    STATES, st.integers(1, 6), st.sampled_from([16, 4096, 4112, 2**20]), st.sampled_from(ALGORITHMS)
)
def test_any_state_comes_back_from_any_rank_count(tensors, ranks, block_bytes, algorithm):
    storage = MemoryStorage()
    manifest = save(storage, tensors, ranks, block_bytes, algorithm)
    assert records.load(Manifest, records.dump(manifest)) == manifest
    assert_same(load_state(storage, manifest), tensors)
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    loaded = load_state(storage, manifest, live)
    assert all(loaded[name] is live[name] for name in tensors)
    assert_same(live, tensors)
    assert state_digest(storage, manifest) == tensors_digest(layout_of(tensors), tensors)


def test_live_tensors_keep_their_strides_and_are_filled(tmp_path):
    tensors = large_state()
    manifest = save(LocalStorage(tmp_path), tensors, 7)
    live = {}
    for name, tensor in tensors.items():
        live[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    strides = {name: tensor.stride() for name, tensor in live.items()}
    load_state(LocalStorage(tmp_path), manifest, live)
    assert_same(live, tensors)
    assert {name: tensor.stride() for name, tensor in live.items()} == strides


def test_live_tensors_that_do_not_fit_are_left_alone():
    storage = MemoryStorage()
    manifest = save(storage, {"w": torch.ones(4)}, 1)
    live = {"w": torch.zeros(5)}
    with pytest.raises(StateMismatch, match="w: stored is F32"):
        load_state(storage, manifest, live)
    assert not live["w"].any()


def test_the_state_digest_is_that_of_the_state_alone():
    tensors = large_state()
    digests = {
        state_digest(s, save(s, tensors, ranks))
        for ranks in (1, 2, 3, 8)
        for s in [MemoryStorage()]
    }
    assert digests == {tensors_digest(layout_of(tensors), tensors)}
    other = tensors | {"model/F32": tensors["model/F32"].clone()}
    other["model/F32"].view(torch.int32)[0, 0] ^= 1
    assert tensors_digest(layout_of(other), other) not in digests
    turned = tensors | {"model/F32": tensors["model/F32"].view(41, 23)}
    assert tensors_digest(layout_of(turned), turned) not in digests


# --- the file -------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_whole_tensors_and_parts(tmp_path):
    tensors = large_state()
    manifest = save(LocalStorage(tmp_path), tensors, 3)
    found: dict[str, list] = {}
    for shard in manifest.shards:
        path = tmp_path / shard.path
        assert path.stat().st_size == shard.size
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["coherent_ray"])
            assert (about["start"], about["stop"]) == (shard.start, shard.stop)
        for name, tensor in safetensors.torch.load_file(path).items():
            part = about["parts"].get(name)
            if part is None:
                assert same_bits(tensor, tensors[name].contiguous()), name
                found[name] = []
                continue
            first, last = part["first_item"], part["first_item"] + tensor.numel()
            assert name == f"{part['tensor']}[{first}:{last}]"
            assert part["shape"] == list(tensors[part["tensor"]].shape)
            whole = tensors[part["tensor"]].contiguous().view(-1)
            assert same_bits(tensor, whole[first:last])
            found.setdefault(part["tensor"], []).append((first, last))
    assert found.keys() == tensors.keys()
    assert sum(bool(parts) for parts in found.values()) == 2, (
        "one tensor is cut at each of two cuts"
    )


def test_paths_headers_and_digests_are_what_the_format_says(tmp_path):
    storage = LocalStorage(tmp_path)
    tensors = large_state()
    manifest = save(storage, tensors, 2, algorithm="sha256")
    first, second = manifest.shards
    assert first.path == "generations/g1-a2/shard-00000-of-00002.safetensors"
    assert second.path == shard_path("generations/g1-a2", 1, 2)
    for shard in manifest.shards:
        raw = (tmp_path / shard.path).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert shard.header_bytes == 8 + length
        assert shard.header_bytes % HEADER_ALIGNMENT == 0
        blocks = [raw[at : at + 4096] for at in range(0, len(raw), 4096)]
        assert shard.blocks == tuple(digest_of(b, "sha256").split(":")[1] for b in blocks)
        assert shard.digest == digest_of(bytes.fromhex("".join(shard.blocks)), "sha256")


def test_the_same_state_makes_the_same_file():
    one, two = MemoryStorage(), MemoryStorage()
    tensors = large_state()
    save(one, tensors, 3)
    save(two, dict(reversed(tensors.items())), 3)
    assert one.files == two.files


def shard_of(storage, tensors, hooks=None, block_bytes=4096):
    layout = layout_of(tensors)
    snapshot = Snapshot(layout, 0, 1)
    snapshot.take(tensors)
    memory = snapshot.memory
    return write_shard(storage, "g", 0, 1, layout, memory, "xxh3_128", block_bytes, hooks)


@pytest.mark.parametrize("block_bytes", [0, -16, 8, 100])
def test_block_sizes_that_would_cut_items_are_refused(block_bytes):
    with pytest.raises(ConfigError, match="block_bytes") as caught:
        shard_of(MemoryStorage(), {"w": torch.ones(4)}, block_bytes=block_bytes)
    assert "16" in caught.value.remedy


def test_memory_of_the_wrong_length_is_refused():
    layout = layout_of({"w": torch.ones(4)})
    with pytest.raises(ValueError, match="owns 16 bytes, not 15"):
        write_shard(MemoryStorage(), "g", 0, 1, layout, memoryview(bytes(15)))


def test_a_shard_that_is_there_already_is_not_touched():
    storage = MemoryStorage()
    shard_of(storage, {"w": torch.ones(4)})
    before = dict(storage.files)
    with pytest.raises(AlreadyExists):
        shard_of(storage, {"w": torch.zeros(4)})
    assert storage.files == before


# --- points for faults ----------------------------------------------------------------------------


def test_hooks_are_called_in_order_and_in_the_middle():
    points = []

    class Watched(MemoryStorage):
        def open_writer(self, path):
            self.writer = super().open_writer(path)
            self.written = 0
            write = self.writer.write

            def counting(data):
                self.written += len(data)
                write(data)

            self.writer.write = counting
            return self.writer

    storage = Watched()
    tensors = large_state()
    record = shard_of(
        storage, tensors, lambda p: points.append((p, storage.written, len(storage.files)))
    )
    size = record.size
    assert points == [
        ("shard:begun", 0, 0),
        ("shard:half-written", size // 2, 0),
        ("shard:unsynced", size, 0),
        ("shard:written", size, 1),
    ]
    plain = MemoryStorage()
    assert shard_of(plain, tensors) == record
    assert plain.files == storage.files


@pytest.mark.parametrize("point", ["shard:begun", "shard:half-written", "shard:unsynced"])
def test_a_death_before_the_end_leaves_nothing_under_the_name(tmp_path, point):
    class Died(BaseException):
        pass

    def hook(reached):
        if reached == point:
            raise Died

    threads = threading.active_count()
    storage = LocalStorage(tmp_path)
    with pytest.raises(Died):
        shard_of(storage, large_state(), hook)
    assert list(storage.list()) == []
    assert threading.active_count() == threads
    assert shard_of(storage, large_state()).size > 4096


def test_a_storage_that_fails_says_so_and_leaves_no_thread():
    class Full(MemoryStorage):
        def open_writer(self, path):
            writer = super().open_writer(path)

            def write(data):
                raise StorageError("no space left on device", where=path)

            writer.write = write
            return writer

    threads = threading.active_count()
    with pytest.raises(StorageError, match="no space left"):
        shard_of(Full(), large_state())
    assert threading.active_count() == threads


def test_hashing_stops_when_writing_has_failed(monkeypatch):
    hashed = []

    class Slow:
        def update(self, data):
            hashed.append(len(data))
            time.sleep(0.02)

        def hexdigest(self):
            return "0" * 32

    def fail(point):
        raise StorageError(point)

    monkeypatch.setattr("coherent_ray.state.shards.new_hasher", lambda algorithm: Slow())
    with pytest.raises(StorageError, match="shard:begun"):
        shard_of(MemoryStorage(), {"w": torch.ones(100_000)}, fail)
    assert len(hashed) < 50, "of 99 blocks"


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_flipped_bit_in_any_block_of_any_shard_is_found_and_named(algorithm):
    storage = MemoryStorage()
    tensors = large_state()
    manifest = save(storage, tensors, 3, 4096, algorithm)
    layout, draw = layout_of(tensors), random.Random(7)
    spans = dict(zip([t.name for t in layout.tensors], layout.offsets(), strict=True))
    found = 0
    for shard in manifest.shards:
        for block in range(len(shard.blocks)):
            whole = storage.files[shard.path]
            at = draw.randrange(block * 4096, min((block + 1) * 4096, shard.size))
            torn = bytearray(whole)
            torn[at] ^= 1 << draw.randrange(8)
            storage.files[shard.path] = bytes(torn)
            with pytest.raises(ShardDamaged) as caught:
                load_state(storage, manifest)
            details = caught.value.details
            assert (details["shard"], details["block"]) == (shard.path, block)
            assert details["first_byte"] == block * 4096 <= at < details["last_byte"]
            flat_at = at - shard.header_bytes + shard.start
            if at >= shard.header_bytes:
                (hit,) = [
                    t.name
                    for t in layout.tensors
                    if spans[t.name] <= flat_at < spans[t.name] + t.nbytes
                ]
                assert hit in details["tensors"]
            else:
                assert details["tensors"] == []
                assert "it holds the header" in caught.value.what
            with pytest.raises(ShardDamaged):
                state_digest(storage, manifest)
            storage.files[shard.path] = whole
            found += 1
    assert found == sum(len(shard.blocks) for shard in manifest.shards) > 10
    assert_same(load_state(storage, manifest), tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: None, "the shard is missing"),
        (lambda raw: raw[:-1], "bytes instead of"),
        (lambda raw: raw + b"\0", "bytes instead of"),
        (lambda raw: b"", "has 0 bytes"),
    ],
)
def test_missing_short_and_long_shards_are_named(change, words):
    storage = MemoryStorage()
    manifest = save(storage, large_state(), 2)
    path = manifest.shards[1].path
    changed = change(storage.files.pop(path))
    if changed is not None:
        storage.files[path] = changed
    for read in (load_state, state_digest):
        with pytest.raises(ShardDamaged, match=words) as caught:
            read(storage, manifest)
        assert caught.value.where == path
        assert caught.value.details["shard"] == path


def test_the_first_damage_in_order_is_reported_and_live_tensors_get_no_bad_byte():
    storage = MemoryStorage()
    tensors = {"a": torch.ones(4096), "b": torch.ones(4096)}
    manifest = save(storage, tensors, 2)
    for shard in manifest.shards:
        torn = bytearray(storage.files[shard.path])
        torn[-1] ^= 255
        storage.files[shard.path] = bytes(torn)
    live = {name: torch.zeros(4096) for name in tensors}
    with pytest.raises(ShardDamaged) as caught:
        load_state(storage, manifest, live)
    assert caught.value.details["shard"] == manifest.shards[0].path
    assert caught.value.details["tensors"] == ["a"]
    assert all(bool(((t == 0) | (t == 1)).all()) for t in live.values())
    assert not live["a"][-1024:].any(), "the bad block was not used"


def test_shards_of_the_same_size_that_changed_places_are_found():
    storage = MemoryStorage()
    manifest = save(storage, {"a": torch.ones(4096), "b": torch.zeros(4096)}, 2)
    one, two = (shard.path for shard in manifest.shards)
    storage.files[one], storage.files[two] = storage.files[two], storage.files[one]
    with pytest.raises(ShardDamaged, match="block 0"):
        load_state(storage, manifest)


def test_a_header_that_lies_is_found_though_its_digest_is_right():
    """A writer with a wrong layout: every digest holds, the names do not."""
    storage, other = MemoryStorage(), MemoryStorage()
    manifest = save(storage, {"a": torch.ones(8)}, 1)
    lying = save(other, {"b": torch.ones(8)}, 1)
    mixed = Manifest(manifest.header, manifest.fingerprint, lying.shards)
    with pytest.raises(ShardDamaged, match="header is not that of this part"):
        load_state(other, mixed)


# --- boxes ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_any_box_of_any_tensor_is_read(data, ranks):
    storage = MemoryStorage()
    tensors = every_dtype((5, 4, 3)) | {"model/wide": random_tensor(torch.int16, (40, 30), 3)}
    manifest = save(storage, tensors, ranks, 64)
    name = data.draw(st.sampled_from(sorted(tensors)))
    box = []
    for side in tensors[name].shape:
        first = data.draw(st.integers(0, side))
        box.append((first, data.draw(st.integers(first, side))))
    expected = tensors[name][tuple(slice(a, b) for a, b in box)]
    assert same_bits(read_tensor(storage, manifest, name, box), expected)
    assert same_bits(read_tensor(storage, manifest, name), tensors[name])


def test_only_the_blocks_that_hold_the_box_are_read_and_verified():
    reads = []

    class Counting(MemoryStorage):
        def read_into(self, path, start, target):
            reads.append((path, start))
            return super().read_into(path, start, target)

    storage = Counting()
    tensors = {"w": torch.arange(4096.0).view(64, 64), "x": torch.ones(4096)}
    manifest = save(storage, tensors, 2, 1024)
    shard = manifest.shards[0]
    torn = bytearray(storage.files[shard.path])
    torn[shard.header_bytes] ^= 1
    storage.files[shard.path] = bytes(torn)
    box = read_tensor(storage, manifest, "w", [(8, 10), (0, 64)])
    assert torch.equal(box, tensors["w"][8:10])
    assert reads == [(shard.path, shard.header_bytes + 2048)]
    with pytest.raises(ShardDamaged, match="block 4") as caught:
        read_tensor(storage, manifest, "w", [(0, 1), (5, 6)])
    assert caught.value.details["tensors"] == ["w"]


def test_boxes_outside_and_unknown_tensors_are_refused():
    storage = MemoryStorage()
    manifest = save(storage, {"w": torch.ones(4, 4)}, 1)
    for box in ([(0, 5), (0, 4)], [(0, 4)], [(3, 2), (0, 4)], [(-1, 2), (0, 4)]):
        with pytest.raises(ValueError, match="does not lie in shape"):
            read_tensor(storage, manifest, "w", box)
    with pytest.raises(KeyError):
        read_tensor(storage, manifest, "v")
