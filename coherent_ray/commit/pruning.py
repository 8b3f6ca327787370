"""Pruning: gives up what retention no longer keeps, and removes what is left over.

The order makes every crash safe, and every step may be done twice, by two pruners at once:

1. the log is read, and the holds of readers are looked at;
2. generations are read until `coherent_ray.commit.retention` has a plan: only what was found whole
   counts;
3. a `retire` record for each generation that goes, the oldest first. From here on no reader takes
   it, and nothing but its files is left of it;
4. the holds are looked at again (see `coherent_ray.commit.holds` for why that comes after 3);
5. files are deleted: expired holds first, so that their readers can know; a generation's shards
   before its manifest, which says what its shards are. What a generation that stays refers to stays
   with it (`coherent_ray.commit.sharing`).

Whatever a crash leaves of 5, the next prune finds and deletes: what is retired, and what can never
be published. Only files whose names this project gives are deleted, and of a published generation
only those that its manifest names; everything else is reported as foreign.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.holds import Held, Watch
from coherent_ray.commit.inspection import blocks_of, shard_damage
from coherent_ray.commit.leftovers import Leftovers, survey
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody, RetireBody
from coherent_ray.commit.retention import Kept, Plan, Policy, Unverified, key_of, plan
from coherent_ray.commit.sharing import Sharing
from coherent_ray.commit.traces import look
from coherent_ray.errors import (
    ConfigError,
    Damage,
    Fenced,
    Interrupted,
    ManifestDamaged,
    StorageError,
)
from coherent_ray.storage.base import Entry, Storage
from coherent_ray.storage.housekeeping import Housekeeping

#: Seconds after which a temporary file that nobody touches counts as a killed writer's.
GRACE_S = 3600.0
#: How often another attempt may open under a pruner that acts for whichever is open.
_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did, or, as a dry run, would do."""

    retired: tuple[PublishBody, ...]
    """Given up by this prune, in log order."""
    kept: tuple[Kept, ...]
    """The generations that stay, in log order."""
    deleted: tuple[Entry, ...]
    """Files that are gone, in the order in which they went."""
    held: tuple[Held, ...]
    """Holds of readers that kept this prune from giving up a generation or deleting its files."""
    foreign: tuple[Entry, ...]
    """Files that are not this project's, in order of path; left as they are."""
    problems: tuple[str, ...]
    """Files that could not be deleted, and why; the next prune tries again."""
    shared: tuple[Entry, ...] = ()
    """Files of retired generations that stay, since generations that stay refer to them."""
    damaged: Mapping[str, Damage] = field(default_factory=dict)
    """The first damage of each generation that was read and is not whole, by its name."""

    @property
    def freed(self) -> int:
        """Bytes of the files that are gone."""
        return sum(entry.size for entry in self.deleted)


class Pruner:
    """Prunes one run, as often as it is asked. For one thread at a time.

    It remembers what it has verified and how long it has watched each hold, so one that lives on
    reads each generation once, and sees dead holds as dead.
    """

    def __init__(
        self,
        storage: Storage,
        policy: Policy,
        *,
        log: CommitLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[], bool] = lambda: False,
        grace_s: float = GRACE_S,
    ) -> None:
        """Make a pruner; nothing is read yet.

        Args:
            storage: The run's root.
            policy: What to keep.
            log: The run's commit log, where the caller has a view of it.
            clock: Seconds, never going back; it decides when a hold is dead.
            stopped: Asked between steps; True ends the prune with `Interrupted`.
            grace_s: Seconds after which an idle temporary file counts as a killed writer's.
        """
        self._storage = storage
        self._policy = policy
        self._log = log or CommitLog(storage)
        self._generations = Generations(storage, self._log)
        self._sharing = Sharing(self._generations)
        self._stopped = stopped
        self._grace_s = grace_s
        self._whole: set[GenerationKey] = set()
        self._doubted: set[GenerationKey] = set()
        self._seen: frozenset[int] = frozenset()
        """Blocks that were read at the last look: what the next generation refers to is in them."""
        self._found: set[int] = set()
        self._damaged: dict[str, Damage] = {}  # of the last look
        self.watch = Watch(storage, clock)
        """What was seen of the holds."""

    def trust(self, key: GenerationKey) -> None:
        """Take somebody's word that every byte of a generation was just read and is right."""
        self._whole.add(key)

    def doubt(self, key: GenerationKey) -> None:
        """Read a generation again before it counts as whole; from any thread."""
        self._doubted.add(key)

    def prune(
        self, attempt: int | None = None, *, dry_run: bool = False, whole_root: bool = False
    ) -> Pruned:
        """Give up what the policy does not keep, and remove what is left over.

        Args:
            attempt: On whose behalf; a later attempt then fences it. None: whichever is open.
            dry_run: Change nothing; say what would be done.
            whole_root: Report foreign files of the whole root, not only of our directories.

        Raises:
            Fenced: A later attempt has opened; what was given up before stays so.
            LogDamaged: The log cannot be trusted; nothing was given up or deleted.
            StorageError: The storage could not be asked. What was given up before stays so.
            Interrupted: It was stopped.
        """
        history = self._history()
        held = self.watch.look()
        self._damaged = {}
        decided = self._decided(history, _alive(held))
        retired = decided.retire
        if not dry_run:
            retired = self._retire(retired, attempt)
            history = self._log.settled()  # files go by it: no power cut may take its word back
            held = self.watch.look()
        doomed = history.retired | {key_of(publish) for publish in retired}
        found = survey(
            self._storage,
            self._generations,
            history,
            doomed,
            held,
            sharing=self._sharing,
            whole_root=whole_root,
        )
        problems = [_unknown(name) for name in found.unknown]
        deleted = found.files if dry_run else self._delete(found, problems)
        deleted += self._sweep(found, problems, dry_run=dry_run)
        in_the_way = {k.publish.name for k in decided.kept if k.reason == "held"}
        return Pruned(
            retired=retired,
            kept=_kept(decided, history, retired, dry_run=dry_run),
            deleted=tuple(deleted),
            held=tuple(h for h in held if h in found.held or _name_of(h) in in_the_way),
            foreign=tuple(found.foreign),
            problems=tuple(problems),
            shared=tuple(found.shared),
            damaged=self._damaged,
        )

    # --- deciding ---------------------------------------------------------------------------------

    def _history(self) -> History:
        traces = look(self._storage)
        history = self._log.read_on()
        # What the missing records published would look left over, and be deleted.
        if damage := traces.damage(history):
            raise damage
        return history

    def _decided(self, history: History, held: Collection[GenerationKey]) -> Plan:
        verdicts: dict[GenerationKey, bool] = {}
        self._found = set()
        while True:
            decided = plan(history, self._policy, verdicts, held)
            if not isinstance(decided, Unverified):
                self._seen = frozenset(self._found)
                return decided
            verdicts[key_of(decided.publish)] = self._is_whole(decided.publish)

    def _is_whole(self, publish: PublishBody) -> bool:
        """Read a generation, the first time every byte of it, and say whether it is whole."""
        key = key_of(publish)
        deep = key not in self._whole or key in self._doubted
        if key in self._doubted:
            # What rots in one file rots in all that refer to it.
            self._seen, self._found = frozenset(), set()
        self._whole.discard(key)
        try:
            manifest = self._generations.manifest(publish)
        except ManifestDamaged as damage:
            self._damaged[publish.name] = damage
            return False
        for shard in manifest.shards:
            self._check_stop()
            found = shard_damage(self._storage, manifest.header, shard, deep=deep, seen=self._seen)
            if found:
                self._damaged[publish.name] = found[0]
                return False
        self._whole.add(key)
        self._found.update(block for shard in manifest.shards for block in blocks_of(shard))
        if deep:
            self._doubted.discard(key)
        return True

    # --- doing ------------------------------------------------------------------------------------

    def _retire(
        self, wanted: tuple[PublishBody, ...], attempt: int | None
    ) -> tuple[PublishBody, ...]:
        retired: list[PublishBody] = []
        for publish in wanted:
            self._check_stop()
            try:
                self._append(RetireBody(publish.number, publish.attempt), attempt)
            except ConfigError:
                continue  # pinned since the log was read: the user comes first
            retired.append(publish)
        return tuple(retired)

    def _append(self, body: RetireBody, attempt: int | None) -> None:
        for last_try in [False] * (_PATIENCE - 1) + [True]:
            try:
                self._log.append(body, attempt or self._log.read_on().attempt)
            except Fenced:
                # Another attempt has opened. The plan holds all the same: what it keeps is kept.
                if attempt is not None or last_try:
                    raise
            else:
                return

    def _delete(self, found: Leftovers, problems: list[str]) -> list[Entry]:
        deleted: list[Entry] = []
        for entry in found.files:
            self._check_stop()
            try:
                self._storage.delete(entry.path)
            except StorageError as error:
                problems.append(_in_words(error, entry.path))
            else:
                deleted.append(entry)
        return deleted

    def _sweep(self, found: Leftovers, problems: list[str], *, dry_run: bool) -> list[Entry]:
        """Remove what killed writers left, and the directories that are empty now."""
        storage = self._storage
        if not isinstance(storage, Housekeeping):
            return []
        swept: list[Entry] = []
        try:
            for left in storage.temporaries(found.directories):
                if left.idle_s < self._grace_s:
                    continue
                self._check_stop()
                if not dry_run and not storage.drop_temporary(left.path):
                    continue  # its writer lives
                swept.append(Entry(left.path, left.size))
            if not dry_run:
                for directory in found.emptied:
                    storage.drop_directory(directory)
        except StorageError as error:
            problems.append(_in_words(error, "temporary files"))
        return swept

    def _check_stop(self) -> None:
        if self._stopped():
            raise Interrupted("pruning was stopped; the next prune goes on")


def _alive(held: Collection[Held]) -> set[GenerationKey]:
    return {hold.generation for hold in held if not hold.expired}


def _name_of(hold: Held) -> str:
    number, attempt = hold.generation
    return f"g{number}-a{attempt}"


def _kept(
    decided: Plan, history: History, retired: tuple[PublishBody, ...], *, dry_run: bool
) -> tuple[Kept, ...]:
    """Return what stays: as planned, and what was pinned in between."""
    if dry_run:
        return decided.kept
    pinned = [Kept(p, "pinned", None) for p in decided.retire if p not in retired]
    order = {key_of(publish): index for index, publish in enumerate(history.publishes)}
    kept = [k for k in (*decided.kept, *pinned) if key_of(k.publish) not in history.retired]
    return tuple(sorted(kept, key=lambda k: order[key_of(k.publish)]))


def _unknown(name: str) -> str:
    return f"shards of retired generations: the manifest of {name} is damaged, and it may need them"


def _in_words(error: StorageError, fallback: str) -> str:
    return f"{error.where or fallback}: {error.what}"
