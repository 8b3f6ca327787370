"""Large objects in parts: bounded memory, each part repeated by itself, nothing left over."""

import random
import threading
import time

import pytest
from azure_server import AzureServer
from faulty_server import Effect, Strike
from gcs_server import GcsServer
from s3_server import BUCKET, PART_BYTES, S3Server

from coherent_ray.errors import AlreadyExists, StorageError
from coherent_ray.storage import object_writer
from coherent_ray.storage.base import Storage
from coherent_ray.storage.claim import STAMP

PARTS = 5
DATA = random.Random(7).randbytes(PARTS * PART_BYTES + 100)


def write(storage: Storage, path: str = "g1/shard", data: bytes = DATA, piece: int = 9000) -> None:
    with storage.open_writer(path) as writer:
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
        writer.finish()


def methods(server: S3Server | GcsServer | AzureServer, part: str) -> list[str]:
    return [method for method, target in server.faults.requests if part in target]


@pytest.mark.parametrize("piece", [1, 1000, PART_BYTES, PART_BYTES + 1, len(DATA)])
def test_what_is_written_is_what_is_stored_whatever_the_pieces(
    s3: S3Server, prefix: str, piece: int
) -> None:
    data = DATA[: 2 * PART_BYTES + 5] if piece == 1 else DATA
    write(s3.open(prefix), data=data, piece=piece)
    assert s3.read(f"{prefix}/g1/shard") == data
    assert s3.keys(prefix) == {"g1/shard"}
    assert len(methods(s3, "partNumber")) == -(-len(data) // PART_BYTES)


@pytest.mark.parametrize(
    ("size", "parts"), [(0, 0), (1, 0), (PART_BYTES, 0), (PART_BYTES + 1, 2), (2 * PART_BYTES, 2)]
)
def test_what_fits_into_one_part_is_one_conditional_put(
    s3: S3Server, prefix: str, size: int, parts: int
) -> None:
    write(s3.open(prefix), data=DATA[:size])
    assert s3.read(f"{prefix}/g1/shard") == DATA[:size]
    assert len(methods(s3, "partNumber")) == parts


FAULTS: list[Effect] = ["lose", "cut", "repeat", "busy", "broken", "broken_after"]


@pytest.mark.parametrize("effect", FAULTS)
@pytest.mark.parametrize("at", [1, 2, PARTS + 1])
def test_a_part_that_fails_is_sent_again_by_itself(
    s3: S3Server, prefix: str, effect: Effect, at: int
) -> None:
    with s3.faults.striking(Strike(effect, at=at, method="PUT", part="partNumber")):
        write(s3.open(prefix))
        again = 0 if effect == "repeat" else 1
        assert len(methods(s3, "partNumber")) == PARTS + 1 + again
    assert s3.read(f"{prefix}/g1/shard") == DATA
    assert s3.uploads(prefix) == []


@pytest.mark.parametrize("effect", FAULTS)
@pytest.mark.parametrize("part", ["uploads=", "uploadId"])
def test_beginning_and_completing_may_fail_once(
    s3: S3Server, prefix: str, effect: Effect, part: str
) -> None:
    with s3.faults.striking(Strike(effect, method="POST", part=part)):
        write(s3.open(prefix))
    assert s3.read(f"{prefix}/g1/shard") == DATA
    # An upload that was begun twice, because its answer was lost, has no part and no name. Nobody
    # can know of it; the bucket's lifecycle rule ends it.
    begun_twice = part == "uploads=" and effect in {"lose", "repeat", "broken_after"}
    assert len(s3.uploads(prefix)) == begun_twice


@pytest.mark.parametrize("effect", ["lose", "busy", "broken_after"])
def test_the_same_on_google(gcs: GcsServer, prefix: str, effect: Effect) -> None:
    with gcs.faults.striking(
        Strike(effect, at=2, method="PUT", part="partNumber"),
        Strike(effect, method="POST", part="uploadId"),
    ):
        write(gcs.open(prefix))
    assert gcs.read(f"{prefix}/g1/shard") == DATA
    assert gcs.keys(prefix) == {"g1/shard"}


@pytest.mark.parametrize("effect", ["lose", "busy", "broken_after"])
def test_the_same_on_azure(azure: AzureServer, prefix: str, effect: Effect) -> None:
    with azure.faults.striking(
        Strike(effect, at=2, method="PUT", part="comp=block&"),
        Strike(effect, method="PUT", part="comp=blocklist"),
    ):
        write(azure.open(prefix))
    assert azure.read(f"{prefix}/g1/shard") == DATA
    assert azure.keys(prefix) == {"g1/shard"}


def test_a_part_that_fails_for_good_leaves_nothing(s3: S3Server, prefix: str) -> None:
    storage = s3.open(prefix, retries=1)
    with s3.faults.striking(Strike("broken", at=2, times=99, method="PUT", part="partNumber")):
        with pytest.raises(StorageError, match="the store answered 500"):
            write(storage)
        assert "DELETE" in methods(s3, "uploadId")
    assert s3.keys(prefix) == set()
    write(storage)
    assert s3.read(f"{prefix}/g1/shard") == DATA


@pytest.mark.parametrize("effect", ["broken", "cut"])
def test_a_completion_that_fails_for_good_leaves_no_name(
    s3: S3Server, prefix: str, effect: Effect
) -> None:
    with (
        s3.faults.striking(Strike(effect, times=99, method="POST", part="uploadId")),
        pytest.raises(StorageError) as caught,
    ):
        write(s3.open(prefix, retries=1))
    assert not isinstance(caught.value, AlreadyExists)
    assert s3.read(f"{prefix}/g1/shard") is None


@pytest.mark.parametrize("effect", ["lose", "broken_after"])
def test_a_completion_whose_every_answer_is_lost_has_happened_all_the_same(
    s3: S3Server, prefix: str, effect: Effect
) -> None:
    with s3.faults.striking(Strike(effect, times=99, method="POST", part="uploadId")):
        write(s3.open(prefix, retries=1))
    assert s3.read(f"{prefix}/g1/shard") == DATA


@pytest.mark.parametrize("written", [0, 100, 3 * PART_BYTES, len(DATA)])
@pytest.mark.parametrize("raises", [True, False])
def test_leaving_early_leaves_nothing(
    s3: S3Server, gcs: GcsServer, prefix: str, written: int, raises: bool
) -> None:
    for server in (s3, gcs):
        try:
            with server.open(prefix).open_writer("g1/shard") as writer:
                writer.write(DATA[:written])
                if raises:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert raises
        assert server.keys(prefix) == set()


def test_leaving_early_where_the_store_is_gone_raises_what_was_raised(
    s3: S3Server, prefix: str
) -> None:
    def save() -> None:
        with s3.open(prefix, retries=1).open_writer("g1/shard") as writer:
            writer.write(DATA)
            raise ZeroDivisionError

    gone = Strike("busy", times=99, method="DELETE")
    with s3.faults.striking(gone), pytest.raises(ZeroDivisionError):
        save()
    assert s3.read(f"{prefix}/g1/shard") is None


def test_memory_is_bounded_by_the_parts_that_are_on_their_way(s3: S3Server, prefix: str) -> None:
    """The server takes no part for a while: the writer takes no more than it may hold."""
    storage, taken = s3.open(prefix, parallel_parts=2), [0]
    gate = Strike("delay", times=2, method="PUT", part="partNumber", seconds=1.0)

    def fill() -> None:
        with storage.open_writer("g1/shard") as writer:
            for at in range(0, len(data), 1000):
                writer.write(data[at : at + 1000])
                taken[0] = at + 1000
            writer.finish()

    data = DATA * 4
    with s3.faults.striking(gate):
        thread = threading.Thread(target=fill)
        thread.start()
        while len(methods(s3, "partNumber")) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        held, others = taken[0], len(methods(s3, "partNumber"))
        thread.join()
    assert others == 2
    assert 2 * PART_BYTES <= held <= 4 * PART_BYTES
    assert s3.read(f"{prefix}/g1/shard") == data


def test_one_large_piece_is_not_taken_whole_either(s3: S3Server, prefix: str) -> None:
    storage = s3.open(prefix, parallel_parts=1)
    with (
        s3.faults.striking(Strike("broken", at=2, times=99, method="PUT", part="partNumber")),
        pytest.raises(StorageError),
        s3.open(prefix, parallel_parts=1, retries=0).open_writer("g1/shard") as writer,
    ):
        writer.write(DATA * 20)
    assert len(methods(s3, "partNumber")) <= 4
    write(storage, data=DATA * 20, piece=len(DATA) * 20)
    assert s3.read(f"{prefix}/g1/shard") == DATA * 20


# --- names that are taken -------------------------------------------------------------------------


def test_a_name_that_is_taken_costs_no_part(s3: S3Server, prefix: str) -> None:
    s3.write(f"{prefix}/g1/shard", b"theirs")
    with pytest.raises(AlreadyExists):
        write(s3.open(prefix))
    assert methods(s3, "partNumber") == []
    assert s3.read(f"{prefix}/g1/shard") == b"theirs"


def test_a_name_that_is_taken_meanwhile_stays_taken(s3: S3Server, prefix: str) -> None:
    with s3.open(prefix).open_writer("g1/shard") as writer:
        writer.write(DATA)
        s3.write(f"{prefix}/g1/shard", b"theirs")
        with pytest.raises(AlreadyExists):
            writer.finish()
    assert s3.read(f"{prefix}/g1/shard") == b"theirs"
    assert s3.uploads(prefix) == []


def test_who_completes_and_is_overwritten_at_once_is_told(s3: S3Server, prefix: str) -> None:
    """The window that no store closes: another completes between our last look and our word."""
    with (
        s3.faults.striking(Strike("delay", method="HEAD", at=3, seconds=0.5)),
        s3.open(prefix).open_writer("g1/shard") as writer,
    ):
        writer.write(DATA)
        # The two looks before this one were at the beginning and before the completion.
        thread = threading.Thread(target=_overwrite, args=(s3, f"{prefix}/g1/shard"))
        thread.start()
        with pytest.raises(AlreadyExists):
            writer.finish()
        thread.join()
    assert s3.read(f"{prefix}/g1/shard") == b"theirs"


def _overwrite(s3: S3Server, key: str) -> None:
    while s3.read(key) is None:
        time.sleep(0.01)
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=b"theirs", Metadata={STAMP: "another"})


# --- what else may be wrong -----------------------------------------------------------------------


def test_a_store_that_lost_a_part_is_found_out(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = s3.open(prefix).open_writer("g1/shard")
    writer.write(DATA)
    writer._written += 1
    with pytest.raises(StorageError, match=f"holds {len(DATA)} of {len(DATA) + 1} bytes"):
        writer.finish()


def test_more_parts_than_a_store_takes_are_refused_before(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "MOST_PARTS", PARTS)
    with pytest.raises(StorageError) as caught:
        write(s3.open(prefix))
    assert "storage.part_bytes" in caught.value.remedy
    assert s3.keys(prefix) == set()
    write(s3.open(prefix), data=DATA[: PARTS * PART_BYTES])
    assert s3.read(f"{prefix}/g1/shard") == DATA[: PARTS * PART_BYTES]


def test_a_writer_that_was_left_takes_no_more(s3: S3Server, prefix: str) -> None:
    with s3.open(prefix).open_writer("g1/shard") as writer:
        writer.write(DATA)
    for verb in (lambda: writer.write(b"x"), writer.finish):
        with pytest.raises(StorageError, match="closed"):
            verb()
