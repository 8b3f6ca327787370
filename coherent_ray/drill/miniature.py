"""A whole run in miniature: two ranks and a coordinator, with the real parts, in one process.

The log, the machine, its hands, the pruner and the shard writer are the product's own; what is left
out is Ray, the asyncio loop and torch's training. Every scene of the play may be broken off by a
`Crash` at any system call and is then played again by those who are left: a new coordinator, to
whom living ranks repeat their words, or a new attempt where a rank has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    Answer,
    AskReadBack,
    Event,
    HistoryRead,
    StorageAction,
)
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    Acknowledgement,
    DataPosition,
    GenerationHeader,
    PlanIdentity,
    ShardRecord,
    StateLayout,
    TensorSpec,
    dump,
    generation_directory,
    generation_name,
)
from coherent_ray.commit.performer import perform
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.read_back import read_back
from coherent_ray.commit.records import RetireBody
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.service import Service
from coherent_ray.commit.testing.invariants import Witness
from coherent_ray.digests import digest_of
from coherent_ray.state.reuse import previous_of
from coherent_ray.state.shards import write_shard
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Crash, flipped
from coherent_ray.storage.testing.memory import MemoryStorage

RUN = "miniature"
RANKS = 2
LAYOUT = StateLayout(
    (TensorSpec("model/weight", "F32", (16, 8)), TensorSpec("optimizer/exp_avg", "F32", (16, 8)))
)
PLAN = PlanIdentity(digest_of(b"data"), 1000, 7, "feistel-v1", 32, 4, 8)
BLOCK_BYTES = 128

Line = tuple[tuple[int, int], ...]
"""Generations, by number and attempt, each a small change of the one before; never empty."""


def header_of_generation(number: int, attempt: int, ranks: int = RANKS) -> GenerationHeader:
    """Return what all ranks agree on about one generation."""
    return GenerationHeader(
        format=1,
        run_id=RUN,
        number=number,
        attempt=attempt,
        claim="invariant",
        ranks=ranks,
        position=DataPosition(epoch=0, position=320 * number, update=10 * number),
        plan=PLAN,
        layout=LAYOUT,
        values={},
        environment={},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )


def state_bytes(line: Line, ranks: int = RANKS) -> bytes:
    """Return the whole flat state of one generation.

    The first of a line has a state of its own; each later one changes the last block of each part.
    """
    state = bytearray(_words(*line[0]))
    for number, attempt in line[1:]:
        for rank in range(ranks):
            stop = LAYOUT.cut(rank + 1, ranks)
            state[stop - BLOCK_BYTES : stop] = _words(number, attempt)[-BLOCK_BYTES:]
    return bytes(state)


def _words(number: int, attempt: int) -> bytes:
    words = [digest_of(f"{number} {attempt} {at}".encode())[-64:] for at in range(32)]
    return bytes.fromhex("".join(words))[: LAYOUT.nbytes]


def write_and_word(
    storage: Storage,
    rank: int,
    line: Line,
    ranks: int = RANKS,
    base: ShardRecord | None = None,
) -> Acknowledgement:
    """Write a rank's shard with the product's writer, and return what the rank then says.

    Args:
        storage: The run's root.
        rank: Whose.
        line: The generation, and before it those that it came from by small changes.
        ranks: How many there are.
        base: The rank's shard of the one before it, to which it refers; None: it refers to none.
    """
    number, attempt = line[-1]
    state = memoryview(state_bytes(line, ranks))
    part = state[LAYOUT.cut(rank, ranks) : LAYOUT.cut(rank + 1, ranks)]
    header = header_of_generation(number, attempt, ranks)
    known = None
    if base is not None:
        earlier = header_of_generation(*line[-2], ranks)
        known = previous_of(earlier, base).known(header, base.algorithm, BLOCK_BYTES, 100)
    shard = write_shard(
        storage,
        generation_directory(number, attempt),
        rank,
        ranks,
        LAYOUT,
        part,
        block_bytes=BLOCK_BYTES,
        known=known,
    )
    return Acknowledgement(
        attempt=attempt,
        number=number,
        rank=rank,
        ranks=ranks,
        shard=shard,
        header_digest=digest_of(dump(header)),
        fingerprint=digest_of(state),
        tensor_fingerprints=("0" * 16,) * len(LAYOUT.tensors),
        header=header if rank == 0 else None,
    )


class Process:
    """A coordinator process: it knows what the log and the ranks' calls tell it, and no more."""

    def __init__(
        self,
        storage: Storage,
        writer: str,
        hear: Callable[[Fate], None],
        *,
        reads_back: bool = False,
    ) -> None:
        """Start it; it reads the log.

        Args:
            storage: The run's root.
            writer: Its name in the log.
            hear: Called with each answer, at the moment at which it leaves.
            reads_back: Whether ranks read one another's shards before anything is published.
        """
        self.storage = storage
        # Its own way of reading and opening, without its loop: what it trusts, this one trusts.
        self._service = Service(RUN, lambda: storage)
        history = self._service._open()
        self.log = self._service._log
        self.log.writer = writer
        self.machine = Coordinator(RUN, history, read_back=reads_back)
        self._hear = hear
        self._todo: deque[StorageAction] = deque()
        self._asked: deque[AskReadBack] = deque()
        self._calls: list[Acknowledgement] = []

    def open(self, token: str) -> int:
        """Open an attempt as the service does, and return its number."""
        attempt, history = self._service._append_attempt(token)
        self.tell(HistoryRead(history))
        return attempt

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Take a rank's word."""
        self._calls.append(ack)
        self.tell(AckReceived(ack, len(self._calls)))

    def work(self) -> None:
        """Do all that the machine asks of the storage, and of the ranks."""
        while self._todo or self._asked:
            if self._asked:
                self._read(self._asked.popleft())
                continue
            event = perform(self._todo.popleft(), self.storage, self.log)
            if event is not None:
                self.tell(event)

    def _read(self, asked: AskReadBack) -> None:
        """Be the rank that is asked: read, and call again."""
        word = self._calls[asked.call - 1]
        header = header_of_generation(word.number, word.attempt, word.ranks)
        read = read_back(self.storage, header, asked.shard)
        self.acknowledge(replace(word, read_back=read))

    def tell(self, event: Event) -> None:
        """Hand the machine an event."""
        for action in self.machine.handle(event, 0.0):
            if isinstance(action, Answer):
                self._hear(action.fate)
            elif isinstance(action, AskReadBack):
                self._asked.append(action)
            else:
                self._todo.append(action)


class Run:
    """Those who take part, and what they were promised.

    Attributes:
        witness: The promises.
        heard: Every answer, in order.
        after_death: Called when a process has died, before others go on.
    """

    def __init__(self, storage: Storage, witness: Witness | None = None, name: str = "w") -> None:
        """Begin or go on; nothing is read yet.

        Args:
            storage: The run's root.
            witness: What was promised before.
            name: Begins the names of writers and tokens.
        """
        self.storage = storage
        self.witness = witness or Witness()
        self.heard: list[Fate] = []
        self.after_death: Callable[[], None] = lambda: None
        self._name = name
        self._processes = 0
        self._tokens = 0
        self._process: Process | None = None
        self._pending_token: str | None = None
        self._attempt = 0
        self._number = 0
        self._words: dict[int, Acknowledgement] = {}
        self._rank_at_work = False
        self._before_record: Callable[[], None] | None = None
        self._reads_back = False
        self._refers = False
        self._line: Line = ()
        """What was published last, where the save after it has not failed."""
        self._shards: dict[int, ShardRecord] = {}

    # --- scenes -----------------------------------------------------------------------------------

    def open(self) -> None:
        """The driver opens an attempt; it repeats its token until it has an answer."""
        self._process = self._process or self._started()
        self._attempt = self._opened(self._process)
        self._words = {}

    def reopen(self) -> None:
        """All is started anew, with nothing but the log."""
        if self._pending_token is None:
            self._process = None
        self.open()

    def save(self) -> None:
        """Every rank writes and acknowledges; the generation is published."""
        self._write_shards()
        self._acknowledge()

    def save_more(self) -> None:
        """Every rank writes what has changed, and refers to the generation before for the rest."""
        self._refers = True
        try:
            self.save()
        finally:
            self._refers = False

    def save_more_retired(self) -> None:
        """As before; it is given up and pruned when the log is read and the record not created."""
        self._before_record, self._process = self._give_up, None
        try:
            self.save_more()
        finally:
            self._before_record, self._process = None, None

    def save_short(self) -> None:
        """A rank acknowledges a shard of which the storage has kept a part."""
        self._write_shards(short=1)
        self._acknowledge()

    def save_read_back(self) -> None:
        """Every rank writes, acknowledges, and reads the shard of the rank before."""
        self._reads_back, self._process = True, None
        try:
            self.save_more()
        finally:
            self._reads_back, self._process = False, None

    def save_flipped(self) -> None:
        """A bit of a shard turns between its rank and the storage; the ranks read back."""
        self._write_shards(turned=1)
        self.save_read_back()

    def save_overtaken(self) -> None:
        """A rival opens an attempt when the log is read and the record not yet created."""
        self._before_record, self._process = self._rival, None
        try:
            self.save()
        finally:
            self._before_record, self._process = None, None

    def rank_comes_late(self) -> None:
        """A rank of an attempt that is over finishes its shard, and says so."""
        attempt = self._attempt - 1
        if attempt in self.witness.attempts:
            words = self._word(1, 900, attempt)
            path = words.shard.path
            if not any(e.path == path for e in self.storage.list(f"generations/g900-a{attempt}")):
                write_and_word(self.storage, 1, ((900, attempt),))
            self._process = self._process or self._started()
            self._process.acknowledge(words)

    def prune(self) -> None:
        """The newest generation stays, the others go."""
        self._processes += 1
        log = CommitLog(self.storage, f"{self._name}-pruner-{self._processes}")
        Pruner(self.storage, Policy(1), log=log).prune(self._attempt)

    def go_on(self) -> None:
        """Nothing fails any more: a new attempt, a generation, a prune."""
        self.reopen()
        self._number = CommitLog(self.storage).read().next_number - 1
        self.save()
        self.prune()

    # --- playing ----------------------------------------------------------------------------------

    def play(self, scenes: Sequence[str]) -> None:
        """Play scenes; one that is broken off by a `Crash` is played again by those who live."""
        for scene in scenes:
            while True:
                try:
                    getattr(self, scene)()
                except Crash:
                    self._die()
                else:
                    break

    def _die(self) -> None:
        self.after_death()
        self._process = None
        if self._rank_at_work:
            # The worker group goes down with its rank, and the driver opens another attempt.
            self._rank_at_work = False
            self._words = {}
            self._pending_token = self._pending_token or self._new_token()
            self.open()

    # --- ranks ------------------------------------------------------------------------------------

    def _write_shards(self, short: int | None = None, turned: int | None = None) -> None:
        if not self._words:
            self._number += 1
        for rank in range(RANKS):
            if rank not in self._words:
                self._rank_at_work = True
                if rank in {short, turned}:
                    self._words[rank] = self._badly_written(rank, half=rank == short)
                else:
                    self._words[rank] = self._written(rank)
                self._rank_at_work = False

    def _written(self, rank: int) -> Acknowledgement:
        ack = self._write(rank, self.storage)
        kept = MemoryStorage()
        self._write(rank, kept)
        self.witness.shards |= kept.files
        return ack

    def _badly_written(self, rank: int, *, half: bool) -> Acknowledgement:
        kept = MemoryStorage()
        ack = self._write(rank, kept)
        data = kept.files[ack.shard.path]
        with self.storage.open_writer(ack.shard.path) as writer:
            writer.write(data[: len(data) // 2] if half else flipped(data, 8 * len(data) - 3))
            writer.finish()
        return ack

    @property
    def _now(self) -> Line:
        """The generation that is being saved, and what it came from."""
        return (*(self._line if self._refers else ()), (self._number, self._attempt))

    def _write(self, rank: int, storage: Storage) -> Acknowledgement:
        line = self._now
        base = self._shards[rank] if len(line) > 1 else None
        return write_and_word(storage, rank, line, base=base)

    def _word(self, rank: int, number: int, attempt: int) -> Acknowledgement:
        return write_and_word(MemoryStorage(), rank, ((number, attempt),))

    # --- coordinators -----------------------------------------------------------------------------

    def _acknowledge(self) -> None:
        self._process = self._process or self._started()
        for ack in list(self._words.values()):
            self._process.acknowledge(ack)
        self._process.work()
        # As in the product: what comes after a save that failed refers to nothing.
        line = self._now
        self._line = line if generation_name(*line[-1]) in self.witness.published else ()
        self._shards = {rank: ack.shard for rank, ack in self._words.items()}
        self._words = {}

    def _started(self) -> Process:
        self._processes += 1
        storage = self.storage
        if self._before_record is not None:
            storage = cast(Storage, _BeforeRecord(storage, self._before_record))
        name = f"{self._name}-{self._processes}"
        return Process(storage, name, self._hear, reads_back=self._reads_back)

    def _hear(self, fate: Fate) -> None:
        self.heard.append(fate)
        if fate.kind == "published" and fate.name not in self.witness.published:
            self.witness.published.append(fate.name)

    def _rival(self) -> None:
        self._before_record = None
        self._processes += 1
        rival = Process(self.storage, f"{self._name}-{self._processes}", self._hear)
        self._attempt = self._opened(rival)

    def _give_up(self) -> None:
        self._before_record = None
        self._processes += 1
        log = CommitLog(self.storage, f"{self._name}-{self._processes}")
        if self._line and self._line[-1] not in log.read().retired:
            log.append(RetireBody(*self._line[-1]), self._attempt)
        Pruner(self.storage, Policy(1), log=log).prune(self._attempt)

    def _opened(self, process: Process) -> int:
        self._pending_token = token = self._pending_token or self._new_token()
        attempt = process.open(token)
        self.witness.attempts[attempt] = token
        self._pending_token = None
        return attempt

    def _new_token(self) -> str:
        self._tokens += 1
        return f"{self._name}-token-{self._tokens}"


class _BeforeRecord:
    """A storage on which something happens between the reading of the log and the first record."""

    def __init__(self, inner: Storage, happens: Callable[[], None]) -> None:
        self._inner = inner
        self._happens: Callable[[], None] | None = happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, data: bytes) -> None:
        """As the inner one; what was agreed happens before."""
        new = not any(entry.path == path for entry in self._inner.list("log"))
        if path.startswith("log/") and new and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        self._inner.create(path, data)
