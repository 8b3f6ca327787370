"""The machine, in every order in which its events can come."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from ranks import RUN, Ranks, Shell, check_published_is_whole

from coherent_ray.commit.ballot import QUOTED_PROBLEMS
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    AppendFailed,
    AppendPublish,
    CheckShards,
    HistoryRead,
    Key,
    ManifestFailed,
    ManifestWritten,
    PublishAppended,
    RefreshHint,
    ShardsChecked,
    Tick,
    WriteManifest,
)
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import History
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest, load
from coherent_ray.commit.records import AttemptBody
from coherent_ray.digests import digest_of
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
KEY = Key(attempt=1, number=1)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def shell(storage: MemoryStorage) -> Shell:
    shell = Shell(storage, ack_timeout_s=60.0)
    assert shell.open("first") == 1
    RANKS.write(storage)
    return shell


def opened(attempts: int = 1) -> History:
    history = History()
    for attempt in range(1, attempts + 1):
        body = AttemptBody(attempt=attempt, run_id=RUN, token=f"t{attempt}")
        history = history.extended([history.successor(body, "test")])
    return history


# --- the good path --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_acknowledgements_publishes(
    shell: Shell, storage: MemoryStorage, order: tuple[int, ...]
) -> None:
    calls = []
    for place, rank in enumerate(order):
        assert not shell.todo, f"something was asked for after {place} of 3 ranks"
        calls.append(shell.acknowledge(RANKS.ack(rank)))
    shell.run()
    assert [shell.answers[call] for call in calls] == [Fate("published", 1, 1, seq=2)] * 3
    assert check_published_is_whole(storage).latest.name == "g1-a1"


def test_the_steps_come_in_the_protocol_s_order(shell: Shell) -> None:
    for rank in range(3):
        shell.acknowledge(RANKS.ack(rank))
    steps = []
    while shell.todo:
        assert not shell.answers or isinstance(shell.todo[0], RefreshHint)
        steps.append(type(shell.step()))
    assert steps == [CheckShards, WriteManifest, AppendPublish, RefreshHint]


def test_what_is_published_is_what_the_ranks_said(shell: Shell, storage: MemoryStorage) -> None:
    shell.save(RANKS)
    (publish,) = CommitLog(storage).read().publishes
    manifest = load(Manifest, storage.read(publish.manifest))
    assert manifest.header == RANKS.header
    assert manifest.shards == tuple(RANKS.shard(rank) for rank in range(3))
    assert manifest.fingerprint == RANKS.ack(0).fingerprint
    assert (publish.update, publish.epoch) == (10, 0)
    assert publish.receipts == RANKS.header.receipts


def test_one_rank_alone_is_enough_where_there_is_one(shell: Shell, storage: MemoryStorage) -> None:
    alone = Ranks(ranks=1, number=2)
    alone.write(storage)
    assert [fate.kind for fate in shell.save(alone)] == ["published"]


def test_many_generations_in_a_row(shell: Shell, storage: MemoryStorage) -> None:
    for number in range(2, 12):
        group = Ranks(number=number, update=10 * number)
        group.write(storage)
        assert {fate.kind for fate in shell.save(group)} == {"published"}
    history = check_published_is_whole(storage)
    assert [p.number for p in history.publishes] == list(range(2, 12))


# --- repeated calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("place", range(8))
def test_a_repeated_acknowledgement_joins_wherever_it_comes(
    shell: Shell, storage: MemoryStorage, rank: int, place: int
) -> None:
    """Places: before and after each rank's word, each I/O step, and after the end."""
    events = [("ack", 0), ("ack", 1), ("ack", 2), *[("step", 0)] * 4, ("end", 0)]
    calls = []
    for index, (what, which) in enumerate(events):
        if index == place:
            calls.append(shell.acknowledge(RANKS.ack(rank)))
        if what == "ack":
            calls.append(shell.acknowledge(RANKS.ack(which)))
        elif shell.todo:
            shell.step()
    shell.run()
    assert {shell.answers[call].kind for call in calls} == {"published"}
    assert len(shell.answers) == 4
    assert len(check_published_is_whole(storage).publishes) == 1


@pytest.mark.parametrize("steps", range(4))
def test_another_word_from_the_same_rank_fails_unless_the_log_decides(
    shell: Shell, storage: MemoryStorage, steps: int
) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
    for _ in range(steps):
        shell.step()
    other = dataclasses.replace(RANKS.shard(1), digest="xxh3_128:" + "0" * 32)
    calls.append(shell.acknowledge(RANKS.ack(1, shard=other)))
    shell.run()
    kinds = {shell.answers[call].kind for call in calls}
    # From the moment that the append is on its way, only the log can tell.
    assert kinds == ({"failed"} if steps < 2 else {"published"})
    assert bool(check_published_is_whole(storage).publishes) == (steps >= 2)


def test_two_words_before_the_others_came_are_quoted(shell: Shell) -> None:
    other = dataclasses.replace(RANKS.shard(1), digest="xxh3_128:" + "0" * 32)
    first, second = (shell.acknowledge(ack) for ack in (RANKS.ack(1), RANKS.ack(1, shard=other)))
    fate = shell.answers[first]
    assert fate == shell.answers[second]
    assert fate.kind == "failed"
    assert fate.details == {
        "rank": 1, "first": RANKS.shard(1).digest, "second": other.digest,
    }  # fmt: skip
    assert other.digest in fate.reason
    assert RANKS.shard(1).digest in fate.reason


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "present", [c for n in (1, 2) for c in itertools.combinations(range(3), n)]
)
def test_a_time_out_names_the_missing_ranks(shell: Shell, present: tuple[int, ...]) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank), now=100.0 + rank) for rank in present]
    assert shell.machine.deadline == 160.0 + present[0]
    shell.tick(now=159.9 + present[0])
    assert not shell.answers
    shell.tick(now=160.0 + present[0])
    missing = [rank for rank in range(3) if rank not in present]
    for call in calls:
        assert shell.answers[call].kind == "failed"
        assert shell.answers[call].details == {"missing": missing}
        assert "did not acknowledge within 60 s" in shell.answers[call].reason
    assert shell.machine.deadline is None


def test_after_a_time_out_late_words_get_the_same_fate(
    shell: Shell, storage: MemoryStorage
) -> None:
    first = shell.acknowledge(RANKS.ack(0), now=0.0)
    shell.tick(now=60.0)
    late = [shell.acknowledge(RANKS.ack(rank), now=61.0) for rank in (0, 1, 2)]
    shell.run()
    assert {call: shell.answers[call] for call in late} == dict.fromkeys(late, shell.answers[first])
    assert not check_published_is_whole(storage).publishes


def test_a_generation_whose_words_are_complete_no_longer_times_out(shell: Shell) -> None:
    for rank in range(3):
        shell.acknowledge(RANKS.ack(rank), now=0.0)
    assert shell.machine.deadline is None
    shell.tick(now=1e9)
    shell.run()
    assert {fate.kind for fate in shell.answers.values()} == {"published"}


def test_a_failed_generation_does_not_poison_the_next(shell: Shell, storage: MemoryStorage) -> None:
    shell.acknowledge(RANKS.ack(0), now=0.0)
    shell.tick(now=60.0)
    following = Ranks(number=2)
    following.write(storage)
    assert {fate.kind for fate in shell.save(following)} == {"published"}


def test_the_machine_says_what_it_waits_for(shell: Shell) -> None:
    assert shell.machine.in_flight() == {}
    shell.acknowledge(RANKS.ack(0))
    assert shell.machine.in_flight() == {"g1-a1": "the acknowledgement of ranks 1 and 2"}
    shell.acknowledge(RANKS.ack(1))
    shell.acknowledge(RANKS.ack(2))
    seen = []
    while shell.machine.in_flight():
        seen.append(shell.machine.in_flight()["g1-a1"])
        shell.step()
    assert seen == ["the check of its shards", "its manifest", "its record in the commit log"]


# --- order among generations ----------------------------------------------------------------------


def test_an_overtaken_generation_fails(shell: Shell, storage: MemoryStorage) -> None:
    later = Ranks(number=2)
    later.write(storage)
    early = [shell.acknowledge(RANKS.ack(rank)) for rank in (0, 1)]
    assert {fate.kind for fate in shell.save(later)} == {"published"}
    early.append(shell.acknowledge(RANKS.ack(2)))
    shell.run()
    for call in early:
        assert shell.answers[call].kind == "failed"
        assert "g2-a1 was complete first" in shell.answers[call].reason
    assert check_published_is_whole(storage).latest.number == 2


def test_two_generations_at_once_are_published_in_order(
    shell: Shell, storage: MemoryStorage
) -> None:
    later = Ranks(number=2)
    later.write(storage)
    for rank in range(3):
        shell.acknowledge(RANKS.ack(rank))
        shell.acknowledge(later.ack(rank))
    shell.run()
    assert {fate.kind for fate in shell.answers.values()} == {"published"}
    assert [p.number for p in check_published_is_whole(storage).publishes] == [1, 2]


# --- attempts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(5))
def test_a_new_attempt_fences_what_is_not_yet_in_the_log(
    shell: Shell, storage: MemoryStorage, steps: int
) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
    for _ in range(steps):
        shell.step()
    assert shell.open("second") == 2
    shell.run()
    kinds = {shell.answers[call].kind for call in calls}
    assert kinds == ({"fenced"} if steps < 3 else {"published"})
    assert len(check_published_is_whole(storage).publishes) == (steps >= 3)


def test_what_waits_for_its_append_is_fenced_by_what_the_log_shows() -> None:
    """The log holds the later attempt and not the record, so the record can never come."""
    machine = machine_after_acks()
    machine.handle(ShardsChecked(KEY, ()), 0.0)
    machine.handle(ManifestWritten(KEY), 0.0)
    answers = machine.handle(HistoryRead(opened(attempts=2)), 0.0)
    assert [answer.fate.kind for answer in answers] == ["fenced"] * 3
    assert machine.handle(AppendFailed(KEY, "fenced", "fenced"), 0.0) == []


def test_an_older_attempt_s_word_is_fenced(shell: Shell) -> None:
    shell.open("second")
    call = shell.acknowledge(RANKS.ack(0))
    assert shell.answers[call].kind == "fenced"
    assert shell.answers[call].reason == "attempt 1 is over: attempt 2 has opened"


def test_an_older_attempt_s_published_generation_stays_published(shell: Shell) -> None:
    shell.save(RANKS)
    shell.open("second")
    call = shell.acknowledge(RANKS.ack(0))
    assert shell.answers[call] == Fate("published", 1, 1, seq=2)


def test_an_attempt_that_nobody_opened_is_refused(shell: Shell) -> None:
    call = shell.acknowledge(Ranks(attempt=7).ack(0))
    assert shell.answers[call].kind == "failed"
    assert "attempt 7 has not been opened" in shell.answers[call].reason


def test_the_same_number_in_two_attempts_is_two_generations(
    shell: Shell, storage: MemoryStorage
) -> None:
    shell.save(RANKS)
    shell.open("second")
    again = Ranks(attempt=2)
    again.write(storage)
    assert {fate.kind for fate in shell.save(again)} == {"published"}
    names = [p.name for p in check_published_is_whole(storage).publishes]
    assert names == ["g1-a1", "g1-a2"]


def test_an_attempt_s_token_opens_it_once(shell: Shell) -> None:
    assert shell.open("second") == 2
    assert shell.open("second") == 2
    assert shell.open("first") == 1
    assert shell.machine.attempt == 2
    assert shell.open("third") == 3


# --- the machine alone: failures that a shell reports ---------------------------------------------


def machine_after_acks() -> Coordinator:
    machine = Coordinator(RUN, opened())
    for rank in range(3):
        actions = machine.handle(AckReceived(RANKS.ack(rank), rank), 0.0)
    assert actions == [CheckShards(KEY, tuple(RANKS.shard(rank) for rank in range(3)))]
    return machine


def fates_of(actions: list[object]) -> set[tuple[str, str]]:
    return {(action.fate.kind, action.fate.reason) for action in actions}


def test_a_bad_shard_fails_the_generation() -> None:
    problems = tuple(f"shard {index} is missing" for index in range(QUOTED_PROBLEMS + 2))
    actions = machine_after_acks().handle(ShardsChecked(KEY, problems), 0.0)
    assert len(actions) == 3
    ((kind, reason),) = fates_of(actions)
    assert kind == "failed"
    assert reason.startswith("shard 0 is missing; ")
    assert reason.endswith("; and 2 more")
    assert actions[0].fate.details == {"problems": list(problems)}


def test_a_manifest_that_cannot_be_written_fails_the_generation() -> None:
    machine = machine_after_acks()
    machine.handle(ShardsChecked(KEY, ()), 0.0)
    actions = machine.handle(ManifestFailed(KEY, "no space is left"), 0.0)
    assert fates_of(actions) == {("failed", "the manifest was not written: no space is left")}


@pytest.mark.parametrize(
    ("outcome", "kind", "uncertain"),
    [("fenced", "fenced", None), ("refused", "failed", False), ("unknown", "failed", True)],
)
def test_an_append_that_failed_says_how_sure_it_is(
    outcome: str, kind: str, uncertain: bool | None
) -> None:
    machine = machine_after_acks()
    machine.handle(ShardsChecked(KEY, ()), 0.0)
    (append,) = machine.handle(ManifestWritten(KEY), 0.0)
    assert isinstance(append, AppendPublish)
    actions = machine.handle(AppendFailed(KEY, "the reason", outcome), 0.0)
    assert {action.fate.kind for action in actions} == {kind}
    assert all("the reason" in action.fate.reason for action in actions)
    assert actions[0].fate.details.get("uncertain") is uncertain


def test_the_append_names_the_manifest_that_was_written() -> None:
    machine = machine_after_acks()
    (write,) = machine.handle(ShardsChecked(KEY, ()), 0.0)
    (append,) = machine.handle(ManifestWritten(KEY), 0.0)
    assert isinstance(write, WriteManifest)
    assert (append.body.manifest, append.body.manifest_size) == (write.path, len(write.data))
    assert append.body.manifest_digest == digest_of(write.data)


def test_what_is_published_after_all_is_said_to_be() -> None:
    """An append whose answer was lost for good, and whose record is found later."""
    machine = machine_after_acks()
    machine.handle(ShardsChecked(KEY, ()), 0.0)
    (append,) = machine.handle(ManifestWritten(KEY), 0.0)
    machine.handle(AppendFailed(KEY, "gone", "unknown"), 0.0)
    history = opened()
    history = history.extended([history.successor(append.body, "test")])
    machine.handle(HistoryRead(history), 0.0)
    (answer,) = machine.handle(AckReceived(RANKS.ack(2), 9), 0.0)
    assert answer.fate == Fate("published", 1, 1, seq=2)


def test_the_log_can_publish_what_this_machine_only_staged() -> None:
    """A process of the same attempt that was thought dead finished it."""
    twin = machine_after_acks()
    twin.handle(ShardsChecked(KEY, ()), 0.0)
    (append,) = twin.handle(ManifestWritten(KEY), 0.0)
    history = opened()
    history = history.extended([history.successor(append.body, "twin")])
    machine = Coordinator(RUN, opened())
    machine.handle(AckReceived(RANKS.ack(1), 5), 0.0)
    answer, hint = machine.handle(HistoryRead(history), 0.0)
    assert (answer.call, answer.fate) == (5, Fate("published", 1, 1, seq=2))
    assert isinstance(hint, RefreshHint)


@pytest.mark.parametrize(
    "event",
    [
        ShardsChecked(KEY, ()),
        ShardsChecked(KEY, ("bad",)),
        ManifestWritten(KEY),
        ManifestFailed(KEY, "bad"),
        AppendFailed(KEY, "bad", "fenced"),
        AppendFailed(KEY, "bad", "unknown"),
        Tick(),
    ],
)
def test_an_event_that_comes_too_early_or_too_late_changes_nothing(event: object) -> None:
    unheard = Coordinator(RUN, opened())
    assert unheard.handle(event, 0.0) == []
    settled = Coordinator(RUN, opened())
    settled.handle(AckReceived(RANKS.ack(0), 1), 0.0)
    settled.handle(Tick(), 1e9)
    assert settled.handle(event, 1e9) == []
    published = machine_after_acks()
    published.handle(PublishAppended(KEY, 2), 0.0)
    assert published.handle(event, 0.0) == []
    (answer,) = published.handle(AckReceived(RANKS.ack(0), 9), 0.0)
    assert answer.fate.kind == "published"


def test_a_machine_without_a_log_refuses_every_word() -> None:
    (answer,) = Coordinator(RUN).handle(AckReceived(RANKS.ack(0), 1), 0.0)
    assert answer.fate.kind == "failed"
