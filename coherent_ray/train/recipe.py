"""The recipe: the settings that decide what an update does, beside the data and the environment.

A learning-rate schedule depends on the length of the run, an update on optimizer and task: on the
task's settings, and on its source.
Another recipe is another job, so it goes into every generation, and admission compares it.
How often a run saves, on how many workers and where, is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit.manifest import GenerationHeader
from coherent_ray.config import Config
from coherent_ray.train.code import NO_CODE, Code

#: Settings that decide no update, or that the environment fingerprint covers.
_ELSEWHERE = {"training.threads", "training.device", "training.on_nonfinite", "task.folder"}
#: Keys of a recipe that tell from which source the task is; see `coherent_ray.train.code`.
CODE = "code."
#: Keys of a recipe that tell from which weights the run started; see `coherent_ray.train.origin`.
ORIGIN = "init_from."


def recipe_of(config: Config, code: Code = NO_CODE) -> dict[str, str]:
    """Return the settings by dotted key, each value as canonical JSON.

    Args:
        config: The run's configuration.
        code: What the job computes from.
    """
    values = config.model_dump(mode="json", include={"task", "training", "optimizer"})
    settings = {k: v for k, v in _flat("", values).items() if k not in _ELSEWHERE}
    if config.training.strategy == "replicated":
        del settings["training.strategy"]  # as in generations from before there was another
    modules = {f"{CODE}{name}": f'"{digest}"' for name, digest in code.modules.items()}
    return dict(sorted((settings | modules).items()))


def differences(stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one line for each setting that differs, ``key: stored -> now``.

    A setting that an older version did not know yet is one that was not made.
    """
    return [
        f"{key}: {stored.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(stored.keys() | now.keys())
        if stored.get(key, "null") != now.get(key, "null")
    ]


def origin_of(recipe: Mapping[str, str]) -> dict[str, str]:
    """Return what a recipe tells of the weights that a run started from; empty: its task's own."""
    return {key: value for key, value in recipe.items() if key.startswith(ORIGIN)}


def length_of(header: GenerationHeader) -> int | None:
    """Return how many updates the whole run of a generation has; None: it does not say."""
    plan = header.plan
    per_epoch = -(-plan.examples // plan.global_batch)
    for key, each in (("training.updates", 1), ("training.epochs", per_epoch)):
        told = canonical.load(header.recipe.get(key, "null").encode())
        if isinstance(told, int):
            return told * each
    return None


def _flat(prefix: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: canonical.dump(value).decode()}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    return found
