"""The configuration: what is right is kept exactly, what is wrong is named, all of it at once."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

from coherent_ray import config
from coherent_ray.config import Config
from coherent_ray.config.section import Section
from coherent_ray.errors import ConfigError

GOOD: dict[str, Any] = {
    "run": {"root": "runs/first"},
    "task": {"factory": "jobs.language_model:LanguageModel", "args": {"width": 128}},
    "data": {
        "source": {"format": "parquet", "paths": ["data/text.parquet"], "columns": ["text"]},
        "global_batch": 32,
        "lanes": 4,
        "microbatch": 8,
    },
    "training": {"updates": 60},
}
TEXT = """\
run:
  root: runs/first
task:
  factory: jobs.language_model:LanguageModel
data:
  source:
    format: parquet
    paths: [data/text.parquet]
  global_batch: 32
  lanes: 4
  microbatch: 8
training:
  updates: 60
"""


def changed(**settings: Any) -> dict[str, Any]:
    """GOOD with some settings changed; ``a__b`` is ``a.b``; the value ``...`` removes one."""
    values = copy.deepcopy(GOOD)
    for name, value in settings.items():
        *path, last = name.split("__")
        at = values
        for part in path:
            at = at.setdefault(part, {})
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return values


def problems(values: dict[str, Any]) -> dict[str, str]:
    """Key and message of each problem with these values."""
    with pytest.raises(ConfigError) as caught:
        config.build(values)
    assert caught.value.exit_code == 2
    found = caught.value.details["problems"]
    assert isinstance(found, list)
    for problem in found:
        assert problem["key"] in str(caught.value)
        assert problem["message"] in str(caught.value)
    return {problem["key"]: problem["message"] for problem in found}


# --- what is right --------------------------------------------------------------------------------


def test_what_is_given_is_kept_and_the_rest_has_defaults():
    made = config.build(GOOD)
    assert made.run.root == "runs/first"
    assert made.run.claim == "invariant"
    assert made.task is not None
    assert made.task.args == {"width": 128}
    assert made.data.lanes == 4
    assert made.data.seed == 0
    assert made.training.updates == 60
    assert made.training.threads == 1
    assert made.checkpoint.digest == "xxh3_128"
    assert made.cluster.workers == 1
    assert made.device == "cpu"


@pytest.mark.parametrize("workers", [{"min": 1, "max": 4}, {"min": 2, "max": 2}])
@pytest.mark.parametrize("claim", ["invariant", "statistical"])
def test_workers_may_be_a_range(workers, claim):
    made = config.build(changed(cluster__workers=workers, run__claim=claim))
    cluster = made.cluster
    assert (cluster.elastic, cluster.fewest, cluster.most) == (True, *workers.values())
    assert cluster.num_workers == tuple(workers.values()), "as Ray takes it"
    assert cluster.needs == {"CPU": workers["min"]}, "what it cannot go on without"
    assert config.build(json.loads(made.model_dump_json())) == made


def test_one_number_is_a_range_of_one():
    cluster = config.build(changed(cluster__workers=3)).cluster
    assert (cluster.elastic, cluster.fewest, cluster.most) == (False, 3, 3)
    assert cluster.num_workers == 3


def test_a_misspelled_end_of_a_range_is_named():
    with pytest.raises(ConfigError) as caught:
        config.build(changed(cluster__workers={"min": 1, "maxi": 2}))
    assert "cluster.workers.maxi: is not a known key (did you mean cluster.workers.max?)" in str(
        caught.value
    )


def test_it_survives_its_own_json():
    made = config.build(GOOD)
    assert config.build(json.loads(made.model_dump_json())) == made


def test_it_is_frozen():
    made = config.build(GOOD)
    with pytest.raises(PydanticError):
        made.data.seed = 3  # type: ignore[misc]


def test_building_leaves_the_values_alone():
    values = changed()
    config.build(values)
    assert values == GOOD


def test_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = changed(
        data__source__paths=["a.parquet", "/b.parquet", "s3://bucket/c"],
        data__prepare={
            "factory": "jobs.digits:prepare",
            "args": {"path": "a.parquet", "also": ["/b.parquet", "other", 3]},
        },
    )
    made = config.build(values).resolved()
    assert made.run.root == str(tmp_path / "runs/first")
    assert made.data.source.paths == [str(tmp_path / "a.parquet"), "/b.parquet", "s3://bucket/c"]
    assert made.data.prepare is not None
    assert made.data.prepare.args == {
        "path": str(tmp_path / "a.parquet"),
        "also": ["/b.parquet", "other", 3],
    }
    assert made.resolved() == made


def test_relative_paths_may_mean_another_directory(monkeypatch, tmp_path):
    made = config.build(changed(run__root="r", data__source__paths=["x", "/y"]))
    there = made.resolved("/there")
    assert there.run.root == "/there/r"
    assert there.data.source.paths == ["/there/x", "/y"]
    monkeypatch.chdir(tmp_path)
    assert made.resolved() == made.resolved(tmp_path)


def test_home_and_repeated_paths_are_resolved(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = config.build(changed(run__root="~/r", data__source__paths=["/x", "/x"])).resolved()
    assert made.run.root == str(tmp_path / "r")
    assert made.data.source.paths == ["/x", "/x"]


def test_a_gpu_decides_the_device():
    assert config.build(changed(cluster__use_gpu=True)).device == "cuda"


def test_token_files():
    source = {"format": "tokens", "paths": ["t.bin"], "window": 128, "dtype": "uint16"}
    made = config.build(changed(data__source=source))
    assert made.data.source.window == 128


@pytest.mark.parametrize("value", [0, 2**64 - 1])
def test_seeds_at_their_ends(value):
    assert config.build(changed(data__seed=value)).data.seed == value


def test_an_integer_is_a_number():
    assert config.build(changed(optimizer__lr=1)).optimizer.lr == 1.0


def test_a_training_function_of_one_s_own_needs_no_task():
    assert config.build(changed(task=...)).task is None


# --- what is wrong --------------------------------------------------------------------------------

WRONG = [
    (changed(run=...), "run", "is required"),
    (changed(run__root=...), "run.root", "is required"),
    (changed(run__root=""), "run.root", "must have 1 or more characters, not \"\""),
    (changed(run__root=3), "run.root", "must be a string, not 3"),
    (changed(run__run_id="Bad Name"), "run.run_id", "must match"),
    (changed(run__claim="invariants"), "run.claim", "must be one of exact, invariant, statistical"),
    (changed(run__rooot="x"), "run.rooot", "is not a known key"),
    (changed(task__factory="jobs.text"), "task.factory", "must be of the form package.module:Name"),
    (changed(task__factory="a b:C"), "task.factory", "must be of the form package.module:Name"),
    (changed(task__args=[1]), "task.args", "must be a mapping, not [1]"),
    (changed(task__args={"a": [float("inf")]}), "task.args.a[0]", "must be a finite number"),
    (changed(task__args={"a": {"b": b"x"}}), "task.args.a.b", "must be a plain value, not a bytes"),
    (changed(data__source__format="csv"), "data.source.format", "must be one of parquet, arrow"),
    (changed(data__source__paths="x"), "data.source.paths", 'must be a list, not "x"'),
    (changed(data__source__paths=[]), "data.source.paths", "must have 1 or more items"),
    (changed(data__source__paths=["a", 2]), "data.source.paths[1]", "must be a string, not 2"),
    (changed(data__source__columns=["a", "a"]), "data.source.columns", "names a column twice"),
    (changed(data__source__window=3), "data.source.window", "is for the format tokens"),
    (changed(data__source__format="tokens"), "data.source.columns", "token files have no columns"),
    (changed(data__prepare={}), "data.prepare.factory", "is required"),
    (changed(data__seed=-1), "data.seed", "must be 0 or more, not -1"),
    (changed(data__seed=2**64), "data.seed", f"must be less than {2**64}"),
    (changed(data__seed="7"), "data.seed", 'must be an integer, not "7"'),
    (changed(data__seed=True), "data.seed", "must be an integer, not true"),
    (changed(data__global_batch=0), "data.global_batch", "must be 1 or more, not 0"),
    (changed(data__lanes=64), "data.lanes", "64 lanes need a global_batch of 64 or more, not 32"),
    (changed(data__microbatch=2.5), "data.microbatch", "must be an integer, not 2.5"),
    (changed(data__verify="mtime"), "data.verify", "must be one of content, structure"),
    (changed(training__updates=...), "training.updates", "is required, or epochs instead"),
    (changed(training__epochs=1), "training.epochs", "cannot be given together with updates"),
    (changed(training__updates=0), "training.updates", "must be 1 or more"),
    (changed(training__precision="int8"), "training.precision", "must be one of fp32, bf16, fp16"),
    (changed(training__clip_norm=0), "training.clip_norm", "must be more than 0"),
    (changed(training__clip_norm=float("nan")), "training.clip_norm", "must be"),
    (changed(training__device="cuda"), "training.device", "cuda needs cluster.use_gpu: true"),
    (
        changed(training__device="cpu", cluster__use_gpu=True),
        "training.device",
        "cpu contradicts cluster.use_gpu: true",
    ),
    (changed(optimizer__lr="fast"), "optimizer.lr", 'must be a number, not "fast"'),
    (changed(optimizer__betas=[0.9]), "optimizer.betas", "must have 2 or more items"),
    (changed(optimizer__betas=[0.9, 1.0]), "optimizer.betas[1]", "must be less than 1"),
    (changed(checkpoint__every_updates=0), "checkpoint.every_updates", "must be 1 or more"),
    (changed(checkpoint__digest="md5"), "checkpoint.digest", "must be one of xxh3_128, blake3"),
    (changed(checkpoint__block_bytes=5000), "checkpoint.block_bytes", "must be a multiple of 4096"),
    (changed(checkpoint__ack_timeout_s=0), "checkpoint.ack_timeout_s", "must be more than 0"),
    (changed(checkpoint__keep=0), "checkpoint.keep", "must be 1 or more"),
    (changed(checkpoint__keep=2, checkpoint__keep_every=0), "checkpoint.keep_every", "1 or more"),
    (changed(checkpoint__keep_every=5), "checkpoint.keep_every", "needs checkpoint.keep"),
    (changed(checkpoint=None), "checkpoint", "must be a mapping of settings, not null"),
    (changed(cluster__workers=5), "cluster.workers", "5 workers need 5 lanes or more"),
    (changed(cluster__workers="two"), "cluster.workers", "an integer, or a mapping of min and max"),
    (changed(cluster__workers=True), "cluster.workers", "an integer, or a mapping of min and max"),
    (changed(cluster__workers=0), "cluster.workers", "must be 1 or more, not 0"),
    (changed(cluster__workers={"min": 1}), "cluster.workers.max", "is required"),
    (changed(cluster__workers={"min": 0, "max": 2}), "cluster.workers.min", "must be 1 or more"),
    (changed(cluster__workers={"min": 1.0, "max": 2}), "cluster.workers.min", "an integer, not 1"),
    (changed(cluster__workers={"min": 3, "max": 2}), "cluster.workers.max", "must be min (3) or"),
    (changed(cluster__workers={"min": 1, "max": 5}), "cluster.workers.max", "5 lanes or more"),
    (changed(cluster__workers={"min": 1, "max": 2, "mx": 1}), "cluster.workers.mx", "not a known"),
    (
        changed(cluster__workers={"min": 1, "max": 2}, run__claim="exact"),
        "cluster.workers",
        "is a range, and run.claim: exact promises nothing at another rank count",
    ),
    (changed(cluster__resize_interval_s=0), "cluster.resize_interval_s", "must be 0.1 or more"),
    (changed(cluster__use_gpu="yes"), "cluster.use_gpu", 'must be true or false, not "yes"'),
    (changed(cluster__max_failures=-2), "cluster.max_failures", "must be -1 or more"),
    (changed(cluster__resources_per_worker={"CPU": -1}), "cluster.resources_per_worker.CPU", "0"),
    (
        changed(cluster__address="auto", cluster__num_cpus=2),
        "cluster.num_cpus",
        "is for a local cluster",
    ),
    (
        changed(cluster__resources_per_worker={"GPU": 1.0}),
        "cluster.resources_per_worker.GPU",
        "1 contradicts use_gpu: false",
    ),
    (
        changed(cluster__use_gpu=True, cluster__resources_per_worker={"GPU": 0.0}),
        "cluster.resources_per_worker.GPU",
        "0 contradicts use_gpu: true",
    ),
    (changed(cluter={"workers": 2}), "cluter", "is not a known key"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "key", "message"), WRONG, ids=[w[1] for w in WRONG])
def test_each_wrong_setting_is_named(values, key, message):
    found = problems(values)
    assert key in found
    assert message in found[key]


def test_there_are_more_than_thirty_bad_cases():
    assert len(WRONG) > 30


def test_only_what_is_wrong_is_named():
    for values, key, _ in WRONG:
        assert set(problems(values)) - {key} <= {"data.source.window", "data.source.dtype"}


def test_all_are_named_at_once_in_one_error():
    found = problems(changed(run__root=1, data__seed=-1, checkpoint__digest="md5", zebra=1))
    assert set(found) == {"run.root", "data.seed", "checkpoint.digest", "zebra"}


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        (changed(cluter={}), "cluster"),
        (changed(data__sed=7), "data.seed"),
        (changed(data__source__colums=["a"]), "data.source.columns"),
        (changed(checkpoint__digest="blake"), "blake3"),
        # Right name, wrong section.
        (changed(training__lr=0.1), "optimizer.lr"),
        (changed(lanes=4), "data.lanes"),
        (changed(data__factory="a:b"), "task.factory"),
    ],
)
def test_the_nearest_known_key_or_value_is_shown(values, suggestion):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {suggestion}?")):
        config.build(values)


def test_where_nothing_is_near_the_known_keys_are_listed():
    assert problems(changed(run__zzzzz=1)) == {
        "run.zzzzz": "is not a known key; known here: root, run_id, claim"
    }


def test_a_remedy_is_given():
    with pytest.raises(ConfigError) as caught:
        config.build({})
    assert "validate --schema" in caught.value.remedy
    assert set(problems({})) == {"run", "data", "training"}


def test_a_long_value_is_cut():
    (message,) = problems(changed(data__seed="x" * 1000)).values()
    assert len(message) < 100


# --- files and overrides --------------------------------------------------------------------------


def test_a_file_is_loaded(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    made = config.load(path)
    assert made == config.load(str(path))
    assert made.training.updates == 60


def test_overrides_replace_the_file_s():
    made = config.parse(
        TEXT, ["data.seed=7", "optimizer.lr=3e-3", "task.args.deep.er=[1, a]", "run.claim=exact"]
    )
    assert made.data.seed == 7
    assert made.optimizer.lr == 3e-3
    assert made.task is not None
    assert made.task.args == {"deep": {"er": [1, "a"]}}
    assert made.run.claim == "exact"


def test_the_last_override_wins_and_values_may_hold_equals_signs():
    made = config.parse(TEXT, ["data.seed=1", "data.seed=2", "task.args.x=a=b"])
    assert made.data.seed == 2
    assert made.task is not None
    assert made.task.args["x"] == "a=b"


def test_null_takes_a_setting_back():
    made = config.parse(TEXT, ["training.updates=null", "training.epochs=2"])
    assert (made.training.updates, made.training.epochs) == (None, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seed", "is not of the form section.key=value"),
        ("=3", "is not of the form section.key=value"),
        ("data..seed=3", "is not of the form section.key=value"),
        ("data.sed=3", "--set: data.sed: is not a known key (did you mean data.seed?)"),
        ("data.seed=x", '--set: data.seed: must be an integer, not "x"'),
        ("run.root.x=3", "run.root: is not a mapping"),
        ("data.seed=[1", "not YAML"),
        ("data.seed={a: 1, a: 2}", "the key a is there twice"),
    ],
)
def test_bad_overrides(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.parse(TEXT, [override])


def test_lines_are_told():
    text = TEXT.replace("lanes: 4", "lanes: four").replace("updates: 60", "updats: 60")
    with pytest.raises(ConfigError) as caught:
        config.parse(text, where="job.yaml")
    assert 'line 10: data.lanes: must be an integer, not "four"' in caught.value.what
    assert "line 13: training.updats: is not a known key" in caught.value.what
    assert caught.value.where == "job.yaml"


def test_a_missing_key_is_told_at_its_section():
    with pytest.raises(ConfigError, match=r"line 5: data\.microbatch: is required"):
        config.parse(TEXT.replace("  microbatch: 8\n", ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the configuration is empty"),
        ("# nothing\n", "the configuration is empty"),
        ("[1, 2]", "is not a mapping of sections"),
        ("just text", "is not a mapping of sections"),
        (TEXT + "run:\n  root: again\n", "the key run is there twice: in line 1 and in line 14"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        config.parse(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"run: \xff"), "not UTF-8"),
    ],
)
def test_bad_files(tmp_path, make, message):
    path = tmp_path / "job.yaml"
    make(path)
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(path)
    assert caught.value.where == str(path)


# --- the schema -----------------------------------------------------------------------------------


def sections(model: type[BaseModel] = Config) -> dict[str, type[BaseModel]]:
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for form in (field.annotation, *getattr(field.annotation, "__args__", ())):
            kind = getattr(form, "__origin__", form)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= sections(kind)
    return found


def test_every_setting_is_described():
    for name, model in sections().items():
        assert issubclass(model, Section)
        assert model.__doc__
        for key, field in model.model_fields.items():
            assert field.description, f"{name}.{key}"
            assert field.description.rstrip().endswith("."), f"{name}.{key}"


def test_the_schema_is_strict_and_knows_every_section():
    made = config.schema()
    assert made["additionalProperties"] is False
    assert set(made["$defs"]) == set(sections()) - {"Config"}
    assert all(part["additionalProperties"] is False for part in made["$defs"].values())
    assert json.loads(json.dumps(made)) == made


def test_the_schema_file_is_current():
    path = Path(__file__).parent.parent / "configs" / "schema.json"
    expected = json.dumps(config.schema(), ensure_ascii=False, indent=2) + "\n"
    assert path.read_text() == expected, "coherent-ray validate --schema > configs/schema.json"


def test_every_shipped_configuration_is_valid():
    for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")):
        made = config.load(path)
        assert made.data.lanes % 1 == 0
        assert yaml.safe_load(path.read_text())["run"]["root"] == made.run.root


def test_a_signing_key_needs_shards_that_resist_forgery() -> None:
    signed = {"signing_key": {"env": "A_KEY"}}
    with pytest.raises(ConfigError, match="xxh3_128"):
        config.build(GOOD | {"storage": signed})
    kept = config.build(GOOD | {"storage": signed, "checkpoint": {"digest": "blake3"}})
    assert kept.storage.options.key_env == "A_KEY"
