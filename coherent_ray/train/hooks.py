"""Named points at which a drill may strike. They cost one comparison when nobody listens.

A hook is set for a whole process, worker or coordinator, by the drill, before the session or the
actor begins. It may take as long as it likes: whoever reaches the point waits.

| point | reached by | when |
|---|---|---|
| `update@N` | every rank | update N is done, its generation is not begun |
| `save:begin`, `save:acknowledge` | every rank's writer | no shard yet; the shard is durable |
| `shard:begun`, `shard:half-written` | every rank's writer | as they say |
| `shard:unsynced`, `shard:written` | every rank's writer | as they say |
| `save:read_back` | every rank's writer, if asked to | another rank's shard is not read yet |
| `memory:begun`, `memory:half` | every rank, if it keeps | its copy's slot is void; it is copied |
| `memory:whole` | every rank, if it keeps | its copy is whole |
| `publish:begin@N`, `publish:end@N` | coordinator | before, after the record that publishes N |
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


def reach(hook: Hook | None, point: str, update: int | None = None) -> None:
    """Say that a point is reached, of an update where one is given."""
    if hook is not None:
        hook(point if update is None else f"{point}@{update}")
