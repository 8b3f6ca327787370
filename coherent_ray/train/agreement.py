"""The last proof before training: every rank holds the same state, bit for bit.

Admission compares what can be known without a model. A training function of the user's own brings
its model later, so its first collective is this one: 32 bytes a rank, compared by every rank.

The same comparison finds, while it trains, a rank whose state has silently become another: a bit
that flipped, a faulty kernel. Each save makes it through the acknowledgements; `check_replicas`
makes it where no save is due. Only in updates where it is asked for: no other one sends anything.
"""

from __future__ import annotations

from collections import Counter

import torch

from coherent_ray import canonical
from coherent_ray.commit import manifest as records
from coherent_ray.commit.fates import against, groups_of, name_ranks
from coherent_ray.commit.manifest import StateLayout
from coherent_ray.digests import Digest, digest_of
from coherent_ray.errors import ReplicaDiverged, StateMismatch
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import Fingerprint, fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.train.collectives import gather_all, sum_over_ranks

_DIGEST_BYTES = 32
_TENSOR_BYTES = 8


def check_same_start(state: State, rank: int, ranks: int, device: torch.device) -> None:
    """Return if every rank starts from the same state.

    Args:
        state: This rank's.
        rank: This rank.
        ranks: Number of ranks; at 1 nothing is compared.
        device: Where collectives run.

    Raises:
        StateMismatch: A rank's state differs; names the ranks and the first tensor.
    """
    if ranks == 1:
        return
    layout, prints, shape = _compared(state)
    shapes = _gather(_raw(shape), ranks, device)
    if len(set(shapes)) > 1:
        others = _minority(shapes)
        raise _mismatch(others, "other tensors, hyper-parameters or schedules than the other ranks")
    wholes = _gather(_raw(prints.digest), ranks, device)
    if len(set(wholes)) > 1:
        name = _first_difference(prints, [t.name for t in layout.tensors], ranks, device)
        raise _mismatch(_minority(wholes), f"another value of {name} than the other ranks")


def check_replicas(state: State, update: int, rank: int, ranks: int, device: torch.device) -> None:
    """Return if every rank still holds the same state.

    Args:
        state: This rank's, after an update.
        update: The update.
        rank: This rank.
        ranks: Number of ranks; at 1 nothing is compared.
        device: Where collectives run.

    Raises:
        ReplicaDiverged: A rank's state differs; names the ranks and the first tensor.
        PeerLost: Another rank is gone.
    """
    if ranks == 1:
        return
    layout, prints, values = _compared(state)
    seen = _gather(_raw(prints.digest) + _raw(values), ranks, device)
    wholes = [row[:_DIGEST_BYTES] for row in seen]
    if len(set(wholes)) > 1:
        name = _first_difference(prints, [t.name for t in layout.tensors], ranks, device)
        raise _diverged(wholes, update, name)
    if len(set(seen)) > 1:
        raise _diverged(seen, update, None)


def _compared(state: State) -> tuple[StateLayout, Fingerprint, Digest]:
    """Return the layout, the tensors' fingerprint, and the digest of all that is no tensor."""
    layout = layout_of(state.tensors)
    prints = fingerprint(layout, state.tensors, lambda sums: sum_over_ranks(sums, None))
    return layout, prints, digest_of(records.dump(layout) + canonical.dump(state.values))


def _diverged(seen: list[bytes], update: int, tensor: str | None) -> ReplicaDiverged:
    groups = groups_of(dict(enumerate(seen)))
    odd = sorted(rank for group in groups[1:] for rank in group)
    first = f"the first tensor that differs is {tensor!r}" if tensor else "no tensor differs"
    return ReplicaDiverged(
        f"{against(groups, 'state')} after update {update}; {first}",
        where=f"update {update}",
        remedy="resume from the last published generation; look at the ranks named here",
        details={"ranks": odd, "groups": groups, "tensor": tensor, "update": update},
    )


def _first_difference(
    prints: Fingerprint, names: list[str], ranks: int, device: torch.device
) -> str:
    """Return the first tensor that is not the same everywhere; all ranks call this together."""
    rows = _gather(b"".join(bytes.fromhex(text) for text in prints.tensors), ranks, device)
    for index, name in enumerate(names):
        at = slice(index * _TENSOR_BYTES, (index + 1) * _TENSOR_BYTES)
        if len({row[at] for row in rows}) > 1:
            return name
    return "the state"


def _gather(mine: bytes, ranks: int, device: torch.device) -> list[bytes]:
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    rows = torch.empty(ranks * len(mine), dtype=torch.uint8, device=device)
    gather_all(rows, own, None)
    raw = bytes(rows.tolist())
    return [raw[at : at + len(mine)] for at in range(0, len(raw), len(mine))]


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.partition(":")[2])[:_DIGEST_BYTES]


def _minority(values: list[bytes]) -> list[int]:
    votes = Counter(values)
    common = max(votes, key=lambda v: (votes[v], v == values[0]))
    return [rank for rank, value in enumerate(values) if value != common]


def _mismatch(others: list[int], what: str) -> StateMismatch:
    return StateMismatch(
        f"{name_ranks(others)} would start with {what}",
        where=name_ranks(others),
        remedy="build model, optimizer and scheduler from the configuration alone, never from the "
        "rank or an unseeded generator",
        details={"ranks": others},
    )
