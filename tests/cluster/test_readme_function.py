"""The training function that the README shows runs as it stands there, as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators
from coherent_ray.train.identity import run_id_of

README = Path(__file__).parents[2] / "README.md"


def test_the_function_of_the_readme_runs(
    ray_cluster: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = README.read_text().split("```python\n")[1:]
    source = next(b.partition("```")[0] for b in blocks if "TorchTrainer(" in b)
    (tmp_path / "own.py").write_text(source)
    values = {**tiny.values(Path("run"), tiny_data), "optimizer": {}}
    del values["task"]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": ray_cluster, "RAY_ENABLE_AUTO_CONNECT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    monkeypatch.chdir(tmp_path)
    config = config_.load("my.yaml")
    coordinators.stop(run_id_of(config))
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(tiny.history(tmp_path / "run")) == tiny.UPDATES
    generations = Generations(open_storage(str(tmp_path / "run")))
    last = generations.history().publishes[-1]
    assert generations.verify(last) == []
    assert "code.__main__" in generations.manifest(last).header.recipe
