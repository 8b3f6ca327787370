"""``ls`` and ``show``: what was published is what is told, and damage is not hidden."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from published import RUN_ID, flip

from coherent_ray import canonical
from coherent_ray.commit.findings import finding_of, write_findings
from coherent_ray.commit.manifest import Manifest, load
from coherent_ray.commit.records import PinBody, RetireBody
from coherent_ray.errors import ShardDamaged


def test_ls_tells_every_generation(call, published):
    done = call("ls", published.root)
    assert done.code == 0
    assert done.err == ""
    head, titles, *rows = done.rows()
    assert " ".join(head) == "run first: 3 generations, 2 attempts"
    assert titles == ["generation", "update", "epoch", "ranks", "attempt", "size", "when", "state"]
    assert [(row[0], row[1], row[3], row[4], row[-1]) for row in rows] == [
        ("g1-a1", "10", "2", "1", "published"),
        ("g2-a1", "20", "2", "1", "published"),
        ("g3-a2", "30", "3", "2", "latest"),
    ]


def test_ls_columns_stand_under_their_titles(call, published):
    _, titles, *rows = call("ls", published.root).out.splitlines()
    at = titles.index("state")
    assert [row[at:] for row in rows] == ["published", "published", "latest"]


def test_ls_as_json(call, published):
    value = call("ls", published.root, "--json").json
    assert value["run_id"] == RUN_ID
    assert value["root"] == str(published.root)
    assert value["attempts"] == 2
    assert [g["generation"] for g in value["generations"]] == ["g1-a1", "g2-a1", "g3-a2"]
    newest = value["generations"][-1]
    files = list((published.root / "generations/g3-a2").iterdir())
    assert newest["size"] == sum(path.stat().st_size for path in files)
    assert (newest["update"], newest["ranks"], newest["latest"]) == (30, 3, True)
    assert newest["published_at"].endswith("+00:00")
    assert newest["damage"] is None


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/"])
def test_ls_takes_every_form_of_a_root(call, published, form):
    done = call("ls", form.format(published.root), "--json")
    assert done.code == 0
    assert len(done.json["generations"]) == 3


def test_ls_takes_a_configuration(call, published, configuration):
    path = configuration(run={"root": str(published.root)})
    assert len(call("ls", path, "--json").json["generations"]) == 3


def test_ls_hides_retired_generations_unless_asked(call, published):
    published.log.append(RetireBody(number=1, attempt=1), published.attempt)
    published.log.append(PinBody(number=2, attempt=1, pinned=True), published.attempt)
    assert [row[0] for row in call("ls", published.root).rows()[2:]] == ["g2-a1", "g3-a2"]
    rows = call("ls", published.root, "--all").out.splitlines()[2:]
    assert rows[0].endswith("retired")
    assert rows[1].endswith("published, pinned")


def test_ls_of_a_retired_generation_does_not_need_its_files(call, published):
    published.log.append(RetireBody(number=1, attempt=1), published.attempt)
    (published.root / "generations/g1-a1/manifest.json").unlink()
    assert call("ls", published.root, "--all").code == 0


def test_ls_names_a_damaged_manifest(call, published):
    flip(published.root / "generations/g2-a1/manifest.json", 40)
    done = call("ls", published.root)
    assert done.code == 1
    assert "generations/g2-a1/manifest.json: the manifest does not hash" in done.out
    row = next(row for row in done.rows() if row[0] == "g2-a1")
    assert row[-1] == "damaged"
    value = call("ls", published.root, "--json")
    assert value.code == 1
    assert "does not hash" in value.json["generations"][1]["damage"]


def test_ls_of_a_run_without_generations(call, tmp_path, make_run):
    make_run(tmp_path / "new").open_attempt()
    done = call("ls", tmp_path / "new")
    assert done.code == 0
    assert done.out == "run first: 0 generations, 1 attempt\n"


def test_ls_of_a_broken_log_names_the_record(call, published):
    (published.root / "log" / f"{3:020d}.json").unlink()
    done = call("ls", published.root, "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "LogDamaged"
    assert done.json["error"]["details"]["readable_until"] == 2


def test_show_tells_the_latest(call, published):
    done = call("show", published.root)
    assert done.code == 0
    assert done.out.startswith("g3-a2 of run first\n")
    facts = {tuple(row[:1]): row for row in done.rows() if row}
    assert facts["update",][1] == "30"
    assert facts["ranks",][1] == "3"
    assert facts["lanes",][1] == "4"
    assert "torch 2.13.0" in " ".join(done.out.split())
    assert "model/weight" not in done.out


@pytest.mark.parametrize(
    ("reference", "name"),
    [("@latest", "g3-a2"), ("@1", "g1-a1"), ("@g2", "g2-a1"), ("@g2-a1", "g2-a1"), ("", "g3-a2")],
)
def test_show_finds_a_generation(call, published, reference, name):
    done = call("show", f"{published.root}{reference}", "--json")
    assert done.code == 0
    assert done.json["generation"] == name


def test_show_as_json_has_the_whole_manifest(call, published):
    value = call("show", published.root, "--json").json
    data = (published.root / "generations/g3-a2/manifest.json").read_bytes()
    assert load(Manifest, canonical.dump(value["manifest"])) == load(Manifest, data)


def test_show_tells_what_the_last_scrub_found(call, published):
    """A note, and no more: what it says changes neither the exit code nor the other lines."""
    assert ["last", "scrub", "-"] in call("show", published.root).rows()
    assert call("show", published.root, "--json").json["scrub"] is None
    at = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
    damage = ShardDamaged("block 3 is bad", where="generations/g2-a1/s", details={"block": 3})
    name = call("show", published.root, "--json").json["generation"]
    write_findings(published.storage, [finding_of(name, [damage], at)])
    done = call("show", published.root)
    assert done.code == 0
    words = f"last scrub 2026-05-04T12:00:00+00:00: {name} is damaged: generations/g2-a1/s"
    assert words in " ".join(done.out.split())
    assert call("show", published.root, "--json").json["scrub"]["faults"][0]["facts"]["block"] == 3
    published.storage.replace("scrub.json", b"{torn")
    assert call("show", published.root, "--json").json["scrub"] is None


def test_show_lists_tensors_when_asked(call, published):
    rows = call("show", published.root, "--tensors").rows()
    assert ["model/weight", "F32", "64x64", "16.0", "KiB"] in rows
    assert ["model/bias", "F32", "64", "256", "B"] in rows


@pytest.mark.parametrize("reference", ["g9", "g1-a2", "12-a7"])
def test_show_of_a_generation_that_is_not_there(call, published, reference):
    done = call("show", f"{published.root}@{reference}", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "NoGeneration"


def test_show_of_a_damaged_manifest(call, published):
    flip(published.root / "generations/g3-a2/manifest.json", 0)
    done = call("show", published.root)
    assert done.code == 1
    assert "generations/g3-a2/manifest.json" in done.err
    assert "Traceback" not in done.err


def test_a_root_with_an_at_sign(call, tmp_path, make_run):
    run = make_run(tmp_path / "me@home")
    run.open_attempt()
    run.publish(5)
    assert call("show", run.root, "--json").json["generation"] == "g1-a1"
    assert call("show", f"{run.root}@g1", "--json").json["generation"] == "g1-a1"


def test_a_root_that_is_named_like_a_generation(call, tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path / "g7")
    run.open_attempt()
    run.publish(5)
    monkeypatch.chdir(tmp_path)
    assert call("show", "g7", "--json").json["generation"] == "g1-a1"


def test_reading_changes_nothing(call, published):
    def files():
        paths = (path for path in published.root.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = files()
    for command in ("ls", "show", "verify", "receipts"):
        assert call(command, published.root).code == 0
    assert files() == before


def test_a_generation_between_two_microbatches_is_marked(call, published):
    published.publish(30, values={"partial": {"update": 31}})
    rows = call("ls", published.root).out.splitlines()[2:]
    assert rows[-1].endswith("latest, in update 31")
    assert rows[-2].endswith("published")
    told = call("ls", published.root, "--json").json["generations"]
    assert [row["mid_update"] for row in told] == [False, False, False, True]
    assert "30, and a part of update 31" in call("show", published.root).out
    assert call("show", published.root, "--json").json["mid_update"] is True
    assert call("show", f"{published.root}@g3", "--json").json["mid_update"] is False
