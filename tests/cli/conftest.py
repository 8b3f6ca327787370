"""A command line to call, runs for it to look at, and configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from published import Published

from coherent_ray.cli import main


@dataclass
class Done:
    """A command that has ended."""

    result: Result

    @property
    def code(self) -> int:
        return self.result.exit_code

    @property
    def out(self) -> str:
        return self.result.stdout

    @property
    def err(self) -> str:
        return self.result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def rows(self) -> list[list[str]]:
        """The words of each line, for plain tables."""
        return [line.split() for line in self.out.splitlines()]


@pytest.fixture
def call():
    """Call the command line with some words."""

    def command(*words: object) -> Done:
        result = CliRunner().invoke(main, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result)

    return command


@pytest.fixture
def make_run():
    """Make a run that has nothing yet."""
    return Published


@pytest.fixture
def published(tmp_path):
    """A run of two attempts and three generations, at updates 10, 20 and 30."""
    run = Published(tmp_path / "run")
    run.open_attempt()
    run.publish(10)
    run.publish(20)
    run.open_attempt()
    run.publish(30, ranks=3)
    return run


@pytest.fixture
def configuration(tmp_path):
    """Write a configuration; sections given replace, key by key, what is there."""

    def write(**sections: Any) -> Path:
        values: dict[str, Any] = {
            "run": {"root": str(tmp_path / "root")},
            "task": {"factory": "jobs.language_model:LanguageModel"},
            "data": {
                "source": {"format": "parquet", "paths": [str(tmp_path / "x.parquet")]},
                "global_batch": 8,
                "lanes": 4,
                "microbatch": 2,
            },
            "training": {"updates": 3},
        }
        for name, section in sections.items():
            values.setdefault(name, {}).update(section)
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write
