"""Clients take from the environment what the options leave open, as the vendors name it."""

import sys

import gcs_server
import pytest
import s3_server

from coherent_ray.errors import ConfigError, StorageError
from coherent_ray.storage import StorageOptions, open_storage
from coherent_ray.storage.address import parse_address
from coherent_ray.storage.clients import connect

S3 = parse_address("s3://bucket/run")

pytestmark = pytest.mark.usefixtures("store_credentials")


def test_the_usual_variables_are_enough(
    s3: s3_server.S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_storage(f"s3://bucket/{prefix}").create("file", b"x")
    assert s3.read(f"{prefix}/file") == b"x"


def test_googles_variables_too(
    gcs: gcs_server.GcsServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs.endpoint)
    open_storage(f"gs://bucket/{prefix}", StorageOptions(allow_http=True)).create("file", b"x")
    assert gcs.read(f"{prefix}/file") == b"x"


def test_an_option_wins_over_the_environment(
    s3: s3_server.S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3.open(prefix).create("file", b"x")
    assert s3.read(f"{prefix}/file") == b"x"


def test_an_endpoint_of_the_environment_needs_the_permission_too(
    s3: s3_server.S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    with pytest.raises(StorageError) as caught:
        open_storage(f"s3://bucket/{prefix}").create("file", b"x")
    assert "storage.allow_http" in caught.value.remedy
    assert s3.faults.requests == []


def test_one_client_never_asks_twice_and_the_other_does() -> None:
    clients = connect(S3, StorageOptions(retries=7, timeout_s=3.0))
    assert clients.once.retry_config["max_retries"] == 0
    assert clients.patient.retry_config["max_retries"] == 7
    assert clients.once.prefix == clients.patient.prefix == "run"


def test_pauses_grow_to_a_limit_and_differ_between_ranks() -> None:
    clients = connect(S3, StorageOptions(retries=12, backoff_s=0.1))
    ones, others = list(clients.pauses()), list(clients.pauses())
    assert len(ones) == 13
    assert ones[0] == 0.0
    assert ones != others
    for index, pause in enumerate(ones[1:]):
        longest = min(0.1 * 2**index, 5.0)
        assert longest / 2 <= pause <= longest


def test_settings_that_make_no_client_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{")
    with pytest.raises(ConfigError) as caught:
        open_storage("gs://bucket/run")
    assert caught.value.where == "gs://bucket/run"
    assert "GOOGLE_" in caught.value.remedy


def test_a_profile_is_read_by_boto3(
    s3: s3_server.S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[training]\naws_access_key_id = from-profile\naws_secret_access_key = s\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "training")
    seen: list[str] = []
    app = s3.faults.app
    monkeypatch.setattr(
        s3.faults,
        "app",
        lambda env, start: (seen.append(env.get("HTTP_AUTHORIZATION", "")), app(env, start))[1],
    )
    s3.open(prefix).create("file", b"x")
    assert "Credential=from-profile/" in seen[0]


def test_a_profile_without_boto3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "training")
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError) as caught:
        open_storage("s3://bucket/run")
    assert "'training'" in caught.value.what
    assert "pip install boto3" in caught.value.remedy
