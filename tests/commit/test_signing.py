"""With a signing key a record counts only if it is signed; without one, its chain alone speaks."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.manifest import Manifest, dump
from coherent_ray.commit.records import AttemptBody, PinBody, PublishBody, decode, encode
from coherent_ray.digests import digest_of
from coherent_ray.errors import ConfigError, LogDamaged, ManifestDamaged, NotSigned
from coherent_ray.storage import LocalStorage, StorageOptions, open_storage
from coherent_ray.storage.signing import KEY_VARIABLE, KeyPlace, key_of
from coherent_ray.storage.testing.faults import FaultyStorage

SECRET = "0123456789abcdef-the-secret"
GROUP = Ranks(ranks=2)


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    monkeypatch.setenv("A_KEY", SECRET)
    return LocalStorage(tmp_path / "run", KeyPlace(env="A_KEY"))


def keyless(storage: LocalStorage) -> LocalStorage:
    return LocalStorage(storage.uri)


def published(storage: LocalStorage, algorithm: str = "xxh3_128") -> PublishBody:
    """A small run: an attempt, a generation, a pin."""
    shards = tuple(
        dataclasses.replace(
            shard, algorithm="blake3", digest="blake3:" + "0" * 64,
            blocks=("0" * 64,) * len(shard.blocks),
        )
        if algorithm == "blake3" else shard
        for shard in (GROUP.shard(0), GROUP.shard(1))
    )  # fmt: skip
    data = dump(Manifest(GROUP.header, digest_of(b"state"), shards))
    path = "generations/g1-a1/manifest.json"
    body = PublishBody(1, 1, 10, 0, path, len(data), digest_of(data), None)
    log = CommitLog(storage, "w")
    log.open_attempt("run-1", "t")
    storage.create(path, data)
    log.append(body, 1)
    log.append(PinBody(1, 1, True), 1)
    return body


def rechain(storage: LocalStorage, change: Any) -> None:
    """Change record 2 as one who can write to the root, and make the whole chain fit again."""
    previous = None
    for seq in (1, 2, 3):
        path = record_path(seq)
        value = json.loads(storage.read(path))
        if seq == 2:
            change(value["record"]["body"])
        value["record"]["previous"] = previous
        previous = value["digest"] = canonical.digest(value["record"])
        storage.replace(path, canonical.dump(value))


def test_a_signed_run_is_read_with_its_key_and_without_one(keyed: LocalStorage) -> None:
    published(keyed)
    assert CommitLog(keyed).read().seq == 3
    assert CommitLog(keyless(keyed)).read().records == CommitLog(keyed).read().records
    data = json.loads(keyed.read(record_path(1)))
    assert data["signature"].startswith("hmac-sha256:")


def test_the_chain_is_the_same_with_signatures_or_without(keyed: LocalStorage) -> None:
    published(keyed)
    first = CommitLog(keyed).read().records[0]
    key = key_of(keyed)
    assert decode(encode(first)) == decode(encode(first, key), key) == first
    assert json.loads(encode(first))["digest"] == json.loads(encode(first, key))["digest"]


def test_a_record_that_is_tampered_with_and_chained_again_is_refused_with_the_key_alone(
    keyed: LocalStorage,
) -> None:
    published(keyed)
    rechain(keyed, lambda body: body.update(update=99))
    with pytest.raises(NotSigned, match="not signed with the key") as caught:
        CommitLog(keyed).read()
    assert caught.value.where == record_path(2)
    assert caught.value.details["readable_until"] == 1
    assert isinstance(caught.value, LogDamaged)
    # docs/formats.md says so: without the key, digests find damage and not forgery.
    assert CommitLog(keyless(keyed)).read().publishes[0].update == 99


def test_an_unsigned_record_is_refused_with_a_key(keyed: LocalStorage) -> None:
    published(keyless(keyed))
    with pytest.raises(NotSigned, match="is not signed, and"):
        CommitLog(keyed).read()


def test_another_key_is_refused(keyed: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    published(keyed)
    monkeypatch.setenv("A_KEY", SECRET + "2")
    with pytest.raises(NotSigned, match="not signed with the key"):
        CommitLog(keyed).read()


@pytest.mark.parametrize("wrong", [None, 1, "", "hmac-sha256:00", "blake3:" + "0" * 64, "é"])
def test_a_signature_that_is_none_is_refused_by_all(keyed: LocalStorage, wrong: Any) -> None:
    published(keyed)
    value = json.loads(keyed.read(record_path(3)))
    keyed.replace(record_path(3), canonical.dump(value | {"signature": wrong}))
    for storage in (keyed, keyless(keyed)):
        with pytest.raises(LogDamaged):
            CommitLog(storage).read()


def test_a_writer_without_the_key_does_not_spoil_a_signed_log(keyed: LocalStorage) -> None:
    published(keyed)
    log = CommitLog(keyless(keyed))
    with pytest.raises(ConfigError, match="log is signed"):
        log.append(PinBody(1, 1, False), 1)
    with pytest.raises(ConfigError, match="log is signed"):
        log.open_attempt("run-1", "t2")
    assert CommitLog(keyed).read().seq == 3


def test_shards_that_anyone_can_forge_do_not_count_with_a_key(keyed: LocalStorage) -> None:
    body = published(keyed)
    with pytest.raises(ManifestDamaged, match="xxh3_128") as caught:
        Generations(keyed).manifest(body)
    assert caught.value.details["kind"] == "unsigned"
    assert Generations(keyless(keyed)).manifest(body)


def test_a_manifest_is_bound_by_its_signed_record(keyed: LocalStorage) -> None:
    body = published(keyed, "blake3")
    assert Generations(keyed).manifest(body)
    data = keyed.read(body.manifest)
    keyed.replace(body.manifest, data.replace(b'"seed":7', b'"seed":8'))
    with pytest.raises(ManifestDamaged, match="does not hash"):
        Generations(keyed).manifest(body)


# --- where the key is -----------------------------------------------------------------------------


def test_a_root_alone_takes_the_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_of(open_storage(str(tmp_path))) is None
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    assert CommitLog(open_storage(str(tmp_path))).keyed
    # A configuration says all there is to say.
    assert not CommitLog(open_storage(str(tmp_path), StorageOptions())).keyed


def test_a_file_holds_the_key_with_or_without_a_line_end(tmp_path: Path) -> None:
    signatures = set()
    for text in (SECRET, SECRET + "\n"):
        (tmp_path / "key").write_text(text)
        storage = open_storage(str(tmp_path), StorageOptions(key_file=str(tmp_path / "key")))
        signatures.add(encode(_first(), key_of(storage)))
    assert len(signatures) == 1


def _first() -> Any:
    return CommitLog(LocalStorage("/nowhere"))._known.successor(AttemptBody(1, "run-1", "t"), "w")


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 5000, "directory"])
def test_a_key_that_is_none_is_an_error_that_names_its_place_alone(
    tmp_path: Path, content: Any
) -> None:
    path = tmp_path / "key"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    storage = LocalStorage(tmp_path, KeyPlace(file=str(path)))
    with pytest.raises(ConfigError) as caught:
        CommitLog(storage)
    assert caught.value.where == str(path)
    assert "short" not in str(caught.value)
    assert "xxx" not in str(caught.value)


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not set") as caught:
        CommitLog(LocalStorage(tmp_path, KeyPlace(env="NO_SUCH_KEY")))
    assert caught.value.where == "NO_SUCH_KEY"


def test_the_key_is_never_printed_pickled_or_stored(keyed: LocalStorage) -> None:
    published(keyed)
    key = key_of(keyed)
    assert key is not None
    assert SECRET not in repr(key) + str(key) + repr(keyed.__dict__)
    with pytest.raises(TypeError, match="does not travel"):
        pickle.dumps(key)
    assert SECRET.encode() not in pickle.dumps(keyed)
    assert pickle.loads(pickle.dumps(keyed)).key_place == KeyPlace(env="A_KEY")
    assert all(SECRET.encode() not in keyed.read(entry.path) for entry in keyed.list())


def test_a_wrapped_storage_keeps_the_key(keyed: LocalStorage) -> None:
    assert CommitLog(FaultyStorage(keyed)).keyed


@pytest.mark.parametrize("places", [(None, None), ("A", "/b")])
def test_a_key_has_one_place(places: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        KeyPlace(*places)
