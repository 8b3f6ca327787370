"""Named points: told to whoever listens, in this process, and to nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coherent_ray.train import hooks


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    yield
    hooks.install(None)


def test_nobody_listens_at_first() -> None:
    assert hooks.installed() is None
    hooks.reach(hooks.installed(), "save:begin")


def test_who_is_installed_hears_every_point_in_order() -> None:
    heard: list[str] = []
    hooks.install(heard.append)
    assert hooks.installed() == heard.append
    for point in ("save:begin", "shard:begun", "save:acknowledge"):
        hooks.reach(hooks.installed(), point)
    assert heard == ["save:begin", "shard:begun", "save:acknowledge"]


def test_a_point_of_an_update_names_it() -> None:
    heard: list[str] = []
    hooks.reach(heard.append, "update", 12)
    hooks.reach(heard.append, "update", 0)
    assert heard == ["update@12", "update@0"]


def test_the_last_one_installed_is_the_only_one() -> None:
    first: list[str] = []
    second: list[str] = []
    hooks.install(first.append)
    hooks.install(second.append)
    hooks.reach(hooks.installed(), "save:begin")
    assert (first, second) == ([], ["save:begin"])
    hooks.install(None)
    assert hooks.installed() is None


def test_what_a_hook_raises_strikes_where_it_was_reached() -> None:
    def strike(point: str) -> None:
        raise KeyboardInterrupt(point)

    with pytest.raises(KeyboardInterrupt, match="save:begin"):
        hooks.reach(strike, "save:begin")
