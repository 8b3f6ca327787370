"""Settings of an object store: what cannot work is refused before the store is asked."""

import pickle
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from coherent_ray.config.sections import Storage
from coherent_ray.errors import ConfigError
from coherent_ray.storage import StorageOptions


def test_the_configuration_has_the_same_settings_with_the_same_defaults() -> None:
    section = Storage().model_dump(exclude={"signing_key"})
    options = asdict(StorageOptions())
    assert (options.pop("key_env"), options.pop("key_file")) == (None, None)
    assert options.pop("backoff_s") == 0.1
    assert section == options
    assert Storage().options == StorageOptions()


def test_the_configurations_settings_arrive() -> None:
    section = Storage(
        endpoint="http://127.0.0.1:9000", allow_http=True, region="eu-1", account="me",
        part_bytes=8 * 2**20, parallel_parts=2, timeout_s=5.0, retries=1,
    )  # fmt: skip
    options = section.options
    settings = section.model_dump(exclude={"signing_key"})
    assert asdict(options) == {**settings, "backoff_s": 0.1, "key_env": None, "key_file": None}
    assert pickle.loads(pickle.dumps(options)) == options
    assert StorageOptions(**asdict(options)) == options


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"endpoint": "http://host"}, "storage.endpoint"),
        ({"endpoint": "host:9000"}, "storage.endpoint"),
        ({"endpoint": "https://"}, "storage.endpoint"),
        ({"endpoint": "ftp://host", "allow_http": True}, "storage.endpoint"),
        ({"part_bytes": 0}, "storage.part_bytes"),
        ({"parallel_parts": 0}, "storage.parallel_parts"),
        ({"retries": -1}, "storage.retries"),
        ({"timeout_s": 0.0}, "storage.timeout_s"),
        ({"timeout_s": float("nan")}, "storage.timeout_s"),
        ({"backoff_s": -1.0}, "storage.timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StorageOptions(**settings)
    assert caught.value.where == where


def test_an_endpoint_without_tls_is_a_choice() -> None:
    assert StorageOptions(endpoint="http://host:1", allow_http=True).allow_http
    with pytest.raises(ConfigError, match="needs allow_http: true"):
        StorageOptions(endpoint="http://host:1")


@pytest.mark.parametrize("place", [{"env": "A_KEY"}, {"file": "/etc/keys/a"}])
def test_the_signing_keys_place_arrives_and_no_key(place: dict[str, str]) -> None:
    options = Storage.model_validate({"signing_key": place}).options
    (name,) = place
    assert asdict(options)[f"key_{name}"] == place[name]
    assert StorageOptions(**asdict(options)) == options
    assert options.key_place is not None


@pytest.mark.parametrize(
    "place", [{}, {"env": "A", "file": "/a"}, {"file": "a"}, {"env": "A B"}, {"env": ""}, "A"]
)
def test_a_signing_key_has_exactly_one_place(place: object) -> None:
    with pytest.raises(ValidationError):
        Storage.model_validate({"signing_key": place})
