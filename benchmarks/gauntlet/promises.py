"""Rows about what a save promises when nothing goes wrong: durability, its moment, the data."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coherent_ray.storage.testing.syncs import TRACED_CALLS, Traced
from gauntlet import bench as acts
from gauntlet.bench import Bench, Child, digest_of
from gauntlet.verdict import NotRun, Verdict, broke, held, short

#: Examples of an epoch, and of one update.
EXAMPLES, BATCH = 1_200, 12
_ATTACH_S = 20.0


def files_synced(bench: Bench) -> Verdict:
    """Was each file of a saved checkpoint synced at its final size, and not written since?"""
    root, names, witness = _watched(bench)
    bad = []
    for name in names:
        seen, size = witness.synced(root / name), (root / name).stat().st_size
        if seen is None:
            bad.append(f"{name} was never synced")
        elif seen[0] != size:
            bad.append(f"{name} was synced at {seen[0]} of {size} bytes")
        elif seen[1]:
            bad.append(f"{name} was written after its last sync")
    if bad:
        return broke(f"{len(bad)} of {len(names)} files: {short('; '.join(bad))}")
    return held(f"{len(names)} of {len(names)} files")


def names_synced(bench: Bench) -> Verdict:
    """Was each file's name synced, and its directories' up to the root?"""
    root, names, witness = _watched(bench)
    nodes = {node for name in names for node in _up_to(root, root / name)}
    bad = sorted(str(node.relative_to(root)) for node in nodes if not witness.named(node))
    if bad:
        return broke(f"{len(bad)} of {len(nodes)} names were never synced: {short(', '.join(bad))}")
    return held(f"{len(nodes)} of {len(nodes)} names")


def _up_to(root: Path, path: Path) -> Iterator[Path]:
    while path != root:
        yield path
        path = path.parent


def _watched(bench: Bench) -> tuple[Path, list[str], Traced]:
    root = bench.root("watched")
    child = bench.start(acts.wait(root), acts.save(root, 1), acts.wait(root), acts.members(root, 1))
    child.wait_for(0)
    with _strace(bench, child) as log:
        child.go(0)
        child.wait_for(2)
        child.go(2)
        child.finish()
    saved, listed = child.outcomes()
    for outcome in (saved, listed):
        if outcome.error is not None:
            raise NotRun(outcome.error)
    return root, list(listed.members), Traced(log.read_text())


@contextmanager
def _strace(bench: Bench, child: Child) -> Iterator[Path]:
    """Watch the process that saves, from now on, with whatever it starts."""
    if shutil.which("strace") is None:
        raise NotRun("there is no strace")
    log, said = bench.place("trace"), bench.place("strace")
    command = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={TRACED_CALLS}", "-o", str(log)]
    with said.open("wb") as file:
        watcher = subprocess.Popen([*command, "-p", str(child.pid)], stdout=file, stderr=file)
    try:
        limit = time.monotonic() + _ATTACH_S
        while "attached" not in said.read_text():
            if watcher.poll() is not None or time.monotonic() > limit:
                raise NotRun(f"strace cannot watch: {said.read_text().strip()}")
            time.sleep(0.02)
        yield log
        watcher.wait(_ATTACH_S)
    finally:
        if watcher.poll() is None:
            watcher.terminate()
            watcher.wait()


def later(bench: Bench) -> Verdict:
    """The state changes as soon as an asynchronous save lets it; what was saved?"""
    root = bench.root("later")
    act = {**acts.save(root, 1, "a", bench.large), "do": "save_behind"}
    (saved,) = bench.run(act)
    if saved.error is not None:
        raise NotRun(saved.error)
    (found,) = bench.run(acts.resume(root, bench.large))
    if found.digest == digest_of(1, "a", bench.large):
        return held("the values of the moment of the call")
    if found.digest == digest_of(2, "a", bench.large):
        return broke("only values of later are in it")
    return broke(f"values of later are in it: {short(found.error or 'a mixture')}")


def ranks(bench: Bench) -> Verdict:
    """Two ranks save in the middle of an epoch, three go on; which examples were trained on?"""
    root = bench.root("order")
    (outcome,) = bench.run(acts.read_on(root, EXAMPLES, BATCH))
    if outcome.error is not None:
        raise NotRun(outcome.error)
    counts = Counter(outcome.value)
    lost = sum(example not in counts for example in range(EXAMPLES))
    twice = sum(count > 1 for count in counts.values())
    words = f"of {EXAMPLES:,} examples {lost:,} never, {twice:,} more than once"
    return broke(words) if lost or twice else held(words)
