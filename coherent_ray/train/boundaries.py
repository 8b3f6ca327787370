"""Boundaries: where an update ends and a generation may begin.

Puts together what a generation says (position, plan, layout, values, environment, receipts) and
hands it to the saver. Every rank does the same with the same numbers: generation numbers follow
from the history and are counted up at each save, so no message is needed to agree on them.
"""

from __future__ import annotations

import time
from dataclasses import replace

from coherent_ray import canonical
from coherent_ray.commit.manifest import (
    DataPosition,
    GenerationHeader,
    StateLayout,
    format_of,
    generation_name,
)
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.parts import extended
from coherent_ray.train.admit import Admitted
from coherent_ray.train.collectives import sum_over_ranks
from coherent_ray.train.receipts import ReceiptChain
from coherent_ray.train.recipe import recipe_of
from coherent_ray.train.saving import Boundary, Saved, Saver


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
        """The saves of this attempt whose fate is known."""

    @property
    def stalls_s(self) -> list[float]:
        """Seconds that training stood still, a save of this attempt."""
        return self._saver.stalls_s

    @property
    def saving(self) -> bool:
        """Whether a save goes on behind the training."""
        return self._saver.in_flight

    def save(self, position: DataPosition, state: State) -> None:
        """Begin a generation; the save before it is settled first.

        Args:
            position: What is read next.
            state: References to the live state at this boundary.

        Raises:
            SaveFailed: More saves in a row failed than allowed; or a subclass.
        """
        since = time.monotonic()
        self._settle()
        self._saver.begin(state, self._boundary(position, state), since)

    def finish(self, position: DataPosition, state: State) -> None:
        """Return once the state at this boundary is published.

        Raises:
            SaveFailed: More saves in a row failed than allowed; or a subclass.
        """
        while True:
            saved = self._settle()
            if saved is None or saved.fate.kind == "published":
                return
            self._saver.wait_for_storage()
            self.save(position, state)

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
        if saved.fate.kind == "published":
            self.published = saved.name
            self._chain.published(saved.update)
        return saved

    def _boundary(self, position: DataPosition, state: State) -> Boundary:
        admitted = self._admitted
        number, self._number = self._number, self._number + 1
        layout = layout_of(state.tensors)
        prints = fingerprint(layout, state.tensors, lambda sums: sum_over_ranks(sums, None))
        if state.parts:
            layout, prints = extended(layout, prints, state.parts)
        else:
            self._chain.note_state(prints.digest)
        segment = self._chain.segment(generation_name(number, admitted.attempt))
        header = self._header(number, position, state, layout)
        header = replace(header, receipts=segment.record if segment else None)
        return Boundary(header, prints, segment.data if segment else b"")

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
