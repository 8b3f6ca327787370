"""What a product must offer to be driven: one small interface, and what to know beforehand.

A column's module imports its product only inside functions: the judging process reads `Column`
from it in an interpreter that may not have the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

BENCHMARKS = Path(__file__).resolve().parent.parent

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """What a product would go on from."""

    name: str
    """Of the checkpoint: a directory or file, as the product names it."""
    state: State
    says: str = ""
    """What it said beside: damage that it passed over."""


class Session(Protocol):
    """One process's use of a product under one root, as its documentation has it."""

    def save(self, step: int, state: State) -> None:
        """Save, and return when the product calls it saved; raise what the product raises."""

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """Begin an asynchronous save, change the state where the product allows, and wait."""

    def resume(self, items: int) -> Found | None:
        """Load what the product would go on from; None: it would start from scratch."""

    def members(self, step: int) -> list[str]:
        """Return the files that the product counts as a step's checkpoint, relative to the root."""

    def close(self) -> None:
        """End."""


@dataclass(frozen=True, slots=True)
class Column:
    """A product, and how it is driven."""

    key: str
    """Its module in this package."""
    name: str
    distribution: str
    """As the registry knows it."""
    imports: str
    """The module that proves that it is installed."""
    settings: str
    """What of its options differs from the default, which API, and why."""
    own: bool = False
    """Whether it runs in this project's interpreter: it is one of its dependencies."""
    preload: tuple[str, ...] = ()
    """Modules to import once: its children are then forks of one process that has done so."""
    patience_s: float = 240.0
    """Seconds that a child may take."""
    pointers: tuple[str, ...] = ()
    """Patterns of files, relative to the root, that say which checkpoint is the newest."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Rows that do not apply, and why."""
