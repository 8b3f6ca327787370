"""Commands that look at a root of which the log is gone, or cut off, call it damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published import Published


def made(folder: Path) -> Published:
    run = Published(folder / "run")
    run.open_attempt()
    run.publish(2)
    run.publish(4)
    run.log.refresh_hint(run.log.read())
    return run


@pytest.mark.parametrize("command", ["ls", "show", "verify", "receipts", "prune"])
@pytest.mark.parametrize("how", ["gone", "empty", "file"])
def test_without_its_log(call: Any, tmp_path: Path, command: str, how: str) -> None:
    run = made(tmp_path)
    (run.root / "log").rename(tmp_path / "elsewhere")
    if how == "empty":
        (run.root / "log").mkdir()
    elif how == "file":
        (run.root / "log").write_text("x")
    done = call(command, run.root)
    assert (done.code, done.out) == (1, "")
    assert "the commit log is gone, but there are files of a run" in done.err
    assert "What to do" in done.err


def test_a_place_without_a_trace_of_a_run_is_misuse(call: Any, tmp_path: Path) -> None:
    done = call("ls", tmp_path)
    assert done.code == 2
    assert "no run lies here" in done.err


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["verify", "--all"]])
def test_without_its_end(call: Any, tmp_path: Path, command: list[str]) -> None:
    run = made(tmp_path)
    max((run.root / "log").iterdir()).unlink()
    done = call(*command, run.root)
    assert done.code == 1
    assert "missing at its end" in " ".join(done.out.split())
    done = call(*command, run.root, "--json")
    assert done.code == 1
    assert done.json["log"]["where"] == "latest.json"


@pytest.mark.parametrize("command", ["show", "receipts"])
def test_showing_what_is_left_warns(call: Any, tmp_path: Path, command: str) -> None:
    run = made(tmp_path)
    assert "warning" not in call(command, run.root).err
    max((run.root / "log").iterdir()).unlink()
    done = call(command, run.root, "--json")
    assert done.out.startswith("{"), "the answer stands alone"
    assert "warning: latest.json tells of record 3, which is gone" in done.err


def without_the_second_attempt(folder: Path) -> Published:
    """Its records and the hint are lost; the generations that it published are there."""
    run = made(folder)
    known = len(run.log.read().records)
    run.open_attempt()
    run.publish(6)
    run.publish(8)
    for path in sorted((run.root / "log").iterdir())[known:]:
        path.unlink()
    (run.root / "latest.json").unlink()
    return run


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["verify", "--all"]])
def test_looking_without_its_end_and_without_the_hint(
    call: Any, tmp_path: Path, command: list[str]
) -> None:
    run = without_the_second_attempt(tmp_path)
    done = call(*command, run.root)
    assert done.code == 1
    assert "generations/g3-a2, generations/g4-a2" in done.out
    assert "Put the missing records back" in done.out
    assert call(*command, run.root, "--json").json["log"]["type"] == "LogDamaged"


@pytest.mark.parametrize("command", [["prune"], ["prune", "--dry-run"], ["pin"], ["unpin"]])
def test_changing_without_its_end_and_without_the_hint(
    call: Any, tmp_path: Path, command: list[str]
) -> None:
    run = without_the_second_attempt(tmp_path)
    (run.root / "generations/g9-a9").mkdir()
    (run.root / "generations/g9-a9/shard-00000-of-00002.safetensors").write_text("x")
    before = {entry.path for entry in run.storage.list("")}
    done = call(*command, run.root)
    assert (done.code, done.out) == (1, "")
    assert "generations/g3-a2, generations/g4-a2, generations/g9-a9" in done.err
    assert {entry.path for entry in run.storage.list("")} == before


def test_a_bit_of_the_hint_stops_nobody(call: Any, tmp_path: Path) -> None:
    run = made(tmp_path)
    hint = run.root / "latest.json"
    at = hint.read_text().index("blake3:") + 10
    data = bytearray(hint.read_bytes())
    data[at] ^= 1
    hint.write_bytes(data)
    assert call("ls", run.root).code == 0
    assert call("prune", run.root).code == 0


@pytest.mark.parametrize("command", [["ls"], ["verify", "--all"]])
def test_a_whole_log_is_no_news(call: Any, tmp_path: Path, command: list[str]) -> None:
    done = call(*command, made(tmp_path).root, "--json")
    assert done.code == 0
    assert done.json["log"] is None
