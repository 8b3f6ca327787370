"""What torch raises in a collective becomes a lost peer; what is no peer's fault does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from coherent_ray.errors import PeerLost
from coherent_ray.train import collectives

ONE = torch.zeros(1)
FAR = torch.zeros(1, device="meta")
CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: collectives.sum_over_ranks(ONE, None),
    "all_to_all_single": lambda: collectives.scatter_all(ONE, ONE, [1], [1], None),
    "all_gather_single": lambda: collectives.gather_all(FAR, FAR, None),
    "get_rank": lambda: collectives.gather_all(ONE, ONE, None),
    "broadcast": lambda: collectives.from_first(ONE, None),
}


class Failing:
    """Stands in for a collective, and for what it returns."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise self.error

    def wait(self) -> None:
        raise self.error


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError, dist.DistNetworkError])
def test_a_failed_collective_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]
) -> None:
    error = kind("Connection closed by peer\nC++ trace")
    monkeypatch.setattr(dist, name, Failing(error))
    with pytest.raises(PeerLost, match=r"failed: Connection closed by peer\n") as caught:
        CALLS[name]()
    assert caught.value.__cause__ is error


def test_waiting_is_a_part_of_it() -> None:
    with pytest.raises(PeerLost, match="exchange failed: timed out"):
        collectives.wait(Failing(RuntimeError("timed out")))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("no group")])
def test_an_error_of_this_rank_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(dist, "broadcast", Failing(error))
    with pytest.raises(type(error)):
        CALLS["broadcast"]()
