"""What a save is about to store: what a boundary says at once, and what is known only behind it.

This rank's own part of the state is copied at the boundary, and of that its fingerprint is made
behind training, from the copy. So whatever follows from the fingerprint is completed there: the
receipts, of which the last one names it, and with them the header. Nothing of a generation is
told to anyone before it is sealed, and every rank seals the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from coherent_ray.commit.manifest import GenerationHeader
from coherent_ray.commit.timings import About
from coherent_ray.digests import Digest
from coherent_ray.state.fingerprint import Fingerprint
from coherent_ray.train.receipts import Segment


@dataclass(frozen=True, slots=True)
class Sealed:
    """A boundary with its fingerprint: complete but for the shard."""

    header: GenerationHeader
    prints: Fingerprint
    receipts: bytes
    """The segment that `header.receipts` names; rank 0 writes it."""
    sealing_s: float
    """Seconds that it took."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a save is about to store, as the training thread leaves it."""

    header: GenerationHeader
    """Without receipts."""
    prints: Callable[[memoryview], Fingerprint]
    """Returns the fingerprint of the replica, given the copy of this rank's part of the state."""
    segment: Callable[[Digest], Segment | None]
    """Returns the receipts that lead here, given the digest of the state; None: there are none."""
    wait_s: float = 0.0
    """Seconds that training has waited for the save before."""
    fingerprint_s: float = 0.0
    """Seconds that training stood still for the fingerprint."""
    about: About | None = None
    """What rank 0 tells of the save besides its times."""

    def sealed(self, copy: memoryview) -> Sealed:
        """Return it with its fingerprint.

        Args:
            copy: Of this rank's part of the state at the boundary.
        """
        begun = time.monotonic()
        prints = self.prints(copy)
        segment = self.segment(prints.digest)
        header = replace(self.header, receipts=segment.record) if segment else self.header
        receipts = segment.data if segment else b""
        return Sealed(header, prints, receipts, time.monotonic() - begun)
