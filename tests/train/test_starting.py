"""What a supervisor says of a start that takes long."""

from __future__ import annotations

from coherent_ray.config.sections import Cluster
from coherent_ray.train.starting import Starting


def test_each_part_of_a_start_is_told_when_it_is_late_and_again_when_that_has_doubled() -> None:
    start = Starting(Cluster(quiet_warning_s=60.0), 0.0)
    assert list(start.words(59.0)) == []
    [words] = start.words(60.0)
    assert "60 s: it loads its packages" in words
    assert list(start.words(119.0)) == []
    assert len(list(start.words(120.0))) == 1
    start.note("found", 130.0)
    start.note("note", 131.0)
    assert list(start.words(189.0)) == []
    [words] = start.words(190.0)
    assert words.startswith("Ray has been starting for 60 s: its processes on this machine")
    start.note("started", 200.0)
    assert list(start.words(10_000.0)) == []


def test_a_named_cluster_is_named() -> None:
    start = Starting(Cluster(address="10.0.0.1:6379"), 0.0)
    start.note("found", 0.0)
    [words] = start.words(61.0)
    assert words.startswith("connecting to Ray at 10.0.0.1:6379 has taken 61 s")
