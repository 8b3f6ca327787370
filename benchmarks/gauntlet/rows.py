"""The rows: every experiment, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gauntlet import crashes, damages, promises
from gauntlet.bench import Bench
from gauntlet.verdict import NotRun, Verdict


@dataclass(frozen=True, slots=True)
class Row:
    """An experiment."""

    key: str
    asks: str
    """What holds is told as a sentence that is true."""
    run: Callable[[Bench], Verdict]
    seen: str = ""
    """Where it was seen before: public reports."""

    def cell(self, bench: Bench, lacks: Mapping[str, str]) -> Verdict:
        """Run it, or say why it does not apply or could not be run."""
        if reason := lacks.get(self.key):
            return Verdict("not applicable", reason)
        try:
            return self.run(bench)
        except NotRun as error:
            return Verdict("not run", str(error))


ROWS = (
    Row("flip", "a flipped bit in a tensor is noticed", damages.flip, "pytorch#126952"),
    Row("cut", "any file cut to half, or gone, is noticed", damages.cut),
    Row("swap", "an older step's or another run's tensor files are noticed", damages.swap),
    Row("pointer", "a torn or lost pointer to the newest is noticed", damages.pointer),
    Row("pickles", "no stored byte is run as code", damages.pickles),
    Row("kill", "kill -9 in mid-save: a whole one is taken", crashes.kill, "Lightning#19970"),
    Row("leftovers", "what a killed save left behind does no harm", crashes.leftovers, "ray#41700"),
    Row("again", "a committed step survives the death of its second save", crashes.again),
    Row("zombie", "an old attempt's late save is fenced", crashes.zombie, "ray#35006"),
    Row("full", "a save that failed (disk full) fails alone", crashes.full, "ray#47939"),
    Row("files", "each file is synced at its final size", promises.files_synced),
    Row("names", "each name is synced, up to the root", promises.names_synced),
    Row("later", "an asynchronous save holds no later values", promises.later, "pytorch#144657"),
    Row("ranks", "2 to 3 ranks in mid-epoch: each example once", promises.ranks, "ray#48224"),
)
