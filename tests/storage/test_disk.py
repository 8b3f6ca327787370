"""The model of a disk: what a power cut may leave, counted by hand for small stories."""

import pytest

from coherent_ray.storage.testing.disk import BLOCK_BYTES, Directory, Disk, File, Image, Model


def images(disk: Disk) -> list[Image]:
    found = {tuple(sorted(image.items(), key=str)): image for image in disk.images()}
    return list(found.values())


def written(disk: Disk, name: str, content: bytes) -> File:
    file = File()
    disk.change(disk.root, {name: file})
    file.content = content
    return file


@pytest.mark.parametrize("model", ["weak", "ordered"])
def test_what_was_synced_is_the_only_thing_that_can_be_found(model: Model) -> None:
    disk = Disk(model)
    disk.sync_file(written(disk, "a", b"1"))
    disk.sync_directory(disk.root)
    assert images(disk) == [{"a": b"1"}]
    assert disk.unsure() == []


def test_a_synced_file_without_a_synced_name_may_be_gone_only_on_a_weak_disk() -> None:
    for model, missing in (("weak", True), ("ordered", False)):
        disk = Disk(model)
        disk.sync_file(written(disk, "a", b"1"))
        assert ({} in images(disk)) is missing


def test_names_come_in_any_combination_or_in_order() -> None:
    for model, combinations in (("weak", 8), ("ordered", 4)):
        disk = Disk(model)
        for name in "abc":
            disk.change(disk.root, {name: File()})
        assert len(images(disk)) == combinations


def test_bytes_are_lost_torn_hollow_garbage_or_there() -> None:
    disk = Disk()
    file = written(disk, "a", bytes([7]) * (2 * BLOCK_BYTES + 10))
    disk.sync_directory(disk.root)
    found = {image["a"] for image in images(disk)}
    now = file.content
    assert {b"", now, now[:BLOCK_BYTES], now[: 2 * BLOCK_BYTES], bytes(len(now))} <= found
    assert any(
        data not in {now, bytes(len(now))} and len(data or b"") == len(now) for data in found
    )


def test_a_rename_is_one_change_and_a_file_keeps_the_bytes_that_were_synced() -> None:
    disk = Disk()
    disk.sync_file(written(disk, "hint", b"old"))
    disk.sync_directory(disk.root)
    new = written(disk, "temporary", b"new")
    disk.sync_file(new)
    disk.sync_directory(disk.root)
    disk.change(disk.root, {"temporary": None, "hint": new})
    assert images(disk) == [{"hint": b"old", "temporary": b"new"}, {"hint": b"new"}]


def test_what_lies_in_a_directory_is_lost_with_its_name() -> None:
    disk = Disk()
    below = Directory()
    disk.change(disk.root, {"g1": below})
    file = File(b"1")
    disk.change(below, {"shard": file})
    disk.sync_file(file)
    disk.sync_directory(below)
    assert images(disk) == [{}, {"g1": None, "g1/shard": b"1"}]


def test_what_nobody_reads_is_there_or_not_whatever_its_bytes() -> None:
    disk = Disk(unread=".tmp-")
    written(disk, ".tmp-1", b"half")
    assert [set(image) for image in images(disk)] == [set(), {".tmp-1"}]


def test_more_outcomes_than_asked_for_are_drawn_from_a_seed_with_both_extremes() -> None:
    disk = Disk()
    for name in "abcdefgh":
        disk.change(disk.root, {name: File()})
    drawn = list(disk.images(most=20, seed=3))
    assert len(drawn) == 20
    assert drawn[:2] == [{}, dict.fromkeys("abcdefgh", b"")]
    assert drawn == list(disk.images(most=20, seed=3)) != list(disk.images(most=20, seed=4))
