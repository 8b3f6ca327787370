"""Every state that a power cut can leave of a run in miniature, and whether recovery bears it.

The play of `coherent_ray.drill.miniature` runs on the real local backend, at each of whose system
calls three things are asked:

1. what if the power goes here? Every state that the disk may then be in is judged;
2. what if the process dies here, another one goes on, and the power goes under *that* one? What
   the dead one left in the kernel's memory alone must not be built upon;
3. what if the power goes again while a run recovers?

To judge a state is to look at it through the invariants, then to let nothing fail any more: a new
attempt must open, save and prune, and the invariants must hold again. States that are equal, for
all that a verb can see of them, under equal promises, are judged once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coherent_ray.commit.testing.invariants import Broken, Witness, check_all
from coherent_ray.digests import Digest, digest_of
from coherent_ray.drill.miniature import Run
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import TEMPORARY_PREFIX, Storage
from coherent_ray.storage.testing.disk import Image, Model
from coherent_ray.storage.testing.power import Recorder, Step, materialise, watched

#: Two attempts and a restart; generations that refer to earlier ones, which go, and one of which
#: goes too early; one is read back; a torn shard, a race, a zombie.
SCENES = (
    "open", "save", "save_more", "prune", "save_short", "save_overtaken", "save",
    "rank_comes_late", "save_more_retired", "save", "reopen", "save_read_back", "prune",
)  # fmt: skip
#: The same in short, for where time is dear.
SHORT_SCENES = ("open", "save", "save_overtaken", "save", "prune")
#: Outcomes of one moment, of which more are drawn and not enumerated.
MOST_OUTCOMES = 4096

Believe = Callable[[Step], bool]


class _Enough(BaseException):
    """What a dead process left is sure by now, and its successor has promised something."""


@dataclass(frozen=True, slots=True)
class State:
    """What a power cut left, and what had been promised by then."""

    image: Image
    witness: Witness
    story: str
    """How it came about, in words."""


@dataclass(slots=True)
class Tally:
    """What was looked at."""

    steps: int = 0
    """System calls after which the power was cut."""
    outcomes: int = 0
    """Ways in which a cut could turn out, all moments together."""
    drawn: int = 0
    """Moments at which outcomes were drawn and not enumerated."""
    deaths: int = 0
    """System calls after which a process was killed."""
    states: int = 0
    """Different states, each of which was judged."""
    broken: Counter[str] = field(default_factory=Counter)
    """Invariants that did not hold, with the number of states."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each of them, the first story and what was found."""

    def blame(self, state: State, broken: Broken) -> None:
        """Count a state that is not as it should be."""
        self.broken[broken.invariant] += 1
        self.examples.setdefault(broken.invariant, f"{state.story}: {broken}")


class Cutter:
    """Plays, cuts, and judges what is left; one file system model, one tally.

    Attributes:
        tally: What was looked at so far.
    """

    def __init__(
        self,
        model: Model = "weak",
        believe: Believe | None = None,
        most: int = MOST_OUTCOMES,
        stop_at_first: bool = False,
    ) -> None:
        """Choose the disk.

        Args:
            model: What it promises.
            believe: Syncs that are really done; None: all.
            most: Outcomes of one moment that are enumerated; of more, so many are drawn.
            stop_at_first: Judge no more states after one that broke an invariant.
        """
        self._model = model
        self._believe = believe
        self._most = most
        self._stop_at_first = stop_at_first
        self._seen: set[Digest] = set()
        self.tally = Tally()

    @property
    def done(self) -> bool:
        """Whether nothing more need be judged."""
        return self._stop_at_first and bool(self.tally.broken)

    def play(self, scenes: Sequence[str], die_after: int | None = None) -> list[State]:
        """Play from nothing, and return the states that were not seen before.

        Args:
            scenes: Of `Run`.
            die_after: The process dies after so many system calls, and power cuts are looked at
                from there on; None: nobody dies.
        """
        with _directory() as root:
            recorder = Recorder(root, model=self._model, believe=self._believe)
            run = Run(LocalStorage(root / "run"))
            return self._watch(recorder, run, lambda: run.play(scenes), die_after)

    def recover(self, state: State) -> list[State]:
        """Let a run go on from a state, and return the new states of power cuts on the way."""
        with _directory() as root:
            materialise(state.image, root)
            recorder = Recorder(root, model=self._model, believe=self._believe)
            run = Run(LocalStorage(root / "run"), state.witness.copy(), "again")
            return self._watch(recorder, run, run.go_on, None, state.story + "; it recovers; ")

    def steps_of(self, scenes: Sequence[str]) -> list[Step]:
        """Return the system calls of a play that nothing disturbs."""
        with _directory() as root:
            recorder = Recorder(root, model=self._model)
            with watched(recorder):
                Run(LocalStorage(root / "run")).play(scenes)
            return recorder.log

    def judge(self, states: Iterable[State]) -> None:
        """Check the invariants on each state, let the run go on from it, and check them again."""
        for state in states:
            if self.done:
                return
            self.tally.states += 1
            with on_disk(state.image) as storage:
                try:
                    check_recovery(storage, state.witness)
                except Broken as broken:
                    self.tally.blame(state, broken)

    # --- leaves -----------------------------------------------------------------------------------

    def _watch(
        self,
        recorder: Recorder,
        run: Run,
        act: Callable[[], None],
        die_after: int | None,
        story: str = "",
    ) -> list[State]:
        found: list[State] = []

        left: list[object] = []
        promises: tuple[object, ...] = ()

        def step() -> None:
            nonlocal left, promises
            count = len(recorder.log)
            if die_after is not None and count < die_after:
                return
            if count == die_after:
                self.tally.deaths += 1
                left, promises = recorder.disk.unsure(), run.witness.promises
                recorder.kill()
            found.extend(self._cut(recorder, run.witness, story + _told(recorder, die_after)))
            if die_after is not None and promises != run.witness.promises:
                unsure = list(map(id, recorder.disk.unsure()))
                if not any(id(thing) in unsure for thing in left):
                    raise _Enough

        recorder.after_step.append(step)
        run.after_death = recorder.revive
        with watched(recorder), suppress(_Enough):
            act()
            found.extend(self._cut(recorder, run.witness, story + "at the end"))
        return found

    def _cut(self, recorder: Recorder, witness: Witness, story: str) -> Iterator[State]:
        self.tally.steps += 1
        kept = None
        count = 0
        for image in recorder.disk.images(self._most, self.tally.steps):
            count += 1
            key = _key(image, witness)
            if key not in self._seen:
                self._seen.add(key)
                kept = kept or witness.copy()
                yield State(image, kept, f"power cut {story}")
        self.tally.outcomes += count
        self.tally.drawn += count == self._most


def check_recovery(storage: Storage, witness: Witness) -> None:
    """Check the invariants, let a run go on where nothing fails any more, and check them again.

    Raises:
        Broken: One does not hold, or, as ``a_writer_can_go_on``, nobody can.
    """
    check_all(storage, witness)
    promised = witness.copy()
    a_writer_can_go_on(storage, promised)
    check_all(storage, promised)


def a_writer_can_go_on(storage: Storage, witness: Witness) -> None:
    """Where nothing fails, a new attempt opens, its first save is published, its prune ends well.

    Raises:
        Broken: It does not; under this function's name.
    """
    run = Run(storage, witness, "next")
    try:
        run.go_on()
    except Exception as error:
        raise Broken("a_writer_can_go_on", f"{type(error).__name__}: {error}") from error
    fates = {fate.kind for fate in run.heard}
    if fates != {"published"}:
        reasons = "; ".join(fate.reason for fate in run.heard)
        raise Broken("a_writer_can_go_on", f"its ranks were answered {fates}: {reasons}")


def _told(recorder: Recorder, die_after: int | None) -> str:
    last = recorder.log[-1]
    if die_after is None:
        return f"after call {len(recorder.log)}, {last}"
    death = recorder.log[die_after - 1]
    return f"after {last}, call {len(recorder.log)}; a process had died after {death}"


def _key(image: Image, witness: Witness) -> Digest:
    """Return what makes a state different for a verb: the content of temporary files does not."""
    words: list[bytes] = []
    for path, data in sorted(_visible(image)):
        words += [f"{path}\0{-1 if data is None else len(data)}\0".encode(), data or b""]
    return digest_of(b"".join([*words, repr(witness.promises).encode()]), "xxh3_128")


def _visible(image: Image) -> Iterator[tuple[str, bytes | None]]:
    unnamed: Counter[str] = Counter()
    for path, data in image.items():
        above, _, name = path.rpartition("/")
        if not name.startswith(TEMPORARY_PREFIX):
            yield path, data
        else:
            unnamed[above] += 1
            yield f"{above}/{TEMPORARY_PREFIX}{unnamed[above]}", b""


@contextmanager
def _directory() -> Iterator[Path]:
    """Make a directory for a while, in memory where the system has a place for that."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="coherent-ray-cut-", dir=place) as path:
        yield Path(path)


@contextmanager
def on_disk(image: Image) -> Iterator[Storage]:
    """Make a state real for a while, and give its run's root."""
    with _directory() as root:
        materialise(image, root)
        yield LocalStorage(root / "run")


def explore(
    cutter: Cutter,
    scenes: Sequence[str] = SCENES,
    deaths: Iterable[int] | None = None,
    twice: bool = False,
) -> Tally:
    """Cut the power after every call of a play, and after every call of those who follow a death.

    Args:
        cutter: The disk, and where the counts go.
        scenes: The play.
        deaths: Calls after which a process dies; None: after each.
        twice: Cut the power again while each state of the play that nobody's death disturbed
            recovers.
    """
    calls = len(cutter.steps_of(scenes))
    found = cutter.play(scenes)
    cutter.judge(found)
    for call in range(1, calls + 1) if deaths is None else deaths:
        if cutter.done:
            break
        cutter.judge(cutter.play(scenes, die_after=call))
    if twice:
        for state in found:
            cutter.judge(cutter.recover(state))
    return cutter.tally
