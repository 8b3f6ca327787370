"""``run``, ``submit`` and ``stop``: what starts a run, here or in a cluster, and what ends it."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from coherent_ray.cli.output import json_option, show_json, show_line
from coherent_ray.cli.place import new_id, whole_run, whole_run_argument
from coherent_ray.cli.validate import config_argument, load_job, set_option
from coherent_ray.config import Config
from coherent_ray.errors import ClusterError, CoherentRayError, ConfigError, NotARun

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

#: Not sent to a cluster, besides what .gitignore names.
EXCLUDES = [".git", ".venv", "__pycache__", "*.egg-info"]
#: What Ray says where no node is ready to take a job yet, and the seconds that it is given.
NO_AGENT = "No available agent"
PATIENCE_S = 60.0
_LOCAL_HOSTS = {None, "localhost", "127.0.0.1", "::1"}


@click.command()
@config_argument
@set_option
@click.option(
    "--address", metavar="ADDR", help="Ray cluster to use, or auto: the one started here."
)
@click.option("--verbose", "-v", is_flag=True, help="Show what Ray and the workers print, too.")
@json_option
def run(
    path: str, overrides: tuple[str, ...], address: str | None, verbose: bool, as_json: bool
) -> int:
    """Train as CONFIG says, from where the published history ends.

    Without an address, in the configuration or here, a local Ray is started for the run. Ctrl-C and
    SIGTERM publish one more generation first. The same command again resumes the run.

    Exit code 0: the run is complete. 1: it was stopped, or failed.
    """
    if address is not None:
        # A local cluster's CPUs mean nothing in another one.
        overrides = (*overrides, f"cluster.address={address}", "cluster.num_cpus=null")
    settings = load_job(path, overrides)
    # Only now that the configuration is known to be right.
    from coherent_ray.cli.display import display_for
    from coherent_ray.cli.summary import show_failure, show_outcome
    from coherent_ray.train.supervisor import supervise

    try:
        with display_for(as_json=as_json) as display:
            outcome = supervise(settings, display, verbose=verbose)
    except CoherentRayError as error:
        show_failure(error, as_json=as_json)
        return error.exit_code
    show_outcome(outcome, settings.run.root, as_json=as_json)
    return 1 if outcome.stopped else 0


@click.command()
@config_argument
@set_option
@click.option("--address", metavar="ADDR", help="Dashboard of the cluster: http://HOST:8265.")
@click.option("--follow", is_flag=True, help="Show the job's output until it ends.")
@json_option
def submit(
    path: str, overrides: tuple[str, ...], address: str | None, follow: bool, as_json: bool
) -> int:
    """Run CONFIG as a Ray job in a cluster.

    The current directory is sent along, without what .gitignore names. Relative paths of the
    configuration mean this machine's: the cluster must see them under the same names.
    """
    if follow and as_json:
        raise click.UsageError("--follow shows the job's output, which is no JSON")
    settings = load_job(path, overrides)
    entrypoint = shlex.join(_entrypoint(_shipped(path), settings, overrides, address))
    client = _client(address)
    job = _submitted(client, entrypoint, settings.run.root)
    at = client.get_address()
    if as_json:
        show_json({"job": job, "address": at, "entrypoint": entrypoint, "root": settings.run.root})
        return 0
    show_line(f"submitted as job {job}; the run lies in {settings.run.root}", style="good")
    if follow:
        return _follow(client, job)
    show_line(f"  follow it:  ray job logs {job} --follow --address {at}")
    show_line(f"  stop it:    ray job stop {job} --address {at}")
    show_line(f"  its state:  coherent-ray ls {settings.run.root}")
    return 0


@click.command()
@whole_run_argument
@click.option("--address", metavar="ADDR", help="Ray cluster; without it, the one started here.")
@json_option
def stop(run: str, address: str | None, as_json: bool) -> int:
    """End the coordinator that RUN left in a Ray cluster.

    What it was about to publish is published first; what the run keeps in memory is let go. A run
    that still trains loses its saves: end that one with Ctrl-C, or with `ray job stop`.
    """
    from coherent_ray.commit.log import CommitLog

    try:
        run_id = CommitLog(whole_run(run).open()).read().run_id or ""
        none_here = None
    except NotARun as error:
        # A run whose workers were never admitted has no log, and may have a coordinator.
        run_id, none_here = new_id(run), error
    stopped = _joined(address) and _stop_coordinator(run_id)
    if none_here is not None and not stopped:
        raise none_here
    if as_json:
        show_json({"run_id": run_id, "stopped": stopped})
    elif stopped:
        show_line(f"the coordinator of run {run_id} has ended", style="good")
    else:
        show_line(f"run {run_id} has no coordinator: there is nothing to stop")
    return 0


def _shipped(path: str) -> str:
    """Return the configuration's path in what is sent to the cluster."""
    try:
        return Path(path).absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        raise ConfigError(
            "the configuration is not below the current directory, which is what the cluster gets",
            where=path,
            remedy="change to the project's directory first",
        ) from None


def _entrypoint(
    path: str, settings: Config, overrides: Sequence[str], address: str | None
) -> list[str]:
    """Return the command that the cluster runs; it finds the files under their absolute names."""
    data = settings.data
    absolute = [
        f"run.root={json.dumps(settings.run.root)}",
        f"data.source.paths={json.dumps(data.source.paths)}",
    ]
    if data.prepare is not None and data.prepare.args:
        absolute.append(f"data.prepare.args={json.dumps(data.prepare.args)}")
    here = address is None or urlsplit(address).hostname in _LOCAL_HOSTS
    program = [sys.executable, "-m", "coherent_ray"] if here else ["coherent-ray"]
    settings_given = [word for text in (*overrides, *absolute) for word in ("--set", text)]
    return [*program, "run", path, *settings_given, "--address", "auto"]


def _client(address: str | None) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    # It tells each file that it does not send.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise ClusterError(
            f"the cluster's job server is not reachable: {error}",
            where=address or "this machine",
            remedy="name the dashboard, http://HOST:8265, or start a cluster: ray start --head",
        ) from error


def _submitted(client: JobSubmissionClient, entrypoint: str, root: str) -> str:
    """Submit the job, and return its id; a cluster that has just started gets some patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            job: str = client.submit_job(
                entrypoint=entrypoint,
                runtime_env={"working_dir": str(Path.cwd()), "excludes": EXCLUDES},
                metadata={"coherent_ray_root": root},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            if NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster did not take the job: {error}",
                    where=client.get_address(),
                    remedy="see `ray status` there; large files belong into .gitignore",
                ) from error
            time.sleep(1.0)
        else:
            return job


def _follow(client: JobSubmissionClient, job: str) -> int:
    import asyncio

    from ray.job_submission import JobStatus

    async def tail() -> None:
        async for text in client.tail_job_logs(job):
            click.echo(text, nl=False)

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        where = f" --address {client.get_address()}"
        show_line(f"job {job} goes on; end it with: ray job stop {job}{where}")
        return 0
    status = client.get_job_status(job)
    if status == JobStatus.SUCCEEDED:
        return 0
    raise ClusterError(f"the job ended as {status.value}", where=job)


def _joined(address: str | None) -> bool:
    """Join a Ray cluster; False where none was named and none runs here."""
    from coherent_ray.train.local_ray import join

    try:
        join(address or "auto", level=logging.ERROR)
    except ClusterError as error:
        if address is None and isinstance(error.__cause__, ConnectionError):
            return False
        raise
    return True


def _stop_coordinator(run_id: str) -> Any:
    import ray

    from coherent_ray.train import coordinators
    from coherent_ray.train.memory import keepers

    try:
        kept = keepers.stop(run_id)
        return coordinators.stop(run_id) or bool(kept)
    finally:
        ray.shutdown()


COMMANDS = (run, submit, stop)
