"""Patches: something of the product is replaced for a while, in this process alone.

That is how bugs are planted, and how ranks that are threads get other collectives than processes
have. What is patched is named where it is used; nothing in the product knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of what is replaced in it, and what makes the replacement of the original."""


@contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    """Plant patches for a while; of two for one name, the later one goes round the earlier."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for thing, name, make in patches:
            found = getattr(thing, name)
            # As it lies there: a class hands out its static methods unwrapped.
            before.append((thing, name, vars(thing).get(name, found)))
            setattr(thing, name, make(found))
        yield
    finally:
        for thing, name, original in reversed(before):
            setattr(thing, name, original)
