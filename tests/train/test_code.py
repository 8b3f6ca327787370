"""From which source a job computes: what counts, what does not, and what a resume makes of it."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from small_run import config_for, found, open_attempt, refused, stop_at, ticket_of, train

from coherent_ray.commit import manifest as records
from coherent_ray.errors import ClaimRefused
from coherent_ray.train import loop
from coherent_ray.train.admit import _unseen
from coherent_ray.train.backend import torch_config
from coherent_ray.train.claims import check_claim
from coherent_ray.train.code import NO_CODE, Code, code_of
from coherent_ray.train.recipe import recipe_of
from coherent_ray.train.task import load_factory

TASK = '''
"""A task."""
import math
import numpy as np
from small_run import Tiny
from beside import scale
from edited_pkg.parts import layers

class Task(Tiny):
    """It."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * scale(), count  # one

def late():
    from edited_pkg import later
    return later
'''
FILES = {
    "edited_pkg/__init__.py": "",
    "edited_pkg/task.py": TASK,
    "edited_pkg/parts/__init__.py": "from .. import config\n",
    "edited_pkg/parts/layers.py": "from ..deep import depth\nNAME = f'{1 + 1}'\n",
    "edited_pkg/deep.py": "depth = 1\n",
    "edited_pkg/config.py": "WIDTH = 3\n",
    "edited_pkg/later.py": "LATE = True\n",
    "edited_pkg/unused.py": "raise SystemExit\n",
    "beside.py": "def scale():\n    return 1.0\n",
    "unrelated.py": "",
}
FACTORY = "edited_pkg.task:Task"
MODULES = {
    "beside", "edited_pkg", "edited_pkg.config", "edited_pkg.deep", "edited_pkg.later",
    "edited_pkg.parts", "edited_pkg.parts.layers", "edited_pkg.task",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project that can be imported, and is forgotten afterwards."""
    for name, text in FILES.items():
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "project")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "project"
    forget()


def forget() -> None:
    """Let the next import be that of a new process."""
    for name in [n for n in sys.modules if n.partition(".")[0] in {"edited_pkg", "beside"}]:
        del sys.modules[name]
    importlib.invalidate_caches()


def code(factory: str = FACTORY) -> Code:
    forget()
    return code_of(load_factory(factory, "task.factory"), factory.partition(":")[0])


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


# --- what counts ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("project")
def test_the_modules_are_those_that_the_imports_lead_to() -> None:
    assert set(code().modules) == MODULES


@pytest.mark.usefixtures("project")
def test_what_was_loaded_before_decides_nothing() -> None:
    before = code()
    importlib.import_module("edited_pkg.later")
    importlib.import_module("unrelated")
    found = load_factory(FACTORY, "task.factory")
    assert code_of(found, "edited_pkg.task") == before


@pytest.mark.usefixtures("project")
def test_installed_packages_count_by_their_version() -> None:
    libraries = code().libraries
    assert libraries["numpy"] == metadata.version("numpy")
    assert not {"math", "coherent_ray", "coherent-ray", "beside"} & libraries.keys()


def test_a_name_that_a_package_hands_on_leads_to_its_source(project: Path) -> None:
    (project / "edited_pkg" / "__init__.py").write_text(
        "def __getattr__(name):\n    from importlib import import_module\n"
        "    return getattr(import_module('edited_pkg.task'), name)\n"
    )
    assert "edited_pkg.task" in code("edited_pkg:Task").modules


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_edit_changes_its_own_module_s_digest_alone(project: Path, name: str) -> None:
    before = code().modules
    file = project / name
    file.write_text(file.read_text() + "\nMORE = 1\n")
    after = code().modules
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert {n for n in after if after[n] != before[n]} == ({module} & MODULES)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# one", "# another word", True),
        ('"""It."""', '"""Something else."""', True),
        ('    """It."""\n\n', "", True),
        ('"""A task."""', "", True),
        ("total * scale()", "(total\n            * scale( ))", True),
        ("total * scale()", "scale() * total", False),
        ("total * scale()", "total * scale() * 1", False),
        ("import math", "import math as m", False),
        ("return later", "return 'later'", False),
    ],
)
def test_what_computes_nothing_changes_nothing(
    project: Path, old: str, new: str, same: bool
) -> None:
    before = code()
    edit(project / "edited_pkg" / "task.py", old, new)
    assert (code() == before) is same


@pytest.mark.parametrize(
    ("one", "other"), [("1", "1.0"), ("1", "True"), ("'1'", "1"), ("b'a'", "'a'"), ("[]", "()")]
)
def test_constants_of_another_type_are_other_constants(project: Path, one: str, other: str) -> None:
    digests = []
    for value in (one, other):
        (project / "beside.py").write_text(f"def scale():\n    return {value}\n")
        digests.append(code().modules["beside"])
    assert digests[0] != digests[1]


def test_a_very_deep_expression_is_no_obstacle(project: Path) -> None:
    text = "def scale():\n    x = 0\n    if x == 1:\n        pass\n"
    text += "".join(f"    elif x == {n}:\n        pass\n" for n in range(400))
    (project / "beside.py").write_text(text + "    return 1.0\n")
    assert "beside" in code().modules


# --- where there is no source ---------------------------------------------------------------------


def interactive() -> Callable[..., object]:
    module = types.ModuleType("typed_by_hand")
    exec("def train(): ...", module.__dict__)
    function: Callable[..., object] = module.__dict__["train"]
    return function


@pytest.mark.parametrize("function", [len, interactive(), loop.train], ids=["C", "prompt", "ours"])
def test_without_source_there_is_no_code(function: Callable[..., object]) -> None:
    assert code_of(function) == NO_CODE


def test_a_function_of_one_s_own_is_named_to_the_driver(project: Path, tmp_path: Path) -> None:
    function = load_factory("edited_pkg.task:late", "function")
    config = config_for(tmp_path)
    assert set(torch_config(config, function).code.modules) == MODULES
    assert torch_config(config).code == NO_CODE


def test_what_cannot_be_seen_is_said(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    own = config.model_copy(update={"task": None})
    assert "the source of the task is not known" in _unseen(config, NO_CODE)[0]
    assert "torch_config(config, function)" in _unseen(own, NO_CODE)[0]
    assert _unseen(own, Code({"a": "b"}, {})) == []
    assert _unseen(config_for(tmp_path, run__claim="statistical"), NO_CODE) == []


# --- a resume -------------------------------------------------------------------------------------


def edited_run(project: Path, folder: Path, claim: str) -> dict[str, Any]:
    """Train a little, then edit the loss; return how the configuration is changed."""
    changes = {"task__factory": FACTORY, "run__claim": claim}
    train(config_for(folder, **changes), stop_at(2))
    forget()
    edit(project / "beside.py", "1.0", "2.0")
    return changes


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("claim", ["exact", "invariant"])
def test_an_edited_task_is_refused_by_module_and_digests(
    project: Path, tmp_path: Path, claim: str
) -> None:
    before = code().modules["beside"]
    changes = edited_run(project, tmp_path, claim)
    error = refused(config_for(tmp_path, **changes), ClaimRefused)
    after = code().modules["beside"]
    assert f'code.beside: "{before}" -> "{after}"' in error.what
    assert error.where == "code.beside"
    assert error.remedy.startswith("put the source of module beside back as it was")
    assert str(project) not in str(error)


@pytest.mark.usefixtures("one_process")
def test_an_edited_task_is_told_under_statistical(project: Path, tmp_path: Path) -> None:
    changes = edited_run(project, tmp_path, "statistical")
    [note] = found(config_for(tmp_path, **changes)).notes
    assert note.startswith("the job changed: code.beside: ")


@pytest.mark.usefixtures("one_process")
def test_a_comment_is_no_reason_to_refuse(project: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, task__factory=FACTORY)
    train(config, stop_at(2))
    forget()
    edit(project / "edited_pkg" / "task.py", "# one", "# two")
    assert found(config).notes == ()


@pytest.mark.usefixtures("project", "one_process")
def test_a_generation_that_tells_of_no_source_is_resumed_and_said_so(tmp_path: Path) -> None:
    """As one that an earlier version wrote."""
    config = config_for(tmp_path, task__factory=FACTORY)
    manifest = train(config, stop_at(2)).manifest()
    header = manifest.header
    assert {k for k in header.recipe if k.startswith("code.")} == {f"code.{m}" for m in MODULES}
    old = replace(
        header,
        recipe=recipe_of(config),
        environment={k: v for k, v in header.environment.items() if "library" not in k},
    )
    stored = records.load(records.Manifest, records.dump(replace(manifest, header=old)))
    facts = dict(header.environment)
    assert "library:numpy" in facts
    [note] = check_claim(config, stored, 1, facts, code())
    assert note.startswith("the source of the task was not known when the generation was saved")


@pytest.mark.usefixtures("project", "one_process")
def test_an_upgraded_library_is_another_environment(tmp_path: Path) -> None:
    config = config_for(tmp_path, task__factory=FACTORY)
    manifest = train(config, stop_at(2)).manifest()
    facts = manifest.header.environment | {"library:numpy": "99.1"}
    with pytest.raises(ClaimRefused, match=r"library:numpy: .* -> 99\.1"):
        check_claim(config, manifest, 1, facts, code())


@pytest.mark.usefixtures("one_process")
def test_a_ticket_tells_of_the_code(project: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, task__factory=FACTORY)
    ticket = ticket_of(open_attempt(config))
    assert set(ticket.code) == MODULES
    assert not [value for value in ticket.code.values() if str(project) in value]


@pytest.mark.parametrize(
    ("name", "counts"), [("coherent_ray.drill.driver", False), ("my.job", True)]
)
def test_a_program_of_ours_is_no_source_of_the_user_s(
    name: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drilled run is completed by the product's own driver: it is the same job."""
    path = tmp_path / "program.py"
    path.write_text("def held(values):\n    pass\n")
    program = types.ModuleType("__main__")
    program.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(path))
    program.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), program.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert ("__main__" in code_of(program.held).modules) is counts
