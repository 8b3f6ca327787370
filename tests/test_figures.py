"""Figures in the documents are what the benchmarks' JSON says, and nobody typed them in."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_current(render: ModuleType) -> None:
    for name in render.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert render.MARKED.search(text), f"{name} has no marked place"
        assert render.rendered(text) == text, f"{name}: run python benchmarks/render.py"


def test_a_typed_in_figure_is_found(render: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    digest = json.loads((render.RESULTS / "replay.json").read_text())["runs"][0]["receipts"]
    shown = digest.partition(":")[2][:8]
    assert shown in text
    assert render.rendered(text.replace(shown, "00000000")) == text


def test_the_storm_on_record_is_fifty_kills_and_the_same_run() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "storm.json").read_text())
    (scenario,) = result["scenarios"]
    assert result["good"]
    assert all(promise["kept"] for promise in scenario["promises"])
    strikes = scenario["injected"]
    assert (len(strikes), result["seed"], result["reference"]["workers"]) == (50, 1, 2)
    assert {strike["target"] for strike in strikes} == {
        "worker", "coordinator", "controller", "driver",
    }  # fmt: skip
    assert scenario["torn_selected"] == 0
    for digest in ("receipts", "state"):
        assert scenario[digest] == result["reference"][digest]


def test_the_replay_campaign_on_record_is_whole_and_equal() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text())
    runs = result["runs"]
    assert result["equal"]
    assert {(r["job"], r["workers"]) for r in runs} == {
        (job, workers) for job in ("language model", "image classifier") for workers in (1, 2, 3, 4)
    }
    for job in ("language model", "image classifier"):
        own = [r for r in runs if r["job"] == job]
        assert len({r["receipts"] for r in own}) == 1
        assert len({r["state"] for r in own}) == 1
        for struck in (r for r in own if r["kills"]):
            assert struck["kills"].count("worker") >= 3
            assert struck["kills"].count("coordinator") >= 1
            assert struck["attempts"] >= 4


def test_the_external_judge_on_record_struck_everywhere_and_found_only_what_was_planted() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "chaos.json").read_text())
    assert result["held"]
    assert {(cell["ranks"], cell["struck"]) for cell in result["cells"]} == {
        (1, "rank 0"), (1, "coordinator"), (2, "rank 0"), (2, "rank 1"), (2, "coordinator"),
    }  # fmt: skip
    for cell in result["cells"]:
        assert set(cell["points"]) == {"before", "torn", "unsynced", "term"}
        assert all(cell["points"].values())
        assert cell["verdicts"]["PASS"] == sum(cell["points"].values())
        assert cell["did_not_crash"] == cell["crashed_elsewhere"] == 0
    assert len(result["planted"]) == 3
    for row in result["planted"]:
        assert row["control"] == "PASS"
        assert row["verdicts"]["PASS"] < sum(row["points"].values())


def test_the_state_plane_on_record_brings_every_byte_back_and_writes_each_once() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "state_plane.json").read_text())
    assert [at["ranks"] for at in result["at"]] == [1, 2]
    for at in result["at"]:
        ours = at["products"]["ours"]
        assert "fails" not in ours
        assert ours["comes_back"]
        assert 1.0 <= ours["written_to_state"] < 1.01
        assert ours["durable_to_write"]["times"] == result["rounds"] >= 5
