"""A run's id: from the configuration, from its history, or from where it lies."""

from __future__ import annotations

import re

from coherent_ray.commit.history import History
from coherent_ray.commit.traces import read_whole
from coherent_ray.config import Config
from coherent_ray.digests import digest_of
from coherent_ray.errors import WrongRun
from coherent_ray.storage import Storage, open_storage
from coherent_ray.train.roots import require_own

_SUFFIX_DIGITS = 8
_NAME_LENGTH = 64


def run_id_of(config: Config) -> str:
    """Return the id of the run that a configuration means.

    The history's word counts; a new run takes ``run.run_id``, or a name made of its root.

    Raises:
        WrongRun: ``run.run_id`` is set, and the root holds another run.
        LogDamaged: The root's commit log cannot be trusted, is gone, or has lost its end.
        ConfigError: A new run would begin inside the root of another.
    """
    storage = open_storage(config.run.root, config.storage.options)
    return run_id_in(config, storage, read_whole(storage))


def run_id_in(config: Config, storage: Storage, history: History) -> str:
    """Return what `run_id_of` does, where the root's log has been read.

    Args:
        config: Its settings.
        storage: The root.
        history: The root's, as `read_whole` gave it.

    Raises:
        WrongRun: ``run.run_id`` is set, and the root holds another run.
        ConfigError: A new run would begin inside the root of another.
    """
    stored = history.run_id
    if stored is None:
        require_own(storage, config.storage.options)
    wanted = config.run.run_id
    if stored is not None and wanted not in {None, stored}:
        raise WrongRun(
            f"the root holds run {stored!r}, but run.run_id is {wanted!r}",
            where=config.run.root,
            remedy=f"set run.run_id: {stored}, or give this run a root of its own",
        )
    return stored or wanted or derived(config.resolved().run.root)


def derived(root: str) -> str:
    """Return a name for the run under a root: its last part, and a digest of the whole address."""
    last = root.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"[^a-z0-9_.-]+", "-", last).strip("-._")[:_NAME_LENGTH] or "run"
    digest = digest_of(root.encode()).partition(":")[2]
    return f"{name}-{digest[:_SUFFIX_DIGITS]}"
