"""Writing past the page cache: the same bytes and the same errors, whoever refuses what."""

import errno
import fcntl
import mmap
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coherent_ray.commit.manifest import generation_directory
from coherent_ray.errors import StorageError, StorageFull
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.storage import LocalStorage, StorageOptions, direct, local, open_storage
from coherent_ray.storage.testing.buffered import buffered
from coherent_ray.storage.testing.power import Recorder, watched
from coherent_ray.storage.testing.syncs import SyncSpy, unsynced

PAGE = direct.ALIGNMENT


class Watching:
    """Stands in for ``os``: notes for each write whether it goes past the cache, and may act."""

    def __init__(self, act: Callable[[int, memoryview, bool], int] | None = None) -> None:
        self._act = act or (lambda file, data, past: os.write(file, data))
        self.writes: list[tuple[bool, int]] = []
        """Past the cache or not, and how many bytes it was asked to write."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: memoryview) -> int:
        past = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        self.writes.append((past, len(data)))
        return self._act(file, data, past)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LEAST_BYTES", PAGE)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watching]:
    def install(act: Callable[[int, memoryview, bool], int] | None = None) -> Watching:
        stand_in = Watching(act)
        monkeypatch.setattr(local, "os", stand_in)
        return stand_in

    return install


@pytest.fixture
def taken(tmp_path: Path) -> None:
    """Skip where the file system of the tests takes no such writes."""
    try:
        file = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.write(file, pages(1))
    except OSError as error:
        pytest.skip(f"O_DIRECT: {error}")
    (tmp_path / "probe").unlink()
    os.close(file)


def pages(count: int, more: int = 0) -> memoryview:
    """Return some bytes that begin at a page."""
    size = count * PAGE + more
    memory = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    memory[:] = os.urandom(size)
    return memory


def write(storage: LocalStorage, *parts: Any, path: str = "shard") -> bytes:
    with storage.open_writer(path) as writer:
        for part in parts:
            writer.write(part)
        writer.finish()
    return b"".join(map(bytes, parts))


@pytest.mark.parametrize("more", [0, 1, 511, 4095])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_the_file_has_the_bytes_whatever_their_number(
    tmp_path: Path, count: int, more: int
) -> None:
    whole = write(LocalStorage(tmp_path), bytes(PAGE), pages(count, more), pages(1), b"end")
    assert (tmp_path / "shard").read_bytes() == whole


@pytest.mark.usefixtures("taken")
def test_what_is_aligned_goes_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, watch: Callable[..., Watching]
) -> None:
    seen = watch()
    write(LocalStorage(tmp_path), bytes(PAGE), pages(5), pages(2, 100))
    assert seen.writes == [(False, PAGE), (True, 5 * PAGE), (True, 2 * PAGE), (False, 100)]


@pytest.mark.usefixtures("taken")
def test_small_files_and_memory_that_lies_elsewhere_go_through_the_cache(
    tmp_path: Path, watch: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "LEAST_BYTES", 2 * PAGE)
    seen = watch()
    storage = LocalStorage(tmp_path)
    whole = write(storage, pages(1), pages(3)[1:], bytes(pages(3)))
    assert not any(past for past, _ in seen.writes)
    assert (tmp_path / "shard").read_bytes() == whole


@pytest.mark.usefixtures("taken")
def test_almost_all_of_a_shard_goes_past_the_cache(
    tmp_path: Path, watch: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header ends at a page, and the snapshot begins at one."""
    monkeypatch.undo()  # the threshold as it is
    monkeypatch.setattr(local, "os", seen := Watching())
    tensors = {"model/w": torch.arange(400_001, dtype=torch.float32), "model/b": torch.ones(3)}
    layout = layout_of(tensors)
    snapshot = Snapshot(layout, 0, 1)
    snapshot.take(tensors)
    storage = LocalStorage(tmp_path)
    points: list[str] = []
    record = write_shard(
        storage, generation_directory(1, 1), 0, 1, layout, snapshot.memory, hooks=points.append
    )
    assert points == ["shard:begun", "shard:half-written", "shard:unsynced", "shard:written"]
    assert sum(size for past, size in seen.writes if not past) <= record.header_bytes + 3 * PAGE
    assert storage.read(record.path, record.header_bytes) == bytes(snapshot.memory)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_who_opens_and_then_refuses_gets_the_same_bytes_and_is_not_tried_again(
    tmp_path: Path, watch: Callable[..., Watching], number: int
) -> None:
    def refuse(file: int, data: memoryview, past: bool) -> int:
        if past:
            raise OSError(number, os.strerror(number))
        return os.write(file, data)

    seen = watch(refuse)
    storage = LocalStorage(tmp_path)
    for path in ("first", "second"):
        whole = write(storage, bytes(PAGE), pages(3, 5), path=path)
        assert (tmp_path / path).read_bytes() == whole
    assert sum(past for past, _ in seen.writes) <= 1


def test_who_refuses_the_very_flag_gets_the_same_bytes(
    tmp_path: Path, watch: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(fcntl, name)

        def fcntl(self, file: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL:
                asked.append(argument)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return fcntl.fcntl(file, command, argument)

    monkeypatch.setattr(direct, "fcntl", Refusing())
    seen = watch()
    storage = LocalStorage(tmp_path)
    whole = write(storage, pages(3), pages(2))
    assert (tmp_path / "shard").read_bytes() == whole
    assert len(asked) == 1
    assert not any(past for past, _ in seen.writes)


@pytest.mark.parametrize("most", [1, 512, PAGE, PAGE + 512, 3 * PAGE])
def test_writes_that_are_cut_short_are_gone_on_with(
    tmp_path: Path, watch: Callable[..., Watching], most: int
) -> None:
    def cut(file: int, data: memoryview, past: bool) -> int:
        # A device cuts at its own sectors.
        return os.write(file, data[: max(most, 512)] if past else data[:PAGE])

    watch(cut)
    whole = write(LocalStorage(tmp_path), bytes(PAGE), pages(20, 7), pages(1))
    assert (tmp_path / "shard").read_bytes() == whole


@pytest.mark.usefixtures("taken")
def test_after_a_short_write_the_rest_goes_past_the_cache_again(
    tmp_path: Path, watch: Callable[..., Watching]
) -> None:
    cuts = iter([PAGE + 512])

    def cut(file: int, data: memoryview, past: bool) -> int:
        return os.write(file, data[: next(cuts, len(data))])

    seen = watch(cut)
    write(LocalStorage(tmp_path), pages(9))
    assert seen.writes == [(True, 9 * PAGE), (False, PAGE - 512), (True, 7 * PAGE)]


def test_who_says_that_nothing_was_written_is_written_to_through_the_cache(
    tmp_path: Path, watch: Callable[..., Watching]
) -> None:
    watch(lambda file, data, past: 0 if past else os.write(file, data))
    whole = write(LocalStorage(tmp_path), pages(3))
    assert (tmp_path / "shard").read_bytes() == whole


def test_nothing_written_through_the_cache_is_an_error_and_no_loop(
    tmp_path: Path, watch: Callable[..., Watching]
) -> None:
    watch(lambda file, data, past: 0)
    with pytest.raises(StorageError) as caught:
        write(LocalStorage(tmp_path), b"some")
    assert caught.value.where == str(tmp_path / "shard")


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, StorageError)],
)
def test_refusals_past_the_cache_are_told_as_ever_and_leave_nothing(
    tmp_path: Path, watch: Callable[..., Watching], number: int, kind: type[StorageError]
) -> None:
    def fail(file: int, data: memoryview, past: bool) -> int:
        if past:
            raise OSError(number, os.strerror(number))
        return os.write(file, data)

    watch(fail)
    with pytest.raises(kind) as caught:
        write(LocalStorage(tmp_path), bytes(PAGE), pages(3))
    assert type(caught.value) is kind
    assert caught.value.where == str(tmp_path / "shard")
    assert caught.value.details["errno"] == errno.errorcode[number]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("taken")
def test_the_user_may_forbid_it_and_a_copy_in_another_process_knows(
    tmp_path: Path, watch: Callable[..., Watching]
) -> None:
    seen = watch()
    forbidden = open_storage(str(tmp_path / "no"), StorageOptions(direct_io=False))
    for number, storage in enumerate((forbidden, pickle.loads(pickle.dumps(forbidden)))):
        write(storage, pages(3), path=str(number))
    assert not any(past for past, _ in seen.writes)
    write(open_storage(str(tmp_path / "yes")), pages(3))
    assert any(past for past, _ in seen.writes)


def test_judges_that_hear_buffered_files_are_not_passed_by(tmp_path: Path) -> None:
    with buffered():
        whole = write(LocalStorage(tmp_path), bytes(10), pages(3), pages(2))
    assert (tmp_path / "shard").read_bytes() == whole
    assert direct.allowed


def test_the_order_of_syncs_is_what_it_was(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.create("first", b"directories are there and synced")
    parts = [bytes(PAGE), pages(2), b"end"]
    with watched(Recorder(tmp_path)) as recorder:
        whole = write(storage, *parts)
    writes = ["write"] * 3
    syncs = ["sync file", "link", "unlink", "sync directory"]
    assert recorder.steps == ["create", *writes, *syncs]
    assert {tree["run/shard"] for tree in recorder.survivors()} == {whole}


def test_a_witness_in_the_process_sees_its_syncs(tmp_path: Path) -> None:
    with SyncSpy() as spy:
        write(LocalStorage(tmp_path / "run"), bytes(PAGE), pages(3, 9))
    assert unsynced(spy, tmp_path / "run", ["shard"]) == []
