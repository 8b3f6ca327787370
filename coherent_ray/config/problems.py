"""What is wrong with a configuration, in words: dotted key, what it must be, the nearest known key.

pydantic finds the errors; its wording is for programmers. Here each becomes one sentence for the
person who wrote the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from coherent_ray.errors import ConfigError
from coherent_ray.yaml_text import dotted

#: pydantic error type of settings that contradict each other; its context lists them.
CONFLICT = "conflict"
#: What pydantic calls, on the way to a value, the two forms that a number of workers may have.
COUNT, RANGE = "[count]", "[range]"

_NOUNS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be {le} or less",
    "less_than": "must be less than {lt}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} or fewer characters",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have {max_length} or fewer items",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted."""
    message: str
    suggestion: str = ""
    """The nearest known key or value; may be empty."""

    def __str__(self) -> str:
        hint = f" (did you mean {self.suggestion}?)" if self.suggestion else ""
        return f"{self.key}: {self.message}{hint}"


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return every problem that a validation found, in the order of the settings."""
    result: list[Problem] = []
    for item in error.errors(include_url=False):
        result.extend(_translate(item, model))
    return result


def as_error(
    problems: Sequence[Problem], where: str, lines: Mapping[str, int | None]
) -> ConfigError:
    """Return one error that tells all problems.

    Args:
        problems: At least one.
        where: The file.
        lines: Line of each dotted key in the file; None for a key that ``--set`` gave.
    """
    shown = [f"{_place(problem.key, lines)}{problem}" for problem in problems]
    what = shown[0]
    if len(shown) > 1:
        what = "\n  ".join([f"{len(shown)} settings are wrong:", *shown])
    details = [{"key": p.key, "message": p.message, "suggestion": p.suggestion} for p in problems]
    return ConfigError(
        what,
        where=where,
        remedy="correct the file; `coherent-ray validate --schema` describes every setting",
        details={"problems": details},
    )


def _place(key: str, lines: Mapping[str, int | None]) -> str:
    at = key
    while at and at not in lines:
        cut = max(at.rfind("."), at.rfind("["))
        at = at[: max(cut, 0)]
    if not at:
        return ""
    line = lines[at]
    return "--set: " if line is None else f"line {line}: "


def _translate(item: Any, model: type[BaseModel]) -> Iterator[Problem]:
    parts = tuple(part for part in item["loc"] if part not in {"[key]", COUNT, RANGE})
    kind, context = item["type"], item.get("ctx", {})
    if kind == CONFLICT:
        for key, message in context["all"]:
            yield Problem(f"{dotted(parts)}.{key}".lstrip("."), message)
        return
    key, given = dotted(parts), _shown(item["input"])
    if kind == "missing":
        yield Problem(key, "is required")
    elif kind == "extra_forbidden":
        yield _unknown(parts, model)
    elif kind == "literal_error" and parts[-1] == "every":
        yield Problem(key, f"must be auto, not {given}", dotted((*parts[:-1], "every_updates")))
    elif kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(item["input"]), allowed, 1)
        yield Problem(key, f"must be one of {', '.join(allowed)}, not {given}", *near)
    elif _NOUNS.get(kind) == _NOUNS["int_type"] and COUNT in item["loc"]:
        yield Problem(key, f"must be an integer, or a mapping of min and max, not {given}")
    elif kind == "string_pattern_mismatch" and parts[-1] == "factory":
        yield Problem(key, f"must be of the form package.module:Name, not {given}")
    elif kind == "string_pattern_mismatch":
        yield Problem(key, f"must match {context['pattern']}, not {given}")
    else:
        yield Problem(key, _sentence(kind, context, item["msg"], given))


def _sentence(kind: str, context: Mapping[str, Any], message: str, given: str) -> str:
    if kind in _NOUNS:
        return f"must be {_NOUNS[kind]}, not {given}"
    if kind in _LIMITS:
        return _LIMITS[kind].format(**context) + f", not {given}"
    return f"{message}, not {given}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown(parts: tuple[str | int, ...], model: type[BaseModel]) -> Problem:
    places = dict(_known(model, ()))
    siblings = places.get(parts[:-1], [])
    name = str(parts[-1])
    begun = [key for key in siblings if key.startswith(name) or name.startswith(key)]
    near = begun or difflib.get_close_matches(name, siblings, 1)
    if near:
        return Problem(dotted(parts), "is not a known key", dotted((*parts[:-1], near[0])))
    elsewhere = [dotted((*at, key)) for at, keys in places.items() for key in keys if key == name]
    if elsewhere:
        return Problem(dotted(parts), "is not a known key", elsewhere[0])
    return Problem(dotted(parts), f"is not a known key; known here: {', '.join(siblings)}")


def _known(
    model: type[BaseModel], at: tuple[str, ...]
) -> Iterator[tuple[tuple[str | int, ...], list[str]]]:
    """Yield each section's place, and the keys that it knows."""
    yield at, list(model.model_fields)
    for name, field in model.model_fields.items():
        for form in (field.annotation, *getattr(field.annotation, "__args__", ())):
            kind = getattr(form, "__origin__", form)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known(kind, (*at, name))
