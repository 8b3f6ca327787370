"""docs/protocol.md names the tests that hold its claims: they must be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "protocol.md").read_text()
NAMED = sorted(set(re.findall(r"(test_\w+\.py)::(test_\w+)", TEXT)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_that_the_document_names_is_there(file: str, test: str) -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert sources, f"there is no {file}"
    assert any(f"def {test}(" in source for source in sources)


def test_the_document_names_tests_at_all() -> None:
    assert len(NAMED) >= 20


WINDOWS = [line for line in TEXT.splitlines() if line.startswith("| coordinator, ")]


@pytest.mark.parametrize("row", WINDOWS)
def test_every_crash_window_of_the_coordinator_names_its_test(row: str) -> None:
    held_by = row.rstrip(" |").rsplit("|", 1)[1]
    assert re.search(r"test_\w+|the same", held_by), row


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:commit|train)/\w+\.py)`", TEXT))))
def test_a_file_that_the_document_names_is_there(path: str) -> None:
    assert (ROOT / "coherent_ray" / path).is_file()
