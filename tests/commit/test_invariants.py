"""The invariants hold of a sound run, and each of them fails where it should, under its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks import Ranks, Shell

from coherent_ray import canonical
from coherent_ray.commit.testing.invariants import (
    INVARIANTS,
    Broken,
    Witness,
    check_all,
    damage_is_never_selected,
)
from coherent_ray.storage.testing.memory import MemoryStorage

SHARD = "generations/g2-a1/shard-00000-of-00002.safetensors"


def sound() -> tuple[MemoryStorage, Witness]:
    storage = MemoryStorage()
    shell = Shell(storage)
    witness = Witness(attempts={shell.open("token"): "token"})
    for number in (1, 2, 3):
        group = Ranks(ranks=2, number=number, update=10 * number)
        group.write(storage)
        witness.shards |= {group.shard(rank).path: group.content(rank) for rank in range(2)}
        if number < 3:
            shell.save(group)
            witness.published.append(f"g{number}-a1")
    return storage, witness


def unpublish(storage: MemoryStorage) -> None:
    del storage.files["log/00000000000000000003.json"]


def gap(storage: MemoryStorage) -> None:
    del storage.files["log/00000000000000000002.json"]


def reopened(storage: MemoryStorage) -> None:
    for seq in (1, 2, 3):
        del storage.files[f"log/{seq:020d}.json"]
    del storage.files["latest.json"]
    Shell(storage).open("another-token")


def torn(storage: MemoryStorage) -> None:
    storage.files[SHARD] = storage.files[SHARD][:-1] + b"?"


def lost_word(storage: MemoryStorage) -> None:
    del storage.files[SHARD.replace("g2", "g3")]


def ahead(storage: MemoryStorage) -> None:
    hint = canonical.load(storage.files["latest.json"])
    storage.files["latest.json"] = canonical.dump(hint | {"seq": 9})


BREAKS: dict[str, Callable[[MemoryStorage], None]] = {
    "the_log_chain_holds": gap,
    "latest_never_goes_back": unpublish,
    "attempts_are_given_once": reopened,
    "acknowledgements_are_true": lost_word,
    "latest_is_whole": torn,
    "the_hint_is_not_ahead": ahead,
}


def test_all_hold_of_a_sound_run_and_of_nothing() -> None:
    check_all(*sound())
    check_all(MemoryStorage())
    damage_is_never_selected(*sound())


@pytest.mark.parametrize("name", BREAKS)
def test_each_fails_under_its_name(name: str) -> None:
    storage, witness = sound()
    BREAKS[name](storage)
    check = next(check for check in INVARIANTS if check.__name__ == name)
    with pytest.raises(Broken, match=name) as raised:
        check(storage, witness)
    assert raised.value.invariant == name


def test_a_reader_that_is_given_other_bytes_is_noticed() -> None:
    storage, witness = sound()
    witness.shards[SHARD] = b"what the rank wrote"
    check = next(check for check in INVARIANTS if check.__name__.startswith("no_reader"))
    with pytest.raises(Broken, match="no_reader_selects_what_is_torn_or_foreign"):
        check(storage, witness)


def test_damage_that_a_reader_turns_away_from_is_no_fault_of_its() -> None:
    storage, witness = sound()
    torn(storage)
    damage_is_never_selected(storage, witness)
