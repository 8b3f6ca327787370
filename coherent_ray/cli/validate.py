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
@click.option("--settings-only", is_flag=True, help="Neither import the task nor look at the data.")
@json_option
def validate(
    path: str | None,
    overrides: tuple[str, ...],
    schema: bool,
    settings_only: bool,
    as_json: bool,
) -> int:
    """Check CONFIG and print it with every default filled in.

    Names every setting that is wrong, all at once; then, what the settings name: makes the task,
    looks at the data's files, gives the task's collate the first rows, and asks whether a local Ray
    can have what the workers need, and whether the run's root can be a directory. Nothing is
    written, and the run's root is not touched.
    """
    if schema:
        show_json(config.schema())
        return 0
    if path is None:
        raise click.UsageError("name a CONFIG, or ask for --schema")
    settings = load_job(path, overrides)
    if not settings_only:
        _require_what_is_named(settings, path)
    values = settings.model_dump(mode="json")
    if as_json:
        show_json(values)
        return 0
    show_line(f"# {path} is valid. With every default filled in:", style="good")
    show_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip(), "yaml")
    return 0


def _require_what_is_named(settings: Config, path: str) -> None:
    """Return if task, data and resources are there.

    Raises:
        ConfigError: They are not; names all that is missing.
    """
    from coherent_ray.train.preflight import faults

    found = faults(settings)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = [f"{error.where}: {error.what} ({error.remedy})" for error in found]
        problems = [{"key": e.where, "message": e.what, "suggestion": e.remedy} for e in found]
        raise ConfigError(
            "\n  ".join([f"{len(found)} things are wrong:", *lines]),
            where=path,
            details={"problems": problems},
        )


COMMANDS = (validate,)
