"""The code: from which source a job computes, module by module, so that a resume can compare it.

A setting that changed is seen in the recipe; an edited loss would not be. So the recipe has a
digest of each module of the user's that the task's module leads to by its imports: those of the
same top-level package, and those that lie in the same directory. What is installed beside them
counts by its version, in the environment.

The digest is of the syntax tree without docstrings: comments, layout and quotes compute nothing.
Imports are followed as they are written, not as ``sys.modules`` has them, so that what was loaded
by whom and when decides nothing. No path is kept, only names of modules.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from coherent_ray import canonical
from coherent_ray.digests import Digest

#: Ours: the version of the formats speaks for it.
_OURS = "coherent_ray"
_END = object()
_INSTALLED = {"site-packages", "dist-packages"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Code:
    """What a job computes from."""

    modules: dict[str, str]
    """Digest of each module of the user's, by name; empty: no source was found."""
    libraries: dict[str, str]
    """Version of each installed package that these import, by name."""

    def __or__(self, other: Code) -> Code:
        """Return both together."""
        return Code(self.modules | other.modules, self.libraries | other.libraries)


NO_CODE = Code({}, {})


def code_of(function: Callable[..., object], name: str | None = None) -> Code:
    """Return what a function or class computes from: its module, and what that leads to.

    Args:
        function: Imported already.
        name: The module that it was asked for by, where that may be another one.

    Returns:
        Nothing where its module has no source: interactive, compiled, or gone.
    """
    own = getattr(function, "__module__", None) or ""
    first = sys.modules.get(name or own)
    file = getattr(first, "__file__", None)
    origin = Path(file) if file else None
    tree = _tree(origin)
    if first is None or tree is None or _OURS in {_top(first.__name__), _top(_started_as(first))}:
        return NO_CODE
    reached = _Reached(first.__name__, _home(first.__name__, origin))
    reached.take(first.__name__, tree, is_package=hasattr(first, "__path__"))
    reached.look_at(own)
    reached.follow()
    return Code(reached.modules, _versions(reached.libraries))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _started_as(module: ModuleType) -> str:
    """Return the name that a program's module has, where it was started by ``python -m NAME``."""
    return module.__spec__.name if module.__spec__ is not None else ""


class _Reached:
    """The modules that are reached from a first one."""

    def __init__(self, first: str, home: Path | None) -> None:
        self._top = first.partition(".")[0]
        self._home = home
        self._seen: set[str] = set()
        self._waiting: list[tuple[str, ast.Module, bool]] = []
        self.modules: dict[str, str] = {}
        self.libraries: set[str] = set()

    def take(self, name: str, tree: ast.Module, *, is_package: bool) -> None:
        """Count a module in."""
        self._seen.add(name)
        self._waiting.append((name, tree, is_package))

    def look_at(self, name: str) -> None:
        """Count in what a name stands for, and the packages that it lies in, if it is the user's.

        A name that is no module but something inside one stands for nothing.
        """
        for part in _with_parents(name):
            if not part or part in self._seen:
                continue
            self._seen.add(part)
            spec = _spec(part)
            origin = Path(spec.origin) if spec is not None and spec.origin else None
            if not self._is_the_user_s(part, origin):
                self.libraries.add(part.partition(".")[0])
            elif spec is not None and (tree := _tree(origin)) is not None:
                self.take(part, tree, is_package=spec.submodule_search_locations is not None)

    def follow(self) -> None:
        """Look at all that the modules import, and what those import."""
        while self._waiting:
            name, tree, is_package = self._waiting.pop()
            self.modules[name] = _digest(tree)
            for wanted in _imports(tree, name, is_package):
                self.look_at(wanted)

    def _is_the_user_s(self, name: str, origin: Path | None) -> bool:
        top = name.partition(".")[0]
        if top == _OURS or top in sys.stdlib_module_names:
            return False
        return top == self._top or (self._home is not None and _home(name, origin) == self._home)


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing anything: not even the package that it lies in."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    parent = name.rpartition(".")[0]
    if not parent:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
    above = _spec(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(above.submodule_search_locations))


def _home(name: str, file: Path | None) -> Path | None:
    """Return the directory that a module's top-level package lies in; None: it is installed."""
    if file is None or _INSTALLED & set(file.parts):
        return None
    up = name.count(".") + (file.stem == "__init__")
    return file.resolve().parents[up] if up < len(file.parents) else None


def _tree(file: Path | None) -> ast.Module | None:
    if file is None or file.suffix != ".py":
        return None
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imports(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute name of everything that is imported, at the top of a module or later."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            if base:
                yield base
                # What is taken from a package may be a module of it.
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _digest(tree: ast.Module) -> Digest:
    """Return the digest of syntax, the same whatever version of Python parsed it.

    What is empty is left out: newer versions have fields that older ones lack.
    """
    words: list[str] = []
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += [_END, *reversed(node)]
            words.append("[")
        elif isinstance(node, ast.AST):
            fields = [pair for pair in _fields(node) if pair[1] is not None and pair[1] != []]
            waiting += [_END, *(part for name, value in reversed(fields) for part in (value, name))]
            words.append(type(node).__name__)
        else:
            words.append("]" if node is _END else repr(node))
    return canonical.digest(words)


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    for name, value in ast.iter_fields(node):
        is_documented = (
            name == "body"
            and isinstance(node, _DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        )
        yield name, value[1:] if is_documented else value


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _versions(names: set[str]) -> dict[str, str]:
    """Return the versions of the installed packages that some names are imported from."""
    found = {
        distribution: metadata.version(distribution)
        for name in names - {_OURS}
        for distribution in _distributions().get(name, [])
    }
    return dict(sorted(found.items()))
