"""The configuration: all sections together, loaded strictly, and checked all at once.

A setting that is not known, has the wrong type or an impossible value is an error that names its
dotted key, its line and the nearest known key; all errors of a file come together. Nothing here
imports torch or Ray, and nothing here touches the places that the settings name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    ValidationError,
)

from coherent_ray import yaml_text
from coherent_ray.config.problems import Problem, as_error, problems_of
from coherent_ray.config.section import Section
from coherent_ray.config.sections import (
    Checkpoint,
    Cluster,
    Data,
    InitFrom,
    Optimizer,
    Run,
    Storage,
    Task,
    Training,
)
from coherent_ray.errors import ConfigError


class Config(Section):
    """A whole configuration."""

    model_config = ConfigDict(title="Coherent Ray configuration")

    run: Run
    """Where the run's history lies, and what it promises."""
    storage: Storage = Storage()
    """How to talk to the object store that holds the run's root; directories need none of it."""
    task: Task | None = None
    """What is trained; `run` and `submit` need it, a training function of one's own does not."""
    init_from: InitFrom | None = None
    """The weights that the run starts from; null: those that the task builds."""
    data: Data
    """Which examples an update takes."""
    training: Training
    """How long and how the model is trained."""
    optimizer: Optimizer = Optimizer()
    """AdamW's settings, for tasks that bring no optimizer of their own."""
    checkpoint: Checkpoint = Checkpoint()
    """When generations are saved, and how they are checked."""
    cluster: Cluster = Cluster()
    """The Ray cluster, and what a failure may cost."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield what contradicts across sections."""
        most = self.cluster.most
        if most > self.data.lanes:
            yield (
                "cluster.workers.max" if self.cluster.elastic else "cluster.workers",
                f"{most} workers need {most} lanes or more; data.lanes is {self.data.lanes}",
            )
        if self.cluster.elastic and self.run.claim == "exact":
            yield (
                "cluster.workers",
                "is a range, and run.claim: exact promises nothing at another rank count; give one "
                "number, or set run.claim: invariant",
            )
        if self.training.strategy == "fsdp2":
            if self.run.claim == "invariant":
                yield (
                    "run.claim",
                    "invariant cannot be kept with training.strategy: fsdp2, whose reduce-scatter "
                    "adds in an order that depends on the number of workers; use exact or "
                    "statistical",
                )
            if self.checkpoint.mid_update:
                yield "checkpoint.mid_update", "needs training.strategy: replicated"
        if self.storage.signing_key is not None and self.checkpoint.digest == "xxh3_128":
            yield (
                "checkpoint.digest",
                "storage.signing_key needs blake3 or sha256: xxh3_128 does not resist forgery",
            )
        if self.training.device == "cuda" and not self.cluster.use_gpu:
            yield "training.device", "cuda needs cluster.use_gpu: true"
        if self.training.device == "cpu" and self.cluster.use_gpu:
            yield "training.device", "cpu contradicts cluster.use_gpu: true"

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the workers train, with auto decided."""
        return "cuda" if self.cluster.use_gpu else "cpu"

    def resolved(self, directory: str | Path = "") -> Config:
        """Return the same configuration with absolute paths; addresses stay as they are.

        An argument of `data.prepare` that names one of the data's paths goes with it, since both
        mean one file. Workers have other current directories than the user.

        Args:
            directory: What relative paths are relative to; empty: the current directory.
        """
        source, prepare, task = self.data.source, self.data.prepare, self.task
        names = {path: _absolute(path, directory) for path in source.paths}
        paths = [names[path] for path in source.paths]
        source = source.model_copy(update={"paths": paths})
        if prepare is not None:
            prepare = prepare.model_copy(update={"args": _renamed(prepare.args, names)})
        data = self.data.model_copy(update={"source": source, "prepare": prepare})
        run = self.run.model_copy(update={"root": _absolute(self.run.root, directory)})
        if task is not None and task.folder is not None:
            task = task.model_copy(update={"folder": _absolute(task.folder, directory)})
        origin = self.init_from
        if origin is not None:
            place = _absolute(origin.source, directory)
            origin = origin.model_copy(update={"source": place})
        changes = {"run": run, "data": data, "task": task, "init_from": origin}
        return self.model_copy(update=changes)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a YAML file.

    Args:
        path: The file.
        overrides: Settings that replace the file's, as ``data.seed=7``; values are YAML.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong; names all of them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(
            f"the configuration cannot be read: {error.strerror}",
            where=str(path),
            remedy="name a YAML file that exists and is readable",
        ) from error
    return _with_folder(parse(text, overrides, where=str(path)), Path(path).parent)


def parse(text: str, overrides: Sequence[str] = (), *, where: str = "configuration") -> Config:
    """Return the configuration of a YAML text.

    Args:
        text: One YAML document: a mapping of sections.
        overrides: Settings that replace the text's, as ``data.seed=7``; values are YAML.
        where: What to call the text in errors.

    Raises:
        ConfigError: A setting is wrong; names all of them.
    """
    document = yaml_text.parse(text, where)
    if document.value is None:
        raise ConfigError("the configuration is empty", where=where)
    if not isinstance(document.value, dict):
        raise ConfigError("the configuration is not a mapping of sections", where=where)
    lines: dict[str, int | None] = dict(document.lines)
    for override in overrides:
        lines[_apply(document.value, override)] = None
    return build(document.value, where=where, lines=lines)


def build(
    values: Mapping[str, Any],
    *,
    where: str = "configuration",
    lines: Mapping[str, int | None] | None = None,
) -> Config:
    """Return the configuration of plain values, as a YAML file would give them.

    Args:
        values: Sections by name.
        where: What to call the values in errors.
        lines: Line of each dotted key in the file; None for a key that ``--set`` gave.

    Raises:
        ConfigError: A setting is wrong; names all of them.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise as_error(problems_of(error, Config), where, lines or {}) from error


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
    }


def _absolute(path: str, directory: str | Path) -> str:
    if "://" in path:
        return path
    return str((Path(directory) / Path(path).expanduser()).absolute())


def _with_folder(config: Config, folder: Path) -> Config:
    task = config.task
    if task is not None and task.folder is None:
        task = task.model_copy(update={"folder": str(folder.absolute())})
    return config.model_copy(update={"task": task})


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _apply(values: dict[str, Any], override: str) -> str:
    """Put one ``a.b=c`` into the values, and return its dotted key."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"the override {override!r} is not of the form section.key=value",
            where="--set",
            remedy="write, for example, --set data.seed=7",
        )
    value = yaml_text.parse(text, f"--set {override}").value
    at = values
    for index, part in enumerate(parts[:-1]):
        inner = at.setdefault(part, {})
        if inner is None:
            inner = at[part] = {}
        if not isinstance(inner, dict):
            place = yaml_text.dotted(tuple(parts[: index + 1]))
            problem = Problem(place, "is not a mapping, so nothing can be set below it")
            raise as_error([problem], "--set", {})
        at = inner
    at[parts[-1]] = value
    return key.strip()
