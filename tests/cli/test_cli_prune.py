"""``prune``, ``pin`` and ``unpin``: what they say, what they do, and that they agree."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from published import RUN_ID, flip

from coherent_ray.commit.holds import Hold
from coherent_ray.commit.log import CommitLog


def live(run) -> list[str]:
    return [publish.name for publish in CommitLog(run.storage).read().live]


def files(run) -> set[str]:
    return {str(p.relative_to(run.root)) for p in run.root.rglob("*") if p.is_file()}


def hold(run, number: int, lease_s: float = 60.0) -> Hold:
    publish = next(p for p in run.log.read().publishes if p.number == number)
    made = Hold(run.storage, publish, lease_s)
    made.take(run.log)
    return made


# --- prune ----------------------------------------------------------------------------------------


def test_old_generations_go(call, published):
    done = call("prune", published.root, "--keep", "2")
    assert done.code == 0
    rows = done.rows()
    assert rows[0] == ["generation", "update", "state", "why"]
    assert rows[1] == ["g1-a1", "10", "retired"]
    assert rows[2] == ["g2-a1", "20", "whole", "among", "the", "newest"]
    assert rows[3] == ["g3-a2", "30", "whole", "among", "the", "newest"]
    assert done.out.splitlines()[4].startswith("deleted 3 files, ")
    assert live(published) == ["g2-a1", "g3-a2"]
    assert not (published.root / "generations/g1-a1").exists()
    assert call("verify", published.root, "--all").code == 0
    assert call("receipts", published.root, "--json").code == 0


def test_a_dry_run_changes_nothing(call, published):
    before = files(published)
    dry = call("prune", published.root, "--keep", "1", "--dry-run", "--json").json
    assert files(published) == before
    assert live(published) == ["g1-a1", "g2-a1", "g3-a2"]
    assert dry["dry_run"] is True
    assert dry["retired"] == ["g1-a1", "g2-a1"]
    assert dry["kept"] == [{"generation": "g3-a2", "reason": "recent", "whole": True}]
    plain = call("prune", published.root, "--keep", "1", "--dry-run")
    assert plain.rows()[1] == ["g1-a1", "10", "would", "go"]
    assert "would delete 6 files" in plain.out
    real = call("prune", published.root, "--keep", "1", "--json").json
    assert {key: real[key] for key in real if key != "dry_run"} == {
        key: dry[key] for key in dry if key != "dry_run"
    }
    gone = {entry["path"] for entry in real["deleted"]}
    assert gone == before - files(published) - {f"log/{n:020d}.json" for n in (6, 7)}
    assert real["freed"] == sum(entry["size"] for entry in real["deleted"]) > 0


def test_without_options_nothing_is_given_up(call, published):
    stray = published.root / "generations/g7-a1/shard-00000-of-00001.safetensors"
    stray.parent.mkdir()
    stray.write_bytes(b"left by attempt 1")
    done = call("prune", published.root, "--json")
    assert done.code == 0
    assert done.json["retired"] == []
    assert [entry["path"] for entry in done.json["deleted"]] == [
        "generations/g7-a1/shard-00000-of-00001.safetensors"
    ]
    assert not stray.parent.exists()
    assert len(live(published)) == 3


def test_milestones(call, published):
    done = call("prune", published.root, "--keep", "1", "--keep-every", "20", "--json")
    assert [(k["generation"], k["reason"]) for k in done.json["kept"]] == [
        ("g2-a1", "every"), ("g3-a2", "recent"),
    ]  # fmt: skip
    assert done.json["retired"] == ["g1-a1"]


def test_a_configuration_says_what_to_keep(call, configuration, make_run, tmp_path):
    run = make_run(tmp_path / "root")
    run.open_attempt()
    for update in range(10, 60, 10):
        run.publish(update)
    path = configuration(checkpoint={"keep": 2, "keep_every": 20})
    dry = call("prune", path, "--dry-run", "--json").json
    assert dry["retired"] == ["g1-a1", "g3-a1"]
    # An option replaces its own setting alone.
    dry = call("prune", path, "--dry-run", "--json", "--keep", "1").json
    assert dry["retired"] == ["g1-a1", "g3-a1"]
    dry = call("prune", path, "--dry-run", "--json", "--keep-every", "1000").json
    assert dry["retired"] == ["g1-a1", "g2-a1", "g3-a1"]
    dry = call("prune", run.root, "--dry-run", "--json", "--keep", "2").json
    assert dry["retired"] == ["g1-a1", "g2-a1", "g3-a1"]


def test_damage_counts_for_nothing_and_is_said(call, published):
    flip(published.root / "generations/g3-a2/shard-00001-of-00003.safetensors", 600)
    done = call("prune", published.root, "--keep", "1")
    assert done.code == 0
    assert [row[:3] for row in done.rows()[1:4]] == [
        ["g1-a1", "10", "retired"], ["g2-a1", "20", "whole"], ["g3-a2", "30", "damaged"],
    ]  # fmt: skip
    assert live(published) == ["g2-a1", "g3-a2"]


def test_foreign_files_are_named_and_left(call, published):
    mine = [published.root / "notes.txt", published.root / "generations/g1-a1/notes.txt"]
    for path in mine:
        path.write_text("mine")
    done = call("prune", published.root, "--keep", "1")
    assert "2 files not of this run, left as found:" in done.out
    assert "  notes.txt (4 B)" in done.out
    assert all(path.read_text() == "mine" for path in mine)
    for number in range(12):
        (published.root / f"note-{number}").write_text("mine")
    assert "  and 4 more" in call("prune", published.root).out
    value = call("prune", published.root, "--json").json
    assert len(value["foreign"]) == 14
    assert value["foreign"][0] == {"path": "generations/g1-a1/notes.txt", "size": 4}


def test_the_files_of_ray_are_not_foreign(call, published):
    for name in ("checkpoint_manager_snapshot.json", ".validate_storage_marker"):
        (published.root / name).write_text("{}")
    assert call("prune", published.root, "--json").json["foreign"] == []


def test_a_file_that_cannot_be_deleted(call, published, monkeypatch):
    from coherent_ray.errors import StorageError
    from coherent_ray.storage import LocalStorage

    real = LocalStorage.delete

    def delete(self, path):
        if path.endswith("g1-a1/shard-00000-of-00002.safetensors"):
            raise StorageError("permission denied", where=path)
        real(self, path)

    monkeypatch.setattr(LocalStorage, "delete", delete)
    done = call("prune", published.root, "--keep", "2")
    assert done.code == 1
    assert "could not be deleted: generations/g1-a1/shard-00000" in done.out
    assert "permission denied" in done.out


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_that_lives_is_left_in_peace(call, published):
    made = hold(published, 1)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            made.renew()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        done = call("prune", published.root, "--keep", "1")
    finally:
        stop.set()
        thread.join()
    assert done.code == 0
    assert "waiting to see whether these readers live: process" in done.out
    assert "in the way: process" in done.out
    assert live(published) == ["g1-a1", "g3-a2"]
    made.release()
    assert call("prune", published.root, "--keep", "1", "--json").json["retired"] == ["g1-a1"]


def test_a_reader_that_died_is_found_out(call, published):
    made = hold(published, 1, lease_s=0.2)
    done = call("prune", published.root, "--keep", "1", "--json")
    assert done.json["held"] == []
    assert sorted(done.json["retired"]) == ["g1-a1", "g2-a1"]
    assert made.path in [entry["path"] for entry in done.json["deleted"]]
    assert live(published) == ["g3-a2"]


@pytest.mark.parametrize("options", [["--no-wait"], ["--dry-run"]])
def test_nobody_waits_who_does_not_want_to(call, published, options):
    hold(published, 1, lease_s=3600.0)
    done = call("prune", published.root, "--keep", "1", "--json", *options)
    (held,) = done.json["held"]
    assert held["generation"] == "g1-a1"
    assert "process" in held["by"]
    assert done.json["retired"] == ["g2-a1"]


def test_a_hold_that_nobody_can_read_is_not_waited_for(call, published):
    path = published.root / f"holds/g1-a1-{'0' * 32}.json"
    path.parent.mkdir()
    path.write_text("of a later version")
    done = call("prune", published.root, "--keep", "1", "--json")
    assert [held["path"] for held in done.json["held"]] == [f"holds/{path.name}"]
    assert live(published) == ["g1-a1", "g3-a2"]


# --- pin and unpin --------------------------------------------------------------------------------


def test_what_is_pinned_stays(call, published):
    done = call("pin", f"{published.root}@g1")
    assert (done.code, done.out) == (0, "g1-a1 (update 10) is pinned\n")
    call("prune", published.root, "--keep", "1")
    assert live(published) == ["g1-a1", "g3-a2"]
    states = {row[0]: row[-1] for row in call("ls", published.root).rows()[2:]}
    assert states == {"g1-a1": "pinned", "g3-a2": "latest"}
    done = call("unpin", f"{published.root}@g1-a1")
    assert (done.code, done.out) == (0, "g1-a1 (update 10) is not pinned\n")
    call("prune", published.root, "--keep", "1")
    assert live(published) == ["g3-a2"]


def test_saying_it_twice_changes_nothing(call, published):
    root = published.root
    assert call("unpin", f"{root}@g1", "--json").json["changed"] is False
    assert call("pin", f"{root}@g1", "--json").json == {
        "root": str(root), "generation": "g1-a1", "pinned": True, "changed": True,
    }  # fmt: skip
    records = len(CommitLog(published.storage).read().records)
    assert call("pin", f"{root}@g1", "--json").json["changed"] is False
    assert len(CommitLog(published.storage).read().records) == records
    assert call("unpin", f"{root}@g1", "--json").json["changed"] is True
    assert call("pin", f"{root}@g1", "--json").json["changed"] is True


def test_the_latest_where_none_is_named(call, published):
    for run in (published.root, f"{published.root}@latest"):
        assert call("pin", run, "--json").json["generation"] == "g3-a2"
        assert call("unpin", run, "--json").json["generation"] == "g3-a2"


def test_what_is_not_there_cannot_be_pinned(call, published):
    done = call("pin", f"{published.root}@g9", "--json")
    assert (done.code, done.json["error"]["type"]) == (1, "NoGeneration")
    call("prune", published.root, "--keep", "1")
    done = call("pin", f"{published.root}@g1")
    assert done.code == 1
    assert "g1 is retired" in done.err


def test_an_attempt_that_opens_meanwhile_is_no_reason_to_fail(call, published, monkeypatch):
    real = CommitLog.append
    opened = []

    def append(self, body, attempt):
        if not opened:
            opened.append(attempt)
            CommitLog(published.storage).open_attempt(RUN_ID, "meanwhile")
        return real(self, body, attempt)

    monkeypatch.setattr(CommitLog, "append", append)
    assert call("pin", f"{published.root}@g1").code == 0
    history = CommitLog(published.storage).read()
    assert history.attempt == 3
    assert history.pinned == {(1, 1)}


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [["--keep", "0"], ["--keep", "x"], ["--keep-every", "10"], ["--keep-every", "0"]]
)
def test_misuse(call, published, options):
    before = files(published)
    assert call("prune", published.root, *options).code == 2
    assert files(published) == before


def test_a_whole_run_is_pruned(call, published, tmp_path):
    assert call("prune", f"{published.root}@g1", "--keep", "1").code == 2
    done = call("prune", tmp_path / "nothing", "--json")
    assert (done.code, done.json["error"]["type"]) == (2, "NotARun")


def test_a_run_without_generations(call, make_run, tmp_path):
    make_run(tmp_path / "new").open_attempt()
    done = call("prune", tmp_path / "new", "--keep", "1")
    assert (done.code, done.out) == (0, "deleted 0 files, 0 B\n")


def test_verify_does_not_miss_what_was_pruned_under_it(call, published, monkeypatch):
    from coherent_ray.commit.generations import Generations

    real, pruned = Generations.verify, []

    def verify(self, publish, deep=True):
        if not pruned:
            pruned.append(call("prune", published.root, "--keep", "1").code)
        return real(self, publish, deep)

    monkeypatch.setattr(Generations, "verify", verify)
    done = call("verify", published.root, "--all")
    assert done.code == 0
    assert done.out.splitlines()[:3] == [
        "g1-a1 (update 10): retired meanwhile",
        "g2-a1 (update 20): retired meanwhile",
        "g3-a2 (update 30): whole",
    ]


def test_a_damaged_generation_has_its_file_and_what_to_do(call, published):
    path = "generations/g3-a2/shard-00001-of-00003.safetensors"
    flip(published.root / path, 600)
    done = call("prune", published.root, "--keep", "1", "--dry-run")
    assert f"  {path}: block 0 (bytes 0 to 4096)" in done.out
    assert f"`coherent-ray verify {published.root}@g3-a2`" in done.out
    value = call("prune", published.root, "--keep", "1", "--json").json
    assert value["damaged"]["g3-a2"]["where"] == path
    assert list(value["damaged"]) == ["g3-a2"]


@pytest.mark.parametrize(
    ("name", "told"),
    [(b"a\x1b[31mb", r"a\x1b[31mb"), (b"a\nb", r"a\nb"), (b"a\xffb", r"a\xffb")],
)
def test_a_name_harms_no_terminal(call, published, name, told):
    Path(os.fsdecode(os.fsencode(published.root) + b"/" + name)).write_text("x")
    for command in (["prune", "--dry-run"], ["verify", "--all"]):
        done = call(*command, published.root)
        assert done.code == 0
        assert f"  {told} (1 B)" in done.out
        assert "\x1b" not in done.out
        found = call(*command, published.root, "--json").json
        (entry,) = found["foreign"] if "foreign" in found else found["extra"]
        assert os.fsencode(entry["path"]) == name
