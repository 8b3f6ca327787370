"""What a section of the configuration is, and the types that sections share.

Apart from `coherent_ray.config`, so that the list of all settings holds nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from coherent_ray import yaml_text
from coherent_ray.config.problems import CONFLICT

FACTORY_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


def _not_json(value: Any, at: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
    """Yield each place in a value from YAML that JSON could not hold."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_json(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, (*at, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield yaml_text.dotted(at), f"must be a finite number, not {value}"
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        yield yaml_text.dotted(at), f"must be a plain value, not a {kind}: {value!r}"


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    refuse(_not_json(value, ()))
    return value


def refuse(conflicts: Iterator[tuple[str, str]]) -> None:
    """Refuse a section if it has conflicts, all of them at once."""
    found = list(conflicts)
    if found:
        raise PydanticCustomError(CONFLICT, "settings contradict each other", {"all": found})


Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Factory = Annotated[str, Field(pattern=FACTORY_PATTERN)]
Arguments = Annotated[dict[str, Any], AfterValidator(_plain)]


class Section(BaseModel):
    """A part of the configuration: strict, frozen, no unknown keys."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield ``(key below this section, what is wrong)`` of settings that do not fit."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        refuse(self.conflicts())
        return self
