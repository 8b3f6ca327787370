"""A run whose root is in an object store: the same run to the bit, and its options everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import small_run
from faulty_server import IgnoresConditions, Strike, served
from s3_server import BUCKET, S3Server, client_of, moto_app
from small_run import Left, assert_same_state, config_for, train

from coherent_ray.commit.log import CommitLog
from coherent_ray.config import Config
from coherent_ray.errors import ConfigError
from coherent_ray.storage import StorageOptions
from coherent_ray.storage.object_store import ObjectStorage
from coherent_ray.train import backend, coordinators, outcome, ownership, preflight, trainer
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.wishes import WISH_SAVE, WISH_STOP


def on(s3: S3Server, prefix: str, folder: Path, **changes: Any) -> Config:
    """A small run's configuration, with its root on the server."""
    root = {"run__root": f"s3://{BUCKET}/{prefix}", "run__run_id": "small"}
    storage = {"storage__endpoint": s3.endpoint, "storage__allow_http": True}
    return config_for(folder, **root, **storage, **changes)


def test_a_run_in_an_object_store_is_the_same_run(s3: S3Server, prefix: str, trained: Path) -> None:
    """Stopped half-way and resumed, while every fifth change loses its answer."""
    config = on(s3, prefix, trained, training__updates=4)
    lost = [Strike("lose", method="PUT", at=at) for at in (1, 6, 11)]
    with s3.faults.striking(*lost):
        first = train(config, wishes=[0, WISH_STOP | WISH_SAVE])
        assert first.generations == ["g1-a1"]
        stored = train(config)
    assert stored.generations == ["g1-a1", "g2-a2"]
    local = Left(config_for(trained, training__updates=4))
    assert stored.chain() == local.chain()
    assert_same_state(stored.state(), local.state())
    assert stored.manifest().fingerprint == local.manifest().fingerprint
    assert s3.uploads(prefix) == []


# --- before a run starts --------------------------------------------------------------------------


@pytest.fixture
def puts(s3: S3Server) -> Any:
    return lambda: [target for method, target in s3.faults.requests if method == "PUT"]


def test_the_first_preflight_lets_creators_race_and_later_ones_do_not(
    s3: S3Server, prefix: str, trained: Path, puts: Any
) -> None:
    config = on(s3, prefix, trained)
    found = preflight.check(config)
    assert (found.run_id, found.done, found.latest) == ("small", 0, None)
    assert sum("/probe/" in target for target in puts()) >= 2 + 8
    CommitLog(small_run.root_of(config)).open_attempt("small", "token")
    s3.faults.forget()
    preflight.check(config)
    assert sum("/probe/" in target for target in puts()) == 2
    assert {path.partition("/")[0] for path in s3.keys(prefix)} == {"log", "datasets"}


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(
    trained: Path, store_credentials: None
) -> None:
    with served(IgnoresConditions(moto_app())) as endpoint:
        client = client_of(endpoint)
        client.create_bucket(Bucket="loose")
        config = config_for(
            trained,
            run__root="s3://loose/run",
            storage__endpoint=endpoint,
            storage__allow_http=True,
        )
        with pytest.raises(ConfigError, match="ignores conditions"):
            preflight.check(config)
        assert "Contents" not in client.list_objects_v2(Bucket="loose")


# --- Ray's own files ------------------------------------------------------------------------------


def test_rays_files_of_a_run_in_an_object_store_are_kept_on_this_machine(
    s3: S3Server, prefix: str, trained: Path
) -> None:
    config = on(s3, prefix, trained)
    one, other = trainer.run_config(config), trainer.run_config(config)
    for made in (one, other):
        place = Path(str(made.storage_path))
        assert place.is_dir()
        assert list(place.iterdir()) == []
        assert made.name is not None
        assert made.name.startswith(f"{prefix}-")
    assert one.storage_path != other.storage_path, "nothing of an earlier start is found"
    assert s3.faults.requests == []


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, trained: Path) -> list[dict[str, Any]]:
    """What Ray is told; its own files lie in the local run's root."""
    told: list[dict[str, Any]] = []
    storage = SimpleNamespace(experiment_fs_path=str(trained / "run"))
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "report", lambda metrics, **more: told.append(metrics | more))
    return told


def finished(config: Config, published: str | None, rank: int = 0) -> Any:
    return SimpleNamespace(
        config=config,
        rank=rank,
        stopped=False,
        progress=SimpleNamespace(metrics={"loss": 1.0}),
        boundaries=SimpleNamespace(published=published),
    )


def test_ray_is_told_where_the_generation_lies_and_gets_no_checkpoint(
    s3: S3Server, prefix: str, trained: Path, reported: list[dict[str, Any]]
) -> None:
    outcome.report_outcome(finished(on(s3, prefix, trained), "g2-a1"))
    (told,) = reported
    assert told["checkpoint"] is None
    assert told["address"] == f"s3://{BUCKET}/{prefix}/generations/g2-a1"
    assert (told["loss"], told["stopped"]) == (1.0, False)


# --- the coordinator ------------------------------------------------------------------------------


def test_the_actor_reaches_the_store_as_it_was_told(s3: S3Server, prefix: str) -> None:
    options = StorageOptions(endpoint=s3.endpoint, allow_http=True, retries=2)
    actor = CoordinatorActor(
        "run",
        f"s3://{BUCKET}/{prefix}",
        ack_timeout_s=60.0,
        read_back=False,
        storage=asdict(options),
    )

    async def story() -> tuple[int, dict[str, Any]]:
        return await actor.open_attempt("token"), await actor.ping()

    attempt, facts = asyncio.run(story())
    assert attempt == 1
    assert facts["options"]["storage"] == asdict(options)
    assert StorageOptions(**facts["options"]["storage"]) == options
    assert s3.keys(prefix) >= {"log/00000000000000000001.json"}


def test_a_coordinator_with_other_options_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    stopped: list[str] = []
    options = asdict(StorageOptions(retries=3))

    def start(actor: object, run_id: str, root: str, options: dict[str, Any]) -> Any:
        started.append(options)
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: options))

    facts = {"root": "s3://b/run", "options": {"storage": {}}}
    monkeypatch.setattr(coordinators, "find", lambda run_id: None)
    monkeypatch.setattr(coordinators, "_start", start)
    monkeypatch.setattr(coordinators, "answer", lambda *_: facts)
    monkeypatch.setattr(coordinators, "stop", lambda run_id, **_: stopped.append(run_id))
    coordinators.connect("run", "s3://b/run", storage=options)
    assert stopped == ["run"]
    assert [found["storage"] for found in started] == [options] * 2
    facts["options"] = started[0]
    coordinators.connect("run", "s3://b/run", storage=options)
    assert stopped == ["run"]


def test_the_gate_hands_the_options_on(
    s3: S3Server, prefix: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on(s3, prefix, trained)
    told: dict[str, Any] = {}

    class Enough(Exception):
        pass

    def connect(run_id: str, root: str, **options: Any) -> Any:
        told.update(run_id=run_id, root=root, **options)
        raise Enough

    monkeypatch.setattr(coordinators, "connect", connect)
    monkeypatch.setattr(ownership, "require_no_other", lambda run_id: None)
    with pytest.raises(Enough):
        backend.admit_group(None, backend.torch_config(config))
    assert told["root"] == f"s3://{BUCKET}/{prefix}"
    assert StorageOptions(**told["storage"]) == config.storage.options
    assert told["storage"]["endpoint"] == s3.endpoint
    assert isinstance(small_run.root_of(config), ObjectStorage)
