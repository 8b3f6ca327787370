"""Every file under a published generation, every record and receipt: synced whole, and its name.

Two witnesses watch the product's own saving code: one in the process, always; ``strace``, where it
is there. Each is shown a backend that forgets, and must say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saving_story import SAVES, tell

from coherent_ray.commit.generations import Generations
from coherent_ray.drill.shutdowns import Forgets, forgetting
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.syncs import TRACED_CALLS, SyncSpy, Traced, Witness, unsynced

STORY = Path(__file__).parent / "saving_story.py"


def durable(root: Path) -> list[str]:
    """Every file that a reader of the run relies on."""
    storage = LocalStorage(root)
    generations = Generations(storage)
    paths = [entry.path for entry in storage.list("log")]
    published = generations.history().publishes
    assert len(published) == SAVES
    for publish in published:
        assert publish.receipts is not None
        paths += [publish.manifest, publish.receipts.path]
        paths += [shard.path for shard in generations.manifest(publish).shards]
    assert len(paths) == 1 + SAVES * (1 + 1 + 1 + 2)
    return paths


def faults(witness: Witness, root: Path) -> list[str]:
    return unsynced(witness, root, durable(root))


# --- in the process -------------------------------------------------------------------------------


def test_everything_published_was_synced_whole_and_then_its_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with SyncSpy() as spy:
        tell(root)
    assert faults(spy, root) == []
    assert spy.syncs > 2 * len(durable(root))


@pytest.mark.parametrize(
    ("forgets", "said"), [("files", "was never synced"), ("directories", "the name")]
)
def test_the_spy_sees_what_a_backend_forgets(tmp_path: Path, forgets: Forgets, said: str) -> None:
    root = tmp_path / "run"
    with SyncSpy() as spy, forgetting(forgets):
        tell(root)
    found = faults(spy, root)
    assert len(found) >= len(durable(root))
    assert all(said in fault for fault in found)


def test_the_spy_sees_a_sync_that_comes_too_early(tmp_path: Path) -> None:
    with SyncSpy() as spy:
        with (tmp_path / "empty").open("wb") as file:
            file.write(b"still in the buffer")
            os.fsync(file)  # the classic: nothing has left the buffer
        (tmp_path / "rewritten").write_bytes(b"one")
        for path in (tmp_path / "rewritten", tmp_path, tmp_path.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        os.utime(tmp_path / "rewritten", ns=(1, 1))
        (tmp_path / "late").write_bytes(b"")
    assert unsynced(spy, tmp_path, ["empty", "rewritten", "late"]) == [
        "empty was synced at 0 bytes and has 19",
        "rewritten was written after its last sync",
        "late was never synced",
        f"the name {tmp_path.name}/late was never synced",
    ]
    assert os.fsync.__module__ == "posix", "the real one is back"


# --- from outside ---------------------------------------------------------------------------------


def traced(folder: Path, *words: str) -> Traced:
    """Run a program under strace, in this interpreter."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    log = folder / "trace"
    watch = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={TRACED_CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*watch, sys.executable, *words], capture_output=True, text=True, check=False, timeout=240
    )
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"strace may not watch here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return Traced(log.read_text())


def test_strace_sees_everything_published_synced_whole_and_then_its_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    witness = traced(tmp_path, str(STORY), str(root))
    assert faults(witness, root) == []
    assert witness.syncs > 2 * len(durable(root))


@pytest.mark.parametrize(
    ("forgets", "said"), [("files", "was never synced"), ("directories", "the name")]
)
def test_strace_sees_what_a_backend_forgets(tmp_path: Path, forgets: str, said: str) -> None:
    root = tmp_path / "run"
    found = faults(traced(tmp_path, str(STORY), str(root), forgets), root)
    assert len(found) >= len(durable(root))
    assert all(said in fault for fault in found)


EARLY = """
import os, sys
root = sys.argv[1]
os.mkdir(root)
with open(root + "/empty", "wb") as file:
    file.write(b"still in the buffer")
    os.fsync(file)
file = os.open(root + "/more", os.O_CREAT | os.O_WRONLY)
os.write(file, b"one")
os.fsync(file)
os.write(file, b"two")
os.pwrite(file, b"x", 0)
for path in (root, os.path.dirname(root)):
    os.fsync(os.open(path, os.O_RDONLY))
open(root + "/late", "wb").close()
os.rename(root + "/late", root + "/later")
"""


def test_strace_sees_a_sync_that_comes_too_early(tmp_path: Path) -> None:
    root = tmp_path / "run"
    witness = traced(tmp_path, "-c", EARLY, str(root))
    assert unsynced(witness, root, ["empty", "more", "later"]) == [
        "empty was synced at 0 bytes and has 19",
        "more was synced at 3 bytes and has 6",
        "later was never synced",
        "the name run/later was never synced",
    ]


def test_calls_that_overlap_are_put_together_and_a_sync_counts_from_its_beginning() -> None:
    trace = """\
1 openat(3</r>, "a", O_WRONLY|O_CREAT|O_EXCL, 0666) = 4</r/a>
1 write(4</r/a>, ""..., 5) = 5
1 fsync(3</r> <unfinished ...>
2 openat(5</r>, "b", O_WRONLY|O_CREAT|O_EXCL, 0666 <unfinished ...>
1 <... fsync resumed>) = 0
2 <... openat resumed>) = 6</r/b>
1 fsync(4</r/a> <unfinished ...>
2 write(4</r/a>, ""..., 2) = 2
1 <... fsync resumed>) = 0
2 fsync(6</r/b>) = -1 EIO (Input/output error)
1 +++ exited with 0 +++
"""
    witness = Traced(trace)
    assert witness.synced(Path("/r/a")) == (5, True)
    assert witness.named(Path("/r/a"))
    assert witness.synced(Path("/r/b")) is None
    assert not witness.named(Path("/r/b"))
    assert witness.syncs == 2


def test_what_lies_in_a_directory_follows_its_new_name() -> None:
    trace = """\
1 mkdir("/r/tmp", 0777) = 0
1 openat(AT_FDCWD</>, "/r/tmp/a", O_WRONLY|O_CREAT, 0666) = 4</r/tmp/a>
1 write(4</r/tmp/a>, ""..., 5) = 5
1 fsync(4</r/tmp/a>) = 0
1 fsync(5</r/tmp>) = 0
1 openat(AT_FDCWD</>, "/r/tmp/b", O_WRONLY|O_CREAT, 0666) = 6</r/tmp/b>
1 rename("/r/tmp", "/r/final") = 0
"""
    witness = Traced(trace)
    assert witness.synced(Path("/r/final/a")) == (5, False)
    assert witness.named(Path("/r/final/a"))
    assert not witness.named(Path("/r/final/b"))
    assert not witness.named(Path("/r/final")), "its new name was not synced"
    assert witness.synced(Path("/r/tmp/a")) is None


def test_calls_with_one_path_are_taken_too() -> None:
    trace = """\
7 mkdir("/root/tmp", 0777) = 0
7 creat("/root/tmp/file", 0600) = 3</root/tmp/file>
7 unlink("/root/tmp/file") = 0
7 rmdir("/root/tmp") = 0
7 openat(AT_FDCWD</root>, "kept", O_WRONLY|O_CREAT, 0600) = 3</root/kept>
7 fsync(4</root>) = 0
"""
    witness = Traced(trace)
    assert witness.named(Path("/root/kept"))
    assert not witness.named(Path("/root/tmp"))
