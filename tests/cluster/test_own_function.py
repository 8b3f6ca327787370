"""A training function of the user's own, given to Ray's TorchTrainer: what Ray and the run show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny

import coherent_ray
from coherent_ray.commit.generations import Generations
from coherent_ray.storage import open_storage

if TYPE_CHECKING:
    from conftest import OwnRun


def test_the_run_is_whole(reference: OwnRun) -> None:
    assert tiny.published(reference.root) == ["g1-a1", "g2-a1", "g3-a1", "g4-a1"]
    assert tiny.selected(reference.root) == "g4-a1"
    assert [r.update for r in tiny.history(reference.root)] == list(range(1, tiny.UPDATES + 1))
    # Seven updates an epoch; the seventh takes the two examples that are left.
    spans = [(r.epoch, r.start, r.stop, r.count) for r in tiny.history(reference.root)]
    assert spans[5:8] == [(0, 40, 48, 8), (0, 48, 50, 2), (1, 0, 8, 8)]


def test_the_result_has_the_last_update_s_metrics(reference: OwnRun) -> None:
    metrics = reference.result.metrics
    assert metrics is not None
    last = tiny.history(reference.root)[-1]
    assert (metrics["update"], metrics["updates"], metrics["attempt"]) == (12, 12, 1)
    assert float(metrics["loss"]).hex() == last.loss
    assert float(metrics["grad_norm"]).hex() == last.grad_norm
    assert metrics["receipt"] == last.digest
    assert metrics["generation"] == "g4-a1"
    assert metrics["stopped"] is False


def test_the_result_s_checkpoint_is_the_generation_where_it_lies(reference: OwnRun) -> None:
    checkpoint = reference.result.checkpoint
    assert checkpoint is not None
    place = reference.root / "generations" / "g4-a1"
    assert Path(checkpoint.path) == place
    with checkpoint.as_directory() as directory:
        assert Path(directory) == place
    assert {p.name for p in place.iterdir()} == {
        "manifest.json",
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.safetensors",
    }


def test_nothing_was_copied(reference: OwnRun) -> None:
    """Every shard in the whole directory is one that a manifest names, where it says."""
    storage = open_storage(str(reference.root))
    generations = Generations(storage)
    named = {
        str(reference.root / shard.path)
        for publish in generations.history().publishes
        for shard in generations.manifest(publish).shards
    }
    found = {str(path) for path in reference.root.parent.rglob("*.safetensors")}
    assert found == named
    assert not list(reference.root.parent.rglob("*.pt"))
    assert not list(reference.root.rglob("checkpoint_*/"))


def test_every_generation_is_whole_to_the_last_byte(reference: OwnRun) -> None:
    generations = Generations(open_storage(str(reference.root)))
    for publish in generations.history().publishes:
        assert generations.verify(publish) == []


def test_the_face_is_lazy_and_complete() -> None:
    program = (
        "import sys, coherent_ray as c; heavy = {'torch', 'ray', 'pydantic', 'yaml'};"
        "assert not heavy & set(sys.modules), 'the face is heavy';"
        "assert set(c.__all__) <= set(dir(c));"
        "[getattr(c, name) for name in c.__all__];"
        "from coherent_ray import session, torch_config, load_config, run_config;"
        "assert c.load_config.__module__ == 'coherent_ray.config'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        coherent_ray.sesion  # noqa: B018
