"""The house stays as drawn: imports go down only, files are short, rooms keep their rules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "coherent_ray"
SOURCES = sorted(PACKAGE.rglob("*.py"))
JOBS = sorted((ROOT / "jobs").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: Who may import whom; each layer may also import itself, and the ground.
GROUND = {"errors", "digests", "canonical"}
BELOW = {
    "storage": set(),
    "commit": {"storage"},
    "state": {"storage", "commit"},
    "data": {"storage", "commit"},
    "config": {"commit", "storage", "yaml_text"},
    "yaml_text": set(),
    "train": {"storage", "commit", "state", "data", "config"},
    "drill": {"storage", "commit", "state", "data", "config", "train"},
    "cli": {"storage", "commit", "state", "data", "config", "train", "drill"},
    "__main__": {"cli"},
    "errors": set(),
    "digests": {"errors"},
    "canonical": {"digests"},
}
#: What a layer may not import from outside, wherever in a file.
FOREIGN = {
    "errors": {"torch", "ray", "pydantic", "numpy", "click", "rich"},
    "storage": {"torch", "ray", "click", "rich"},
    "commit": {"torch", "ray", "numpy", "click", "rich"},
    "state": {"ray", "click", "rich"},
    "data": {"ray", "click", "rich"},
    "config": {"torch", "ray", "numpy", "click", "rich"},
}
LONGEST_FILE = 500
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc)($|_)")


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Yield the absolute name of each module that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            yield node.module or ""
            # `from coherent_ray import config` names a layer by its last part.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers_imported(path: Path) -> set[str]:
    parts = (name.split(".") for name in imports_of(path))
    return {name[1] for name in parts if name[0] == "coherent_ray" and len(name) > 1}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down_only(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    allowed = BELOW[layer] | GROUND | {layer, "__version__"}
    if layer in GROUND:
        allowed = BELOW[layer] | {layer}
    assert layers_imported(path) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_layers_do_not_know_what_is_not_theirs(path):
    banned = FOREIGN.get(layer_of(path), set())
    assert {name.split(".")[0] for name in imports_of(path)} & banned == set()


def test_every_room_has_its_place_in_the_drawing():
    rooms = {layer_of(path) for path in SOURCES} - {"__init__"}
    assert rooms <= set(BELOW)


def test_the_arrows_have_no_cycle():
    done: set[str] = set()
    while len(done) < len(BELOW):
        free = {layer for layer, below in BELOW.items() if below <= done} - done
        assert free, f"these import each other: {sorted(set(BELOW) - done)}"
        done |= free


def test_only_the_ground_calls_hash_libraries_for_stored_digests():
    callers = {
        name_of(path)
        for path in SOURCES
        if {"xxhash", "blake3"} & {name.split(".")[0] for name in imports_of(path)}
    }
    assert callers <= {"coherent_ray/digests.py"}


def test_nothing_stored_is_pickled():
    for path in SOURCES:
        names = {name.split(".")[0] for name in imports_of(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
        text = path.read_text()
        assert not re.search(r"torch\.(save|load)\(", text), path


@pytest.mark.parametrize("path", SOURCES + JOBS + TESTS, ids=name_of)
def test_files_are_short(path):
    lines = path.read_text().count("\n")
    assert lines <= LONGEST_FILE


def test_files_are_named_for_one_noun():
    for path in SOURCES:
        assert not BANNED_NAMES.search(path.stem), path
        # `commit/log.py`, not `commit/commit_log.py`.
        assert not path.stem.startswith(path.parent.name + "_"), path


def test_functions_are_short():
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[len(lengths) * 9 // 10] < 40


@pytest.mark.parametrize("path", SOURCES + JOBS, ids=name_of)
def test_modules_begin_with_their_rule(path):
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text))


def test_test_modules_have_names_of_their_own():
    # pytest puts each test's folder on the path: two modules of one name would hide each other.
    names = [path.name for path in TESTS if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_tests_mirror_the_sources():
    for path in TESTS:
        room = path.relative_to(ROOT / "tests").parts
        if len(room) > 1 and room[0] not in {"cluster", "jobs", "drill", "fuzz"}:
            assert (PACKAGE / room[0]).is_dir(), path


@pytest.mark.parametrize(
    "module",
    ["coherent_ray", "coherent_ray.commit.manifest", "coherent_ray.config", "coherent_ray.cli"],
)
def test_light_modules_start_light(module):
    program = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'ray', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_no_file_names_a_place_that_only_one_machine_has():
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    private = re.compile("|".join(("/wo" + "rk/", "/tmp/se" + "tup")))
    kinds = {".py", ".sh", ".md", ".yaml", ".toml", ".txt", ".json"}
    for name in filter(None, tracked.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in kinds:
            assert not private.search(path.read_text()), name
