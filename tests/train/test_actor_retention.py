"""What a configuration keeps and scrubs reaches the coordinator, which is known by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from small_run import config_for

from coherent_ray.commit.scrubbing import Schedule
from coherent_ray.config import Config
from coherent_ray.storage import LocalStorage
from coherent_ray.train import backend, coordinators, ownership
from coherent_ray.train.actor import CoordinatorActor


class Asked(Exception):
    """The coordinator was asked for; nothing more is needed here."""


def asked_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options with which a worker group of this configuration asks for it."""
    seen: dict[str, Any] = {}

    def connect(run_id: str, root: str, *, actor: object = None, **options: Any) -> None:
        seen.update(options)
        raise Asked

    monkeypatch.setattr(coordinators, "connect", connect)
    monkeypatch.setattr(ownership, "require_no_other", lambda run_id: None)
    with pytest.raises(Asked):
        backend.admit_group(None, backend.torch_config(config))
    return seen


@pytest.mark.parametrize("every_s", [None, 3600.0])
def test_the_configured_scrub_reaches_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float | None
) -> None:
    config = config_for(
        tmp_path, checkpoint__scrub_every_s=every_s, checkpoint__scrub_bytes_per_s=1000
    )
    options = asked_for(config, monkeypatch)
    assert (options["scrub_every_s"], options["scrub_bytes_per_s"]) == (every_s, 1000)

    async def play() -> dict[str, Any]:
        actor = CoordinatorActor("small", config.run.root, **options)
        rounds = actor._service.rounds
        assert (rounds and rounds._schedule) == (Schedule(every_s, 1000) if every_s else None)
        await actor.report({"saving": True})
        assert actor._service.saving
        await actor.open_attempt("first")
        assert not actor._service.saving, "who said so is gone"
        status = await actor.status()
        await actor._service.close()
        return status

    assert asyncio.run(play())["scrub"] == ({"damaged": []} if every_s else None)


@pytest.mark.parametrize(("keep", "every"), [(None, None), (3, None), (2, 100)])
def test_the_configuration_reaches_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None, every: int | None
) -> None:
    config = config_for(tmp_path, checkpoint__keep=keep, checkpoint__keep_every=every)
    options = asked_for(config, monkeypatch)
    assert (options["keep"], options["keep_every"]) == (keep, every)

    async def play() -> dict[str, Any]:
        actor = CoordinatorActor("small", config.run.root, **options)
        assert await actor.open_attempt("first") == 1
        upkeep = actor._service.upkeep
        assert upkeep is not None
        assert (upkeep._policy.keep, upkeep._policy.keep_every) == (keep, every)
        return await actor.ping()

    # Other options mean another coordinator, so that a changed configuration takes effect.
    assert asyncio.run(play())["options"] == options
    assert [entry.path for entry in LocalStorage(config.run.root).list("log")]
