"""``run``, ``submit`` and ``stop``, with Ray's side played by doubles."""

from __future__ import annotations

import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from coherent_ray import config
from coherent_ray.errors import AdmissionRefused, ClusterError
from coherent_ray.train import supervisor
from coherent_ray.train.events import Event
from coherent_ray.train.supervisor import Outcome

FACTS = {
    "run_id": "job", "updates": 3, "done": 3, "latest": "g2-a1", "complete": True, "stopped": False,
    "saves": [
        {"name": "g1-a1", "update": 2, "fate": "published", "reason": "", "stall_s": 0.001,
         "durable_s": 0.5, "shard_bytes": 2048},
        {"name": "g2-a1", "update": 3, "fate": "published", "reason": "", "stall_s": 0.003,
         "durable_s": 0.7, "shard_bytes": 2048},
    ],
}  # fmt: skip


@pytest.fixture
def supervised(monkeypatch):
    """Play the supervisor; hands back what it was asked for."""
    asked = []

    def play(outcome: Outcome | Exception):
        def supervise(settings, on_event, *, verbose=False):
            asked.append((settings, verbose))
            on_event(Event("started", facts={"run_id": "job", "updates": 3, "done": 0}))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(supervisor, "supervise", supervise)
        return asked

    return play


def outcome(**facts) -> Outcome:
    return Outcome(facts.get("stopped", False), FACTS | facts, 0, Path("/tmp/driver.log"))


def test_run_to_the_end(call, supervised, configuration, tmp_path):
    asked = supervised(outcome())
    done = call("run", configuration())
    assert done.code == 0
    assert "run job: 3 updates, from the beginning" in done.err
    text = " ".join(done.out.split())
    assert text.startswith("run job is complete: 3 updates")
    assert "generations 2 published by this command" in text
    assert "stall per save 2.0 ms median, 3.0 ms longest" in text
    assert "time to durable 0.60 s median" in text
    assert f"coherent-ray ls {tmp_path}/root" in text
    ((settings, verbose),) = asked
    assert settings.training.updates == 3
    assert verbose is False


def test_run_as_json(call, supervised, configuration, tmp_path):
    supervised(outcome())
    done = call("run", configuration(), "--json", "-v")
    assert done.code == 0
    assert done.err == ""
    assert done.json["latest"] == "g2-a1"
    assert done.json["root"] == f"{tmp_path}/root"
    assert (done.json["stopped"], done.json["restarts"]) == (False, 0)


def test_run_again_when_complete(call, supervised, configuration):
    supervised(outcome(saves=[]))
    done = call("run", configuration())
    assert done.code == 0
    assert "is complete" in done.out
    assert "stall per save" not in done.out


def test_run_that_was_stopped_says_how_to_resume(call, supervised, configuration):
    supervised(outcome(stopped=True, done=2, complete=False, latest="g1-a1"))
    done = call("run", configuration())
    assert done.code == 1
    assert "was stopped; it resumes at g1-a1 by the same command" in done.out


def test_failed_saves_are_told(call, supervised, configuration):
    failed = FACTS["saves"][0] | {"fate": "failed", "reason": "no space is left"}
    supervised(outcome(saves=[failed, FACTS["saves"][1]]))
    assert "1: no space is left" in call("run", configuration()).out


def test_where_the_time_of_saves_went_is_told(call, supervised, configuration):
    times = {"stall_s": 0.5, "wait_s": 0.1, "fingerprint_s": 0.2, "snapshot_s": 0.2,
             "write_s": 1.0, "hash_s": 0.75, "sync_s": 0.25, "acknowledge_s": 0.5}  # fmt: skip
    saves = [save | {"times": times, "lost_s": None} for save in FACTS["saves"]]
    saves[0]["lost_s"] = 1.25
    supervised(outcome(saves=saves, skipped=3, cadence={"text": "a save every 140 s"}))
    text = " ".join(call("run", configuration()).out.split())
    assert "stall in all 1.00 s: wait 0.20 s, fingerprint 0.40 s, snapshot 0.40 s" in text
    assert "behind training write 2.00 s, hash 1.50 s, sync 0.50 s, acknowledge 1.00 s" in text
    assert "updates slowed by 1.25 s, measured beside 1 of 2 saves" in text
    assert "skipped saves 3: one was still in flight (on_busy: skip)" in text
    assert "cadence a save every 140 s" in text


def test_all_restarts_are_told(call, supervised, configuration):
    died = {"worker group": 2, "coordinator": 1}
    supervised(replace(outcome(), restarts=1, restarted=died))
    text = " ".join(call("run", configuration()).out.split())
    assert "restarts 1 driver, 2 worker groups, 1 coordinator" in text
    supervised(replace(outcome(), restarted=died))
    assert call("run", configuration(), "--json").json["restarted"] == died


def test_run_that_is_refused(call, supervised, configuration):
    supervised(AdmissionRefused("the data changed", where="rank 1", remedy="put it back"))
    done = call("run", configuration())
    assert done.code == 1
    assert "error: rank 1: the data changed\nWhat to do: put it back" in done.err
    assert done.out == ""


def test_address_replaces_the_local_cluster(call, supervised, configuration):
    asked = supervised(outcome())
    call("run", configuration(cluster={"num_cpus": 3}), "--address", "auto", "--set", "data.seed=5")
    settings, _ = asked[0]
    assert (settings.cluster.address, settings.cluster.num_cpus) == ("auto", None)
    assert settings.data.seed == 5


def test_run_with_a_wrong_configuration_starts_nothing(call, supervised, configuration):
    asked = supervised(outcome())
    assert call("run", configuration(), "--set", "data.lanes=0").code == 2
    assert asked == []


# --- submit ---------------------------------------------------------------------------------------


class Client:
    """Ray's job client, as far as it is used."""

    jobs: list[dict] = []  # noqa: RUF012
    refusals: list[str] = []  # noqa: RUF012
    status = "SUCCEEDED"

    def __init__(self, address=None):
        if address == "http://nowhere:1":
            raise ConnectionError("refused")
        self.address = address or "http://127.0.0.1:8265"

    def submit_job(self, **job):
        self.jobs.append(job)
        if self.refusals:
            raise RuntimeError(self.refusals.pop(0))
        return "raysubmit_1"

    def get_address(self):
        return self.address

    async def tail_job_logs(self, job):
        for text in ("one\n", "two\n"):
            yield text

    def get_job_status(self, job):
        return types.SimpleNamespace(value=self.status)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Play Ray's job server, and stand where the configuration lies."""
    module = types.ModuleType("ray.job_submission")
    module.JobSubmissionClient = Client
    module.JobStatus = types.SimpleNamespace(SUCCEEDED="SUCCEEDED")
    monkeypatch.setitem(sys.modules, "ray.job_submission", module)
    monkeypatch.setattr(Client, "jobs", [])
    monkeypatch.chdir(tmp_path)
    return Client


def test_submit_sends_the_directory_and_absolute_places(call, cluster, configuration, tmp_path):
    prepare = {"factory": "jobs.digits:prepare", "args": {"path": "x.parquet"}}
    source = {"format": "parquet", "paths": ["x.parquet"]}
    configuration(run={"root": "here/run"}, data={"source": source, "prepare": prepare})
    done = call("submit", "job.yaml", "--set", "data.seed=5", "--address", "http://head:8265")
    assert done.code == 0
    assert "submitted as job raysubmit_1" in done.out
    (job,) = cluster.jobs
    assert job["runtime_env"]["working_dir"] == str(tmp_path)
    assert ".venv" in job["runtime_env"]["excludes"]
    program, command, path, *options = shlex.split(job["entrypoint"])
    assert (program, command, path) == ("coherent-ray", "run", "job.yaml")
    assert options[-2:] == ["--address", "auto"]
    # What the cluster will make of it, wherever it stands.
    overrides = [text for text in options[:-2] if text != "--set"]
    made = config.load("job.yaml", overrides)
    assert made.run.root == str(tmp_path / "here/run")
    assert made.data.source.paths == [str(tmp_path / "x.parquet")]
    assert made.data.prepare is not None
    assert made.data.prepare.args == {"path": str(tmp_path / "x.parquet")}
    assert made.data.seed == 5


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:8265", "http://localhost:1"])
def test_on_this_machine_this_python_runs_it(call, cluster, configuration, address):
    configuration()
    call("submit", "job.yaml", *(["--address", address] if address else []))
    assert cluster.jobs[0]["entrypoint"].startswith(f"{sys.executable} -m coherent_ray run ")


def test_submit_as_json(call, cluster, configuration):
    configuration()
    value = call("submit", "job.yaml", "--json").json
    assert value["job"] == "raysubmit_1"
    assert value["entrypoint"] == cluster.jobs[0]["entrypoint"]


def test_names_with_spaces_survive(call, cluster, configuration, tmp_path):
    configuration(run={"root": "my runs/it's one"})
    call("submit", "job.yaml")
    words = shlex.split(cluster.jobs[0]["entrypoint"])
    (root,) = [word for word in words if word.startswith("run.root=")]
    assert yaml.safe_load(root.partition("=")[2]) == f"{tmp_path}/my runs/it's one"


def test_follow_shows_the_output(call, cluster, configuration, monkeypatch):
    configuration()
    monkeypatch.setattr(sys.modules["ray.job_submission"].JobStatus, "SUCCEEDED", None)
    monkeypatch.setattr(Client, "get_job_status", lambda self, job: None)
    done = call("submit", "job.yaml", "--follow")
    assert done.code == 0
    assert done.out.endswith("one\ntwo\n")


def test_follow_of_a_job_that_fails(call, cluster, configuration, monkeypatch):
    configuration()
    monkeypatch.setattr(Client, "status", "FAILED")
    done = call("submit", "job.yaml", "--follow")
    assert done.code == 1
    assert "raysubmit_1: the job ended as FAILED" in done.err


def test_a_cluster_that_is_not_ready_is_waited_for(call, cluster, configuration, monkeypatch):
    configuration()
    monkeypatch.setattr("coherent_ray.cli.launch.time.sleep", lambda seconds: None)
    monkeypatch.setattr(Client, "refusals", ["500: No available agent to submit job"] * 2)
    assert call("submit", "job.yaml").code == 0
    assert len(cluster.jobs) == 3
    assert cluster.jobs[0] == cluster.jobs[2]


def test_patience_ends(call, cluster, configuration, monkeypatch):
    configuration()
    monkeypatch.setattr("coherent_ray.cli.launch.PATIENCE_S", -1.0)
    monkeypatch.setattr(Client, "refusals", ["No available agent to submit job"])
    assert call("submit", "job.yaml").code == 1


def test_a_job_that_is_refused(call, cluster, configuration, monkeypatch):
    configuration()
    monkeypatch.setattr(Client, "refusals", ["the package is too large"])
    done = call("submit", "job.yaml")
    assert done.code == 1
    assert "127.0.0.1:8265: the cluster did not take the job: the package is too large" in done.err
    assert len(cluster.jobs) == 1


def test_a_cluster_that_is_not_there(call, cluster, configuration):
    configuration()
    done = call("submit", "job.yaml", "--address", "http://nowhere:1")
    assert done.code == 1
    assert "http://nowhere:1: the cluster's job server is not reachable: refused" in done.err
    assert "ray start --head" in done.err


def test_a_configuration_elsewhere_cannot_be_sent(call, cluster, configuration, monkeypatch):
    path = configuration()
    (path.parent / "below").mkdir()
    monkeypatch.chdir(path.parent / "below")
    done = call("submit", path)
    assert done.code == 2
    assert "not below the current directory" in done.err
    assert cluster.jobs == []


# --- stop -----------------------------------------------------------------------------------------


@pytest.fixture
def ray_here(monkeypatch):
    """Play Ray: `state` has the coordinators, or None where no cluster runs."""
    state: dict = {"coordinators": {"first"}, "closed": 0, "keepers": 0}
    ray = types.ModuleType("ray")

    def join(address, **options):
        if state["coordinators"] is None:
            raise ClusterError("no Ray there", where=address) from ConnectionError("no cluster")
        state["address"] = address

    def shutdown():
        state["closed"] += 1

    ray.shutdown = shutdown
    local_ray = types.ModuleType("coherent_ray.train.local_ray")
    local_ray.join = join
    coordinators = types.ModuleType("coherent_ray.train.coordinators")
    keepers = types.ModuleType("coherent_ray.train.memory.keepers")

    def stop(run_id):
        there = run_id in state["coordinators"]
        state["coordinators"].discard(run_id)
        return there

    def stop_keepers(run_id):
        found, state["keepers"] = state["keepers"], 0
        return found

    coordinators.stop = stop
    keepers.stop = stop_keepers
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "coherent_ray.train.coordinators", coordinators)
    monkeypatch.setitem(sys.modules, "coherent_ray.train.local_ray", local_ray)
    monkeypatch.setattr("coherent_ray.train.coordinators", coordinators, raising=False)
    monkeypatch.setitem(sys.modules, "coherent_ray.train.memory.keepers", keepers)
    monkeypatch.setattr("coherent_ray.train.memory.keepers", keepers, raising=False)
    return state


def test_stop_ends_the_coordinator_once(call, published, ray_here):
    done = call("stop", published.root)
    assert (done.code, done.out) == (0, "the coordinator of run first has ended\n")
    assert ray_here["address"] == "auto"
    done = call("stop", published.root, "--json")
    assert (done.code, done.json) == (0, {"run_id": "first", "stopped": False})
    assert ray_here["closed"] == 2


def test_stop_ends_keepers_that_have_lost_their_coordinator(call, published, ray_here):
    ray_here["coordinators"].clear()
    ray_here["keepers"] = 2
    done = call("stop", published.root, "--json")
    assert (done.code, done.json) == (0, {"run_id": "first", "stopped": True})
    assert ray_here["keepers"] == 0


def test_stop_without_a_cluster(call, published, ray_here):
    ray_here["coordinators"] = None
    done = call("stop", published.root)
    assert (done.code, done.out) == (0, "run first has no coordinator: there is nothing to stop\n")
    done = call("stop", published.root, "--address", "head:6379")
    assert done.code == 1
    assert "head:6379: no Ray there" in done.err


def test_stop_of_no_run(call, tmp_path, ray_here):
    assert call("stop", tmp_path).code == 2
