"""Where every rank is, as the ranks tell it: which ones a silent run waits for.

A rank's place is an update and a phase of it. The training thread only writes it down; a thread
beside it tells the coordinator when it has changed, so the update path neither sends nor waits, and
what a rank did last before it hung is told although it hangs. `Whereabouts` is the coordinator's
side, and has no clock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from coherent_ray.commit.fates import name_ranks

Phase = Literal["setup", "data", "task", "reduction", "save"]
#: In the order in which an update goes through them.
PHASES: tuple[str, ...] = get_args(Phase)
WORDS = {
    "setup": "setting up, before the first update",
    "data": "waiting for data",
    "task": "in the training function's own code",
    "reduction": "waiting for other ranks in a collective",
    "save": "waiting for a save",
}
#: Seconds between two words of one rank, at least; with many ranks it is more.
TELL_EVERY_S = 1.0
#: Words a second that the coordinator gets from all ranks together.
WORDS_PER_S = 200
#: Seconds after which a place is told again, although it is the same.
REPEAT_S = 10.0
#: The same, for a rank that must hear of wishes in the middle of an update.
LISTEN_S = 2.0


class Beacon:
    """A rank's side: a thread that tells its newest place."""

    def __init__(
        self,
        tell: Callable[[int, str], None],
        ranks: int,
        update: int,
        repeat_s: float = REPEAT_S,
    ) -> None:
        """Begin to tell.

        Args:
            tell: Called with update and phase, in the beacon's own thread; must not wait for long.
            ranks: How many there are.
            update: The first that this rank will work on.
            repeat_s: Seconds after which the same place is told again.
        """
        self._repeat_s = repeat_s
        self._tell = tell
        self._every_s = max(TELL_EVERY_S, ranks / WORDS_PER_S)
        self._place: tuple[int, str] = (update, "setup")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._shine, name="coherent-beacon", daemon=True)
        self._thread.start()

    def at(self, update: int, phase: Phase) -> None:
        """Write down where this rank is; for the training thread."""
        self._place = (update, phase)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _shine(self) -> None:
        told: tuple[int, str] | None = None
        same_s = 0.0
        while not self._ended.is_set():
            place = self._place
            if place != told or same_s >= self._repeat_s:
                try:
                    self._tell(*place)
                    told, same_s = place, 0.0
                except Exception:  # the coordinator may be between two lives: told again
                    told = None
            self._ended.wait(self._every_s)
            same_s += self._every_s


@dataclass(slots=True)
class _Rank:
    update: int
    phase: str
    heard: float


class Whereabouts:
    """The coordinator's side: all ranks of the newest attempt."""

    def __init__(self) -> None:
        self._attempt = 0
        self._expected = 0
        self._ranks: dict[int, _Rank] = {}
        self._begun = 0.0
        self._first = 0
        self._lowest = 0
        self._moved = 0.0

    def note(self, attempt: int, rank: int, ranks: int, place: tuple[int, str], now: float) -> None:
        """Take in where a rank is.

        Args:
            attempt: The rank's; older ones than the newest are ignored.
            rank: The rank.
            ranks: How many there are.
            place: The update that it works on, and one of `PHASES`.
            now: Seconds, of any clock that only grows.
        """
        if attempt < self._attempt:
            return
        update, phase = place
        if attempt > self._attempt:
            self._attempt, self._expected, self._ranks = attempt, ranks, {}
            self._begun = self._moved = now
            self._first = self._lowest = update
        self._ranks[rank] = _Rank(update, phase, now)
        lowest = min(place.update for place in self._ranks.values())
        if len(self._ranks) == self._expected and lowest > self._lowest:
            self._lowest, self._moved = lowest, now

    def summary(self, now: float) -> dict[str, Any] | None:
        """Return who is behind, as JSON values; None: no rank has told anything yet.

        Returns:
            ``attempt``; ``quiet_s`` (seconds since all ranks had finished another update);
            ``usual_s`` (seconds an update so far; 0: none is finished); ``ranks``, ``behind``
            (ranks), ``update`` and ``phase`` (of those; None: they have told nothing),
            ``unheard_s`` (since the first of those was last heard).
        """
        if not self._ranks:
            return None
        missing = [rank for rank in range(self._expected) if rank not in self._ranks]
        done = self._lowest - self._first
        facts: dict[str, Any] = {
            "attempt": self._attempt,
            "quiet_s": now - self._moved,
            "usual_s": (self._moved - self._begun) / done if done > 0 else 0.0,
            "ranks": self._expected,
        }
        if missing:
            begun = now - self._begun
            return {**facts, "behind": missing, "update": None, "phase": None, "unheard_s": begun}
        at, phase = min((p.update, PHASES.index(p.phase)) for p in self._ranks.values())
        behind = [r for r, p in self._ranks.items() if (p.update, p.phase) == (at, PHASES[phase])]
        heard = min(self._ranks[rank].heard for rank in behind)
        return {
            **facts,
            "behind": sorted(behind),
            "update": at,
            "phase": PHASES[phase],
            "unheard_s": now - heard,
        }


class Silence:
    """The driver's side: when to say that nothing happens, and what."""

    #: Times the usual update that none may take before anything is said.
    TIMES = 10.0
    #: Seconds between two words about one silence, at most.
    LONGEST_S = 600.0

    def __init__(self, warn_s: float, collective_timeout_s: float) -> None:
        self._warn_s = warn_s
        self._collective_s = collective_timeout_s
        self._next_s = 0.0

    def words(self, facts: dict[str, Any] | None) -> str | None:
        """Return what to say now, about a `Whereabouts.summary`; None: nothing."""
        if facts is None:
            return None
        quiet = float(facts["quiet_s"])
        limit = max(self._warn_s, self.TIMES * float(facts["usual_s"]))
        if quiet < limit:
            self._next_s = 0.0
            return None
        if quiet < self._next_s:
            return None
        self._next_s = quiet + min(quiet, self.LONGEST_S)
        return f"no update has finished for {quiet:.0f} s: {behind(facts)}{self._end(facts)}"

    def _end(self, facts: dict[str, Any]) -> str:
        """Return what will end the silence, if anything."""
        some_wait = len(facts["behind"]) < facts["ranks"] and facts["phase"] != "setup"
        if some_wait or facts["phase"] == "reduction":
            return (
                f". The collective that waits for it gives up {self._collective_s:g} s after it "
                "began (cluster.collective_timeout_s), and the group starts again"
            )
        return ". Nothing but you ends this: Ctrl-C three times, or kill that worker"


def behind(facts: dict[str, Any]) -> str:
    """Return in words which ranks are behind, and where they are."""
    ranks = list(facts["behind"])
    everyone = len(ranks) == facts["ranks"] and len(ranks) > 1
    who = "every rank" if everyone else name_ranks(ranks)
    if facts["phase"] is None:
        return f"{who}: not a word since the workers were admitted"
    where = "" if facts["phase"] == "setup" else f", in update {facts['update']:,}"
    words = f"{who}{where}: {WORDS[facts['phase']]}"
    if facts["unheard_s"] > 3 * REPEAT_S:
        words += f" (last heard {facts['unheard_s']:.0f} s ago: is its process frozen?)"
    return words
