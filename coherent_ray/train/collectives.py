"""Collectives: each as torch has it, but for its error, which says that a peer was lost.

What torch raises when a peer dies or freezes is a bare RuntimeError. A lost peer is cured by a
restart of the group and an exception of the task is not, so the two must differ in type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from coherent_ray.errors import PeerLost

Group = dist.ProcessGroup | None
"""None: the default group."""


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


def wait(work: dist.Work) -> None:
    """End what `scatter_all` began.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("all_to_all"):
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


def from_first(tensor: Tensor, group: Group) -> None:
    """Overwrite every rank's tensor with rank 0's.

    Raises:
        PeerLost: Another rank is gone, or did not answer in time.
    """
    with _peers("broadcast"):
        dist.broadcast(tensor, group=group, group_src=0)


def _gather_in_pairs(received: Tensor, sent: Tensor, group: Group) -> None:
    """Gather by direct messages: gloo's own took two to four times as long at 2 to 4 ranks."""
    own = dist.get_rank(group)
    operations = []
    for rank, place in enumerate(received.view(-1, sent.numel())):
        if rank == own:
            place.copy_(sent)
        else:
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=rank))
            operations.append(dist.P2POp(dist.irecv, place, group=group, group_peer=rank))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


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
