"""History: the protocol's rules, and what follows from the records."""

import pytest

from coherent_ray.commit.history import History, RecordRefused
from coherent_ray.commit.records import (
    AttemptBody,
    Body,
    PinBody,
    PublishBody,
    Record,
    RetireBody,
    kind_of,
)
from coherent_ray.digests import digest_of


def attempt(number: int, run_id: str = "run-1", token: str | None = None) -> AttemptBody:
    return AttemptBody(attempt=number, run_id=run_id, token=token or f"token-{number}")


def publish(number: int, of: int = 1, content: bytes = b"manifest") -> PublishBody:
    return PublishBody(
        number=number, attempt=of, update=10 * number, epoch=0,
        manifest=f"generations/g{number}-a{of}/manifest.json", manifest_size=len(content),
        manifest_digest=digest_of(content), receipts=None,
    )  # fmt: skip


def retire(number: int, of: int = 1) -> RetireBody:
    return RetireBody(number=number, attempt=of)


def pin(number: int, of: int = 1, pinned: bool = True) -> PinBody:
    return PinBody(number=number, attempt=of, pinned=pinned)


def told(*bodies: Body) -> History:
    history = History()
    for body in bodies:
        assert history.refusal(body) is None
        history = history.extended([history.successor(body, "writer")])
    return history


def test_nothing_said_is_nothing_there() -> None:
    empty = History()
    assert (empty.seq, empty.attempt, empty.run_id, empty.latest) == (0, 0, None, None)
    assert (empty.publishes, empty.live, empty.attempts) == ((), (), ())
    assert (empty.retired, empty.pinned, empty.next_number) == (frozenset(), frozenset(), 1)


def test_what_follows_from_the_records() -> None:
    history = told(
        attempt(1), publish(1), publish(2), attempt(3), publish(3, 3), pin(1), retire(3, 3),
    )  # fmt: skip
    assert history.seq == 7
    assert history.run_id == "run-1"
    assert history.attempt == 3
    assert [body.attempt for body in history.attempts] == [1, 3]
    assert [body.name for body in history.publishes] == ["g1-a1", "g2-a1", "g3-a3"]
    assert [body.name for body in history.live] == ["g1-a1", "g2-a1"]
    assert history.latest == publish(2)
    assert history.retired == {(3, 3)}
    assert history.pinned == {(1, 1)}
    assert history.next_number == 4
    assert history.publish_of(3, 3) == publish(3, 3)
    assert history.publish_of(3, 1) is None


def test_latest_is_what_was_published_last_not_what_has_the_highest_number() -> None:
    """A resume that fell back from g3 goes on from there."""
    assert told(attempt(1), publish(3), attempt(2), publish(2, 2)).latest == publish(2, 2)


def test_the_same_number_again_in_a_later_attempt_is_another_generation() -> None:
    history = told(attempt(1), publish(1), attempt(2), publish(1, 2))
    assert [body.name for body in history.live] == ["g1-a1", "g1-a2"]
    assert history.latest == publish(1, 2)


def test_a_history_does_not_change_when_another_grows_from_it() -> None:
    old = told(attempt(1), publish(1))
    new = old.extended([old.successor(retire(1), "writer")])
    assert old.latest == publish(1)
    assert old.retired == frozenset()
    assert new.latest is None
    assert old.extended([]) == old


@pytest.mark.parametrize(
    ("before", "body", "reason"),
    [
        ([], publish(1), "while attempt 0 is open"),
        ([], retire(1), "never published"),
        ([attempt(2)], attempt(2, token="x"), "cannot open after attempt 2"),
        ([attempt(2)], attempt(1), "cannot open after attempt 2"),
        ([attempt(1)], attempt(2, token="token-1"), "has opened attempt 1"),
        ([attempt(1)], attempt(2, "run-2"), "an attempt of run 'run-2'"),
        ([attempt(1), attempt(2)], publish(1, 1), "while attempt 2 is open"),
        ([attempt(1)], publish(1, 2), "while attempt 1 is open"),
        ([attempt(1), publish(1)], publish(1, content=b"other"), "already, with other content"),
        ([attempt(1), publish(2)], publish(1), "after g2-a1"),
        ([attempt(1)], retire(1), "never published"),
        ([attempt(1)], pin(1), "never published"),
        ([attempt(1), publish(1), retire(1)], retire(1), "retired already"),
        ([attempt(1), publish(1), retire(1)], pin(1), "retired already"),
        ([attempt(1), publish(1), pin(1)], retire(1), "pinned"),
    ],
)
def test_the_rules(before: list[Body], body: Body, reason: str) -> None:
    history = told(*before)
    said = history.refusal(body)
    assert said is not None
    assert reason in said
    with pytest.raises(RecordRefused) as caught:
        history.extended([history.successor(body, "writer")])
    assert caught.value.seq == len(before) + 1


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ([], attempt(5)),
        ([attempt(1)], attempt(7)),
        ([attempt(1), publish(5)], publish(6)),
        ([attempt(1), publish(5), attempt(2)], publish(5, 2)),
        ([attempt(1), publish(1), pin(1), pin(1, pinned=False)], retire(1)),
        ([attempt(1), publish(1), attempt(2)], retire(1)),
    ],
)
def test_what_the_rules_allow(before: list[Body], body: Body) -> None:
    assert told(*before, body).records[-1].body == body


def test_a_body_that_holds_already_is_found() -> None:
    bodies: list[Body] = [attempt(1), publish(1), publish(2), pin(1), retire(2)]
    history = told(*bodies)
    for seq, body in enumerate(bodies, 1):
        record = history.record_of(body)
        assert record is not None
        assert record.seq == seq
    for body in [attempt(2), publish(1, content=b"other"), pin(1, pinned=False), retire(1)]:
        assert history.record_of(body) is None


def test_a_pin_that_was_taken_back_does_not_hold() -> None:
    history = told(attempt(1), publish(1), pin(1), pin(1, pinned=False))
    assert history.record_of(pin(1)) is None
    assert history.record_of(pin(1, pinned=False)) == history.records[3]
    assert history.pinned == frozenset()


def _record(seq: int, previous: str | None, body: Body) -> Record:
    return Record(seq=seq, previous=previous, writer="w", kind=kind_of(body), body=body)


def test_the_chain_is_checked() -> None:
    history = told(attempt(1), publish(1))
    tip = history.records[-1].digest
    good = _record(3, tip, publish(2))
    assert history.extended([good]).seq == 3
    for record, reason in [
        (_record(4, tip, publish(2)), "says that it is record 4"),
        (_record(2, tip, publish(2)), "says that it is record 2"),
        (_record(3, history.records[0].digest, publish(2)), "chain"),
        (_record(3, digest_of(b"another log"), publish(2)), "chain"),
        (_record(1, None, attempt(2)), "says that it is record 1"),
    ]:
        with pytest.raises(RecordRefused, match=reason) as caught:
            history.extended([record])
        assert caught.value.seq == 3


def test_the_first_bad_record_of_several_is_the_one_that_is_named() -> None:
    history = told(attempt(1), publish(1), publish(2), publish(3))
    records = list(history.records)
    records[2] = _record(3, records[1].digest, publish(9))
    with pytest.raises(RecordRefused) as caught:
        History.of(records)
    assert caught.value.seq == 4


def test_of_builds_the_same_as_one_by_one() -> None:
    history = told(attempt(1), publish(1), publish(2), retire(1))
    again = History.of(history.records)
    assert again == history
    assert again.standing == history.standing
