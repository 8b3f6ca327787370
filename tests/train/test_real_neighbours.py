"""Bad neighbours for real: file systems that are full, read-only, frozen, cut off and taken away.

Each is mounted for its test; where this process may not, the test is skipped and says why. What is
only played is in `test_bad_neighbours.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coherent_ray.commit.generations import Generations
from coherent_ray.config.sections import Checkpoint
from coherent_ray.drill.disks import SmallDisk
from coherent_ray.drill.saves import Saves
from coherent_ray.errors import LogDamaged, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.loop_device import Disk

SIZE = 4 * 2**20
SHORT_S = 0.5
OPTIONS = Checkpoint(block_bytes=4096, max_failed_saves=20, storage_timeout_s=60)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    place.mkdir()
    return place


@pytest.fixture
def small(root: Path) -> Iterator[SmallDisk]:
    """A small file system in memory where the run lies."""
    try:
        disk = SmallDisk(root, SIZE)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield disk
    disk.close()


@contextmanager
def saving(root: Path) -> Iterator[Saves]:
    """Two ranks that have published g1."""
    saves = Saves(lambda: LocalStorage(root), items=3000, options=OPTIONS)
    try:
        saves.open()
        assert {one.fate.kind for one in saves.save()} == {"published"}
        yield saves
    finally:
        saves.close()


@contextmanager
def impatient(saves: Saves) -> Iterator[None]:
    """Within, a storage that owes an answer for `SHORT_S` is not waited for any longer."""
    patient, wait_s = OPTIONS, saves.service._storage_timeout_s
    hasty = OPTIONS.model_copy(update={"storage_timeout_s": SHORT_S})
    try:
        saves.service._storage_timeout_s = SHORT_S
        for saver in saves.savers:
            saver._options = hasty
        yield
    finally:
        saves.service._storage_timeout_s = wait_s
        for saver in saves.savers:
            saver._options = patient


def failed(saves: Saves) -> str:
    """Save, see both ranks fail, and return why."""
    saved = saves.save()
    assert [one.fate.kind for one in saved] == ["failed"] * 2
    return saved[0].fate.reason


def published(saves: Saves) -> None:
    saved = saves.save()
    assert [one.fate.kind for one in saved] == ["published"] * 2, saved[0].fate.reason


def latest_of(root: Path) -> str:
    found = Generations(LocalStorage(root)).select("refuse")
    assert found is not None
    return found.publish.name


def test_a_full_file_system(root: Path, small: SmallDisk) -> None:
    with saving(root) as saves:
        small.fill()
        reason = failed(saves)
        assert str(root) in reason
        assert "no space left on device" in reason
        assert latest_of(root) == "g1-a1"
        small.free()
        published(saves)
    assert latest_of(root) == "g3-a1"


def test_a_file_system_that_is_made_read_only(root: Path, small: SmallDisk) -> None:
    with saving(root) as saves:
        command("mount", "-o", "remount,ro", str(root))
        reason = failed(saves)
        assert str(root) in reason
        assert "read-only file system" in reason
        assert latest_of(root) == "g1-a1"
        command("mount", "-o", "remount,rw", str(root))
        published(saves)
    assert latest_of(root) == "g3-a1"


def test_a_user_without_rights() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody who may not")
    folder = Path(tempfile.mkdtemp(prefix="coherent-ray-"))
    try:
        folder.chmod(0o755)
        root = folder / "run"
        with saving(root) as saves:
            os.seteuid(65_534)
            try:
                reason = failed(saves)
            finally:
                os.seteuid(0)
            assert str(root) in reason
            assert "permission denied" in reason
            assert latest_of(root) == "g1-a1"
            published(saves)
        assert latest_of(root) == "g3-a1"
    finally:
        shutil.rmtree(folder)


# --- a file system that is not there any more -----------------------------------------------------


@pytest.fixture
def vanishing(root: Path, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A file system where the run lies, that can be taken away; called again, it is back."""
    behind = tmp_path / "behind"
    behind.mkdir()
    try:
        disk = SmallDisk(behind, SIZE)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    there = [False]

    def swap() -> None:
        if there[0]:
            command("umount", "-l", str(root))
        else:
            command("mount", "--bind", str(behind), str(root))
        there[0] = not there[0]

    try:
        swap()
        yield swap
    finally:
        subprocess.run(["umount", "-l", str(root)], capture_output=True, check=False)
        disk.close()


def test_a_mount_that_vanishes_is_missed_and_no_second_history_begins(
    root: Path, vanishing: Callable[[], None]
) -> None:
    with saving(root) as saves:
        vanishing()
        for _ in range(2):
            reason = failed(saves)
            assert reason.startswith("rank ")
            assert f"{root}/log/00000000000000000001.json: the last record that was read" in reason
        assert list(root.iterdir()) == [], "nothing is written below the mount point"
        with pytest.raises(LogDamaged, match="not here any more"):
            saves.open()
        assert not list(root.glob("log/*"))
        vanishing()
        assert latest_of(root) == "g1-a1"
        published(saves)
    assert latest_of(root) == "g4-a1"


def test_a_coordinator_whose_mount_vanishes_alone_publishes_nothing(
    root: Path, vanishing: Callable[[], None]
) -> None:
    """Its ranks, on other nodes, still write; here they are made to forget the log."""
    with saving(root) as saves:
        for saver in saves.savers:
            saver._log = None
        vanishing()
        reason = failed(saves)
        assert f"{root}/log/" in reason
        assert "not here any more" in reason
        assert not list(root.glob("log/*"))
        vanishing()
        published(saves)
    assert latest_of(root) == "g3-a1"


# --- devices --------------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Disk]:
    with suppress(StorageError), Disk("ext4", tmp_path, 64 << 20) as disk:
        yield disk
        return
    pytest.skip("no loop device can be mounted here")


def test_a_device_that_fails_and_is_mounted_again(device: Disk) -> None:
    root = device.place / "run"
    with saving(root) as saves:
        device.cut()
        reason = failed(saves)
        assert str(root) in reason
        assert "input/output error" in reason
        device.unmount()
        device.mount()
        assert latest_of(root) == "g1-a1"
        published(saves)
    assert latest_of(root) == "g3-a1"


def test_a_file_system_that_stands_still(device: Disk) -> None:
    """Frozen by the kernel: every write hangs where no signal reaches it, until it is thawed."""
    if shutil.which("fsfreeze") is None:
        pytest.skip("there is no fsfreeze")
    root, place = device.place / "run", str(device.place)
    with saving(root) as saves:
        # If this test dies, the file system must not stay as it is.
        with subprocess.Popen(["sh", "-c", f"sleep 45; fsfreeze -u {place}"]) as rescue:
            command("fsfreeze", "-f", place)
            try:
                begun = time.monotonic()
                with impatient(saves):
                    reason = failed(saves)
                    again = failed(saves)
                assert time.monotonic() - begun < 20
                assert latest_of(root) == "g1-a1"
            finally:
                command("fsfreeze", "-u", place)
                rescue.terminate()
        assert str(root) in reason
        assert "no answer from the storage for" in reason
        assert "no answer from the storage for" in again
        end = time.monotonic() + 30
        while any(saver._is_stuck() for saver in saves.savers) and time.monotonic() < end:
            time.sleep(0.01)
        published(saves)
    assert latest_of(root) == "g4-a1"


def test_a_system_call_that_fails_in_a_process_that_goes_on(tmp_path: Path) -> None:
    """`strace` lets every sync of a living process fail for a while, as a dying disk would."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    script = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from test_real_neighbours import saving
with saving(Path(sys.argv[1])) as saves:
    print("ready", flush=True)
    for line in sys.stdin:
        print(*{f"{s.fate.kind}: {s.fate.reason}" for s in saves.save()}, flush=True)
"""
    root = tmp_path / "run"
    words = [sys.executable, "-c", script, str(root), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def answer(said: str = "") -> str:
            if said:
                print(said, file=child.stdin, flush=True)
            return child.stdout.readline().strip() if child.stdout else ""

        assert answer() == "ready"
        inject = "inject=fsync:error=EIO"
        tracing = ["strace", "-f", "-p", str(child.pid), "-e", "trace=fsync", "-e", inject]
        with subprocess.Popen(tracing, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            first = tracer.stderr.readline()
            if "attached" not in first:
                child.kill()
                pytest.skip(f"strace cannot attach here: {first.strip()}")
            said = answer("save")
            tracer.terminate()
            tracer.communicate(timeout=30)
        assert said.startswith("failed: rank ")
        assert f"{root}/" in said
        assert "input/output error" in said
        assert latest_of(root) == "g1-a1"
        assert answer("save") == "published:"
        child.stdin.close()
        assert child.wait(30) == 0
    assert latest_of(root) == "g3-a1"
