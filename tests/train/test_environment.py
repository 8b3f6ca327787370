"""The environment fingerprint: the facts that change bits, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coherent_ray.train import environment
from coherent_ray.train.environment import DISPATCH_VARIABLES, fingerprint, prepare

pytestmark = pytest.mark.usefixtures("one_process")

CPU = torch.device("cpu")


def changed(before: dict[str, str]) -> set[str]:
    """Return the names of the facts that are others now."""
    now = fingerprint(CPU)
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def test_what_is_told() -> None:
    prepare(CPU, threads=1, deterministic=True)
    facts = fingerprint(CPU)
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["threads"] == "1"
    assert facts["deterministic"] == "True"
    assert set(facts) >= {"machine", "cpu_capability", "mkldnn", "matmul_precision"}
    assert all(isinstance(value, str) and value for value in facts.values())


def test_it_is_the_same_each_time() -> None:
    assert fingerprint(CPU) == fingerprint(CPU)


def test_threads_are_told() -> None:
    prepare(CPU, threads=1, deterministic=True)
    before = fingerprint(CPU)
    prepare(CPU, threads=2, deterministic=True)
    assert changed(before) == {"threads"}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_mode_is_set_and_told(deterministic: bool) -> None:
    prepare(CPU, threads=1, deterministic=deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert fingerprint(CPU)["deterministic"] == str(deterministic)
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("name", DISPATCH_VARIABLES)
def test_variables_that_choose_kernels_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    before = fingerprint(CPU)
    assert f"env:{name}" not in before
    monkeypatch.setenv(name, "AVX2")
    assert changed(before) == {f"env:{name}"}
    assert fingerprint(CPU)[f"env:{name}"] == "AVX2"


def test_precision_of_products_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(CPU)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert changed(before) == {"matmul_precision"}
    finally:
        torch.set_float32_matmul_precision(precision)


def test_places_and_names_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, user, directory or OMP_NUM_THREADS computes the same bits."""
    prepare(CPU, threads=1, deterministic=True)
    before = fingerprint(CPU)
    for name in ("HOSTNAME", "HOME", "USER", "PWD", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    assert changed(before) == set()
    text = str(before)
    assert os.uname().nodename not in text
    assert str(Path.cwd()) not in text


def test_a_fresh_process_under_rays_threads_tells_the_same() -> None:
    """Ray sets OMP_NUM_THREADS from a worker's CPUs; a run's threads are the configuration's."""
    prepare(CPU, threads=1, deterministic=False)
    program = (
        "import json, torch; from coherent_ray.train.environment import fingerprint; "
        "torch.set_num_threads(1); print(json.dumps(fingerprint(torch.device('cpu'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == fingerprint(CPU)


def test_a_gpus_workspace_is_set_where_a_run_is_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare(CPU, threads=1, deterministic=True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare(torch.device("cuda"), threads=1, deterministic=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare(torch.device("cuda"), threads=1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare(torch.device("cuda"), threads=1, deterministic=True)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_told() -> None:
    facts = environment.fingerprint(torch.device("cuda"))
    assert facts["device"] == "cuda"
    assert {"gpu", "cuda", "cudnn", "tf32"} <= facts.keys()
