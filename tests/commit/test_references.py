"""References: what a user types for a run and a generation."""

import pytest

from coherent_ray.commit.references import Reference, parse_reference


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("runs/one", Reference("runs/one")),
        ("runs/one@g12", Reference("runs/one", 12)),
        ("runs/one@12", Reference("runs/one", 12)),
        ("runs/one@g12-a3", Reference("runs/one", 12, 3)),
        ("runs/one@12-a3", Reference("runs/one", 12, 3)),
        ("runs/one@latest", Reference("runs/one")),
        ("s3://user@bucket/run@g1", Reference("s3://user@bucket/run", 1)),
        ("s3://user@bucket/run", Reference("s3://user@bucket/run")),
        ("me@home", Reference("me@home")),
        ("me@g", Reference("me@g")),
        ("run@g0", Reference("run@g0")),
        ("run@g01", Reference("run@g01")),
        ("run@g1-a0", Reference("run@g1-a0")),
        ("run@g1-a", Reference("run@g1-a")),
        ("run@", Reference("run@")),
        ("12", Reference("12")),
        ("@12", Reference("", 12)),
        ("@latest", Reference("")),
        ("g12", Reference("g12")),
        ("latest", Reference("latest")),
        ("", Reference("")),
        ("run@1234567890123456789", Reference("run@1234567890123456789")),
    ],
)
def test_references(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize("name", ["latest", "g12", "g12-a3"])
def test_a_reference_says_itself(name: str) -> None:
    assert parse_reference(f"run@{name}").generation == name
