"""A damaged log is never believed: the file is named, and up to where the log can be read."""

from collections.abc import Callable

import pytest
from logs import started
from test_history import publish

from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.records import encode
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.testing.faults import FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage


def test_any_bit_that_flips_in_any_record_is_found() -> None:
    whole = started(2)
    for seq in (1, 2, 3):
        data = whole.files[record_path(seq)]
        for bit in range(0, 8 * len(data), 7):
            storage = MemoryStorage()
            storage.files = {**whole.files, record_path(seq): flipped(data, bit)}
            with pytest.raises(LogDamaged) as caught:
                CommitLog(storage).read()
            assert caught.value.where == record_path(seq)
            assert caught.value.details == {"readable_until": seq - 1}
            assert seq == 1 or f"{seq - 1} can be read." in caught.value.remedy


@pytest.mark.parametrize("read", [lambda log: log.read(), lambda log: log.append(publish(9), 1)])
def test_a_gap_is_found_and_never_filled(read: Callable[[CommitLog], object]) -> None:
    for seq in (1, 2, 3):
        storage = started(3)
        del storage.files[record_path(seq)]
        with pytest.raises(LogDamaged, match="missing") as caught:
            read(CommitLog(storage))
        assert caught.value.details == {"readable_until": seq - 1}
        assert record_path(seq) not in storage.files


def test_records_in_the_wrong_place_are_found() -> None:
    whole, other = started(3), started(3)
    del other.files[record_path(2)]
    for damage in [
        {record_path(3): whole.files[record_path(2)]},
        {record_path(2): whole.files[record_path(3)]},
        {record_path(1): whole.files[record_path(2)]},
        {record_path(5): whole.files[record_path(4)]},
    ]:
        storage = MemoryStorage()
        storage.files = {**whole.files, **damage}
        with pytest.raises(LogDamaged):
            CommitLog(storage).read()


def test_another_runs_record_is_found_by_the_chain() -> None:
    mine, theirs = started(3), MemoryStorage()
    log = CommitLog(theirs)
    log.open_attempt("run-1", "another-token")
    log.append(publish(1), 1)
    mine.files[record_path(2)] = theirs.files[record_path(2)]
    with pytest.raises(LogDamaged, match="chain") as caught:
        CommitLog(mine).read()
    assert caught.value.where == record_path(2)


def test_a_record_that_breaks_the_rules_is_found_by_every_reader() -> None:
    """Written by a writer that did not ask: right chain, right digest, wrong all the same."""
    storage = started()
    rogue = CommitLog(storage).read().successor(publish(5, 4), "rogue")
    storage.files[record_path(3)] = encode(rogue)
    with pytest.raises(LogDamaged, match="while attempt 1 is open"):
        CommitLog(storage).read()


def test_other_files_beside_the_records_are_nobodys_business() -> None:
    storage = started()
    for name in ("log/README", "log/1.json", f"log/{7:020d}.json.bak", f"log/sub/{7:020d}.json"):
        storage.files[name] = b"?"
    assert CommitLog(storage).read().seq == 2


def test_a_view_keeps_what_it_has_checked() -> None:
    """A long-lived writer reads what is new; a reader that must know reads all."""
    storage = FaultyStorage(started(5))
    log = CommitLog(storage)
    log.settled()
    storage.calls.clear()
    log.append(publish(6), 1)
    # Before it and behind it, the last record is looked for: the root may have vanished.
    assert [verb for verb, _ in storage.calls] == ["read", "read", "create", "read"]
    storage.calls.clear()
    log.read()
    assert len([path for verb, path in storage.calls if verb == "read"]) == 8


@pytest.mark.parametrize(
    ("seq", "end"),
    [(1, "copy of the run."), (2, "; record 1 can be read."), (3, "; records 1 to 2 can be read.")],
)
def test_a_record_that_is_cut_off_is_told_in_plain_words(seq: int, end: str) -> None:
    storage = started(2)
    storage.files[record_path(seq)] = storage.files[record_path(seq)][:-20]
    with pytest.raises(LogDamaged, match="the record is damaged: it is cut off, or no JSON") as e:
        CommitLog(storage).read()
    assert e.value.remedy.endswith(end)
