"""Coherent Ray: data-parallel PyTorch training on Ray clusters that fail.

The public face. Everything else is found by its own name, one layer at a time:
``cli, drill -> train -> data, state -> commit -> storage -> errors``.

What is here is imported when it is first used: most of it needs torch and Ray, and a command line
that only reads a run must not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coherent_ray.config import load as load_config
    from coherent_ray.state.weights import load_weights
    from coherent_ray.train.backend import torch_config
    from coherent_ray.train.session import session
    from coherent_ray.train.trainer import run_config

__all__ = ["__version__", "load_config", "load_weights", "run_config", "session", "torch_config"]
__version__ = "0.1.0"

_PLACES = {
    "load_config": ("coherent_ray.config", "load"),
    "load_weights": ("coherent_ray.state.weights", "load_weights"),
    "run_config": ("coherent_ray.train.trainer", "run_config"),
    "session": ("coherent_ray.train.session", "session"),
    "torch_config": ("coherent_ray.train.backend", "torch_config"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inner = _PLACES[name]
    value = getattr(import_module(module), inner)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names that are there, imported or not."""
    return sorted({*globals(), *__all__})
