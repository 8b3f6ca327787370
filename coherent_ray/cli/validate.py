"""``validate``: is this configuration right, and what does it come to?"""

from __future__ import annotations

from collections.abc import Sequence

import click
import yaml

from coherent_ray import config
from coherent_ray.cli.output import json_option, show_json, show_line, show_text
from coherent_ray.config import Config
from coherent_ray.errors import ConfigError

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace one setting, as data.seed=7. May be given many times.",
)
config_argument = click.argument("path", metavar="CONFIG", type=click.Path())


def load_job(path: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of something that the command line can run, paths absolute.

    Raises:
        ConfigError: A setting is wrong, or there is no task.
    """
    loaded = config.load(path, overrides)
    if loaded.task is None:
        raise ConfigError(
            "task: is required: what is trained",
            where=path,
            remedy="name it as task: {factory: package.module:Name}",
            details={"problems": [{"key": "task", "message": "is required", "suggestion": ""}]},
        )
    return loaded.resolved()


@click.command()
@click.argument("path", metavar="CONFIG", type=click.Path(), required=False)
@set_option
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a configuration instead.")
@json_option
def validate(path: str | None, overrides: tuple[str, ...], schema: bool, as_json: bool) -> int:
    """Check CONFIG and print it with every default filled in.

    Names every setting that is wrong, all at once. Neither imports the task nor touches the data.
    """
    if schema:
        show_json(config.schema())
        return 0
    if path is None:
        raise click.UsageError("name a CONFIG, or ask for --schema")
    values = load_job(path, overrides).model_dump(mode="json")
    if as_json:
        show_json(values)
        return 0
    show_line(f"# {path} is valid. With every default filled in:", style="good")
    show_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip(), "yaml")
    return 0


COMMANDS = (validate,)
