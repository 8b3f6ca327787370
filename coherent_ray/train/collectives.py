"""Collectives: each as torch has it, but for its error, which says that a peer was lost.

What torch raises when a peer dies or freezes is a bare RuntimeError. A lost peer is cured by a
restart of the group and an exception of the task is not, so the two must differ in type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coherent_ray.errors import PeerLost

Group = dist.ProcessGroup | None
"""None: the default group."""


def second_group() -> Group:
    """Return a process group of all ranks beside the default one; all ranks must call this.

    What runs in one of them need not be in the same order on every rank as what runs in the other.

    Raises:
        PeerLost: Another rank is gone.
    """
    first = dist.group.WORLD
    assert first is not None
    device = torch.device("cuda" if dist.get_backend(first) == "nccl" else "cpu")
    # Without this it would be torch's own, not what this run waits for a peer.
    timeout = first._get_backend(device).options._timeout
    with _peers("new_group"):
        made: Group = dist.new_group(timeout=timeout)
    return made


def sum_over_ranks(tensor: Tensor, group: Group) -> None:
    """Add every rank's tensor, in place, in an order that the backend chooses.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("all_reduce"):
        dist.all_reduce(tensor, group=group)


def scatter_all(
    received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: Group
) -> dist.Work:
    """Begin to send one part to each rank; `wait` ends it.

    Args:
        received: 1-D, filled with the parts of rank 0, 1, ...
        sent: 1-D, the parts for rank 0, 1, ...; must not change before the end.
        receive: Items from each rank.
        send: Items to each rank.
        group: The ranks.

    Raises:
        PeerLost: Another rank is gone.
    """
    with _peers("all_to_all"):
        work: dist.Work | None = dist.all_to_all_single(
            received, sent, receive, send, group=group, async_op=True
        )
    assert work is not None
    return work


def ready(work: dist.Work, device: torch.device) -> bool:
    """Return whether what begun can be gone on from without waiting, or has failed.

    A GPU's work always can be: what comes after it waits in the stream, not here.
    """
    return device.type != "cpu" or bool(work.is_completed())


def wait(work: dist.Work) -> None:
    """End what `scatter_all` or `gather_begin` began.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("exchange"):
        work.wait()


def gather_all(received: Tensor, sent: Tensor, group: Group) -> None:
    """Bring every rank's tensor to all, one after the other.

    Args:
        received: 1-D, ``ranks`` times as long as ``sent``.
        sent: 1-D.
        group: The ranks.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("all_gather"):
        if sent.device.type == "cpu":
            _gather_in_pairs(received, sent, group)
        else:
            dist.all_gather_single(received, sent, group=group)


def gather_begin(rows: Tensor, tag: int, group: Group) -> list[dist.Work]:
    """Begin to bring every rank's row to all; `wait` ends it.

    Args:
        rows: 2-D, contiguous, one row a rank: this rank's is sent, the others are filled.
        tag: Tells apart what runs at the same time.
        group: The ranks.

    Raises:
        PeerLost: Another rank is gone.
    """
    with _peers("all_gather"):
        if rows.device.type == "cpu":
            return _gather_begun(rows, tag, group)
        own = rows[dist.get_rank(group)]
        work: dist.Work | None = dist.all_gather_single(
            rows.flatten(), own, group=group, async_op=True
        )
    assert work is not None
    return [work]


def from_first(tensor: Tensor, group: Group) -> None:
    """Overwrite every rank's tensor with rank 0's.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("broadcast"):
        dist.broadcast(tensor, group=group, group_src=0)


def _gather_in_pairs(received: Tensor, sent: Tensor, group: Group) -> None:
    rows = received.view(-1, sent.numel())
    rows[dist.get_rank(group)].copy_(sent)
    for work in _gather_begun(rows, 0, group):
        work.wait()


def _gather_begun(rows: Tensor, tag: int, group: Group) -> list[dist.Work]:
    """Gather by direct messages: gloo's own took two to four times as long at 2 to 4 ranks."""
    own = dist.get_rank(group)
    operations: list[dist.P2POp] = []
    for rank, place in enumerate(rows):
        if rank != own:
            to: dict[str, Any] = {"group": group, "tag": tag, "group_peer": rank}
            operations.append(dist.P2POp(dist.isend, rows[own], **to))
            operations.append(dist.P2POp(dist.irecv, place, **to))
    begun: list[dist.Work] = dist.batch_isend_irecv(operations)
    return begun


@contextmanager
def _peers(collective: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise PeerLost(
            f"{collective} failed: {reason}",
            remedy="see why another rank ended; the group is started again",
        ) from error
