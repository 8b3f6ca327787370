"""Rows about processes that die, stand still or meet a full disk in the middle of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gauntlet import bench as acts
from gauntlet.bench import Bench, digest_of
from gauntlet.verdict import NotRun, Verdict, broke, held, short

#: How much of a save's bytes are there when it is killed.
SHARES = (0.05, 0.5, 0.95)
#: Attempts that a run makes before it is called a crash loop.
TRIES = 2
STALE = "left-over-of-a-dead-attempt.bin"


def kill(bench: Bench) -> Verdict:
    """SIGKILL in the middle of the second save; what does a fresh process go on from?"""
    struck, bad, taken = 0, [], set()
    for share in SHARES:
        root = bench.root(f"kill-{share}")
        if _struck(bench, root, share) is None:
            continue
        struck += 1
        (outcome,) = bench.run(acts.resume(root, bench.large))
        if outcome.error is not None:
            bad.append(f"killed at {share:.0%}: cannot go on, {short(outcome.error)}")
        elif outcome.digest == digest_of(2, "a", bench.large):
            taken.add("the new one, whole")
        elif outcome.digest == digest_of(1, "a", bench.large):
            taken.add("the one before")
        elif outcome.found is None:
            bad.append(f"killed at {share:.0%}: begins from scratch; the one before is gone")
        else:
            bad.append(f"killed at {share:.0%}: loads a torn one, and says nothing")
    if not struck:
        raise NotRun("no save was slow enough to be struck in its middle")
    if bad:
        return broke("; ".join(bad))
    return held(f"killed at {struck} places: {', '.join(sorted(taken))} is taken")


def leftovers(bench: Bench) -> Verdict:
    """After such a kill, with one more file of the dead attempt's, the same step is saved again."""
    root = bench.root("left")
    torn = _struck(bench, root, 0.5)
    if torn is None:
        raise NotRun("no save was slow enough to be struck in its middle")
    for folder in {path.parent for path in torn if path.exists()}:
        (folder / STALE).write_bytes(b"stale")
    for _ in range(TRIES):
        _, saved, listed = bench.run(
            acts.resume(root, bench.large),
            acts.save(root, 2, "b", bench.large),
            acts.members(root, 2),
        )
        if saved.error is None:
            break
    else:
        return broke(f"saving the step again fails, {TRIES} times of {TRIES}: {short(saved.error)}")
    (found,) = bench.run(acts.resume(root, bench.large))
    if found.digest != digest_of(2, "b", bench.large):
        return broke(f"what was saved does not load: {short(found.error or 'another state')}")
    if any(Path(name).name == STALE for name in listed.members):
        return broke("the dead attempt's extra file is part of the new checkpoint")
    return held("the second save is whole, and has only its own files")


def again(bench: Bench) -> Verdict:
    """A saved step is saved again, and that save is killed; is the first one still there?"""
    root = bench.root("again")
    first = bench.run(acts.save(root, 1, "a", bench.large), acts.save(root, 2, "a", bench.large))
    _all_good(first)
    child = bench.start(acts.wait(root), acts.save(root, 2, "b", bench.large))
    child.wait_for(0)
    if not child.strike(1, root, 0.5, 8 * bench.large, signal.SIGKILL):
        child.finish()
        (outcome,) = child.outcomes()
        if outcome.error is None:
            raise NotRun("no save was slow enough to be struck in its middle")
        (found,) = bench.run(acts.resume(root, bench.large))
        if found.digest == digest_of(2, "a", bench.large):
            return held(f"refuses to save a step twice: {short(outcome.error)}")
        return broke(f"neither: {short(outcome.error)}")
    child.kill()
    (found,) = bench.run(acts.resume(root, bench.large))
    if found.digest in {digest_of(2, variant, bench.large) for variant in "ab"}:
        return held("the committed one is still taken, whole")
    if found.error is not None:
        return broke(f"the committed one is destroyed: {short(found.error)}")
    if found.digest == digest_of(1, "a", bench.large):
        return broke("the committed one is gone; the one before is taken")
    return broke("loads a mixture, and says nothing" if found.found else "begins from scratch")


def zombie(bench: Bench) -> Verdict:
    """An attempt stands still in mid-save; another saves the same step; then the first goes on."""
    root = bench.root("zombie")
    old = bench.start(
        acts.save(root, 1, "a", bench.large), acts.wait(root), acts.save(root, 2, "a", bench.large)
    )
    old.wait_for(1)
    if not old.strike(2, root, 0.5, 8 * bench.large, signal.SIGSTOP):
        raise NotRun("no save was slow enough to be struck in its middle")
    _, saved = bench.run(acts.resume(root, bench.large), acts.save(root, 2, "b", bench.large))
    (before,) = bench.run(acts.resume(root, bench.large))
    old.signal(signal.SIGCONT)
    old.finish()
    told = old.outcomes()[-1].error
    old.kill()
    (found,) = bench.run(acts.resume(root, bench.large))
    new, late = digest_of(2, "b", bench.large), digest_of(2, "a", bench.large)
    if saved.error is not None:
        return broke(f"the new attempt cannot save: {short(saved.error)}")
    if found.digest == new:
        words = f"is told: {short(told)}" if told else "is not told"
        return held(f"the new attempt's is taken; the old one {words}")
    if found.digest == late:
        return broke("the old attempt's late save is taken for the run's newest")
    was = "was whole before" if before.digest == new else "was broken before"
    return broke(f"the new attempt's, which {was}, is torn: {short(found.error or 'a mixture')}")


def full(bench: Bench) -> Verdict:
    """The disk is full during the second save, and has room again for the third, in one process."""
    from coherent_ray.drill.disks import BALLAST, SmallDisk

    place = bench.root("small")
    expected = 8 * 1_000_000
    try:
        disk = SmallDisk(place, 8 * expected)
    except OSError as error:
        raise NotRun(f"no small file system can be mounted here: {error}") from error
    root = place / "run"
    root.mkdir()
    try:
        child = bench.start(
            acts.save(root, 1),
            acts.wait(root), acts.save(root, 2),
            acts.wait(root), acts.save(root, 3),
        )  # fmt: skip
        child.wait_for(1)
        disk.fill()
        ballast = place / BALLAST
        os.truncate(ballast, ballast.stat().st_size - int(0.4 * expected))
        child.go(1)
        child.wait_for(3)
        disk.free()
        child.go(3)
        child.finish()
        first, second, third = child.outcomes()
        (found,) = bench.run(acts.resume(root))
    finally:
        disk.close()
    if first.error is not None:
        raise NotRun(first.error)
    if second.error is None:
        return broke("the save on the full disk is called good")
    if third.error is not None:
        return broke(f"saves fail for ever after one that failed: {short(third.error)}")
    if found.digest != digest_of(3):
        return broke(f"the third save does not load: {short(found.error or 'another state')}")
    return held(f"the second fails ({short(second.error)}), the third is whole")


# --- leaves ---------------------------------------------------------------------------------------


def _struck(bench: Bench, root: Path, share: float) -> set[Path] | None:
    """Save a step, and kill the next one's save in its middle.

    Returns:
        The files that the killed save had begun; None: it was over too soon.
    """
    child = bench.start(
        acts.save(root, 1, "a", bench.large), acts.wait(root), acts.save(root, 2, "a", bench.large)
    )
    child.wait_for(1)
    _all_good(child.outcomes()[:1])
    before = {path for path in root.rglob("*") if path.is_file()}
    struck = child.strike(2, root, share, 8 * bench.large, signal.SIGKILL)
    child.kill()
    return {path for path in root.rglob("*") if path.is_file()} - before if struck else None


def _all_good(outcomes: list[acts.Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise NotRun(outcome.error)
