"""The argument RUN: a run's root, its address, or its configuration file, and maybe a generation.

``RUN@GENERATION`` is split at the last ``@``. A file or directory that exists under the whole text
is what is meant, whatever its name looks like; else what follows the ``@`` must name a generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from coherent_ray import config
from coherent_ray.cli.output import show_warning
from coherent_ray.commit.log import HINT, record_path
from coherent_ray.commit.log_end import read_hint
from coherent_ray.commit.references import FORMS, parse_reference
from coherent_ray.commit.traces import log_gone
from coherent_ray.config.sections import Checkpoint
from coherent_ray.errors import ConfigError, NotARun, NotFound
from coherent_ray.storage import Storage, StorageOptions, open_storage

run_argument = click.argument("run", metavar="RUN[@GENERATION]")
whole_run_argument = click.argument("run", metavar="RUN")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lies, and which of its generations is meant."""

    root: str
    """Path or address."""
    generation: str | None
    """None where none was named."""
    options: StorageOptions | None = None
    """From the configuration file, where one was named; None: as the environment says."""

    def open_warned(self) -> Storage:
        """Return the run's storage, and say on stderr where its log is known to have lost its end.

        For commands that show what is there; `ls` and `verify` make it their answer.

        Raises:
            CoherentRayError: As `open` does.
        """
        storage = self.open()
        seq = read_hint(storage).get("seq")
        if isinstance(seq, int) and 0 < seq < 2**63 and not _is_stored(storage, record_path(seq)):
            show_warning(
                f"{HINT} tells of record {seq}, which is gone: the commit log lost its end, and "
                "what is shown is from before it; `coherent-ray verify` says more"
            )
        return storage

    def open(self) -> Storage:
        """Return the run's storage.

        Raises:
            ConfigError: The address names no place that this version can use.
            LogDamaged: There are files of a run, but no commit log.
            NotARun: There is neither.
        """
        storage = open_storage(self.root, self.options)
        if next(iter(storage.list("log")), None) is None:
            if damage := log_gone(storage):
                raise damage
            remedy = (
                "name the run's directory, or the configuration file that it was run with; a run "
                "that has just been started has a log when its workers are admitted"
            )
            if "@" in self.root.rpartition("/")[2]:
                remedy += f"; to name a generation, write {FORMS}"
            raise NotARun(
                "no run lies here: there is no commit log", where=storage.uri, remedy=remedy
            )
        return storage


def place_of(text: str) -> Place:
    """Return the place that a RUN argument names.

    Raises:
        ConfigError: The argument is a configuration file that cannot be used, or what follows its
            ``@`` names no generation.
    """
    if _exists(text):
        return _place(text, None)
    reference = parse_reference(text)
    if reference.run == text:
        _refuse_no_name(text)
        return _place(text, None)
    if not reference.run:
        raise ConfigError("no run is named before the @", where=text, remedy=f"Write {FORMS}.")
    return _place(reference.run, reference.generation)


def whole_run(text: str) -> Place:
    """Return the place that a RUN argument names, which may not name a generation.

    Raises:
        ConfigError: The argument is a configuration file that cannot be used.
    """
    place = place_of(text)
    if place.generation is not None:
        raise click.UsageError(f"this command takes a whole run, without @{place.generation}")
    return place


def new_id(text: str) -> str:
    """Return the id that the run of a RUN argument has from its driver, before it has a log."""
    from coherent_ray.train.identity import derived

    if not _is_configuration(text):
        return derived(open_storage(text).uri)
    run = config.load(text).resolved().run
    return run.run_id or derived(run.root)


def checkpoint_of(text: str) -> Checkpoint | None:
    """Return how the run of a RUN argument saves; None where that is no configuration file.

    Raises:
        ConfigError: The argument is a configuration file that cannot be used.
    """
    return config.load(text).checkpoint if _is_configuration(text) else None


def _refuse_no_name(text: str) -> None:
    """Refuse what was meant for a generation's name and is none.

    An address may end in anything, and whether it exists is known only when it is opened.
    """
    run, at, name = text.rpartition("@")
    if at and "/" not in name and "://" not in text and (not run or _exists(run)):
        raise ConfigError(
            f"{name!r} is no name of a generation", where=text, remedy=f"Write {FORMS}."
        )


def _is_stored(storage: Storage, path: str) -> bool:
    try:
        storage.size(path)
    except NotFound:
        return False
    return True


def _exists(text: str) -> bool:
    try:
        return "://" not in text and bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError):
        return False  # no path at all, which is told when it is opened


def _place(text: str, generation: str | None) -> Place:
    if not _is_configuration(text):
        return Place(text, generation)
    settings = config.load(text)
    return Place(settings.run.root, generation, settings.storage.options)


def _is_configuration(text: str) -> bool:
    path = Path(text)
    return "://" not in text and (path.is_file() or path.suffix in {".yaml", ".yml"})
