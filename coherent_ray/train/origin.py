"""The origin: the weights that a run starts from, where it starts from another run's or a file's.

Read once, at the run's beginning, and never again: a resume goes on from the run's own generations.
What was read is part of the run from its first update on: of the recipe of each generation, and of
what the first receipt follows, so that no two starts have one history.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from coherent_ray import canonical
from coherent_ray.config import Config
from coherent_ray.digests import algorithm_of
from coherent_ray.errors import AdmissionRefused
from coherent_ray.state.weights import Weights, fitted, put_weights, read_weights
from coherent_ray.train.recipe import ORIGIN, origin_of


def read(config: Config) -> Weights | None:
    """Read and verify the weights that a new run starts from; None: its task's own.

    Raises:
        AdmissionRefused: They are not those whose digest the configuration has.
        CoherentRayError: They cannot be read, or are damaged.
    """
    section = config.init_from
    if section is None:
        return None
    algorithm = algorithm_of(section.digest) if section.digest else "sha256"
    weights = read_weights(
        section.source, config.storage.options, averaged=section.averaged, algorithm=algorithm
    )
    if section.digest is not None and weights.digest != section.digest:
        raise AdmissionRefused(
            f"the weights of {weights.source} have the digest {weights.digest}, and "
            f"init_from.digest is {section.digest}",
            where=section.source,
            remedy="name the weights that are meant, or take the digest out",
            details={"stored": section.digest, "found": weights.digest},
        )
    return weights


def check(config: Config, weights: Weights | None, model: nn.Module) -> None:
    """Return if the weights fit a model.

    Raises:
        StateMismatch: They do not; names the tensors.
    """
    if weights is not None and (section := config.init_from) is not None:
        fitted(weights, model, strict=section.strict, skip=section.skip)


def begin(config: Config, weights: Weights, model: nn.Module) -> None:
    """Let a model start from some weights.

    Raises:
        StateMismatch: They do not fit; nothing was changed.
    """
    section = config.init_from
    assert section is not None
    put_weights(model, fitted(weights, model, strict=section.strict, skip=section.skip))


def recipe(config: Config, weights: Weights | None) -> dict[str, str]:
    """Return what a generation's recipe tells of a run's origin; empty: it has none."""
    section = config.init_from
    if weights is None or section is None:
        return {}
    facts = {"source": weights.source, "digest": weights.digest, "averaged": section.averaged}
    facts["skip"] = list(section.skip)
    return {f"{ORIGIN}{key}": canonical.dump(value).decode() for key, value in facts.items()}


def of_history(config: Config, stored: Mapping[str, str]) -> dict[str, str]:
    """Return the origin of a run that goes on.

    Raises:
        AdmissionRefused: The configuration names weights to start from, and the run, which has
            begun, did not start from any.
    """
    found = origin_of(stored)
    if config.init_from is not None and not found:
        raise AdmissionRefused(
            "init_from is set, and this run has begun without: it goes on from its own generations",
            where="init_from",
            remedy="take init_from out; or start a new run under another run.root",
        )
    return found


def in_words(facts: Mapping[str, str]) -> list[str]:
    """Return a note that tells where a new run's weights are from; none where it has no origin."""
    if not facts:
        return []
    source, digest = (canonical.load(facts[ORIGIN + key].encode()) for key in ("source", "digest"))
    return [f"a new run: its weights are those of {source} ({digest})"]
