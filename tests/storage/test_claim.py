"""Taking a name while answers are lost, late, doubled or refused: each line of the claim's table.

Whatever the network does, one claim at most has the name, whoever is told that it has it finds its
own bytes there, and whoever is told that it is taken finds another's.
"""

import threading

import pytest
import s3_server
from azure_server import AzureServer
from faulty_server import Effect, Strike
from gcs_server import GcsServer

from coherent_ray.errors import AlreadyExists, StorageError, StorageFull
from coherent_ray.storage import claim as claim_
from coherent_ray.storage.claim import STAMP, look
from coherent_ray.storage.clients import connect

S3 = s3_server.S3Server
UNSURE: list[Effect] = ["lose", "cut", "repeat", "busy", "broken", "broken_after", "conflict"]


@pytest.mark.parametrize("effect", UNSURE)
def test_one_fault_changes_nothing_for_the_one_who_claims(
    s3: S3, prefix: str, effect: Effect
) -> None:
    with s3.faults.striking(Strike(effect, method="PUT")):
        s3.open(prefix).create("log/1", b"mine")
    assert s3.read(f"{prefix}/log/1") == b"mine"
    with pytest.raises(AlreadyExists):
        s3.open(prefix).create("log/1", b"mine")


@pytest.mark.parametrize("effect", UNSURE)
def test_nor_on_google(gcs: GcsServer, prefix: str, effect: Effect) -> None:
    with gcs.faults.striking(Strike(effect, method="PUT")):
        gcs.open(prefix).create("log/1", b"mine")
    assert gcs.read(f"{prefix}/log/1") == b"mine"


@pytest.mark.parametrize("effect", UNSURE)
def test_nor_on_azure(azure: AzureServer, prefix: str, effect: Effect) -> None:
    with azure.faults.striking(Strike(effect, method="PUT")):
        azure.open(prefix).create("log/1", b"mine")
    assert azure.read(f"{prefix}/log/1") == b"mine"


@pytest.mark.parametrize("effect", UNSURE)
def test_no_fault_lets_a_name_be_taken_twice(s3: S3, prefix: str, effect: Effect) -> None:
    s3.write(f"{prefix}/log/1", b"theirs")
    with s3.faults.striking(Strike(effect, method="PUT")), pytest.raises(AlreadyExists):
        s3.open(prefix).create("log/1", b"mine")
    assert s3.read(f"{prefix}/log/1") == b"theirs"


@pytest.mark.parametrize("effect", ["lose", "broken_after", "repeat"])
@pytest.mark.parametrize("reading", ["busy", "cut", "lose"])
def test_looking_who_has_it_may_fail_as_well(
    s3: S3, prefix: str, effect: Effect, reading: Effect
) -> None:
    with s3.faults.striking(Strike(effect, method="PUT"), Strike(reading, method="GET", times=2)):
        s3.open(prefix).create("log/1", b"mine")
    assert s3.read(f"{prefix}/log/1") == b"mine"


def test_the_same_bytes_are_not_the_same_claim(s3: S3, prefix: str) -> None:
    """Two creators of equal bytes, and the second's answer is lost: it did not make the object."""
    s3.open(prefix).create("log/1", b"same")
    with s3.faults.striking(Strike("lose", method="PUT")), pytest.raises(AlreadyExists):
        s3.open(prefix).create("log/1", b"same")


def test_a_late_request_cannot_undo_what_came_in_between(s3: S3, prefix: str) -> None:
    """The first request is still on its way when the claim is made again, and then given up."""
    late = Strike("late", method="PUT", part="log/1", seconds=0.5)
    with s3.faults.striking(late):
        s3.open(prefix).create("log/1", b"mine")
        s3.faults.join()
        assert s3.read(f"{prefix}/log/1") == b"mine"
    with s3.faults.striking(late), pytest.raises(StorageError) as caught:
        s3.open(f"{prefix}/b", retries=0).create("log/1", b"mine")
    assert caught.value.details["unanswered"] == 1
    assert not isinstance(caught.value, AlreadyExists)
    assert s3.read(f"{prefix}/b/log/1") == b"mine", "the error says that it may yet be found"


def test_a_rival_in_between_wins_over_a_late_request(s3: S3, prefix: str) -> None:
    with s3.faults.striking(Strike("late", method="PUT", seconds=0.5)):
        with pytest.raises(StorageError):
            s3.open(prefix, retries=0).create("log/1", b"late")
        s3.open(prefix).create("log/1", b"rival")
        s3.faults.join()
        assert s3.read(f"{prefix}/log/1") == b"rival"


def test_many_rivals_under_lost_answers_and_one_wins(s3: S3, prefix: str) -> None:
    for number in range(4):
        path, won = f"log/{number}", []
        strikes = [
            Strike("lose", method="PUT", part=path, at=1),
            Strike("broken_after", method="PUT", part=path, at=3),
            Strike("busy", method="PUT", part=path, at=4),
            Strike("conflict", method="PUT", part=path, at=5),
        ]

        def race(index: int, path: str, won: list[bytes]) -> None:
            word = b"rival %d" % index
            try:
                s3.open(prefix).create(path, word)
            except AlreadyExists:
                return
            won.append(word)

        with s3.faults.striking(*strikes):
            threads = [threading.Thread(target=race, args=(i, path, won)) for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(won) == 1
        assert s3.read(f"{prefix}/{path}") == won[0]


@pytest.mark.parametrize("effect", ["busy", "broken"])
def test_a_store_that_stays_away_is_an_error_and_the_name_is_free(
    s3: S3, prefix: str, effect: Effect
) -> None:
    with s3.faults.striking(Strike(effect, method="PUT", times=3)):
        with pytest.raises(StorageError) as caught:
            s3.open(prefix, retries=2).create("log/1", b"mine")
        assert caught.value.details["unanswered"] == 3
        assert "the store answered 50" in caught.value.what
        puts = [method for method, _ in s3.faults.requests if method == "PUT"]
        assert len(puts) == 3
    s3.open(prefix).create("log/1", b"another")
    assert s3.read(f"{prefix}/log/1") == b"another"


def test_a_conflict_that_does_not_end_is_no_taken_name(s3: S3, prefix: str) -> None:
    """`AlreadyExists` is a promise that something is there. Here nothing is."""
    with (
        s3.faults.striking(Strike("conflict", method="PUT", times=2)),
        pytest.raises(StorageError) as caught,
    ):
        s3.open(prefix, retries=1).create("log/1", b"mine")
    assert type(caught.value) is StorageError
    assert "nothing is stored there" in caught.value.what


def test_a_refusal_for_good_is_not_asked_again(s3: S3, prefix: str) -> None:
    with s3.faults.striking(Strike("deny", method="PUT")):
        with pytest.raises(StorageError) as caught:
            s3.open(prefix).create("log/1", b"mine")
        assert len(s3.faults.requests) == 1
    assert "right to read" in caught.value.remedy
    assert caught.value.where.endswith(f"/{prefix}/log/1")


def test_a_bucket_that_is_not_there_is_named(s3: S3) -> None:
    storage = s3_server.ObjectStorage("s3://nobucket/run", s3.options())
    with pytest.raises(StorageError) as caught:
        storage.create("log/1", b"mine")
    assert caught.value.what == "the bucket or container does not exist"
    assert "Make it" in caught.value.remedy


def test_a_store_without_room_is_full(s3: S3, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(environ: dict, start_response) -> list[bytes]:
        start_response("507 Insufficient Storage", [("Content-Length", "0")])
        return [b""]

    monkeypatch.setattr(s3.faults, "app", full)
    with pytest.raises(StorageFull):
        s3.open(prefix, retries=1).create("log/1", b"mine")


# --- stores that forget, or change, what they were given ------------------------------------------


@pytest.fixture
def forgetful(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A store without metadata: nothing bears a stamp."""
    app, name = s3.faults.app, f"HTTP_X_AMZ_META_{STAMP.upper()}"
    monkeypatch.setattr(
        s3.faults,
        "app",
        lambda env, start: app({k: v for k, v in env.items() if k != name}, start),
    )
    return s3


def test_without_a_stamp_the_very_bytes_decide(forgetful: S3, prefix: str) -> None:
    with forgetful.faults.striking(Strike("lose", method="PUT")):
        forgetful.open(prefix).create("log/1", b"mine")
    assert forgetful.read(f"{prefix}/log/1") == b"mine"
    with (
        forgetful.faults.striking(Strike("lose", method="PUT")),
        pytest.raises(AlreadyExists),
    ):
        forgetful.open(prefix).create("log/1", b"other")


def test_without_a_stamp_and_with_an_answer_nobody_is_believed(forgetful: S3, prefix: str) -> None:
    with forgetful.faults.striking(Strike("repeat", method="PUT")), pytest.raises(AlreadyExists):
        forgetful.open(prefix).create("log/1", b"mine")


def test_our_stamp_on_other_bytes_is_damage(
    s3: S3, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_, "new_stamp", lambda: "stamp")
    s3.open(prefix).create("log/1", b"short")
    for data in (b"other", b"longer"):
        with pytest.raises(StorageError, match="other bytes than it was given"):
            s3.open(prefix, retries=0).create("log/1", data)
    assert s3.read(f"{prefix}/log/1") == b"short"


def test_a_strangers_large_object_is_not_read(s3: S3, prefix: str) -> None:
    s3.write(f"{prefix}/log/1", bytes(2**20))
    with s3.faults.striking(Strike("flip", method="GET", part="log/1")):
        with pytest.raises(AlreadyExists):
            s3.open(prefix).create("log/1", b"mine")
        assert [method for method, _ in s3.faults.requests] == ["PUT", "GET"]


# --- looking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", bytes(1000)])
def test_look_tells_size_and_stamp(s3: S3, prefix: str, data: bytes) -> None:
    storage = s3.open(prefix)
    clients = connect(storage._address, storage._options)
    assert look(clients, "file") is None
    storage.create("file", data)
    found = look(clients, "file")
    assert found is not None
    assert found.size == len(data)
    assert found.stamp is not None
    s3.write(f"{prefix}/file", data)
    found = look(clients, "file")
    assert found is not None
    assert found.stamp is None
