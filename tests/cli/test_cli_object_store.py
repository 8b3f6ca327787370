"""Commands look at a run in an object store as at one in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server

from coherent_ray.storage import StorageOptions, open_storage


@pytest.fixture
def run(published, s3: S3Server, prefix: str) -> str:
    """The run of the other tests, copied into a bucket; its address."""
    for path in Path(published.root).rglob("*"):
        if path.is_file():
            s3.write(f"{prefix}/{path.relative_to(published.root)}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture
def named(run: str, s3: S3Server, configuration) -> Path:
    """The configuration that the run was made with."""
    return configuration(run={"root": run}, storage={"endpoint": s3.endpoint, "allow_http": True})


@pytest.fixture
def by_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


def test_a_configuration_says_how_to_reach_it(call, run: str, named: Path) -> None:
    listed = call("ls", named, "--json")
    assert listed.code == 0, listed.err
    assert listed.json["root"] == run
    assert [g["generation"] for g in listed.json["generations"]] == ["g1-a1", "g2-a1", "g3-a2"]
    assert all(g["published_at"] for g in listed.json["generations"])
    assert call("show", f"{named}@g2", "--json").json["update"] == 20
    assert call("verify", named, "--all").code == 0


def test_so_does_the_environment(call, run: str, by_environment: None) -> None:
    assert call("show", f"{run}@g3-a2", "--json").json["root"] == run
    assert call("receipts", run, "--last", "1", "--json").json["update"] == 30


def test_damage_is_named(call, run: str, s3: S3Server, prefix: str, named: Path) -> None:
    key = f"{prefix}/generations/g3-a2/shard-00001-of-00003.safetensors"
    data = s3.read(key)
    assert data is not None
    s3.write(key, data[:-1] + bytes([data[-1] ^ 1]))
    done = call("verify", named)
    assert done.code == 1
    assert "generations/g3-a2/shard-00001-of-00003.safetensors" in done.out + done.err


def test_an_attempt_that_the_log_does_not_know_is_seen(
    call, run: str, s3: S3Server, prefix: str, named: Path
) -> None:
    s3.open(prefix).create("generations/g9-a9/manifest.json", b"x")
    assert s3.open(prefix).directories("generations") == ["g1-a1", "g2-a1", "g3-a2", "g9-a9"]
    done = call("ls", named)
    assert done.code == 1
    assert "generations/g9-a9; records are missing" in done.out


def test_generations_are_given_up(call, run: str, s3: S3Server, prefix: str, named: Path) -> None:
    s3.write(f"{prefix}/notes.txt", b"somebody's")
    done = call("prune", named, "--keep", "1")
    assert done.code == 0, done.err
    left = {path.split("/")[1] for path in s3.keys(prefix) if path.startswith("generations/")}
    assert left == {"g3-a2"}
    assert s3.read(f"{prefix}/notes.txt") == b"somebody's"


def test_a_bucket_without_a_run(call, s3: S3Server, by_environment: None) -> None:
    done = call("ls", f"s3://{BUCKET}/nothing")
    assert done.code == 2
    assert f"s3://{BUCKET}/nothing: no run lies here" in done.err
    # An address may end in anything, so what was meant for a generation is told too.
    assert "RUN@g12" in call("ls", f"s3://{BUCKET}/nothing@G3").err
    assert "RUN@g12" not in done.err


def test_a_store_that_is_not_there_is_one_clear_error(call, configuration) -> None:
    path = configuration(
        run={"root": "s3://bucket/run"},
        storage={"endpoint": "http://127.0.0.1:1", "allow_http": True, "retries": 0},
    )
    done = call("ls", path)
    assert done.code == 1
    assert "the store does not answer" in done.err
    assert "Traceback" not in done.err


def test_the_configuration_says_what_is_wrong_with_an_endpoint(call, configuration) -> None:
    path = configuration(run={"root": "s3://b/run"}, storage={"endpoint": "http://h:1"})
    done = call("validate", path)
    assert done.code == 2
    assert "storage.endpoint: is an address without TLS" in done.err


def test_what_the_copy_holds_is_what_the_run_held(run: str, s3: S3Server, published) -> None:
    storage = open_storage(run, StorageOptions(endpoint=s3.endpoint, allow_http=True))
    assert list(storage.list("log")) == list(published.storage.list("log"))
