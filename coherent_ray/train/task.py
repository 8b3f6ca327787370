"""The task protocol: what a user writes to train an own model, and how the YAML's name becomes one.

A task builds the model, turns rows into a batch, and gives the loss as a *sum* over a *count* of
examples or tokens. It never divides: the count that the sum is divided by is the whole update's,
over all lanes, and only the reduction knows it. That is what makes short tails and uneven
microbatches weigh what they should.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from coherent_ray.data.columns import Rows
from coherent_ray.errors import CoherentRayError, TaskError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Task(Protocol):
    """What is trained. Made once in every worker, from the same arguments."""

    def build_model(self) -> nn.Module:
        """Return a new model with initial weights, on the CPU.

        The random state is seeded before the call, the same on every rank.
        """

    def collate(self, rows: Rows) -> Any:
        """Turn rows into one batch of CPU tensors: a tensor, or tuples, lists and dicts of them.

        Called in a background thread: must not draw from a global random state. What is random
        draws from ``rows["_seed"]``, one uint64 an example, the same whoever reads it and when.
        ``rows["_example"]`` has the row numbers.

        Args:
            rows: One entry a column: an array ``[n, ...]``, or a list of ``n`` values.
        """

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the loss *summed* over a batch, and how many examples or tokens it sums over.

        Args:
            model: The model, in training mode.
            batch: What `collate` returned, on the model's device.

        Returns:
            A scalar with gradient, and the count, at least 0.
        """


class WithOptimizer(Protocol):
    """A task that brings its own optimizer."""

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer; where a task has none, the configuration's AdamW is used."""


class WithScheduler(Protocol):
    """A task that brings a learning-rate schedule."""

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        """Return the scheduler; it takes one step after each update.

        Args:
            optimizer: The optimizer in use.
            updates: Updates of the whole run.
        """


class WithAverage(Protocol):
    """A task that keeps an average of the model's weights, besides the model."""

    def configure_average(self, model: nn.Module) -> AveragedModel:
        """Return the averaged model; it takes in the weights after each update.

        Args:
            model: The model that is trained, on its device.
        """


class WithShards(Protocol):
    """A task that says which modules FSDP2 gathers together; for ``training.strategy: fsdp2``."""

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply ``fully_shard(..., mesh=mesh)`` to modules, and to the whole model last."""


class WithInitialWeights(Protocol):
    """A task whose ``build_model`` returns a model on the ``meta`` device, without memory."""

    def init_weights(self, model: nn.Module) -> None:
        """Fill all parameters and buffers, those that are not persistent too, on the device.

        Called before a resume's state is loaded as well. The random state is seeded, on each rank
        by another seed where parameters are sharded: what is no parameter must not be random then.
        """


#: Methods of the protocol, with the number of arguments each is called with.
_REQUIRED = {"build_model": 0, "collate": 1, "loss": 2}
_OPTIONAL = {
    "configure_optimizer": 1,
    "configure_scheduler": 2,
    "configure_average": 1,
    "shard": 2,
    "init_weights": 1,
}


def load_task(factory: str, args: Mapping[str, object]) -> Task:
    """Return the task that a configuration names.

    Args:
        factory: ``package.module:Name`` of a class or function.
        args: Keyword arguments for it.

    Raises:
        TaskError: It cannot be found or called, or what it made does not follow the protocol.
    """
    task = call_factory(factory, args, "task.factory")
    check_task(task, factory)
    return cast(Task, task)


def check_task(task: object, where: str) -> None:
    """Check that an object follows the task protocol.

    Raises:
        TaskError: A method is missing or cannot be called as the protocol calls it.
    """
    for name, arguments in {**_REQUIRED, **_OPTIONAL}.items():
        method = getattr(task, name, None)
        if method is None and name in _OPTIONAL:
            continue
        if not callable(method):
            raise TaskError(
                f"what it makes, a {type(task).__name__}, has no method {name}()",
                where=where,
                remedy="a task needs build_model(), collate(rows) and loss(model, batch)"
                + _did_you_mean(name, dir(task)),
            )
        try:
            inspect.signature(method).bind(*range(arguments))
        except TypeError as error:
            raise TaskError(
                f"{type(task).__name__}.{name}() cannot be called with its {arguments} "
                f"argument{'' if arguments == 1 else 's'}: {error}",
                where=where,
                remedy="see coherent_ray.train.task.Task for the signatures",
            ) from error
        except ValueError:  # built-in callables may have no signature
            continue


def call_factory(factory: str, args: Mapping[str, object], key: str) -> object:
    """Find what a name of the configuration stands for, and call it.

    Args:
        factory: ``package.module:Name``.
        args: Keyword arguments.
        key: Key of the configuration that named it, for messages.

    Returns:
        What it returned.

    Raises:
        TaskError: It cannot be found, cannot take these arguments, or raised.
    """
    target = load_factory(factory, key)
    _check_arguments(target, factory, args, key)
    try:
        return target(**args)
    except CoherentRayError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"calling it failed with {type(error).__name__}: {error}",
            where=f"{key}: {factory}",
            remedy="check its arguments in the configuration",
        ) from error


def load_factory(factory: str, key: str) -> Callable[..., object]:
    """Return the class or function of a name such as ``package.module:Name``.

    The current directory is looked at last, so that a project need not be installed.

    Raises:
        TaskError: Not such a name, no such module, no such name in it, or not callable.
    """
    where = f"{key}: {factory}"
    module_name, colon, path = factory.partition(":")
    if not (colon and module_name and path):
        raise TaskError(
            "it is not of the form package.module:Name",
            where=where,
            remedy="write, for example, jobs.language_model:LanguageModelTask",
        )
    found: object = _import(module_name, where)
    for name in path.split("."):
        if not hasattr(found, name):
            owner = getattr(found, "__name__", module_name)
            raise TaskError(
                f"{owner} has no {name!r}",
                where=where,
                remedy="check the name after the colon" + _did_you_mean(name, dir(found)),
            )
        found = getattr(found, name)
    if not callable(found):
        raise TaskError(
            f"{path} is a {type(found).__name__}, not a class or function",
            where=where,
            remedy="name a class or function",
        )
    return found


def look_in(*folders: str) -> None:
    """Let modules be imported from some directories, too, after all others; those that are there.

    Args:
        folders: Absolute; empty ones are passed over.
    """
    for folder in folders:
        if folder and folder not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)


def _import(name: str, where: str) -> object:
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if "" not in sys.path:
        look_in(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise TaskError(
                f"there is no module {missing}",
                where=where,
                remedy=f"install it, or run where it can be imported (the current directory is "
                f"{here})" + _did_you_mean(missing.rpartition(".")[2], _modules_beside(missing)),
            ) from error
        raise TaskError(
            f"module {name} needs the module {missing}, which is not installed",
            where=where,
            remedy=f"install {missing} in the workers' environment",
        ) from error
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"importing {name} failed with {type(error).__name__}: {error}",
            where=where,
            remedy=f"try: python -c 'import {name}'",
        ) from error


def _modules_beside(name: str) -> list[str]:
    import pkgutil

    parent = name.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    package = sys.modules.get(parent)
    return [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))]


def _check_arguments(
    target: Callable[..., object], factory: str, args: Mapping[str, object], key: str
) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        names = list(signature.parameters)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [name for name in args if name not in names and not open_ended]
        hint = _did_you_mean(unknown[0], names) if unknown else ""
        reason = f"it has no argument {unknown[0]!r}" if unknown else str(error)
        raise TaskError(
            f"it cannot be called with the configured arguments: {reason}",
            where=f"{key}: {factory}",
            remedy=f"it takes ({', '.join(names)}){hint}",
        ) from error


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, [n for n in names if not n.startswith("__")], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
