"""A task's name in the YAML becomes a task, or one error that says what is wrong with it."""

import pickle
import sys

import pytest
import torch
from torch import nn

from coherent_ray.errors import ConfigError, DataError, TaskError
from coherent_ray.train.task import Task, call_factory, check_task, load_factory, load_task

MODULE = """
import torch
from torch import nn
from coherent_ray.errors import DataError

NUMBER = 7

class Good:
    def __init__(self, width, depth=2):
        self.width, self.depth = width, depth
    def build_model(self):
        return nn.Linear(self.width, 1)
    def collate(self, rows):
        return torch.as_tensor(rows["x"])
    def loss(self, model, batch):
        return model(batch).sum(), len(batch)

class Outer:
    class Inner(Good):
        pass

def make(width):
    return Good(width)

def anything(**settings):
    return Good(len(settings))

def nothing():
    return None

def fails(width):
    raise ZeroDivisionError("width is odd")

def refuses():
    raise DataError("no vocabulary")

class NoLoss(Good):
    loss = None

class Misspelt:
    def build_model(self): ...
    def colate(self, rows): ...
    def loss(self, model, batch): ...

class WrongLoss(Good):
    def loss(self, batch):
        return 0

class Needy(Good):
    def build_model(self, device):
        return None

class WrongScheduler(Good):
    def configure_scheduler(self, optimizer):
        return None

class WrongOptimizer(Good):
    configure_optimizer = 5
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with modules that is the current one and on no path."""
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "my_task.py").write_text(MODULE)
    (package / "broken.py").write_text("x = 1 / 0")
    (package / "bad_syntax.py").write_text("def f(:")
    (package / "needy.py").write_text("import not_installed_anywhere.deeper")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in {"", str(tmp_path)}])
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


def load(name, **args):
    return load_task(f"my_pkg.my_task:{name}", args)


# --- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Good", "make", "Outer.Inner"])
def test_classes_functions_and_nested_names(project, name):
    task = load(name, width=3)
    assert isinstance(task, Task)
    assert task.build_model().in_features == 3
    summed, count = task.loss(task.build_model(), task.collate({"x": [[1.0, 2.0, 3.0]]}))
    assert summed.ndim == 0
    assert count == 1


def test_arguments_reach_the_factory(project):
    assert load("Good", width=3, depth=9).depth == 9
    assert load("anything", a=1, b=2).width == 2


def test_the_current_directory_is_looked_at_last(project):
    (project / "json.py").write_text("raise RuntimeError('shadowed')")
    load("Good", width=1)
    assert sys.path[-1] == str(project)
    assert load_factory("json:dumps", "k").__module__ == "json"


def test_tasks_with_every_method_are_accepted():
    class Full:
        def build_model(self):
            return nn.Linear(1, 1)

        def collate(self, rows, extra=None):
            return rows

        def loss(self, model, batch, *rest):
            return torch.zeros(()), 0

        def configure_optimizer(self, model):
            return None

        def configure_scheduler(self, optimizer, updates):
            return None

    check_task(Full(), "here")


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "args", "what", "remedy"),
    [
        ("my_pkg.my_task", {}, "not of the form", "jobs.language_model:LanguageModelTask"),
        (":Good", {}, "not of the form", ""),
        ("my_pkg.my_task:", {}, "not of the form", ""),
        ("my_pkk.my_task:Good", {}, "no module my_pkk", "{project}"),
        ("my_pkg.my_tusk:Good", {}, "no module my_pkg.my_tusk", "'my_task'"),
        ("my_pkg.needy:Good", {}, "needs the module not_installed_anywhere", "install"),
        ("my_pkg.broken:Good", {}, "ZeroDivisionError: division by zero", "import my_pkg.broken"),
        ("my_pkg.bad_syntax:Good", {}, "SyntaxError", ""),
        ("my_pkg.my_task:Godo", {"width": 1}, "has no 'Godo'", "'Good'"),
        ("my_pkg.my_task:Outer.Iner", {"width": 1}, "Outer has no 'Iner'", "'Inner'"),
        ("my_pkg.my_task:NUMBER", {}, "NUMBER is a int", "class or function"),
        ("my_pkg.my_task:Good", {}, "missing a required argument: 'width'", "(width, depth)"),
        ("my_pkg.my_task:Good", {"widht": 1}, "widht", "did you mean 'width'?"),
        ("my_pkg.my_task:Good", {"width": 1, "zzz": 2}, "it has no argument 'zzz'", ""),
        ("my_pkg.my_task:fails", {"width": 1}, "ZeroDivisionError: width is odd", "arguments"),
        ("my_pkg.my_task:nothing", {}, "a NoneType, has no method build_model()", ""),
        ("my_pkg.my_task:NoLoss", {"width": 1}, "has no method loss()", ""),
        ("my_pkg.my_task:Misspelt", {}, "has no method collate()", "did you mean 'colate'?"),
        ("my_pkg.my_task:WrongLoss", {"width": 1}, "loss() cannot be called with its 2 arg", ""),
        ("my_pkg.my_task:Needy", {"width": 1}, "build_model() cannot be called", "Task"),
        ("my_pkg.my_task:WrongScheduler", {"width": 1}, "configure_scheduler() cannot", ""),
        ("my_pkg.my_task:WrongOptimizer", {"width": 1}, "no method configure_optimizer()", ""),
    ],
)
def test_every_way_to_be_wrong_is_one_clear_error(project, factory, args, what, remedy):
    with pytest.raises(TaskError) as caught:
        load_task(factory, args)
    error = caught.value
    assert what in error.what
    assert remedy.format(project=project) in error.remedy
    assert factory in error.where
    assert error.exit_code == 2
    assert isinstance(error, ConfigError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_projects_own_errors_pass_through(project):
    with pytest.raises(DataError, match="no vocabulary"):
        load("refuses")


def test_the_key_that_named_it_is_told(project):
    with pytest.raises(TaskError) as caught:
        call_factory("my_pkg.my_task:Godo", {}, "data.prepare.factory")
    assert caught.value.where == "data.prepare.factory: my_pkg.my_task:Godo"


def test_factories_without_a_signature_are_called(project):
    assert call_factory("builtins:dict", {"a": 1}, "k") == {"a": 1}
