"""Boundaries: numbers, receipts and headers of generation after generation, whatever their fate."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import CPU, config_for, request_for
from test_saving import WAIT_S, ScriptedLine

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import DataPosition, GenerationHeader, ReceiptSegment
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.errors import Fenced, SaveFailed
from coherent_ray.state import chunks
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import Fingerprint, fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.storage import open_storage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train.admit import Admitted, find_out
from coherent_ray.train.boundaries import Boundaries
from coherent_ray.train.receipts import ReceiptChain, decode, first_link
from coherent_ray.train.saving import Saver

pytestmark = pytest.mark.usefixtures("one_process")


class Run:
    """One rank's boundaries after a start, with a coordinator that follows a script."""

    def __init__(self, admitted: Admitted, kinds: list[str], **options: Any) -> None:
        self.line = ScriptedLine(kinds)
        self.storage = MemoryStorage()
        self.chain = ReceiptChain(admitted.receipt_tip, 0)
        self.admitted = admitted
        chosen = admitted.config.checkpoint.model_copy(update=options)
        saver = Saver(self.storage, admitted.rank, chosen, self.line)
        self.boundaries = Boundaries(admitted, saver, self.chain)
        self.state = State({"model/weight": torch.ones(4)}, {"scheduler": {"steps": [0]}})

    def train(self, updates: int = 1) -> None:
        for _ in range(updates):
            number = self.chain.update + 1
            self.chain.append(
                epoch=0, start=8 * (number - 1), stop=8 * number, ids=digest_of(b"ids"), count=8,
                loss=1.0 / number, grad_norm=1.0, lr=[0.1],
            )  # fmt: skip
            self.state.tensors["model/weight"].add_(1)

    def save(self) -> None:
        self.boundaries.save(self.position, self.state)

    def finish(self) -> None:
        self.boundaries.finish(self.position, self.state)

    @property
    def position(self) -> DataPosition:
        return DataPosition(0, 8 * self.chain.update, self.chain.update)

    @property
    def headers(self) -> list[GenerationHeader]:
        return [word.header for word in self.line.words if word.header is not None]

    @property
    def segments(self) -> list[tuple[int, int] | None]:
        """First and last update of each generation's receipts."""
        return [(h.receipts.first, h.receipts.last) if h.receipts else None for h in self.headers]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path)


def admitted(config: Config, rank: int = 0, ranks: int = 1) -> Admitted:
    CommitLog(open_storage(config.run.root)).open_attempt("small", "token")
    return find_out(request_for(config, 1), rank, ranks, CPU)


@pytest.fixture
def start(config: Config) -> Admitted:
    return admitted(config)


def test_what_a_boundary_says(start: Admitted) -> None:
    run = Run(start, [])
    run.train(3)
    run.save()
    run.finish()
    [header] = run.headers
    assert (header.number, header.attempt, header.run_id) == (1, 1, "small")
    assert (header.claim, header.ranks) == ("invariant", 1)
    assert header.position == DataPosition(0, 24, 3)
    assert header.plan == start.plan.identity
    assert header.environment == start.environment
    assert header.receipt_tip == run.chain.tip
    assert header.values == {"scheduler": {"steps": [0]}}
    assert header.recipe["task.factory"] == '"small_run:Tiny"'
    assert isinstance(header.receipts, ReceiptSegment)
    receipts = decode(run.storage.files[header.receipts.path])
    assert [r.update for r in receipts] == [1, 2, 3]
    assert receipts[0].previous == first_link(start.plan.identity)
    # Only the update that a generation holds names a state.
    assert [r.state for r in receipts] == [None, None, run.line.words[0].fingerprint]


def test_numbers_count_up_whatever_becomes_of_them(start: Admitted) -> None:
    run = Run(start, ["published", "failed", "published", "failed"])
    for _ in range(4):
        run.train()
        run.save()
    run.finish()
    assert [header.number for header in run.headers] == [1, 2, 3, 4, 5]
    assert [saved.name for saved in run.boundaries.saves] == [f"g{n}-a1" for n in range(1, 6)]


def test_receipts_cover_everything_since_the_last_published_generation(start: Admitted) -> None:
    run = Run(start, ["published", "failed", "failed", "published", "published"])
    for updates in (2, 3, 1, 1, 2):
        run.train(updates)
        run.save()
    run.finish()
    # 3 and 6 to 7 were said by generations that failed, so the next ones say them again.
    assert run.segments == [(1, 2), (3, 5), (3, 6), (3, 7), (8, 9)]
    assert run.chain.pending == ()
    tips = [header.receipt_tip for header in run.headers]
    assert len(set(tips)) == 5
    assert tips[-1] == run.chain.tip


def test_a_save_is_settled_only_at_the_next_boundary(start: Admitted) -> None:
    run = Run(start, [])
    run.line.gate = threading.Event()
    run.train()
    run.save()
    assert (run.boundaries.published, run.boundaries.saves) == (None, [])
    assert len(run.chain.pending) == 1
    run.line.gate.set()
    run.train()
    run.save()
    assert run.boundaries.published == "g1-a1"
    assert [saved.update for saved in run.boundaries.saves] == [1]
    assert [r.update for r in run.chain.pending] == [2]
    run.finish()
    assert run.boundaries.published == "g2-a1"
    assert len(run.boundaries.stalls_s) == 2
    assert all(0 < stall < WAIT_S for stall in run.boundaries.stalls_s)


def test_the_wait_for_the_last_save_counts_as_stall(start: Admitted) -> None:
    run = Run(start, [])
    run.line.gate = threading.Event()
    run.train()
    run.save()
    threading.Timer(0.1, run.line.gate.set).start()
    run.train()
    run.save()
    run.finish()
    assert run.boundaries.stalls_s[1] > 0.05


def test_a_header_does_not_follow_live_values(start: Admitted) -> None:
    run = Run(start, [])
    run.line.gate = threading.Event()
    run.train()
    run.save()
    run.state.values["scheduler"]["steps"].append(99)
    run.line.gate.set()
    run.finish()
    assert run.headers[0].values == {"scheduler": {"steps": [0]}}


def test_a_generation_without_new_updates_has_no_receipts(start: Admitted) -> None:
    run = Run(start, [])
    run.train(2)
    run.save()
    run.save()
    run.finish()
    assert run.segments == [(1, 2), None]
    assert run.headers[0].receipt_tip == run.headers[1].receipt_tip


def test_the_end_is_tried_again_until_it_is_published(start: Admitted) -> None:
    run = Run(start, ["failed", "failed", "published"], max_failed_saves=2)
    run.train(4)
    run.save()
    run.finish()
    assert run.boundaries.published == "g3-a1"
    assert run.segments == [(1, 4)] * 3
    assert [saved.fate.kind for saved in run.boundaries.saves] == ["failed", "failed", "published"]


def test_the_end_gives_up_where_the_configuration_says_so(start: Admitted) -> None:
    run = Run(start, ["failed"] * 9, max_failed_saves=2)
    run.train(4)
    run.save()
    with pytest.raises(SaveFailed, match="3 saves in a row failed"):
        run.finish()
    assert run.boundaries.published is None


def test_an_end_that_has_nothing_in_flight_is_an_end(start: Admitted) -> None:
    run = Run(start, [])
    run.finish()
    assert run.line.words == []


def test_a_fence_stops_training_at_the_next_boundary(start: Admitted) -> None:
    run = Run(start, ["fenced"])
    run.train()
    run.save()
    run.train()
    with pytest.raises(Fenced):
        run.save()
    assert [word.number for word in run.line.words] == [1]


def test_closing_waits_only_where_somebody_is_there_to_answer(start: Admitted) -> None:
    run = Run(start, [])
    run.line.gate = threading.Event()
    run.train()
    run.save()
    run.boundaries.close(wait=False)
    assert run.line.words == []
    run.line.gate.set()
    run.boundaries.close(wait=True)
    assert [word.number for word in run.line.words] == [1]


def test_all_ranks_say_the_same_without_a_message(config: Config) -> None:
    """Two ranks over one history: their headers are equal to the last byte."""
    one, other = (Run(admitted(config, rank, 2), ["published", "failed"]) for rank in range(2))
    for run in (one, other):
        for _ in range(3):
            run.train(2)
            run.save()
        run.finish()
    said = [[word.header_digest for word in run.line.words] for run in (one, other)]
    assert said[0] == said[1]
    assert len(set(said[0])) == 3
    assert other.headers == []
    assert not any(path.startswith("receipts/") for path in other.storage.files)


def large(seed: int) -> dict[str, torch.Tensor]:
    """A state of many chunks, of which some lie across the edges of the ranks' parts."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(9_001, generator=generator),
        "model/turned": torch.randn(31, 77, generator=generator).t(),
        "model/half": torch.randn(5_000, generator=generator).bfloat16(),
        "optimizer/step": torch.tensor(float(seed)),
    }


def states_said(folder: Path, ranks: int) -> list[list[str | None]]:
    """Save three times, the second time in vain; return what each segment names of states."""
    folder /= f"{ranks}"
    folder.mkdir()
    config = config_for(folder)
    runs = [Run(admitted(config, r, ranks), ["published", "failed"]) for r in range(ranks)]
    for run in runs:
        for update in range(1, 4):
            run.train(2)
            run.state = State(large(update), {})
            run.save()
        run.finish()
    words = [[(w.header_digest, w.fingerprint) for w in run.line.words] for run in runs]
    # The header has the digest of the segment, so every rank has sealed the same lines.
    assert words == [words[0]] * ranks
    expected = [fingerprint(layout_of(large(n)), large(n)).digest for n in (1, 2, 3)]
    assert [found for _, found in words[0]] == expected
    files = [runs[0].storage.files[h.receipts.path] for h in runs[0].headers if h.receipts]
    return [[receipt.state for receipt in decode(data)] for data in files]


def test_every_rank_count_names_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    first, second, third = (fingerprint(layout_of(large(n)), large(n)).digest for n in (1, 2, 3))
    for ranks in (1, 2, 3):
        # The one that failed holds no state, so the next segment names none of its update.
        assert states_said(tmp_path, ranks) == [
            [None, first], [None, second], [None, None, None, third],
        ]  # fmt: skip


def test_what_is_appended_meanwhile_is_not_in_the_segment(start: Admitted) -> None:
    """Receipts are encoded behind training, which goes on."""
    run = Run(start, [])
    run.line.gate = threading.Event()
    sealing = threading.Event()
    original = run.boundaries._prints

    def late(*given: Any) -> Any:
        layout, finish = original(*given)

        def wait(copy: memoryview) -> Fingerprint:
            assert sealing.wait(WAIT_S)
            return finish(copy)

        return layout, wait

    run.boundaries._prints = late  # type: ignore[method-assign]
    run.train(2)
    tip, state = run.chain.tip, run.state.tensors["model/weight"].clone()
    run.save()
    run.train(3)
    sealing.set()
    run.line.gate.set()
    run.finish()
    assert run.segments == [(1, 2)]
    assert run.headers[0].receipt_tip == tip
    was = {"model/weight": state}
    assert run.line.words[0].fingerprint == fingerprint(layout_of(was), was).digest
    assert [r.update for r in run.chain.pending] == [3, 4, 5]
