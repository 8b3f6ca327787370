"""Planted bugs: each takes one thing out of the protocol, and each must be found, by name.

A check that has never failed proves nothing. So every sync, every order and every rule that the
protocol rests on is taken out once, and the power cuts of `coherent_ray.drill.power_cuts` must come
upon a state in which an invariant does not hold. Where an ordered file system hides the bug,
that is said too: such code passes on it for years.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit import fields, generations, history, manifest, performer
from coherent_ray.commit.ballot import Acknowledged, Checked, Verified
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import Action, Answer, AppendPublish, Event, Key
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import Standing
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.sharing import Shared, Sharing
from coherent_ray.commit.testing.invariants import Broken, damage_is_never_selected
from coherent_ray.drill import miniature
from coherent_ray.drill.miniature import Run, write_and_word
from coherent_ray.drill.patching import Patch, planted
from coherent_ray.drill.power_cuts import SHORT_SCENES, Cutter, State, on_disk
from coherent_ray.errors import AlreadyExists
from coherent_ray.storage import LocalStorage, local
from coherent_ray.storage.local import LocalWriter
from coherent_ray.storage.testing.disk import Image, Model
from coherent_ray.storage.testing.faults import flipped
from coherent_ray.storage.testing.power import Step


@dataclass(frozen=True, slots=True)
class Bug:
    """One thing that is not as it must be."""

    name: str
    found_by: str
    """The invariant that does not hold, where the disk promises little."""
    hidden: bool = False
    """Whether an ordered file system never shows it."""
    patches: tuple[Patch, ...] = ()
    unsynced: Callable[[Step, str], bool] | None = None
    """Syncs that are left out; asked with the name of the file that is being finished."""
    scenes: tuple[str, ...] = SHORT_SCENES
    deaths: bool = False
    """Whether it takes a process that dies before the power does."""


_finishing: list[str] = []


def find(bug: Bug, model: Model = "weak") -> str | None:
    """Return the invariant by which a bug is found; None: it is not.

    Args:
        bug: What is planted.
        model: What the disk promises.
    """
    unsynced = bug.unsynced

    def believe(step: Step) -> bool:
        return unsynced is None or not unsynced(step, _finishing[-1] if _finishing else "")

    cutter = Cutter(model, believe, most=64, stop_at_first=True)
    with planted(
        (*bug.patches, (LocalWriter, "finish", _noting), (LocalWriter, "rename", _noting))
    ):
        states = cutter.play(bug.scenes)
        cutter.judge(states)
        if bug.deaths:
            for call in range(1, len(cutter.steps_of(bug.scenes)) + 1):
                if cutter.done:
                    break
                cutter.judge(cutter.play(bug.scenes, die_after=call))
        return next(iter(cutter.tally.broken), None) or _tampered(states[-1])


def _tampered(last: State) -> str | None:
    """Damage a state where it stands, and return the name of what does not hold then."""
    for tamper in (_flip_a_shard, _cut_a_shard, _fork_the_log):
        with on_disk(tamper(dict(last.image))) as storage:
            try:
                damage_is_never_selected(storage, last.witness)
            except Broken as broken:
                return broken.invariant
    return None


def _noting(original: Callable[[LocalWriter], None]) -> Callable[[LocalWriter], None]:
    def noted(writer: LocalWriter) -> None:
        _finishing.append(writer._name)
        try:
            original(writer)
        finally:
            _finishing.pop()

    return noted


# --- syncs ----------------------------------------------------------------------------------------


def _file(begins: str) -> Callable[[Step, str], bool]:
    return lambda step, name: step.kind == "sync file" and name.startswith(begins)


def _name(begins: str) -> Callable[[Step, str], bool]:
    return lambda step, name: step.kind == "sync directory" and name.startswith(begins)


def _above(path: str) -> Callable[[Step, str], bool]:
    def above(step: Step, name: str) -> bool:
        return step.kind == "sync directory" and not name and step.path == path

    return above


def _name_first(original: Any) -> Callable[[LocalWriter], None]:
    def finish(writer: LocalWriter) -> None:
        system = vars(local)["os"]  # whatever stands in for it now
        free = writer._link()
        writer._named = True
        system.unlink(writer._temporary, dir_fd=writer._directory)
        system.fsync(writer._file)
        system.fsync(writer._directory)
        writer._close()
        if not free:
            raise AlreadyExists("the name is taken", where=writer._where)

    return finish


def _taken_at_once(original: Callable[[LocalWriter], bool]) -> Callable[[LocalWriter], bool]:
    def link(writer: LocalWriter) -> bool:
        free = original(writer)
        if not free:
            raise AlreadyExists("the name is taken", where=writer._where)
        return free

    return link


def _overwriting(original: Any) -> Callable[[LocalStorage, str, bytes], None]:
    return lambda storage, path, data: storage.replace(path, data)


# --- orders ---------------------------------------------------------------------------------------


def _record_first(original: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
    def write(machine: Coordinator, key: Key, verified: Verified) -> list[Action]:
        actions = original(machine, key, verified)
        machine._stages[key] = sealed = verified.sealed()
        return [AppendPublish(key, sealed.publish), *actions]

    return write


def _unread(original: Any) -> Callable[..., Verified]:
    return lambda stage, new=None: Acknowledged(stage.manifest).verified()


def answer_first(original: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
    """Have the machine answer when the manifest is there."""

    def written(machine: Coordinator, key: Key) -> list[Action]:
        actions = original(machine, key)
        if not actions:
            return []
        fate = Fate("published", key.number, key.attempt, seq=1)
        calls = machine._waiting.pop(key, [])
        return [*(Answer(call.number, fate) for call in calls), *actions]

    return written


def _hint_first(original: Callable[..., Event]) -> Callable[..., Event]:
    def append(action: AppendPublish, log: CommitLog) -> Event:
        known = log.read_on()
        with suppress(ValueError):
            log.refresh_hint(known.extended([known.successor(action.body, log.writer)]))
        return original(action, log)

    return append


def _last_shard_last(original: Any) -> Callable[[Run], None]:
    def save(run: Run) -> None:
        run._words = run._words or _words(run)
        words = list(run._words.values())
        run._acknowledge()
        last = words[-1]
        path = last.shard.path
        if not any(entry.path == path for entry in run.storage.list("generations")):
            write_and_word(run.storage, last.rank, ((last.number, last.attempt),))

    return save


def _words(run: Run) -> dict[int, Any]:
    run._number += 1
    last = miniature.RANKS - 1
    words = {rank: run._written(rank) for rank in range(last)}
    return words | {last: run._word(last, run._number, run._attempt)}


def _files_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def retire(pruner: Pruner, wanted: tuple[PublishBody, ...], attempt: int | None) -> Any:
        for publish in wanted:
            for entry in list(pruner._storage.list(f"generations/{publish.name}")):
                pruner._storage.delete(entry.path)
        return original(pruner, wanted, attempt)

    return retire


# --- rules ----------------------------------------------------------------------------------------


def never(result: Any) -> Callable[[Any], Any]:
    """Have a function always return this."""
    return lambda original: lambda *arguments, **options: result


def _shared_directory(original: Any) -> Callable[[int, int], str]:
    return lambda number, attempt: f"generations/g{number}"


def any_attempt(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Have the log's rules refuse no publish."""

    def refuse(standing: Standing, body: PublishBody) -> str | None:
        return None

    return refuse


def no_fence(original: Any) -> Callable[..., None]:
    """Have the log ask no rule before it writes."""
    return lambda log, body, attempt: None


# --- damage ---------------------------------------------------------------------------------------


def _newest_shard(image: Image) -> str:
    live = [path for path in image if path.endswith("safetensors")]
    return max(live, key=lambda path: (int(path.split("/")[2].split("-a")[0][1:]), path))


def _flip_a_shard(image: Image) -> Image:
    path = _newest_shard(image)
    data = image[path] or b""
    return image | {path: flipped(data, 8 * len(data) - 3)}


def _cut_a_shard(image: Image) -> Image:
    path = _newest_shard(image)
    return image | {path: (image[path] or b"")[:-1]}


def _fork_the_log(image: Image) -> Image:
    """Put in the last record's place one of another history: whole in itself, after another."""
    path = max(path for path in image if "/log/" in path)
    value = canonical.load(image[path] or b"")
    value["record"]["previous"] = canonical.digest("another history")
    value["digest"] = canonical.digest(value["record"])
    return image | {path: canonical.dump(value)}


_NO_CHAIN: tuple[Patch, ...] = ((history, "_check_link", never(None)),)
_SHARED: tuple[Patch, ...] = tuple(
    (module, "generation_directory", _shared_directory)
    for module in (fields, manifest, generations, miniature)
)

_ONE = ("open", "save")

#: Every bug; a test plants each of them under both models.
BUGS: tuple[Bug, ...] = (
    Bug(
        "shards are not synced", "acknowledgements_are_true", unsynced=_file("shard-"), scenes=_ONE
    ),
    Bug("manifests are not synced", "latest_is_whole", unsynced=_file("manifest"), scenes=_ONE),
    Bug("records are not synced", "the_log_chain_holds", unsynced=_file("0000"), scenes=_ONE),
    Bug("a shard's name is not synced", "acknowledgements_are_true", unsynced=_name("shard-")),
    Bug("a manifest's name is not synced", "latest_is_whole", True, unsynced=_name("manifest")),
    Bug("a record's name is not synced", "the_hint_is_not_ahead", unsynced=_name("0000")),
    Bug(
        "a generation's new directory is not synced",
        "acknowledgements_are_true",
        True,
        unsynced=_above("run/generations"),
    ),
    Bug(
        "the log's new directory is not synced",
        "the_hint_is_not_ahead",
        True,
        unsynced=_above("run"),
    ),
    Bug(
        "a file has its name before it is synced",
        "the_log_chain_holds",
        patches=((LocalWriter, "finish", _name_first),),
    ),
    Bug(
        "a name is called taken before it is sure",
        "the_hint_is_not_ahead",
        patches=((LocalWriter, "_link", _taken_at_once),),
        deaths=True,
    ),
    Bug(
        "a record overwrites instead of being linked",
        "attempts_are_given_once",
        patches=((LocalStorage, "create", _overwriting),),
        scenes=("open", "save", "save_overtaken"),
    ),
    Bug(
        "the record comes before the manifest",
        "latest_is_whole",
        patches=((Coordinator, "_write", _record_first),),
    ),
    Bug(
        "published is answered before the record is written",
        "latest_never_goes_back",
        patches=((Coordinator, "_manifest_written", answer_first),),
    ),
    Bug(
        "the hint is written before the record",
        "the_hint_is_not_ahead",
        patches=((performer, "_append_publish", _hint_first),),
    ),
    Bug(
        "the last rank acknowledges before it writes, and nobody looks",
        "latest_is_whole",
        patches=((Run, "save", _last_shard_last), (performer, "_problem", never(""))),
    ),
    Bug(
        "a shard's size is not checked before publish",
        "latest_is_whole",
        patches=((performer, "_problem", never("")),),
        scenes=("open", "save", "save_short"),
    ),
    Bug(
        "a publish does not wait for what was read back",
        "latest_is_whole",
        patches=((Checked, "decide", _unread),),
        scenes=("open", "save", "save_flipped"),
    ),
    Bug(
        "two attempts share a generation's directory",
        "a_writer_can_go_on",
        patches=_SHARED,
        scenes=_ONE,
    ),
    Bug(
        "files go before their retire record",
        "latest_is_whole",
        patches=((Pruner, "_retire", _files_first),),
        scenes=("open", "save", "save", "prune"),
    ),
    Bug(
        "a prune deletes what others refer to",
        "latest_is_whole",
        patches=((Sharing, "of", never(Shared())),),
        scenes=("open", "save", "save_more", "prune"),
    ),
    Bug(
        "a generation may refer to a retired one",
        "latest_is_whole",
        patches=((Standing, "_refuse_base", never(None)),),
        scenes=("open", "save", "save_more_retired"),
    ),
    Bug(
        "a fenced attempt may publish",
        "the_log_chain_holds",
        patches=((Standing, "_refuse_publish", any_attempt), (CommitLog, "_check", no_fence)),
    ),
    Bug("the chain is not checked", "damage_is_never_selected", patches=_NO_CHAIN),
    Bug(
        "a reader does not check shards",
        "damage_is_never_selected",
        patches=((generations, "shard_damage", never([])),),
    ),
)
