"""What an experiment comes to: a verdict and one line of what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Word = Literal["held", "broke", "not applicable", "not run"]
#: Characters of a product's own message that are told.
TOLD = 110


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cell of the table."""

    word: Word
    seen: str


class NotRun(Exception):
    """The experiment could not be made; says why. Never what a product did wrong."""


def held(seen: str) -> Verdict:
    """Return that the product did what a user needs."""
    return Verdict("held", seen)


def broke(seen: str) -> Verdict:
    """Return that it did not."""
    return Verdict("broke", seen)


def short(words: str) -> str:
    """Return a message as it fits into a line."""
    return words if len(words) <= TOLD else words[: TOLD - 1].rstrip() + "…"
