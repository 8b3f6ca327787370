"""What is wished of a run at its next boundary, as one rank knows it.

A wish comes from the coordinator's answers or by a signal, in any thread and at any moment. The
training thread takes what is wished into its vote, and the union of all ranks' wishes is what all
of them do: so they agree on one boundary, without one message more.

Ranks hear of the same wish to save at different updates, and it must make one generation. So it has
a token, which travels with the vote, too: what was voted once is not wished again. Wishes to stop
and to leave end the attempt, and need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Word = Literal["none", "save", "stop", "leave"]

#: Bits of the wishes that travel with the reduction's counts.
WISH_SAVE = 1
WISH_STOP = 2
WISH_LEAVE = 4
#: Not wishes either, but what the cadence needs of other ranks: the clock of rank 0 says that a
#: save is due; a save of this rank is in flight, where one that is due shall then be left out.
DUE = 8
BUSY = 16
#: Not a wish: who says it cannot keep this update's state in memory, so that nobody does.
CANNOT_KEEP = 1 << 13
#: Not a wish: who says it stands between two microbatches, so that the update cannot end yet.
MIDWAY = 1 << 14
#: Tokens lie below this: a vote carries them as float64.
TOKENS = 2**53
#: Tokens that are remembered; an answer that is older than so many wishes is none.
_REMEMBERED = 64
_STICKY: dict[str, int] = {
    "none": 0,
    "save": 0,
    "stop": WISH_STOP | WISH_SAVE,
    "leave": WISH_LEAVE | WISH_SAVE,
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank wishes now."""

    bits: int = 0
    token: int = 0
    """Of the wish to save; 0: of none."""


class Wishes:
    """One rank's wishes. Any thread may tell, the training thread takes."""

    def __init__(self) -> None:
        self._sticky = 0
        self._token = 0
        self._settled: deque[int] = deque(maxlen=_REMEMBERED)

    def hear(self, answer: dict[str, Any]) -> None:
        """Take in what the coordinator answered.

        Args:
            answer: ``wish``, a `Word`, and its ``token``.
        """
        self._sticky |= _STICKY[answer["wish"]]
        if answer["wish"] == "save":
            self._token = int(answer["token"])

    def leave(self) -> None:
        """Take in that this process is told to end."""
        self._sticky |= _STICKY["leave"]

    def now(self) -> Wish:
        """Return what is wished; the same until it is settled."""
        token = 0 if self._token in self._settled else self._token
        return Wish(self._sticky | (WISH_SAVE if token else 0), token)

    def settle(self, tokens: Iterable[int]) -> None:
        """Forget the wishes to save that a vote has brought to all ranks."""
        self._settled.extend(sorted({t for t in tokens if t} - set(self._settled)))

    @property
    def settled(self) -> list[int]:
        """Tokens that were voted."""
        return list(self._settled)
