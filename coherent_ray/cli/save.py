"""``save``: one more generation of a run that trains now."""

from __future__ import annotations

import logging

import click

from coherent_ray.cli.output import json_option, show_json, show_line
from coherent_ray.cli.place import whole_run, whole_run_argument


@click.command()
@whole_run_argument
@click.option("--address", metavar="ADDR", help="Ray cluster; without it, the one started here.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it.",
)
@json_option
def save(run: str, address: str | None, timeout_s: float, as_json: bool) -> int:
    """Have a run that trains publish one more generation now.

    It is of the next boundary: the end of the update that is being computed, or with
    checkpoint.mid_update the next microbatch. Training goes on. Waits until it is published.

    Exit code 1: nothing was published in time, or nobody trains the run.
    """
    import ray

    from coherent_ray.commit.log import CommitLog
    from coherent_ray.train import local_ray, on_demand

    storage = whole_run(run).open()
    run_id = CommitLog(storage).read().run_id or ""
    local_ray.join(address or "auto", level=logging.ERROR)
    try:
        published = on_demand.save_now(run_id, storage, timeout_s)
    finally:
        ray.shutdown()
    if as_json:
        show_json({"run_id": run_id, "generation": published.name, "update": published.update})
    else:
        show_line(f"{published.name} is published, at update {published.update:,}", style="good")
    return 0


COMMANDS = (save,)
