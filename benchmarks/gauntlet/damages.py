"""Rows about damage: what was saved whole is changed on the disk; who notices?

A load that ends with an error, or with an older whole checkpoint, has noticed. One that gives a
state that nobody saved, or another step's under the newest one's name, has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gauntlet import bench as acts
from gauntlet import damage, states
from gauntlet.bench import Bench, Outcome, digest_of
from gauntlet.verdict import NotRun, Verdict, broke, held, short

EXPECTED = 8 * states.SMALL
Trial = tuple[str, Path]
"""A damage in words, and the root that has it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A root with two steps, whole."""

    root: Path
    files: list[str]
    """Of the newest."""
    name: str
    """The newest's, as a resume names it."""
    before: Path
    """A copy of the root with the first step alone."""
    older: list[str]
    """Files of the first step, there."""


def saved(bench: Bench, name: str = "root", variant: str = "a") -> Saved:
    """Save two steps, and see that they load."""
    root = bench.root(name)
    child = bench.start(
        acts.save(root, 1, variant),
        acts.members(root, 1),
        acts.wait(root),
        acts.save(root, 2, variant),
        acts.members(root, 2),
        acts.resume(root),
    )
    child.wait_for(2)
    before = damage.copied(root, bench.place(f"{name}-before"))
    child.go(2)
    child.finish()
    one, older, two, newest, found = child.outcomes()
    for outcome in (one, older, two, newest, found):
        if outcome.error is not None:
            raise NotRun(outcome.error)
    if found.found is None or found.digest != digest_of(2, variant):
        # Not a process that saved both: the cell of a fresh one decides.
        (found,) = bench.run(acts.resume(root))
    if found.found is None or found.digest != digest_of(2, variant):
        raise NotRun(f"what was saved does not load: {found.error or found.found}")
    return Saved(root, list(newest.members), found.found, before, list(older.members))


def flip(bench: Bench) -> Verdict:
    """One bit of a tensor is another one."""
    whole = saved(bench)
    where = damage.flip(whole.root, whole.files, 2)
    ((_, outcome),) = tried(bench, [(where, whole.root)])
    return judged(whole, [(where, outcome)])


def cut(bench: Bench) -> Verdict:
    """Each file of the newest checkpoint in turn is cut to half, or taken away."""
    whole = saved(bench)
    return judged(whole, tried(bench, list(_cuts(bench, whole))))


def _cuts(bench: Bench, whole: Saved) -> Iterator[Trial]:
    for name in whole.files:
        if (whole.root / name).stat().st_size > 1:
            half = damage.copied(whole.root, bench.place("half"))
            damage.cut(half / name)
            yield f"{name} cut to half", half
        gone = damage.copied(whole.root, bench.place("gone"))
        (gone / name).unlink()
        yield f"{name} gone", gone


def swap(bench: Bench) -> Verdict:
    """The newest checkpoint's tensor files are an older step's, or another run's."""
    whole, other = saved(bench), saved(bench, "other", "b")
    trials = []
    for words, source, files in (
        ("an older step's", whole.before, whole.older),
        ("another run's", other.root, other.files),
    ):
        root = damage.copied(whole.root, bench.place("swapped"))
        ours = damage.large_ones(root, whole.files, EXPECTED)
        theirs = damage.large_ones(source, files, EXPECTED)
        for mine, foreign in zip(ours, theirs, strict=False):
            (root / mine).write_bytes((source / foreign).read_bytes())
        trials.append((f"tensor files are {words}", root))
    return judged(whole, tried(bench, trials))


def pointer(bench: Bench) -> Verdict:
    """Each file that says which checkpoint is the newest is cut to half, empty, or gone."""
    whole = saved(bench)
    trials = []
    strokes: list[tuple[str, Callable[[Path], object]]] = [
        ("cut to half", damage.cut),
        ("empty", lambda path: path.write_bytes(b"")),
        ("gone", Path.unlink),
    ]
    for pattern in bench.column.pointers:
        newest = max(whole.root.glob(pattern)).relative_to(whole.root)
        for words, stroke in strokes:
            root = damage.copied(whole.root, bench.place("pointer"))
            stroke(root / newest)
            trials.append((f"{newest} {words}", root))
    return judged(whole, tried(bench, trials))


def pickles(bench: Bench) -> Verdict:
    """Each stored file in turn is one that runs code if it is unpickled."""
    whole = saved(bench)
    trials, canaries = [], {}
    for path in sorted(path for path in whole.root.rglob("*") if path.is_file()):
        name = path.relative_to(whole.root)
        canary = bench.place("canary")
        for words, data in damage.armed(path, canary):
            root = damage.copied(whole.root, bench.place("armed"))
            (root / name).write_bytes(data)
            trials.append((f"{name} {words}", root))
            canaries[f"{name} {words}"] = canary
    ran = []
    for words, _ in tried(bench, trials):
        if canaries[words].exists():
            ran.append(words)
            canaries[words].unlink()
    if ran:
        return broke(f"code ran on load: {'; '.join(ran)}")
    return held(f"no code ran in {len(trials)} loads")


# --- trying and judging ---------------------------------------------------------------------------


def tried(bench: Bench, trials: list[Trial]) -> list[tuple[str, Outcome]]:
    """Load from each root; one that takes the process with it does not keep the rest from it."""
    result: list[tuple[str, Outcome]] = []
    while len(result) < len(trials):
        rest = trials[len(result) :]
        outcomes = bench.run(*(acts.resume(root) for _, root in rest))
        stop = next((i + 1 for i, outcome in enumerate(outcomes) if outcome.died), len(rest))
        if outcomes[0].error == "was not reached":
            raise NotRun(f"no load was reached: {rest[0][0]}")
        result += [(words, outcomes[at]) for at, (words, _) in enumerate(rest[:stop])]
    return result


def judged(whole: Saved, trials: list[tuple[str, Outcome]]) -> Verdict:
    """Judge loads of damaged roots."""
    bad, good = [], []
    for words, outcome in trials:
        fault, seen = _fault(whole, outcome)
        (bad if fault else good).append((words, seen))
    if bad:
        told = "; ".join(f"{words}: {seen}" for words, seen in bad[:3])
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        return broke(f"{len(bad)} of {len(trials)}: {told}{more}")
    kinds = Counter(seen for _, seen in good).most_common()
    return held("; ".join(f"{count} {seen}" for seen, count in kinds))


def _fault(whole: Saved, outcome: Outcome) -> tuple[bool, str]:
    """Return whether a load did not notice, and what it did."""
    if outcome.died:
        return True, short(outcome.error or "")
    if outcome.error is not None:
        return False, f"refused ({short(outcome.error)})"
    if outcome.found is None:
        return True, "begins from scratch, and says nothing"
    if outcome.found != whole.name:
        if outcome.digest == digest_of(1):
            how = "passed over by name" if outcome.says else "passed over"
            return False, f"{how} for the one before"
        return True, f"takes {outcome.found}, whose state nobody saved"
    if outcome.digest == digest_of(2):
        return False, "loaded whole all the same"
    if outcome.digest == digest_of(1):
        return True, "loads the older step's state as the newest"
    return True, "loads another state, and says nothing"
