"""Real power cuts in small: a handful on each file system, and controls that must be caught.

At length: ``benchmarks/power_cuts.py``, whose result is kept as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from coherent_ray.drill.shutdowns import Promises, campaign, judged
from coherent_ray.storage.testing.loop_device import Disk, Journal, Kind, why_not
from coherent_ray.storage.testing.memory import MemoryStorage

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "power_cuts.json"
KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if reason := why_not(request.param, tmp_path):
        pytest.skip(f"no disk can be cut here: {reason}")
    return request.param


@pytest.mark.parametrize("journal", get_args(Journal))
def test_what_was_promised_survives_real_cuts_and_the_run_goes_on(
    kind: Kind, journal: Journal, tmp_path: Path
) -> None:
    done = campaign(kind, journal, 3, 7, tmp_path)
    assert [cut.problems for cut in done.cuts] == [()] * 3
    assert list(tmp_path.iterdir()) == [], "disks must go"


def test_a_backend_that_forgets_to_sync_files_is_caught(kind: Kind, tmp_path: Path) -> None:
    """Directories are harder: a journal forgives them mostly; see `test_durability.py`."""
    done = campaign(kind, "logflush", 3, 7, tmp_path, forgets="files")
    assert done.failures > 0


def test_a_cut_disk_refuses_everything_and_keeps_what_was_synced(
    kind: Kind, tmp_path: Path
) -> None:
    with Disk(kind, tmp_path) as disk:
        (disk.place / "before").write_bytes(b"x")
        disk.remount("sync")
        (disk.place / "synced").write_bytes(b"y")
        disk.remount("async")
        (disk.place / "unsynced").write_bytes(b"z")
        disk.cut()
        with pytest.raises(OSError, match="Input/output"):
            (disk.place / "after").write_bytes(b"x")
        disk.unmount()
        disk.mount()
        assert (disk.place / "synced").read_bytes() == b"y"
        assert not (disk.place / "unsynced").exists()


def test_an_empty_root_breaks_a_promise_only_if_one_was_made() -> None:
    assert judged(MemoryStorage(), Promises()) == []
    assert judged(MemoryStorage(), Promises(["g1-a1"], 1)) == [
        "g1-a1 was called published, and is not in the log",
        "nothing can be selected",
    ]


def test_a_reason_is_given_where_there_is_no_such_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not("xfs", tmp_path) == "there is no mkfs.xfs"


def test_the_campaign_on_record_held() -> None:
    result = json.loads(RESULT.read_text())
    assert result["held"]
    real = [row for row in result["campaigns"] if row["forgets"] == "nothing"]
    assert {(row["file_system"], row["shutdown"]) for row in real} == {
        (kind, journal) for kind in KINDS for journal in get_args(Journal)
    }
    assert sum(row["cuts"] for row in real) >= 200
    assert all(row["failures"] == 0 for row in real)
    controls = [row for row in result["campaigns"] if row["forgets"] != "nothing"]
    assert all(row["failures"] > 0 for row in controls)
