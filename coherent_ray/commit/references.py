"""References: how a user names a run and one of its generations, ``RUN@g12-a3``."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: How a generation is named, for messages.
FORMS = "RUN@g12, RUN@12, RUN@g12-a3 or RUN@latest"
_GENERATION = re.compile(r"(?:latest|g?([1-9][0-9]{0,17})(?:-a([1-9][0-9]{0,17}))?)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A run, and which of its generations."""

    run: str
    """A root, an address or a configuration file; empty in ``@g12``."""
    number: int | None = None
    """None: the latest generation."""
    attempt: int | None = None
    """None: the newest attempt that published this number."""

    @property
    def generation(self) -> str:
        """The generation as the user may type it."""
        if self.number is None:
            return "latest"
        return f"g{self.number}" + (f"-a{self.attempt}" if self.attempt is not None else "")


def parse_reference(text: str) -> Reference:
    """Return what ``RUN``, ``RUN@12``, ``RUN@g12``, ``RUN@g12-a3`` or ``RUN@latest`` names.

    What follows the last ``@`` counts as a generation only if it looks like one, so a root may have
    an ``@`` in its name.
    """
    run, at, generation = text.rpartition("@")
    match = _GENERATION.fullmatch(generation)
    if match is None or not at:
        return Reference(text)
    return Reference(run, *(int(part) if part else None for part in match.groups()))


def names_generation(text: str) -> bool:
    """Return whether a text is a generation's name: ``12``, ``g12``, ``g12-a3``, ``latest``."""
    return _GENERATION.fullmatch(text) is not None
