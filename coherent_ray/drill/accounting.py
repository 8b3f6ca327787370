"""What a history consumed: no example lost or repeated, over any whole epoch.

This is all that the claim `statistical` promises of the data, and what the others promise as well.
It is read off the receipts: their positions must tile each epoch, the digest of their example ids
must be that of the examples at these positions, and these must be each example once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coherent_ray.commit.manifest import PlanIdentity
from coherent_ray.data.plan import Plan
from coherent_ray.digests import digest_of
from coherent_ray.train.receipts import Receipt

#: Examples up to which each one is looked for.
COUNTED = 10**8


def faults(identity: PlanIdentity, history: Iterable[Receipt]) -> list[str]:
    """Return what is wrong with what a history consumed; nothing: every promise is kept.

    Args:
        identity: The run's plan.
        history: All of its receipts, in order.
    """
    plan = Plan(identity)
    found: list[str] = []
    epoch, position = 0, 0
    seen = np.zeros(min(identity.examples, COUNTED), dtype=np.bool_)
    orders: dict[int, list[str]] = {}
    for receipt in history:
        if (receipt.epoch, receipt.start) != (epoch, position):
            found.append(
                f"update {receipt.update} begins at position {receipt.start} of epoch "
                f"{receipt.epoch}, not at position {position} of epoch {epoch}"
            )
        epoch, position = receipt.epoch, receipt.stop
        ids = plan.example_ids(receipt.start, min(receipt.stop, identity.examples), epoch)
        if digest_of(ids.astype("<i8").tobytes()) != receipt.ids:
            found.append(f"update {receipt.update} did not take the examples at its positions")
        orders.setdefault(epoch, []).append(receipt.ids)
        if identity.examples <= COUNTED:
            if seen[ids].any():
                found.append(f"update {receipt.update} repeats examples of epoch {epoch}")
            seen[ids] = True
        if position >= identity.examples:
            missing = int(seen.size - seen.sum()) if identity.examples <= COUNTED else 0
            if missing:
                found.append(f"epoch {epoch} is over, and {missing:,} examples were never taken")
            seen[:] = False
            epoch, position = epoch + 1, 0
    return found + _same_orders(orders, identity)


def epochs_of(identity: PlanIdentity, updates: int) -> float:
    """Return how many passes over the data some updates are."""
    per_epoch = -(-identity.examples // identity.global_batch)
    whole, rest = divmod(updates, per_epoch)
    return whole + rest * identity.global_batch / identity.examples


def _same_orders(orders: dict[int, list[str]], identity: PlanIdentity) -> list[str]:
    """Name an epoch in the order of the first; a few examples may be so by chance."""
    first, *others = orders.values() or [[]]
    if min(identity.examples, identity.global_batch) < 4:
        return []
    return [
        f"epoch {epoch} has the order of epoch 0"
        for epoch, ids in enumerate(others, 1)
        if len(ids) > 1 and ids == first[: len(ids)]
    ]
