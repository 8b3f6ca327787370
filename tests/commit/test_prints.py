"""Prints: how many tell of a replica, and which tensors each stands for."""

import dataclasses

import pytest
from ranks import Ranks
from test_ballot import OTHER

from coherent_ray.commit import ballot, prints
from coherent_ray.commit.events import Key
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import StateLayout, TensorSpec, dump


@pytest.mark.parametrize(
    ("tensors", "ranks", "each"),
    [(0, 8, 1), (1, 1, 1), (100_000, 8, 1), (1000, 4096, 1), (1000, 16_384, 4),
     (100_000, 65_536, 1563)],
)  # fmt: skip
def test_all_ranks_together_send_a_bounded_number(tensors: int, ranks: int, each: int) -> None:
    assert prints.tensors_a_print(tensors, ranks) == each
    sent = prints.prints_of(tuple(f"{i:016x}" for i in range(tensors)), ranks)
    assert len(sent) == -(-tensors // each)
    assert len(sent) * ranks <= max(prints.MOST, 64 * ranks)
    assert all(len(mark) == 16 for mark in sent)


def test_a_print_of_several_tensors_tells_of_each() -> None:
    hexes = tuple(f"{i:016x}" for i in range(10_000))
    before = prints.prints_of(hexes, 65_536)
    for place in (0, 157, 9_999):
        changed = (*hexes[:place], "f" * 16, *hexes[place + 1 :])
        after = prints.prints_of(changed, 65_536)
        differ = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert differ == [place // 157]
        words, meant = prints.named([f"t{i}" for i in range(10_000)], differ[0], 65_536)
        assert f"t{place}" in meant
        assert words.startswith("one of the")


def test_a_divergence_among_many_ranks_names_the_tensors_among_which_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prints, "_LEAST", 2)
    monkeypatch.setattr(prints, "MOST", 6)
    layout = StateLayout(tuple(TensorSpec(f"t{i}", "F32", (64,)) for i in range(4)))
    group = Ranks(ranks=3)
    header = dataclasses.replace(group.header, layout=layout)
    staged = ballot.Staged(Key(1, 1), header.run_id, 3, 0.0)
    for rank in range(3):
        sent = ("a" * 16, "b" * 16) if rank != 1 else ("a" * 16, "c" * 16)
        changes: dict[str, object] = {"fingerprint": OTHER} if rank == 1 else {}
        changes["header_digest"] = ballot.digest_of(dump(header))
        changes["header"] = header if rank == 0 else None
        word = group.ack(rank, tensor_fingerprints=sent, **changes)
        assert staged.add(word) is None
    fate = staged.decide()
    assert isinstance(fate, Fate)
    assert fate.kind == "diverged"
    assert "rank 1 has another state" in fate.reason
    assert "one of the 2 from 't2' to 't3'" in fate.reason
    assert fate.details["tensors"] == ["t2", "t3"]
