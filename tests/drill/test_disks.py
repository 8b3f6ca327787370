"""Full storages: a real one where it can be mounted, and the quota that stands in for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from coherent_ray.drill import disks, quota
from coherent_ray.drill.disks import Disk, SmallDisk, disk_for
from coherent_ray.drill.stage import stage_of
from coherent_ray.errors import StorageFull
from coherent_ray.storage import Storage, open_storage

SIZE = 2 * 2**20


@pytest.fixture
def stage(tmp_path: Path) -> Storage:
    return stage_of(str(tmp_path / "run"))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "run"
    place.mkdir()
    try:
        disk = SmallDisk(place, SIZE)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield disk
    disk.close()


def test_a_small_disk_is_full_and_has_room_again(mounted: SmallDisk, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    storage.create("before", b"x" * 5000)
    assert "run" in mounted.fill()
    with pytest.raises(StorageFull):
        storage.create("during", b"x" * 5000)
    mounted.free()
    storage.create("after", b"x" * 5000)
    assert storage.read("before") == storage.read("after")


def test_what_lay_on_a_small_disk_is_gone_with_it(tmp_path: Path, mounted: SmallDisk) -> None:
    (tmp_path / "run" / "file").write_bytes(b"x")
    mounted.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_quota_refuses_shards_while_the_stage_says_so(tmp_path: Path, stage: Storage) -> None:
    inner = open_storage(str(tmp_path / "run"))
    disk = Disk(stage)
    limited = quota.limited(inner, stage)
    assert limited is not inner

    def write(path: str) -> None:
        with limited.open_writer(path) as writer:
            writer.write(b"bytes")
            writer.finish()

    write("before")
    disk.fill()
    with pytest.raises(StorageFull):
        write("during")
    disk.free()
    write("after")
    assert {entry.path for entry in inner.list()} == {"before", "after"}


def test_without_a_quota_the_storage_is_the_run_s_own(tmp_path: Path, stage: Storage) -> None:
    inner = open_storage(str(tmp_path / "run"))
    assert quota.limited(inner, stage) is inner


def test_where_nothing_can_be_mounted_it_is_a_quota_and_says_so(
    tmp_path: Path, stage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(place: Path, size: int) -> SmallDisk:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(disks, "SmallDisk", refused)
    monkeypatch.setattr(disks.os, "geteuid", lambda: 0)
    disk = disk_for(str(tmp_path / "run"), SIZE, stage)
    assert type(disk) is Disk
    assert "quota" in disk.kind
    assert not (tmp_path / "run").exists()
