"""``verify``: every kind of damage is found, named and answered with exit code 1."""

from __future__ import annotations

import errno
import os

import pytest
from published import BLOCK, HEADER_BYTES, flip


def shard(published, generation: str, rank: int, ranks: int):
    return published.root / f"generations/{generation}/shard-{rank:05d}-of-{ranks:05d}.safetensors"


def test_a_whole_run(call, published):
    done = call("verify", published.root, "--all")
    assert done.code == 0
    assert done.out.splitlines() == [
        "g1-a1 (update 10): whole",
        "g2-a1 (update 20): whole",
        "g3-a2 (update 30): whole",
        "receipts: the chain is whole",
        "datasets: as the generations were trained on",
    ]


def test_the_latest_alone(call, published):
    flip(shard(published, "g1-a1", 0, 2), 300)
    done = call("verify", published.root)
    assert done.code == 0
    assert done.out == "g3-a2 (update 30): whole\n"


def test_a_flipped_bit_in_every_block(call, published):
    for block in range(2):
        path = shard(published, "g3-a2", 1, 3)
        flip(path, HEADER_BYTES + block * BLOCK)
        done = call("verify", published.root, "--json")
        flip(path, HEADER_BYTES + block * BLOCK)
        assert done.code == 1
        assert done.json["whole"] is False
        (generation,) = done.json["generations"]
        (damage,) = generation["damages"]
        assert damage["type"] == "ShardDamaged"
        assert damage["where"].endswith("shard-00001-of-00003.safetensors")
        assert damage["details"]["block"] == block
        assert damage["details"]["tensors"] == ["model/weight"]
    assert call("verify", published.root).code == 0


def test_damage_in_words(call, published):
    flip(shard(published, "g2-a1", 0, 2), HEADER_BYTES + 5)
    done = call("verify", f"{published.root}@g2")
    assert done.code == 1
    first, second, third = done.out.splitlines()
    assert first == "g2-a1 (update 20): 1 fault"
    assert "generations/g2-a1/shard-00000-of-00002.safetensors: block 0" in second
    assert "'model/bias'" in second
    assert third.strip().startswith("What to do:")


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "size"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "size"),
        (lambda path: path.write_bytes(b""), "size"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--deep"], ["--quick"]])
def test_harm_to_a_shard(call, published, harm, kind, options):
    harm(shard(published, "g3-a2", 2, 3))
    done = call("verify", published.root, "--json", *options)
    assert done.code == 1
    (damage,) = done.json["generations"][0]["damages"]
    assert damage["details"]["kind"] == kind


def test_quick_reads_no_shard(call, published):
    flip(shard(published, "g3-a2", 0, 3), 500)
    done = call("verify", published.root, "--quick")
    assert done.code == 0
    assert done.out == "g3-a2 (update 30): every size is right\n"


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{}"), lambda p: flip(p, 9)]
)
def test_harm_to_a_manifest(call, published, harm):
    harm(published.root / "generations/g3-a2/manifest.json")
    done = call("verify", published.root, "--json")
    assert done.code == 1
    assert done.json["generations"][0]["damages"][0]["type"] == "ManifestDamaged"


def test_all_goes_on_after_damage(call, published):
    shard(published, "g1-a1", 0, 2).unlink()
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    whole = {g["generation"]: g["whole"] for g in done.json["generations"]}
    assert whole == {"g1-a1": False, "g2-a1": True, "g3-a2": True}
    assert done.json["receipts"] is None


def test_all_checks_the_receipts(call, published):
    segment = min((published.root / "receipts").iterdir())
    flip(segment, 30)
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    assert done.json["receipts"]["type"] == "ReceiptsDamaged"
    plain = call("verify", published.root, "--all")
    assert plain.code == 1
    assert f"receipts: receipts/{segment.name}: the segment does not hash" in plain.out


def test_a_file_that_nobody_published(call, published):
    """It harms no reader, so it is told and no fault: for `verify` as for `prune`."""
    path = "generations/g3-a2/stray.bin"
    ours = "generations/g3-a2/shard-00003-of-00004.safetensors"
    for name in (path, ours):
        (published.root / name).write_bytes(b"?")
    done = call("verify", published.root)
    assert done.code == 0
    assert f"{path}: not of this generation" in done.out
    assert call("verify", published.root, "--json").json["whole"] is True
    done = call("verify", published.root, "--all", "--json")
    assert (done.code, done.json["whole"]) == (0, True)
    told = [{"path": name, "size": 1, "sort": "foreign"} for name in (ours, path)]
    assert done.json["extra"] == told
    pruned = call("prune", published.root, "--json")
    assert (pruned.code, [file["path"] for file in pruned.json["foreign"]]) == (0, [ours, path])


def test_a_run_without_generations(call, tmp_path, make_run):
    make_run(tmp_path / "new").open_attempt()
    for options in ([], ["--all"]):
        done = call("verify", tmp_path / "new", "--json", *options)
        assert done.code == 1
        assert done.json["error"]["type"] == "NoGeneration"


def test_all_with_a_generation_is_misuse(call, published):
    assert call("verify", f"{published.root}@g1", "--all").code == 2


# --- what lies in a file's place ------------------------------------------------------------------


def put_directory(path):
    path.mkdir()


def put_pipe(path):
    os.mkfifo(path)


def put_link(path):
    moved = path.parents[3] / f"moved-{path.name}"
    moved.write_bytes(b"the same bytes elsewhere")
    path.symlink_to(moved)


ODD = [
    (put_directory, "no_file", "a directory"),
    (put_pipe, "no_file", "a named pipe"),
    (put_link, "no_file", "a symbolic link"),
]


def replaced(path, put):
    path.unlink()
    put(path)


@pytest.mark.parametrize(("put", "kind", "words"), ODD)
@pytest.mark.parametrize("options", [[], ["--quick"]])
def test_what_is_no_shard_is_damage_of_its_generation_alone(
    call, published, put, kind, words, options
):
    path = shard(published, "g1-a1", 1, 2)
    replaced(path, put)
    done = call("verify", published.root, "--all", "--json", *options)
    assert done.code == 1
    whole = {g["generation"]: g["whole"] for g in done.json["generations"]}
    assert whole == {"g1-a1": False, "g2-a1": True, "g3-a2": True}
    (damage,) = done.json["generations"][0]["damages"]
    assert (damage["type"], damage["details"]["kind"]) == ("ShardDamaged", kind)
    assert damage["what"] == f"the shard of rank 1 is no file: there is {words}"


@pytest.mark.parametrize(("put", "kind", "words"), ODD)
def test_what_is_no_manifest_is_called_what_it_is(call, published, put, kind, words):
    replaced(published.root / "generations/g2-a1/manifest.json", put)
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    (damage,) = done.json["generations"][1]["damages"]
    assert (damage["type"], damage["details"]["kind"]) == ("ManifestDamaged", kind)
    assert damage["what"] == f"the manifest is no file: there is {words}"


@pytest.mark.parametrize(("put", "kind", "words"), ODD)
def test_what_is_no_receipt_is_called_what_it_is(call, published, put, kind, words):
    segment = min((published.root / "receipts").iterdir())
    replaced(segment, put)
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    (damage,) = done.json["generations"][0]["damages"]
    assert damage["what"].endswith(f"are in no file: there is {words}")
    assert done.json["receipts"]["what"] == f"the segment is no file: there is {words}"
    assert done.json["generations"][2]["whole"] is True


@pytest.mark.parametrize(("put", "kind", "words"), ODD)
def test_what_is_no_record_is_called_what_it_is_even_at_the_end(call, published, put, kind, words):
    record = max((published.root / "log").iterdir())
    replaced(record, put)
    done = call("verify", published.root, "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "LogDamaged"
    assert words in done.json["error"]["what"]


@pytest.mark.parametrize("names", ["shard", "manifest", "receipts"])
def test_what_may_not_be_read_is_told_and_the_rest_goes_on(call, published, monkeypatch, names):
    paths = {
        "shard": shard(published, "g2-a1", 0, 2),
        "manifest": published.root / "generations/g2-a1/manifest.json",
        "receipts": sorted((published.root / "receipts").iterdir())[1],
    }
    closed = paths[names]
    above, real = closed.parent.stat(), os.open

    def refusing(path, flags, *rest, **options):
        in_it = "dir_fd" in options and os.path.samestat(above, os.fstat(options["dir_fd"]))
        if path == closed.name and in_it:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)  # chmod does not keep root out
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    whole = {g["generation"]: g["whole"] for g in done.json["generations"]}
    assert whole == {"g1-a1": True, "g2-a1": False, "g3-a2": True}
    (damage,) = done.json["generations"][1]["damages"]
    assert damage["details"]["kind"] == "refused"
    assert damage["where"] == str(closed)
    assert damage["what"] == "it cannot be read: permission denied"
    assert "right to read" in damage["remedy"]
    assert (done.json["receipts"] is None) == (names != "receipts")


def test_what_to_do_differs_between_the_latest_and_older_ones(call, published):
    for generation, ranks in (("g1-a1", 2), ("g3-a2", 3)):
        shard(published, generation, 0, ranks).unlink()
    done = call("verify", published.root, "--all", "--json")
    old, _, latest = done.json["generations"]
    assert "let the generation go" in old["damages"][0]["remedy"]
    assert "fall_back" not in old["damages"][0]["remedy"]
    assert (
        "'fall_back', the default, goes on from the newest whole"
        in (latest["damages"][0]["remedy"])
    )


# --- beside the generations -----------------------------------------------------------------------


def dataset_of(published):
    (path,) = (published.root / "datasets").iterdir()
    return path


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: replaced(path, put_pipe), "no_file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "content"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), "content"),
        (lambda path: path.write_bytes(b"{}"), "content"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"999", b"998")), "digest"),
        (lambda path: path.rename(path.with_name(f"blake3-{'0' * 64}.json")), "digest"),
    ],
)
def test_all_checks_the_manifest_of_the_data(call, published, harm, kind):
    harm(dataset_of(published))
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 1
    assert done.json["whole"] is False
    assert all(generation["whole"] for generation in done.json["generations"])
    assert done.json["datasets"][0]["details"]["kind"] == kind
    plain = call("verify", published.root, "--all")
    assert plain.code == 1
    assert "datasets: datasets/blake3-" in plain.out


def put(published, path: str, data: bytes = b"12345"):
    place = published.root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


@pytest.mark.parametrize(
    ("path", "sort"),
    [
        ("generations/g4-a1/shard-00000-of-00002.safetensors", "leftover"),
        ("generations/g2-a2/manifest.json", "leftover"),
        ("receipts/000000000021-000000000030-g9-a1.jsonl", "leftover"),
        ("generations/g4-a3/shard-00000-of-00002.safetensors", "unknown"),
        ("generations/g4-a3/manifest.json", "unknown"),
        ("receipts/000000000031-000000000040-g4-a3.jsonl", "unknown"),
        ("receipts/000000000001-000000000011-g1-a1.jsonl", "unknown"),
        ("log/00000000000000000000.json", "unknown"),
        ("notes.txt", "foreign"),
        ("log/00000000000000000003.json.bak", "foreign"),
        ("generations/copy-of-g1/manifest.json", "foreign"),
        ("generations/g4-a1/notes.txt", "foreign"),
        ("datasets/x.json", "foreign"),
    ],
)
def test_all_names_what_no_record_leads_to(call, published, path, sort):
    put(published, path)
    code = 1 if sort == "unknown" else 0
    done = call("verify", published.root, "--all", "--json")
    assert done.json["extra"] == [{"path": path, "size": 5, "sort": sort}]
    assert (done.code, done.json["whole"]) == (code, not code)
    plain = call("verify", published.root, "--all")
    assert plain.code == code
    assert path in plain.out
    assert ("`prune` collects it" in plain.out) == (sort == "leftover")


def test_what_a_running_save_has_written_is_no_fault(call, published):
    put(published, "generations/g4-a2/shard-00000-of-00002.safetensors")
    put(published, "receipts/000000000031-000000000040-g4-a2.jsonl")
    put(published, f"holds/g3-a2-{'0' * 32}.json")
    put(published, f"probe/{'0' * 32}")
    published.log.refresh_hint(published.log.read())
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 0
    assert [(extra["path"].split("/")[0], extra["sort"]) for extra in done.json["extra"]] == [
        ("generations", "unpublished"), ("receipts", "unpublished"),
    ]  # fmt: skip


def test_files_that_writers_did_not_finish_are_named(call, published):
    names = [f"{place}/.tmp-{'0' * 32}" for place in ("generations/g2-a1", "log", "receipts")]
    for name in names:
        (published.root / name).write_bytes(b"?")
    done = call("verify", published.root, "--all", "--json")
    assert done.code == 0
    assert done.json["extra"] == [{"path": n, "size": 1, "sort": "temporary"} for n in names]


def test_files_of_no_attempt_share_one_remedy(call, published):
    for rank in range(3):
        put(published, f"generations/g4-a3/shard-0000{rank}-of-00003.safetensors")
    done = call("verify", published.root, "--all")
    assert done.out.count("the commit log knows nothing that this file can be of") == 3
    assert done.out.count("either records are missing at its end") == 1
