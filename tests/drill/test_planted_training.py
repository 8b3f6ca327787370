"""Every planted bug in training is caught: by a proof, at its place, and by the test it names."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import parity_jobs
import pytest

from coherent_ray.drill import cases
from coherent_ray.drill.lives import InProcess
from coherent_ray.drill.patching import planted
from coherent_ray.drill.planted_training import MUTANTS, Mutant
from coherent_ray.drill.proof import Proof
from coherent_ray.drill.proving import Plan, prove
from coherent_ray.errors import CoherentRayError

TESTS = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("unsynced")


def proved(folder: Path, needs: str, mutant: Mutant | None = None) -> Proof:
    job = cases.prepared(parity_jobs.job(folder, **parity_jobs.JOBS[needs]), None)
    plan = Plan(job, str(folder / "runs"), ranks=(1, 4), kills=0)
    with planted(mutant.patches if mutant else ()):
        return prove(plan, InProcess(), lambda text: None)


@pytest.mark.parametrize("needs", sorted(parity_jobs.JOBS))
def test_without_a_bug_the_claim_is_proved(needs: str, tmp_path: Path) -> None:
    proof = proved(tmp_path, needs)
    assert proof.good, proof.page()
    assert [run.name for run in proof.runs] == ["reference", "4 ranks", "resized"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_proof_finds_it_and_its_place(mutant: Mutant, tmp_path: Path) -> None:
    proof = proved(tmp_path, mutant.needs, mutant)
    assert not proof.good
    last = proof.runs[-1]
    assert any(mutant.says in fault for fault in last.faults), last.faults
    assert mutant.spot in str(last.cause)
    page = proof.page()
    assert "does NOT hold" in page
    assert mutant.says in page


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_test_that_it_names_fails(mutant: Mutant, tmp_path: Path) -> None:
    path, _, function = mutant.test.partition("::")
    name, _, kind = function.rstrip("]").partition("[")
    test = getattr(loaded(TESTS / path), name)
    wanted = inspect.signature(test).parameters
    given: dict[str, Any] = {"kind": kind, "tmp_path": tmp_path}
    with planted(mutant.patches), pytest.raises((AssertionError, CoherentRayError)):
        test(**{key: value for key, value in given.items() if key in wanted})


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"named_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
