"""Boundaries: where an update ends and a generation may begin.

Puts together what a generation says (position, plan, layout, values, environment, receipts) and
hands it to the saver. Every rank does the same with the same numbers: generation numbers follow
from the history and are counted up at each save, so no message is needed to agree on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from coherent_ray import canonical
from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    StateLayout,
    format_of,
    generation_name,
)
from coherent_ray.commit.timings import Why
from coherent_ray.digests import Digest
from coherent_ray.errors import CoherentRayError
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import Fingerprint, begin, fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.parts import extended
from coherent_ray.train.admit import Admitted
from coherent_ray.train.cadence import Cadence
from coherent_ray.train.collectives import sum_over_ranks
from coherent_ray.train.failures import Past, past_of
from coherent_ray.train.receipts import ReceiptChain, Segment, segment_of
from coherent_ray.train.recipe import recipe_of
from coherent_ray.train.saving import Saved, Saver
from coherent_ray.train.sealing import Boundary

#: Saves of an attempt that are remembered one by one, the newest ones.
REMEMBERED = 64


class Boundaries:
    """One rank's boundaries. For the training thread."""

    def __init__(self, admitted: Admitted, saver: Saver, chain: ReceiptChain) -> None:
        self._admitted = admitted
        self._saver = saver
        self._chain = chain
        self._number = admitted.next_number
        durable = admitted.durable
        self.published: str | None = durable.name if durable else None
        """The newest generation that this rank knows to be published."""
        self.saves: list[Saved] = []
        """The saves of this attempt whose fate is known, the last `REMEMBERED` of them."""
        self.lost_s: dict[str, float] = {}
        """Seconds that training lost beside a save, by generation, where it can be told."""
        self.cadence = Cadence(admitted.config.checkpoint, admitted.rank, self, _past(admitted))
        """When it is time to save."""

    @property
    def stalls_s(self) -> list[float]:
        """Seconds that training stood still for each of these saves, and for one in flight."""
        return self._saver.stalls_s

    @property
    def saving(self) -> bool:
        """Whether a save goes on behind the training."""
        return self._saver.in_flight

    @property
    def patient(self) -> bool:
        """Whether one goes on that nobody has to give up."""
        return self._saver.patient

    @property
    def landed(self) -> Saved | None:
        """The newest save whose fate is known."""
        return self._saver.landed

    def save(self, position: DataPosition, state: State, why: Why = "due") -> None:
        """Begin a generation; the save before it is settled first.

        Args:
            position: What is read next.
            state: References to the live state at this boundary.
            why: Told of the save.

        Raises:
            SaveFailed: More saves in a row failed than allowed; or a subclass.
        """
        since = time.monotonic()
        self._settle()
        waited = time.monotonic() - since
        self.note_loss()
        boundary = self._boundary(position, state, waited, why)
        name = generation_name(boundary.header.number, boundary.header.attempt)
        self.cadence.saved(name, self._saver.begin(state, boundary, since) - waited)
        del self.stalls_s[:-REMEMBERED]

    def note_loss(self) -> None:
        """Take down what the last save has cost beside its stall, where that is known now."""
        if lost := self.cadence.lost():
            self.lost_s[lost[0]] = lost[1]
            for name in list(self.lost_s)[:-REMEMBERED]:
                del self.lost_s[name]

    def finish(self, position: DataPosition, state: State, why: Why = "end") -> None:
        """Return once the state at this boundary is published.

        Args:
            position: What would be read next.
            state: References to the live state at this boundary.
            why: Told of a save that has to be repeated.

        Raises:
            SaveFailed: More saves in a row failed than allowed; or a subclass.
        """
        while True:
            saved = self._settle()
            if saved is None or saved.fate.kind == "published":
                return
            self._saver.wait_for_storage()
            self.save(position, state, why)

    def conclude(self) -> str | None:
        """Wait for the save in flight, and return what it published; None: nothing.

        Raises:
            SaveFailed: More saves in a row failed than allowed; or a subclass.
        """
        saved = self._settle()
        return saved.name if saved is not None and saved.fate.kind == "published" else None

    def close(self, *, wait: bool) -> None:
        """End the thread behind training.

        Args:
            wait: Let the save in flight finish; a group that failed has nobody to finish it with.
        """
        if wait:
            self._saver.close()

    def _settle(self) -> Saved | None:
        saved = self._saver.settle()
        if saved is None:
            return None
        self.saves.append(saved)
        del self.saves[:-REMEMBERED]
        if saved.fate.kind == "published":
            self.published = saved.name
            self._chain.published(saved.update)
        return saved

    def _boundary(
        self, position: DataPosition, state: State, waited_s: float, why: Why
    ) -> Boundary:
        admitted = self._admitted
        number, self._number = self._number, self._number + 1
        layout = layout_of(state.tensors)
        begun = time.monotonic()
        layout, prints = self._prints(state, layout)
        fingerprint_s = time.monotonic() - begun
        name, pending = generation_name(number, admitted.attempt), self._chain.pending
        # No receipt names the digest of a state in the middle of an update.
        named = not state.parts

        def segment(digest: Digest) -> Segment | None:
            return segment_of(pending, name, digest if named else None)

        header = self._header(number, position, state, layout)
        about = self.cadence.about(why)
        return Boundary(header, prints, segment, waited_s, fingerprint_s, about)

    def _prints(
        self, state: State, layout: StateLayout
    ) -> tuple[StateLayout, Callable[[memoryview], Fingerprint]]:
        """Return the layout of what is stored, and what completes the fingerprint from the copy."""
        rank, ranks = self._admitted.rank, self._admitted.ranks
        if state.parts:
            whole = fingerprint(layout, state.tensors, _add_ranks)
            layout, prints = extended(layout, whole, state.parts)
            return layout, lambda copy: prints
        own = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
        return layout, begin(layout, state.tensors, _add_ranks, own).finish

    def header(self, position: DataPosition, state: State, layout: StateLayout) -> GenerationHeader:
        """Return the header that a generation at this boundary would have, without receipts.

        Args:
            position: What is read next.
            state: At this boundary.
            layout: Its own.
        """
        return self._header(self._number, position, state, layout)

    def _header(
        self, number: int, position: DataPosition, state: State, layout: StateLayout
    ) -> GenerationHeader:
        admitted = self._admitted
        recipe = recipe_of(admitted.config, admitted.code) | admitted.origin
        return GenerationHeader(
            format=format_of(layout),
            run_id=admitted.run_id,
            number=number,
            attempt=admitted.attempt,
            claim=admitted.config.run.claim,
            ranks=admitted.ranks,
            position=position,
            plan=admitted.plan.identity,
            layout=layout,
            # Through JSON and back: a later change of a live value must not reach this header.
            values=canonical.load(canonical.dump(state.values)),
            environment=admitted.environment,
            recipe=dict(sorted(recipe.items())),
            receipt_tip=self._chain.tip,
            receipts=None,
        )


def _add_ranks(sums: torch.Tensor) -> None:
    sum_over_ranks(sums, None)


def _past(admitted: Admitted) -> Past | None:
    """Return what earlier attempts have seen, where somebody asks for it and it can be read."""
    if admitted.rank == 0 and admitted.config.checkpoint.every is not None:
        with suppress(CoherentRayError):
            return past_of(admitted.storage, admitted.log.read_on(), admitted.attempt)
    return None
