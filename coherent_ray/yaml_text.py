"""YAML as people mean it: the 1.2 core schema, no duplicate keys, and the line of every key.

PyYAML reads YAML 1.1, where ``3e-4`` is a string, ``no`` is false, ``1:30`` is 90 and a key given
twice silently keeps its last value. A configuration must not depend on knowing that. Only plain
values come out of here: mappings with string keys, lists, strings, numbers, booleans and null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from coherent_ray.errors import ConfigError

#: Values that a text may expand to through aliases; more is an attack or an accident.
MAX_VALUES = 100_000

_PREFIX = "tag:yaml.org,2002:"
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:0o[0-7]+|0x[0-9a-fA-F]+|[-+]?[0-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
        r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        "-+.0123456789",
    ),
    ("merge", r"^<<$", "<"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed text."""

    value: Any
    lines: dict[str, int]
    """Line, from 1, of each dotted key."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the 1.2 core schema's resolvers in place of the 1.1 ones."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own shape)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    # Leading zeros are decimal in YAML 1.2; Python's base 0 would refuse them.
    return int(text, 0) if text[:2] in {"0o", "0x"} else int(text, 10)


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_PREFIX + _name, re.compile(_pattern), list(_first))
_Loader.yaml_implicit_resolvers[""] = [(_PREFIX + "null", re.compile(r"^$"))]
_Loader.add_constructor(_PREFIX + "int", _construct_int)


def parse(text: str, where: str) -> Document:
    """Return the value of a YAML text.

    Args:
        text: One YAML document.
        where: What to call the text in errors: its path.

    Raises:
        ConfigError: Not YAML, a key is there twice or is no string, or aliases expand without end.
    """
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise _syntax_error(error, where) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(None, {})
        _check_size(root, where)
        lines: dict[str, int] = {}
        for path, node in _keys(root, (), where):
            lines.setdefault(path, node.start_mark.line + 1)
        return Document(loader.construct_document(root), lines)
    except yaml.YAMLError as error:
        raise _syntax_error(error, where) from error
    except RecursionError as error:
        raise ConfigError("the YAML is nested too deeply", where=where) from error
    except ValueError as error:
        raise ConfigError(f"a value cannot be read: {error}", where=where) from error
    finally:
        loader.dispose()


def dotted(parts: tuple[str | int, ...]) -> str:
    """Return how a place is written: ``data.source.paths[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _syntax_error(error: yaml.YAMLError, where: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if mark is None:
        return ConfigError(f"not YAML: {problem}", where=where)
    place = {"line": mark.line + 1, "column": mark.column + 1}
    return ConfigError(
        f"not YAML: {problem}",
        where=f"{where}, line {mark.line + 1}, column {mark.column + 1}",
        remedy="correct the text at this line, or just before it",
        details=dict(place),
    )


def _check_size(root: yaml.Node, where: str) -> None:
    """Refuse aliases that contain themselves or multiply without end."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node), 0)
        if known is None:
            line = node.start_mark.line + 1
            raise ConfigError("an alias contains itself", where=f"{where}, line {line}")
        if not known:
            sizes[id(node)] = None
            known = sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
        return known

    if size(root) > MAX_VALUES:
        raise ConfigError(f"the aliases expand to more than {MAX_VALUES} values", where=where)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _keys(
    node: yaml.Node, at: tuple[str | int, ...], where: str
) -> Iterator[tuple[str, yaml.Node]]:
    """Yield each place's dotted name and the node that begins it; refuse bad keys on the way."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield dotted((*at, index)), item
            yield from _keys(item, (*at, index), where)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == _PREFIX + "merge":
            continue
        line = key.start_mark.line + 1
        if key.tag != _PREFIX + "str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(
                f"the key {shown} is not a string",
                where=f"{where}, line {line}",
                remedy="put it in quotes, if a key is meant",
            )
        place = dotted((*at, key.value))
        if key.value in first:
            raise ConfigError(
                f"the key {place} is there twice: in line {first[key.value]} and in line {line}",
                where=f"{where}, line {line}",
                remedy="keep one of them",
                details={"key": place, "lines": [first[key.value], line]},
            )
        first[key.value] = line
        yield place, key
        yield from _keys(value, (*at, key.value), where)
