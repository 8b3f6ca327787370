"""What Ray Train is told at the end: the last metrics, and the last generation where it lies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray.train import CheckpointUploadMode

from coherent_ray.train.outcome import report_outcome


def told(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    rays: Path,
    rank: int = 0,
    published: str | None = "g12-a3",
) -> dict[str, Any]:
    """What `ray.train.report` gets from a session that looks like this."""
    calls: list[dict[str, Any]] = []
    context = SimpleNamespace(get_storage=lambda: SimpleNamespace(experiment_fs_path=str(rays)))
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(
        ray.train, "report", lambda metrics, **more: calls.append({"metrics": metrics, **more})
    )
    run: Any = SimpleNamespace(
        rank=rank,
        stopped=True,
        progress=SimpleNamespace(metrics={"update": 7, "loss": 0.5}),
        boundaries=SimpleNamespace(published=published),
        config=SimpleNamespace(
            run=SimpleNamespace(root=str(root)), storage=SimpleNamespace(options=None)
        ),
    )
    report_outcome(run)
    (call,) = calls
    return call


def test_metrics_and_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = told(monkeypatch, tmp_path / "run", tmp_path / "run")
    place = str(tmp_path / "run" / "generations" / "g12-a3")
    assert call["metrics"] == {"update": 7, "loss": 0.5, "stopped": True, "address": place}
    assert call["checkpoint"].path == place
    assert call["checkpoint_upload_mode"] is CheckpointUploadMode.NO_UPLOAD


def test_one_rank_names_the_checkpoint_and_all_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = told(monkeypatch, tmp_path, tmp_path, rank=1)
    assert call["checkpoint"] is None
    assert call["metrics"]["update"] == 7


def test_a_run_without_a_generation_has_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = told(monkeypatch, tmp_path, tmp_path, published=None)
    assert (call["checkpoint"], call["metrics"]["address"]) == (None, None)


@pytest.mark.parametrize("rays", ["elsewhere", "run2", "run/generations/g1-a1"])
def test_a_place_that_ray_would_refuse_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rays: str
) -> None:
    """Ray raises for a checkpoint outside its own directory, after all the training."""
    assert told(monkeypatch, tmp_path / "run", tmp_path / rays)["checkpoint"] is None


def test_ray_s_directory_may_hold_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = told(monkeypatch, tmp_path / "outer" / "run", tmp_path / "outer")
    assert call["checkpoint"] is not None
