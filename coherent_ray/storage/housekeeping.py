"""Housekeeping: what a storage may offer beside its eight verbs, to clear away what is its own.

A writer that is killed leaves a temporary file that no verb can see, and a directory stays when its
last file goes. Only the storage knows these, so only it can remove them; a storage that leaves
nothing behind need not offer this. Nothing here can touch a file that has a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file that somebody was, or is, writing."""

    path: str
    size: int
    """Bytes."""
    idle_s: float
    """Seconds since its writer last touched it, by the storage's own clock; 0: not known."""


@runtime_checkable
class Foldered(Protocol):
    """A storage that names directories without looking into them."""

    def directories(self, above: str) -> list[str]:
        """Return the names of the directories in a directory, in order; none where it is absent.

        In an object store, a directory is what the names of objects make one.
        """


@runtime_checkable
class Housekeeping(Foldered, Protocol):
    """A storage that can be tidied up. Errors are `StorageError`, as those of the verbs."""

    def temporaries(self, directories: Iterable[str]) -> list[Temporary]:
        """Return the storage's own temporary files in some directories (``""``: the root).

        Not those below them. Ages are told by the storage's clock alone, so that no two clocks are
        compared; a file from the future has no age.
        """

    def drop_temporary(self, path: str) -> bool:
        """Remove a temporary file durably, and return whether it is gone.

        It stays where the storage knows that its writer lives, however old it seems: a clock may
        have jumped. Where it cannot know, a writer that still lives finds its file gone when it
        finishes, and fails: never a torn file, at worst a save that must be done again.
        """

    def drop_directory(self, path: str) -> bool:
        """Remove an empty directory durably, and return whether it was there and empty."""
