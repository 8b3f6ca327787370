"""Names that shard files keep for themselves, so that no tensor may have one."""

from __future__ import annotations

import re

#: What a part of a tensor is called in a shard.
_PART = re.compile(r".*\[[0-9]+:[0-9]+\]", re.DOTALL)


def is_reserved(name: str) -> bool:
    """Return whether shard files keep a name for themselves, so that no tensor may have it."""
    return name == "__metadata__" or _PART.fullmatch(name) is not None
