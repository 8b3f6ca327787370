"""``save``: what it says, and how it exits."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from coherent_ray.errors import SaveFailed


@pytest.fixture
def asked(monkeypatch):
    """Play Ray and what asks the coordinator; what it is asked is written down."""
    state = {"closed": 0, "outcome": SimpleNamespace(name="g3-a1", update=1200)}
    ray = types.ModuleType("ray")
    ray.shutdown = lambda: state.update(closed=state["closed"] + 1)
    local_ray = types.ModuleType("coherent_ray.train.local_ray")
    local_ray.join = lambda address, **options: state.update(address=address)
    on_demand = types.ModuleType("coherent_ray.train.on_demand")

    def save_now(run_id, storage, timeout_s):
        state.update(run_id=run_id, timeout_s=timeout_s)
        if isinstance(state["outcome"], Exception):
            raise state["outcome"]
        return state["outcome"]

    on_demand.save_now = save_now
    modules = {"ray": ray}
    modules |= {m.__name__: m for m in (local_ray, on_demand)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if name != "ray":
            package, _, last = name.rpartition(".")
            __import__(package)
            monkeypatch.setattr(sys.modules[package], last, module, raising=False)
    return state


def test_the_generation_is_named(call, published, asked):
    done = call("save", published.root)
    assert (done.code, done.out) == (0, "g3-a1 is published, at update 1,200\n")
    assert (asked["run_id"], asked["address"], asked["timeout_s"]) == ("first", "auto", 120.0)
    assert asked["closed"] == 1


def test_as_json_in_another_cluster(call, published, asked):
    done = call("save", published.root, "--address", "head:6379", "--timeout", "5", "--json")
    assert (done.code, done.json) == (
        0,
        {"run_id": "first", "generation": "g3-a1", "update": 1200},
    )
    assert (asked["address"], asked["timeout_s"]) == ("head:6379", 5.0)


def test_none_in_time_is_a_bad_answer(call, published, asked):
    asked["outcome"] = SaveFailed("no generation was published within 5 s", remedy="wait longer")
    done = call("save", published.root)
    assert done.code == 1
    assert "no generation was published within 5 s" in done.err
    assert asked["closed"] == 1


@pytest.mark.parametrize("words", [("--timeout", "0"), ("--timeout", "soon")])
def test_a_time_that_is_none_is_misuse(call, published, asked, words):
    assert call("save", published.root, *words).code == 2


def test_no_run(call, tmp_path, asked):
    assert call("save", tmp_path).code == 2
