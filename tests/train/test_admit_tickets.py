"""Claims that a resume keeps or breaks; and tickets, which never raise, whatever happens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    config_for,
    coordinating,
    found,
    open_attempt,
    refused,
    request_for,
    stop_at,
    ticket_of,
    train,
)

from coherent_ray.errors import (
    AdmissionRefused,
    ClaimRefused,
    StorageError,
    TaskError,
    TrainingFailed,
)
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.train import admit as admit_
from coherent_ray.train import environment

pytestmark = pytest.mark.usefixtures("one_process")


# --- claims ---------------------------------------------------------------------------------------


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the environment seems to be, for a test to change."""
    now = {"torch": "2.13.0", "threads": "1"}
    monkeypatch.setattr(environment, "fingerprint", lambda device: dict(now))
    return now


def trained_under(claim: str, tmp_path: Path) -> Path:
    config = config_for(tmp_path, run__claim=claim)
    assert train(config, stop_at(2)).manifest().header.claim == claim
    return tmp_path


def test_exact_refuses_another_rank_count(tmp_path: Path) -> None:
    config = config_for(trained_under("exact", tmp_path), run__claim="exact")
    assert found(config).notes == ()
    error = refused(config, ClaimRefused, ranks=2)
    assert "the rank count changed from 1 to 2, and run.claim is exact" in error.what
    assert error.where == "cluster.workers"
    assert error.details == {"stored": 1, "now": 2}


@pytest.mark.parametrize("claim", ["invariant", "statistical"])
def test_other_claims_note_another_rank_count(tmp_path: Path, claim: str) -> None:
    config = config_for(trained_under(claim, tmp_path), run__claim=claim)
    assert found(config, 0, 3).notes == ("rank count changed from 1 to 3",)


@pytest.mark.parametrize("claim", ["exact", "invariant"])
def test_a_changed_environment_is_refused(
    tmp_path: Path, facts: dict[str, str], claim: str
) -> None:
    config = config_for(trained_under(claim, tmp_path), run__claim=claim)
    facts["threads"] = "4"
    facts["env:MKL_CBWR"] = "AVX2"
    error = refused(config, ClaimRefused)
    assert f"the environment changed, and run.claim is {claim}" in error.what
    assert error.details["changes"] == ["env:MKL_CBWR: absent -> AVX2", "threads: 1 -> 4"]


def test_a_changed_environment_is_noted_under_statistical(
    tmp_path: Path, facts: dict[str, str]
) -> None:
    config = config_for(trained_under("statistical", tmp_path), run__claim="statistical")
    facts["threads"] = "4"
    assert found(config).notes == ("environment changed: threads: 1 -> 4",)


@pytest.mark.parametrize("claim", ["exact", "invariant", "statistical"])
def test_another_job_is_refused_or_noted(tmp_path: Path, claim: str) -> None:
    changes: dict[str, Any] = {"training__updates": 9, "optimizer__lr": 0.5}
    config = config_for(trained_under(claim, tmp_path), run__claim=claim, **changes)
    lines = ["optimizer.lr: 0.0003 -> 0.5", "training.updates: 6 -> 9"]
    if claim == "statistical":
        assert found(config).notes == tuple(f"the job changed: {line}" for line in lines)
        return
    error = refused(config, ClaimRefused)
    assert f"the job changed, and run.claim is {claim}: {'; '.join(lines)}" in error.what
    assert error.where == "optimizer.lr"
    assert error.details == {"changes": lines}


@pytest.mark.parametrize(
    ("stored", "asked", "allowed"),
    [
        ("statistical", "exact", False),
        ("statistical", "invariant", False),
        ("exact", "statistical", True),
        ("invariant", "statistical", True),
        ("exact", "invariant", True),
        ("invariant", "exact", True),
    ],
)
def test_a_claim_may_weaken_and_never_grow(
    tmp_path: Path, facts: dict[str, str], stored: str, asked: str, allowed: bool
) -> None:
    config = config_for(trained_under(stored, tmp_path), run__claim=asked)
    if allowed:
        assert found(config).selected is not None
        return
    error = refused(config, ClaimRefused)
    assert f"run.claim is {asked}, but the history was made under {stored}" in error.what
    assert error.remedy.startswith(f"set run.claim: {stored}")


# --- tickets never raise --------------------------------------------------------------------------


def test_what_nobody_foresaw_is_in_the_ticket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = open_attempt(config_for(folder))
    for place in ("find_out", "describe"):
        with monkeypatch.context() as patch:
            patch.setattr(admit_, place, lambda *given: {}["nothing"])
            ticket = ticket_of(request, 1, 2)
        assert type(ticket.refusal) is TrainingFailed
        assert "admission broke: KeyError: 'nothing'" in ticket.refusal.what
        assert ticket.refusal.where == "rank 1"
        assert "in <lambda>" in str(ticket.refusal.details["traceback"])
        assert (ticket.rank, ticket.ranks) == (1, 2)
        assert admit_._admitted is None


def test_a_device_that_is_not_there_is_in_the_ticket(folder: Path) -> None:
    def no_device() -> torch.device:
        raise RuntimeError("no GPU here")

    request = open_attempt(config_for(folder))
    blank = ticket_of(request)
    ticket = admit_._ticket(request, replace(blank, refusal=None), no_device)
    assert ticket.refusal is not None
    assert "no GPU here" in ticket.refusal.what


def test_a_failed_ticket_forgets_the_one_before(folder: Path) -> None:
    request = open_attempt(config_for(folder))
    assert ticket_of(request).refusal is None
    assert admit_.current().attempt == 2
    assert ticket_of(replace(request, attempt=9)).refusal is not None
    with pytest.raises(AdmissionRefused):
        admit_.current()


def test_a_root_that_cannot_be_read_is_in_the_ticket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = open_attempt(config_for(folder))
    storage = FaultyStorage(LocalStorage(folder / "run"), [Fault("refuse", verb="read")])
    monkeypatch.setattr(admit_, "open_storage", lambda uri, options: storage)
    ticket = ticket_of(request)
    assert type(ticket.refusal) is StorageError
    assert storage.struck


def test_the_drivers_directory_is_where_tasks_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "found_by_path.py").write_text("from small_run import Tiny as Task\n")
    factory = "found_by_path:Task"
    config = config_for(folder, task__factory=factory, run__claim="statistical")
    request = open_attempt(config)
    error = ticket_of(request).refusal
    assert type(error) is TaskError
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert ticket_of(replace(request, code_path=str(code))).refusal is None
    assert sys.path[-1] == str(code)


def test_the_coordinator_may_have_died_in_between(folder: Path) -> None:
    """A second coordinator opens a later attempt; the request of the first is too old then."""
    config = config_for(folder)
    with coordinating(config) as first, coordinating(config) as second:
        request = request_for(config, first.open_attempt())
        second.open_attempt()
        error = ticket_of(request).refusal
        assert isinstance(error, AdmissionRefused)
        assert "stop one" in error.remedy
