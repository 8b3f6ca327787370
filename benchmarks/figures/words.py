"""Words as they stand in a table."""

from __future__ import annotations


def code(name: str | None) -> str:
    return f"`{name}`" if name else "hidden"


def cell(words: str) -> str:
    """Return words as they fit into a table's cell."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def short(digest: str) -> str:
    return digest.partition(":")[2][:8]
