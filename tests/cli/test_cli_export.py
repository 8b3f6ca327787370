"""``export`` at the command line: what a user gets who asks for the weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest, dump
from coherent_ray.commit.records import PublishBody, RetireBody
from coherent_ray.digests import digest_of
from coherent_ray.state.weights import load_weights
from coherent_ray.storage import LocalStorage

STATE = {
    "model/0.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "model/0.bias": torch.ones(3),
    "average/module.0.bias": torch.full((3,), 0.5),
    "average/n_averaged": torch.tensor(7),
    "optimizer/0.bias/exp_avg": torch.zeros(3),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with two generations of a real state, by two ranks, the second of which refers."""
    monkeypatch.syspath_prepend("tests/state")
    from test_reuse import save_more

    saved = pytest.importorskip("saved")
    storage = LocalStorage(tmp_path / "run")
    log = CommitLog(storage)
    log.open_attempt("test", "token")
    big = {"model/big": torch.arange(20_000, dtype=torch.float32)}
    first = saved.save(storage, STATE | big, 2, attempt=1, values={"scheduler": {"last": 0.25}})
    changed = STATE | big | {"model/0.bias": torch.full((3,), 2.0)}
    second = save_more(storage, first, changed)
    assert any(shard.reuse for shard in second.shards)
    for manifest in (first, second):
        publish(storage, log, manifest)
    return tmp_path / "run"


def publish(storage: LocalStorage, log: CommitLog, manifest: Manifest) -> None:
    data, header = dump(manifest), manifest.header
    body = PublishBody(
        number=header.number, attempt=header.attempt, update=0, epoch=0,
        manifest=f"{header.directory}/manifest.json", manifest_size=len(data),
        manifest_digest=digest_of(data), receipts=None, base=manifest.base,
    )  # fmt: skip
    storage.create(body.manifest, data)
    log.append(body, header.attempt)


def test_the_weights_have_the_models_own_names(call, run, tmp_path):
    done = call("export", run, tmp_path / "out", "--model", "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert told["generation"] == "g2-a1"
    path = tmp_path / "out" / "model.safetensors"
    assert told["path"] == str(path)
    assert (told["size"], told["tensors"]) == (path.stat().st_size, 3)
    assert told["digest"] == digest_of(path.read_bytes(), "sha256")
    weights = load_file(path)
    assert set(weights) == {"0.weight", "0.bias", "big"}
    assert torch.equal(weights["0.weight"], STATE["model/0.weight"])
    assert torch.equal(weights["0.bias"], torch.full((3,), 2.0))
    assert set(load_weights(path)) == set(weights), "a run can start from it"


def test_a_named_generation_and_all_of_its_state(call, run, tmp_path):
    done = call("export", f"{run}@g1", tmp_path / "out")
    assert done.code == 0
    assert "g1-a1 (update 0): 6 tensors" in done.out
    state = load_file(tmp_path / "out" / "state.safetensors")
    assert set(state) == {*STATE, "model/big"}
    assert torch.equal(state["model/0.bias"], STATE["model/0.bias"])
    values = json.loads((tmp_path / "out" / "state.json").read_text())
    assert values["values"] == {"scheduler": {"last": 0.25}}
    assert values["number"] == 1
    assert "layout" not in values


def test_the_average(call, run, tmp_path):
    assert call("export", run, tmp_path, "--average").code == 0
    assert {name: t.tolist() for name, t in load_file(tmp_path / "model.safetensors").items()} == {
        "0.bias": [0.5] * 3
    }


def test_nothing_is_overwritten(call, run, tmp_path):
    assert call("export", run, tmp_path / "out", "--model").code == 0
    again = call("export", run, tmp_path / "out", "--model")
    assert again.code == 1
    assert "there is such a file already" in again.err
    assert "Name another directory" in again.err


def test_damage_is_named_with_its_file_and_nothing_is_written(call, run, tmp_path):
    path = run / "generations/g1-a1/shard-00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 4
    path.write_bytes(data)
    done = call("export", run, tmp_path / "out", "--model")
    assert done.code == 1
    assert "g1-a1/shard-00000-of-00002.safetensors" in done.err
    assert list((tmp_path / "out").glob("*")) == []


def test_verify_prune_and_show_follow_what_is_referred_to(call, run):
    log = CommitLog(LocalStorage(run))
    log.append(RetireBody(1, 1), 1)
    pruned = call("prune", run, "--keep", 1, "--json")
    assert pruned.code == 0
    value = json.loads(pruned.out)
    kept = [entry["path"] for entry in value["shared"]]
    assert "generations/g1-a1/manifest.json" in kept
    assert value["deleted"] == [] or all("g1-a1" in e["path"] for e in value["deleted"])
    assert "of retired generations" in call("prune", run, "--keep", 1).out
    assert call("verify", run).code == 0
    everything = call("verify", run, "--all", "--json")
    assert [e for e in json.loads(everything.out)["extra"] if e["sort"] == "leftover"] == []
    assert call("show", run).code == 0
    (run / next(path for path in kept if "shard-" in path)).unlink()
    assert call("verify", run).code == 1
