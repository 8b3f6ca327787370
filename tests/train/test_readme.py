"""The task that the README shows is one: it trains as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_run import config_for, train

README = Path(__file__).parents[2] / "README.md"


def test_the_task_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = README.read_text().split("```python\n")[1:]
    source = next(b.partition("```")[0] for b in blocks if b.startswith("# my_task.py\n"))
    (tmp_path / "my_task.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_for(tmp_path, task__factory="my_task:MyTask")
    try:
        left = train(config)
    finally:
        sys.modules.pop("my_task", None)
    assert left.updates == [2, 4, 6]
    assert "code.my_task" in left.manifest().header.recipe


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 160
