"""Every window in which a process or the power may go: what is published is whole, and it goes on.

Two phases, always. First anything may fail, at every single step: what the log publishes must be
there to the last byte. Then nothing fails any more: whoever comes next must publish.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Ranks, Shell, check_published_is_whole

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import History
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage import LocalStorage, directories, local
from coherent_ray.storage.base import TEMPORARY_PREFIX, Storage
from coherent_ray.storage.testing.faults import Crash, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.storage.testing.power import Recorder

RANKS = 2


def save(shell: Shell, number: int, attempt: int, done: list[str]) -> None:
    """Every rank writes and acknowledges; what is answered as published is noted in `done`."""
    group = Ranks(ranks=RANKS, number=number, attempt=attempt, update=10 * number)
    group.write(shell.storage)
    fates = shell.save(group)
    if all(fate.kind == "published" for fate in fates):
        done.append(f"g{number}-a{attempt}")


def story(storage: Storage, done: list[str]) -> None:
    """Two attempts, three generations, as coordinators and ranks would write them."""
    shell = Shell(storage)
    first = shell.open("token-1")
    save(shell, 1, first, done)
    save(shell, 2, first, done)
    shell = Shell(storage)
    save(shell, 3, shell.open("token-2"), done)


def go_on(storage: Storage) -> str:
    """Nothing fails any more: a new attempt opens, and publishes the next generation."""
    shell = Shell(storage)
    history = shell.log.read()
    done: list[str] = []
    attempt = shell.open("token-next")
    save(shell, history.next_number, attempt, done)
    assert done == [f"g{history.next_number}-a{attempt}"]
    return done[0]


def check(storage: Storage, done: list[str]) -> History:
    """The invariant: what is published is whole, what was promised is published, newest wins."""
    history = check_published_is_whole(storage)
    published = [publish.name for publish in history.publishes]
    assert set(done) <= set(published), "an answer said published, and the log does not"
    generations = Generations(storage)
    for publish in history.publishes:
        damages = [d for d in generations.verify(publish) if d.details["kind"] != "receipts"]
        assert damages == []
    selected = generations.select("refuse")
    assert (selected.publish if selected else None) == history.latest
    return history


def steps_of_the_story() -> int:
    storage = FaultyStorage(MemoryStorage())
    story(storage, [])
    return len(storage.calls)


@pytest.mark.parametrize("effect", ["crash_before", "crash_after", "lose_answer", "refuse", "full"])
def test_every_step_of_the_protocol_may_be_the_last(effect: str) -> None:
    total = steps_of_the_story()
    latest = set()
    for at in range(1, total + 1):
        storage = FaultyStorage(MemoryStorage(), [Fault(effect, at=at)])  # type: ignore[arg-type]
        done: list[str] = []
        try:
            story(storage, done)
        except (Crash, CoherentRayError):
            assert storage.struck
        history = check(storage.inner, done)
        latest.add(history.latest.name if history.latest else None)
        name = go_on(storage.inner)
        after = Generations(storage.inner).select("refuse")
        assert after is not None
        assert after.publish.name == name
    assert total > 40
    assert latest >= {"g3-a2"}
    if effect.startswith("crash"):
        assert latest == {None, "g1-a1", "g2-a1", "g3-a2"}, "every window must have been reached"


def test_a_crash_right_before_publish_hides_the_generation_and_right_after_shows_it() -> None:
    for effect, latest in [("crash_before", "g1-a1"), ("crash_after", "g2-a1")]:
        fault = Fault(effect, verb="create", path="log/", at=3)  # type: ignore[arg-type]
        storage = FaultyStorage(MemoryStorage(), [fault])
        done: list[str] = []
        with pytest.raises(Crash):
            story(storage, done)
        assert done == ["g1-a1"]
        assert "generations/g2-a1/manifest.json" in storage.inner.files  # type: ignore[attr-defined]
        selected = Generations(storage.inner).select("refuse")
        assert selected is not None
        assert selected.publish.name == latest


def test_a_worker_that_dies_in_mid_shard_leaves_no_shard() -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("crash_after", verb="write", at=3)])
    with pytest.raises(Crash):
        story(storage, [])
    history = check(storage.inner, ["g1-a1"])
    assert history.latest is not None
    assert history.latest.name == "g1-a1"
    assert [entry.path for entry in storage.inner.list("generations/g2-a1")] == []


def test_a_bit_that_flips_on_its_way_to_the_disk_is_found_by_every_deep_reader() -> None:
    for at in range(1, 7):
        storage = FaultyStorage(MemoryStorage(), [Fault("flip", verb="write", at=at, bit=99)])
        story(storage, [])
        (fault,) = storage.struck
        damaged = [path for verb, path in storage.calls if verb == "write"][at - 1]
        assert fault.effect == "flip"
        found = [
            damage.where
            for info in Generations(storage.inner).list()
            for damage in Generations(storage.inner).verify(info.publish)
            if damage.details["kind"] != "receipts"
        ]
        assert found == [damaged]


# --- power cuts, under the local backend ----------------------------------------------------------


class Cuts:
    """Looks at every state that a power cut may leave, once for each thing that was promised."""

    def __init__(
        self,
        recorder: Recorder,
        done: list[str],
        look: Callable[[MemoryStorage], None],
        most: int | None = None,
    ) -> None:
        self._recorder, self._done, self._look, self._most = recorder, done, look, most
        self._seen: set[tuple[object, ...]] = set()

    @property
    def states(self) -> int:
        return len(self._seen)

    def cut(self) -> None:
        for tree in self._recorder.survivors(self._most):
            files = {
                path.removeprefix("run/"): data
                for path, data in tree.items()
                if TEMPORARY_PREFIX not in path
            }
            key = (*self._done, *sorted(files.items()))
            if key not in self._seen:
                self._seen.add(key)
                storage = MemoryStorage()
                storage.files = files
                self._look(storage)


def recorded(monkeypatch: pytest.MonkeyPatch, root: Path, forget: str = "") -> Recorder:
    recorder = Recorder(root, forget)
    monkeypatch.setattr(local, "os", recorder)
    monkeypatch.setattr(directories, "os", recorder)
    return recorder


def test_after_every_power_cut_what_is_published_is_whole_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    latest = set()

    def look(storage: MemoryStorage) -> None:
        history = check(storage, done)
        latest.add(history.latest.name if history.latest else None)
        go_on(storage)

    recorder = recorded(monkeypatch, tmp_path)
    cuts = Cuts(recorder, done, look)
    recorder.after_step.append(cuts.cut)
    story(LocalStorage(tmp_path / "run"), done)
    cuts.cut()
    assert done == ["g1-a1", "g2-a1", "g3-a2"]
    assert latest == {None, "g1-a1", "g2-a1", "g3-a2"}
    assert cuts.states >= 18


@pytest.mark.parametrize("forget", ["files", "directories"])
def test_without_one_kind_of_sync_the_promise_would_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: str
) -> None:
    """That the check above can fail: it does, for a backend that leaves out these syncs."""
    recorder = recorded(monkeypatch, tmp_path, forget)
    shell = Shell(LocalStorage(tmp_path / "run"))
    done: list[str] = []
    save(shell, 1, shell.open("token-1"), done)
    broken = 0

    def look(storage: MemoryStorage) -> None:
        nonlocal broken
        try:
            check(storage, done)
        except (AssertionError, CoherentRayError):
            broken += 1

    Cuts(recorder, done, look, most=20).cut()
    assert broken > 0


def test_what_is_answered_by_a_record_that_another_left_unsynced_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer dies between link and sync; whoever answers by the record settles it first."""
    record = "run/log/00000000000000000003.json"
    answered: list[str] = []
    recorder = recorded(monkeypatch, tmp_path)
    first = Shell(LocalStorage(tmp_path / "run"))
    attempt = first.open("token-1")
    save(first, 1, attempt, answered)

    def die() -> None:
        if recorder.steps[-1] == "link" and (tmp_path / record).exists():
            recorder.after_step.clear()
            raise Crash

    recorder.after_step.append(die)
    with pytest.raises(Crash):
        save(first, 2, attempt, answered)
    assert answered == ["g1-a1"]
    assert not all(record in tree for tree in recorder.survivors()), "the window was not reached"
    second = Shell(LocalStorage(tmp_path / "run"))
    group = Ranks(ranks=RANKS, number=2, attempt=attempt, update=20)
    assert {fate.kind for fate in second.save(group)} == {"published"}
    assert all(record in tree for tree in recorder.survivors())
