"""A whole run in an object store, as a user starts it, on a network that loses answers.

The command starts a Ray of its own. Driver, coordinator and workers are processes of their own, and
get the store's options from the configuration, its credentials and the signing key from the
environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny
import yaml
from faulty_server import Strike
from s3_server import BUCKET, S3Server

from coherent_ray.commit.generations import Generations
from coherent_ray.errors import NotSigned
from coherent_ray.state import state_digest
from coherent_ray.storage import Storage, StorageOptions, open_storage
from coherent_ray.train import receipts
from coherent_ray.train.receipts import first_difference

if TYPE_CHECKING:
    from conftest import OwnRun


KEY = "TEST_OBJECT_ROOT_KEY"


@pytest.fixture
def configuration(
    s3: S3Server,
    prefix: str,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    monkeypatch.setenv(KEY, "the key of this test alone")
    values = tiny.values(Path("run"), tiny_data, storage__endpoint=s3.endpoint)
    values["run"]["root"] = f"s3://{BUCKET}/{prefix}/run"
    values["storage"] |= {"allow_http": True, "retries": 6, "signing_key": {"env": KEY}}
    values["checkpoint"]["digest"] = "blake3"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.campaign
def test_a_run_is_the_same_run_where_every_seventh_change_loses_its_answer(
    s3: S3Server,
    prefix: str,
    configuration: Path,
    reference: OwnRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3.faults.striking(*(Strike("lose", method="PUT", at=at) for at in range(2, 30, 7))):
        done = subprocess.run(
            [sys.executable, "-m", "coherent_ray", "run", str(configuration), "--json"],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    options = StorageOptions(endpoint=s3.endpoint, allow_http=True, key_env=KEY)
    storage = open_storage(f"s3://{BUCKET}/{prefix}/run", options)
    history = Generations(storage).history()
    assert [p.name for p in history.publishes] == ["g1-a1", "g2-a1", "g3-a1", "g4-a1"]
    ours = list(receipts.history(storage, history))
    assert first_difference(ours, tiny.history(reference.root)) is None
    assert len(ours) == tiny.UPDATES
    assert final_state(storage) == final_state(open_storage(str(reference.root)))
    assert s3.uploads(prefix) == []

    monkeypatch.setenv(KEY, "the key of somebody else")
    with pytest.raises(NotSigned):
        Generations(open_storage(f"s3://{BUCKET}/{prefix}/run", options)).history()


def final_state(storage: Storage) -> str:
    generations = Generations(storage)
    return state_digest(storage, generations.manifest(generations.find("latest")))
