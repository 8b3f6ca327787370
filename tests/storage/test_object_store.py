"""The verbs of an object store under faults, and what other tools leave beside a run's objects."""

from datetime import UTC, datetime

import pytest
from faulty_server import Effect, Strike
from gcs_server import GcsServer
from s3_server import BUCKET, S3Server

from coherent_ray.errors import NotFound, StorageError
from coherent_ray.storage.base import Dated

DATA = bytes(range(256)) * 4096
PASSING: list[Effect] = ["lose", "cut", "busy", "broken", "delay", "repeat"]


@pytest.mark.parametrize("effect", PASSING)
@pytest.mark.parametrize("times", [1, 2])
def test_reads_go_on_where_an_answer_broke_off(
    s3: S3Server, prefix: str, effect: Effect, times: int
) -> None:
    s3.write(f"{prefix}/shard", DATA)
    storage = s3.open(prefix)
    strike = Strike(effect, times=times, method="GET", part="shard")
    with s3.faults.striking(strike):
        assert storage.read("shard") == DATA
    with s3.faults.striking(strike):
        assert storage.read("shard", 1000, 500_000) == DATA[1000:501_000]
    target = bytearray(600_000)
    with s3.faults.striking(strike):
        assert storage.read_into("shard", 7, memoryview(target)) == 600_000
    assert target == DATA[7:600_007]


@pytest.mark.parametrize("effect", ["lose", "cut", "busy", "broken"])
def test_every_other_verb_is_repeated_too(s3: S3Server, prefix: str, effect: Effect) -> None:
    storage = s3.open(prefix)
    with s3.faults.striking(Strike(effect, method="PUT")):
        storage.replace("latest.json", b"hint")
    assert s3.read(f"{prefix}/latest.json") == b"hint"
    with s3.faults.striking(Strike(effect, method="HEAD")):
        assert storage.size("latest.json") == 4
    with s3.faults.striking(Strike(effect, method="GET")):
        assert [entry.path for entry in storage.list()] == ["latest.json"]
    with s3.faults.striking(Strike(effect, method="DELETE")):
        storage.delete("latest.json")
    assert s3.keys(prefix) == set()


def test_what_lasts_is_an_error_with_place_and_reason(s3: S3Server, prefix: str) -> None:
    s3.write(f"{prefix}/file", b"x")
    storage = s3.open(prefix, retries=1)
    verbs = {
        "file": [
            lambda: storage.read("file"),
            lambda: storage.read("file", 0, 1),
            lambda: storage.read_into("file", 0, memoryview(bytearray(1))),
            lambda: storage.size("file"),
            lambda: storage.replace("file", b"y"),
            lambda: storage.delete("file"),
        ],
        "log": [lambda: list(storage.list("log"))],
    }
    for path, calls in verbs.items():
        for verb in calls:
            with (
                s3.faults.striking(Strike("busy", times=99)),
                pytest.raises(StorageError) as caught,
            ):
                verb()
            assert not isinstance(caught.value, NotFound), "nobody could look"
            assert caught.value.where == f"s3://{BUCKET}/{prefix}/{path}"
            assert caught.value.what.startswith("the store answered 503")
            assert caught.value.details == {"status": 503}


def test_no_fault_is_remembered(s3: S3Server, prefix: str) -> None:
    storage = s3.open(prefix, retries=0)
    with s3.faults.striking(Strike("broken", times=99)), pytest.raises(StorageError):
        storage.create("file", b"x")
    storage.create("file", b"x")
    assert storage.read("file") == b"x"


def test_an_answer_that_does_not_come_is_given_up(s3: S3Server, prefix: str) -> None:
    s3.write(f"{prefix}/file", b"x")
    storage = s3.open(prefix, retries=0, timeout_s=0.2)
    with (
        s3.faults.striking(Strike("delay", seconds=1.0)),
        pytest.raises(StorageError, match="does not answer"),
    ):
        storage.read("file")


def test_a_flipped_bit_is_for_digests_to_find(s3: S3Server, prefix: str) -> None:
    """Said in the module's rule: the store's word is all that this layer has."""
    s3.write(f"{prefix}/file", b"xyz")
    with s3.faults.striking(Strike("flip", method="GET")):
        assert s3.open(prefix).read("file") == b"xy{"


# --- what other tools leave -----------------------------------------------------------------------


def test_marks_of_directories_are_not_files(s3: S3Server, prefix: str) -> None:
    for key in ("", "log/", "log/00000000000000000001.json"):
        s3.write(f"{prefix}/{key}", b"")
    storage = s3.open(prefix)
    assert [e.path for e in storage.list("log")] == ["log/00000000000000000001.json"]
    assert "" not in {e.path for e in storage.list()}


def test_an_object_that_cannot_be_listed_is_named_with_a_remedy(s3: S3Server, prefix: str) -> None:
    s3.write(f"{prefix}/log//1", b"x")
    with pytest.raises(StorageError) as caught:
        list(s3.open(prefix).list())
    assert "log//1" in caught.value.what
    assert "prefix of its own" in caught.value.remedy


def test_another_runs_root_beside_this_one_is_not_seen(s3: S3Server, prefix: str) -> None:
    for key in (f"{prefix}-b/log/1", f"{prefix}/log/1", f"{prefix}2", "log/1"):
        s3.write(key, b"x")
    assert [e.path for e in s3.open(prefix).list()] == ["log/1"]


@pytest.mark.parametrize("effect", ["lose", "cut", "busy", None])
def test_long_lists_come_in_pages(gcs: GcsServer, prefix: str, effect: Effect | None) -> None:
    paths = [f"log/{number:04d}" for number in range(1, 134)]
    for path in paths:
        gcs.write(f"{prefix}/{path}", b"x")
    strikes = [Strike(effect, at=2)] if effect else []
    with gcs.faults.striking(*strikes):
        assert [entry.path for entry in gcs.open(prefix).list("log")] == paths
        assert len(gcs.faults.requests) >= 3


def test_a_whole_bucket_can_be_a_root(s3: S3Server) -> None:
    s3.client.create_bucket(Bucket="whole")
    storage = type(s3.open("x"))("s3://whole", s3.options())
    storage.create("log/1", b"x")
    assert [entry.path for entry in storage.list()] == ["log/1"]
    assert storage.read("log/1") == b"x"


def test_when_an_object_was_written_is_for_people(s3: S3Server, prefix: str) -> None:
    storage = s3.open(prefix)
    assert isinstance(storage, Dated)
    assert storage.written_at("file") is None
    storage.create("file", b"x")
    at = storage.written_at("file")
    assert at is not None
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
