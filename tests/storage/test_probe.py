"""The probe lets pass what keeps its word, and refuses what does not, with the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from azure_server import AzureServer
from faulty_server import App, IgnoresConditions, LooksTooEarly, Strike, served
from gcs_server import GcsServer
from s3_server import BUCKET, S3Server, client_of, moto_app

from coherent_ray.digests import Buffer
from coherent_ray.errors import AlreadyExists, ConfigError, StorageError, StorageFull
from coherent_ray.storage import LocalStorage, StorageOptions, open_storage
from coherent_ray.storage.base import Entry, Storage
from coherent_ray.storage.probe import DIRECTORY, probe
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


@pytest.mark.parametrize("thorough", [True, False])
def test_what_keeps_its_word_passes_and_nothing_stays(
    tmp_path: Path, s3: S3Server, gcs: GcsServer, prefix: str, thorough: bool
) -> None:
    for storage in (
        LocalStorage(tmp_path / "run"),
        MemoryStorage(),
        s3.open(prefix),
        gcs.open(prefix),
    ):
        probe(storage, thorough=thorough)
        assert list(storage.list()) == []


def test_azure_passes(azure: AzureServer, prefix: str) -> None:
    probe(azure.open(prefix))
    assert azure.keys(prefix) == set()


def test_lost_answers_do_not_make_a_good_store_a_bad_one(s3: S3Server, prefix: str) -> None:
    strikes = [Strike("lose", method="PUT", at=at) for at in (1, 3, 6)]
    with s3.faults.striking(*strikes):
        probe(s3.open(prefix))


pytestmark = pytest.mark.usefixtures("store_credentials")


@contextmanager
def storage_on(app: App) -> Iterator[Storage]:
    with served(app) as endpoint:
        client_of(endpoint).create_bucket(Bucket=BUCKET)
        options = StorageOptions(endpoint=endpoint, allow_http=True, retries=1, backoff_s=0.01)
        yield open_storage(f"s3://{BUCKET}/negative", options)


def test_a_server_that_ignores_conditions_is_refused() -> None:
    with storage_on(IgnoresConditions(moto_app())) as storage:
        with pytest.raises(ConfigError) as caught:
            probe(storage, thorough=False)
        assert list(storage.list()) == []
    assert "cannot hold a run: it ignores conditions" in caught.value.what
    assert caught.value.where == f"s3://{BUCKET}/negative"
    assert "If-None-Match" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_a_server_that_looks_before_it_takes_is_refused() -> None:
    with storage_on(LooksTooEarly(moto_app())) as storage:
        probe(storage, thorough=False)
        with pytest.raises(ConfigError, match="of 8 creators at once were given a name"):
            probe(storage)
        assert list(storage.list()) == []


class Liar(MemoryStorage):
    """A storage that breaks one promise."""

    def __init__(self, lie: str) -> None:
        super().__init__()
        self.lie = lie

    def create(self, path: str, data: Buffer) -> None:
        if self.lie == "overwrites" and path in self.files:
            self.files[path] = bytes(data)
            raise AlreadyExists("the name is taken", where=path)
        super().create(path, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        yield from () if self.lie == "hides" else super().list(prefix)

    def delete(self, path: str) -> None:
        if self.lie != "keeps":
            super().delete(path)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("overwrites", "it says that a name is taken, and overwrites it"),
        ("hides", "its list does not show what was just written"),
        ("keeps", "what was deleted can still be read"),
    ],
)
def test_each_broken_promise_is_named(lie: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probe(Liar(lie), thorough=False)
    assert caught.value.what == f"this storage cannot hold a run: {reason}"


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("full", verb="create"), StorageFull),
        (Fault("refuse", verb="create"), StorageError),
        (Fault("refuse", verb="create", at=2), StorageError),
        (Fault("refuse", verb="read"), StorageError),
        (Fault("refuse", verb="list"), StorageError),
        (Fault("refuse", verb="delete"), StorageError),
    ],
)
def test_the_probe_finds_what_a_save_would_find(
    fault: Fault, kind: type[StorageError], thorough: bool
) -> None:
    storage = FaultyStorage(MemoryStorage(), [fault])
    with pytest.raises(kind) as caught:
        probe(storage, thorough=thorough)
    assert type(caught.value) is kind, "a storage that fails is no liar"
    assert storage.struck == [fault]
    assert len(storage.inner.files) == (fault.verb == "delete")  # type: ignore[attr-defined]


def test_a_storage_that_gives_back_something_else_is_found() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("flip", verb="read")])
    with pytest.raises(StorageError, match="gave back"):
        probe(storage)


def test_two_probes_at_once_do_not_meet(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create(f"{DIRECTORY}/somebody-elses", b"")
    probe(storage)
    assert [entry.path for entry in storage.list()] == [f"{DIRECTORY}/somebody-elses"]


def test_a_race_that_the_store_does_not_survive_is_its_error() -> None:
    faults = [Fault("refuse", verb="create", at=at) for at in (3, 4)]
    storage = FaultyStorage(MemoryStorage(), faults)
    with pytest.raises(StorageError, match="injected"):
        probe(storage)
    assert storage.inner.files == {}  # type: ignore[attr-defined]
