"""Named points in a save at which a drill may strike. They cost one comparison when nobody listens.

A hook is set for a whole worker process, by the drill, before the session begins.
"""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_installed: Hook | None = None


def install(hook: Hook | None) -> None:
    """Set, or with None remove, this process's hook."""
    global _installed  # noqa: PLW0603 - one process is one rank
    _installed = hook


def installed() -> Hook | None:
    """Return this process's hook."""
    return _installed


def reach(hook: Hook | None, point: str) -> None:
    """Say that a point is reached."""
    if hook is not None:
        hook(point)
