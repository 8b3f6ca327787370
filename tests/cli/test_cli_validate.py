"""``validate``: prints what is right, and names what is wrong, with exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from coherent_ray import config

# What a line of a good file becomes, the key that is named, and a part of what is said.
GOOD = """\
run:
  root: runs/job
  claim: exact
task:
  factory: jobs.language_model:LanguageModelTask
  args: {width: 64}
data:
  source:
    format: parquet
    paths: [text.parquet]
  seed: 1
  global_batch: 16
  lanes: 4
  microbatch: 4
training:
  updates: 10
  precision: fp32
optimizer:
  lr: 3e-4
checkpoint:
  every_updates: 5
  digest: blake3
cluster:
  workers: 2
"""
BAD = [
    ("root: runs/job", "root:", "run.root", "must be a string, not null"),
    ("root: runs/job", "roots: runs/job", "run.roots", "did you mean run.root?"),
    ("claim: exact", "claim: exactly", "run.claim", "did you mean exact?"),
    ("claim: exact", "run_id: -x", "run.run_id", "must match"),
    ("task:", "tasks:", "tasks", "did you mean task?"),
    ("language_model:", "language_model.", "task.factory", "package.module:Name"),
    ("{width: 64}", "[64]", "task.args", "must be a mapping"),
    ("{width: 64}", "{width: .nan}", "task.args.width", "must be a finite number"),
    ("format: parquet", "format: parkett", "data.source.format", "did you mean parquet?"),
    ("format: parquet", "format: tokens", "data.source.window", "is required for the format"),
    ("[text.parquet]", "text.parquet", "data.source.paths", "must be a list"),
    ("[text.parquet]", "[]", "data.source.paths", "1 or more items"),
    ("[text.parquet]", '[""]', "data.source.paths[0]", "1 or more characters"),
    ("seed: 1", "seed: one", "data.seed", "must be an integer"),
    ("seed: 1", "seed: 1.0", "data.seed", "must be an integer"),
    ("seed: 1", "seed: -1", "data.seed", "must be 0 or more"),
    ("global_batch: 16", "batch: 16", "data.global_batch", "is required"),
    ("global_batch: 16", "global_batch: 3", "data.lanes", "4 lanes need a global_batch of 4"),
    ("lanes: 4", "lanes: 0", "data.lanes", "must be 1 or more"),
    ("lanes: 4", "lanes: 1", "cluster.workers", "2 workers need 2 lanes"),
    ("microbatch: 4", "microbatch: true", "data.microbatch", "must be an integer, not true"),
    ("updates: 10", "updates: 10\n  epochs: 1", "training.epochs", "together with updates"),
    ("updates: 10", "threads: 1", "training.updates", "is required, or epochs"),
    ("updates: 10", "updates: 1e3", "training.updates", "must be an integer"),
    ("precision: fp32", "precision: float32", "training.precision", "fp32, bf16, fp16"),
    ("precision: fp32", "clip_norm: -1", "training.clip_norm", "must be more than 0"),
    ("precision: fp32", "device: cuda", "training.device", "cuda needs cluster.use_gpu"),
    ("lr: 3e-4", "lr: 0", "optimizer.lr", "must be more than 0"),
    ("lr: 3e-4", "learning_rate: 3e-4", "optimizer.learning_rate", "not a known key"),
    ("lr: 3e-4", "betas: [0.9]", "optimizer.betas", "2 or more items"),
    ("every_updates: 5", "every: 5", "checkpoint.every", "did you mean checkpoint.every_updates?"),
    ("digest: blake3", "digest: crc32", "checkpoint.digest", "xxh3_128, blake3, sha256"),
    ("digest: blake3", "block_bytes: 4097", "checkpoint.block_bytes", "multiple of 4096"),
    ("digest: blake3", "on_damage: ignore", "checkpoint.on_damage", "fall_back, refuse"),
    ("workers: 2", "workers: 0", "cluster.workers", "must be 1 or more"),
    ("workers: 2", "use_gpu: on", "cluster.use_gpu", "must be true or false"),
    ("workers: 2", "max_failures: many", "cluster.max_failures", "must be an integer"),
    ("workers: 2", "resources_per_worker: {CPU: x}", "cluster.resources_per_worker.CPU", "number"),
    ("cluster:", "cloud:", "cloud", "not a known key"),
]  # fmt: skip
TORN = [
    ("seed: 1", "seed: [1", "not YAML"),
    ("  lanes: 4", " lanes: 4", "not YAML"),
    ("seed: 1", "seed: 1\n  seed: 2", "the key data.seed is there twice"),
    ("seed: 1", "1: seed", "the key 1 is not a string"),
    ("seed: 1", "seed: &a [*a]", "an alias contains itself"),
    ("seed: 1", "seed: !secret x", "not YAML"),
]


@pytest.fixture
def write(tmp_path):
    def file(old: str = "", new: str = "") -> Path:
        assert old in GOOD
        path = tmp_path / "job.yaml"
        path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
        return path

    return file


def test_a_good_file_is_printed_with_every_default(call, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write()
    done = call("validate", path, "--settings-only")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"# {path} is valid.")
    printed = yaml.safe_load(done.out)
    assert printed["run"]["root"] == str(tmp_path / "runs/job")
    assert printed["checkpoint"]["verify"] == "size"
    # What is printed is a configuration again, and the same one.
    path.write_text(done.out)
    assert config.load(path).model_dump() == printed


def test_json_is_the_same(call, write):
    path = write()
    plain = call("validate", path, "--settings-only")
    assert call("validate", path, "--settings-only", "--json").json == yaml.safe_load(plain.out)


def test_set_replaces(call, write):
    words = ["--set", "data.seed=7", "--set", "training.precision=bf16"]
    value = call("validate", write(), "--settings-only", "--json", *words).json
    assert (value["data"]["seed"], value["training"]["precision"]) == (7, "bf16")


@pytest.mark.parametrize(("old", "new", "key", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_settings(call, write, old, new, key, message):
    path = write(old, new)
    done = call("validate", path)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(f"error: {path}: ")
    told = [line for line in done.err.splitlines() if f"{key}: " in line]
    assert told, done.err
    assert message in told[0]
    assert "line " in told[0]
    error = call("validate", path, "--json").json["error"]
    assert error["type"] == "ConfigError"
    assert key in [problem["key"] for problem in error["details"]["problems"]]


@pytest.mark.parametrize(("old", "new", "message"), TORN)
def test_torn_files(call, write, old, new, message):
    done = call("validate", write(old, new))
    assert done.code == 2
    assert message in done.err
    assert "line " in done.err


def test_there_are_enough_bad_cases():
    assert len(BAD) + len(TORN) > 40


def test_no_file(call, tmp_path):
    done = call("validate", tmp_path / "none.yaml")
    assert done.code == 2
    assert "none.yaml: the configuration cannot be read: No such file" in done.err


def test_no_task(call, write):
    old = GOOD[GOOD.index("task:") : GOOD.index("data:")]
    done = call("validate", write(old, ""))
    assert done.code == 2
    assert "task: is required" in done.err


def test_a_bad_override_is_named(call, write):
    done = call("validate", write(), "--set", "data.sed=7")
    assert done.code == 2
    assert "--set: data.sed: is not a known key (did you mean data.seed?)" in done.err


def test_the_schema(call):
    done = call("validate", "--schema")
    assert done.code == 0
    assert done.json == config.schema()
    # It is the file that editors get.
    assert done.out == (Path(__file__).parents[2] / "configs/schema.json").read_text()


def test_settings_alone_touch_neither_task_nor_data(call, write):
    path = write("jobs.language_model:LanguageModelTask", "no.such.place:At")
    assert call("validate", path, "--settings-only").code == 0


# --- what the settings name -----------------------------------------------------------------------


@pytest.fixture
def job(configuration, tmp_path, monkeypatch):
    """Write a configuration whose task lies beside it, and whose data is there."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_job.py").write_text(TASK)
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")

    def write(**sections):
        task = {"factory": "beside_the_job:Task", **sections.pop("task", {})}
        return configuration(task=task, **sections)

    yield write
    sys.modules.pop("beside_the_job", None)


TASK = """
from torch import nn
class Task:
    def __init__(self, width=1): ...
    def build_model(self): return nn.Linear(1, 1)
    def collate(self, rows): ...
    def loss(self, model, batch): ...
def prepare(path): open(path, "x")
"""


def test_what_is_named_is_looked_at_and_nothing_is_written(call, job, tmp_path):
    path = job()
    before = sorted(tmp_path.rglob("*.yaml")), sorted(tmp_path.rglob("root"))
    done = call("validate", path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"# {path} is valid.")
    assert (sorted(tmp_path.rglob("*.yaml")), sorted(tmp_path.rglob("root"))) == before
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"factory": "beside_the_job:Tusk"}}, ["beside_the_job has no 'Tusk'", "'Task'?"]),
        ({"task": {"args": {"widht": 3}}}, ["no argument 'widht'", "did you mean 'width'?"]),
        ({"data": {"source": {"format": "parquet", "paths": ["y.parquet"]}}}, ["y.parquet"]),
        (
            {"data": {"prepare": {"factory": "beside_the_job:prepair"}}},
            ["data.prepare.factory", "did you mean 'prepare'?"],
        ),
        ({"cluster": {"num_cpus": 1, "workers": 3}}, ["3 workers need 3 CPU", "local Ray has 1"]),
    ],
)
def test_one_thing_that_is_wrong(call, job, sections, words):
    done = call("validate", job(**sections))
    assert (done.code, done.out) == (2, "")
    for word in words:
        assert word in done.err


READS = TASK.replace("def collate(self, rows): ...", "def collate(self, rows): rows['label']")


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_a_column_that_the_task_reads_and_the_data_lacks(call, job, tmp_path, columns):
    (tmp_path / "beside_the_job.py").write_text(READS)
    names = {"x": [1, 2, 3]} if columns is None else {"x": [1, 2, 3], "label": [1, 2, 3]}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(names), path)
    source = {"format": "parquet", "paths": [str(path)], "columns": columns}
    done = call("validate", job(data={"source": source}))
    assert (done.code, done.out) == (2, "")
    assert "Task.collate" in done.err
    assert "KeyError: the data has no column 'label'" in done.err
    assert "the columns that are used are: x;" in done.err
    assert call("validate", job(data={"source": source}), "--settings-only").code == 0
    pq.write_table(pa.table({"x": [1], "label": [2]}), path)
    whole = {"format": "parquet", "paths": [str(path)]}
    assert call("validate", job(data={"source": whole})).code == 0


def test_a_collate_sees_the_first_rows_with_what_the_loader_adds(call, job, tmp_path):
    looks = "(rows['x'].tolist(), rows['_example'].tolist(), len(rows['_seed']))"
    text = f"def collate(self, rows): assert {looks} == ([1, 2], [0, 1], 2)"
    (tmp_path / "beside_the_job.py").write_text(TASK.replace("def collate(self, rows): ...", text))
    done = call("validate", job())
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("/etc/passwd", "/etc/passwd is there, and is no directory"),
        ("/etc/passwd/runs/one", "/etc/passwd is there, and is no directory"),
        ("/proc/nope", "the kernel's file system proc"),
        ("{tmp}/hanging", "is there, and is no directory"),
    ],
)
def test_a_root_that_no_directory_can_be_made_at(call, job, tmp_path, root, words):
    (tmp_path / "hanging").symlink_to(tmp_path / "nowhere")
    done = call("validate", job(run={"root": root.format(tmp=tmp_path)}))
    assert (done.code, done.out) == (2, "")
    assert "run.root: " in done.err
    assert words in done.err


def test_everything_that_is_wrong_comes_at_once(call, job):
    source = {"format": "parquet", "paths": ["y.parquet"]}
    path = job(
        task={"args": {"widht": 3}}, data={"source": source}, cluster={"num_cpus": 1, "workers": 3}
    )
    done = call("validate", path)
    assert done.code == 2
    assert "3 things are wrong:" in done.err
    for word in ("widht", "y.parquet", "3 workers need 3 CPU"):
        assert word in done.err
    assert len(call("validate", path, "--json").json["error"]["details"]["problems"]) == 3


def test_data_that_is_yet_to_be_made_is_not_missed_and_not_made(call, job, tmp_path):
    made = str(tmp_path / "made.parquet")
    prepare = {"factory": "beside_the_job:prepare", "args": {"path": made}}
    source = {"format": "parquet", "paths": [made]}
    assert call("validate", job(data={"source": source, "prepare": prepare})).code == 0
    assert not (tmp_path / "made.parquet").exists()
