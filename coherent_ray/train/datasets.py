"""The run's dataset: scanned from the files as they are now, and kept in its root to compare with.

The dataset's hash goes into every generation. Its manifest lies once in the run's root, named by
that hash, so that a refusal can say *what* changed and not only that something did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from pydantic import TypeAdapter

from coherent_ray import canonical
from coherent_ray.commit.inspection import absence, is_lost, unreadable_here
from coherent_ray.commit.inventory import item_of
from coherent_ray.commit.manifest import PlanIdentity
from coherent_ray.config import Config
from coherent_ray.data import order
from coherent_ray.data.columns import Rows
from coherent_ray.data.content import DigestCache, cache_directory
from coherent_ray.data.dataset import DatasetManifest, differences, scan
from coherent_ray.data.loader import EXAMPLE_COLUMN, SEED_COLUMN
from coherent_ray.data.plan import Plan
from coherent_ray.data.sources import Source, first_rows, open_source
from coherent_ray.digests import Digest
from coherent_ray.errors import AdmissionRefused, AlreadyExists, Damage, NotFound, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import TooLong, read_bounded

#: A manifest that is longer is not read; a million files need about so much.
_DATASET_BYTES = 256 * 2**20
_DIRECTORY = "datasets"
_ADAPTER: TypeAdapter[DatasetManifest] = TypeAdapter(DatasetManifest)


def scan_now(config: Config) -> DatasetManifest:
    """Return what the configured files hold at this moment.

    Every rank and every restart of a node asks this; bytes that provably did not change are not
    read again (`coherent_ray.data.content`).

    Raises:
        DataError: They are missing, unreadable, empty, or lack a column.
    """
    source = config.data.source
    return scan(
        source.paths,
        source.format,
        source.columns,
        config.data.verify,
        window=source.window,
        dtype=source.dtype,
        cache=DigestCache(cache_directory() / "digests"),
    )


def open_configured(config: Config, dataset: DatasetManifest) -> Source:
    """Return the source of the configured files.

    Raises:
        DataError: The files are no longer what was scanned.
    """
    source = config.data.source
    return open_source(
        source.paths,
        source.format,
        source.columns,
        dataset,
        window=source.window,
        dtype=source.dtype,
    )


def rows_to_try(config: Config, dataset: DatasetManifest) -> Rows:
    """Return the rows of one microbatch, as `collate` would be given them; the first ones.

    Raises:
        DataError: The files cannot be read.
    """
    source = config.data.source
    rows = first_rows(
        source.paths,
        source.format,
        dataset,
        config.data.microbatch,
        window=source.window,
        dtype=source.dtype,
    )
    count = min(map(len, rows.values()), default=0)
    ids = np.arange(count, dtype=np.int64)
    seeds = Plan(identity_of(config, dataset)).example_seeds(ids, 0)
    return {**rows, EXAMPLE_COLUMN: ids, SEED_COLUMN: seeds}


def identity_of(config: Config, dataset: DatasetManifest) -> PlanIdentity:
    """Return what decides which examples the run's updates take."""
    data = config.data
    return PlanIdentity(
        dataset_hash=dataset.hash,
        examples=dataset.rows,
        seed=data.seed,
        order=order.NAME,
        global_batch=data.global_batch,
        lanes=data.lanes,
        microbatch=data.microbatch,
    )


def path_of(dataset_hash: Digest) -> str:
    """Return where a dataset's manifest lies, relative to the run's root."""
    return f"{_DIRECTORY}/{dataset_hash.replace(':', '-')}.json"


def keep(storage: Storage, dataset: DatasetManifest) -> None:
    """Store a dataset's manifest; it may be there already.

    Raises:
        StorageError: The storage failed.
    """
    data = canonical.dump(_ADAPTER.dump_python(dataset, mode="json"))
    try:
        storage.create(path_of(dataset.hash), data)
    except AlreadyExists:
        return


def kept_damages(storage: Storage, trained_on: Collection[Digest]) -> Iterator[Damage]:
    """Yield what is wrong with the dataset manifests under a root.

    Args:
        storage: The run's root.
        trained_on: Hashes of the data of the run's generations; each must be told of there.

    Raises:
        StorageError: The storage could not be asked.
    """
    listed = {entry.path for entry in storage.list(_DIRECTORY)}
    kept = {path for path in listed if (item := item_of(path)) and item.kind == "dataset"}
    for path in sorted(kept | {path_of(wanted) for wanted in trained_on}):
        try:
            wrong = _wrong(path, read_bounded(storage, path, _DATASET_BYTES))
        except TooLong as error:
            wrong = "size", f"is longer than one can be: {error}"
        except NotFound as error:
            wrong = absence(error)
        except StorageError as error:
            if not (is_lost(error) or unreadable_here(error)):
                raise
            wrong = "refused", f"cannot be read: {error.what}"
        if wrong is not None:
            yield Damage(
                f"the manifest of the data {wrong[1]}",
                where=path,
                remedy="No state depends on it, but without it a refusal cannot say what changed "
                "in the data: put it back from a copy, or remove it, and the next start makes it.",
                details={"kind": wrong[0]},
            )


def _wrong(path: str, data: bytes) -> tuple[str, str] | None:
    """Return in what way a dataset manifest is not what its name says: a kind, and words."""
    try:
        manifest = _ADAPTER.validate_json(data)
        if canonical.dump(_ADAPTER.dump_python(manifest, mode="json")) != data:
            return "content", "is not in canonical JSON"
    except ValueError:  # pydantic's errors are ValueErrors
        return "content", "is torn or holds something else"
    if path_of(manifest.hash) != path:
        return "digest", f"hashes to {manifest.hash}, not to its name"
    return None


def check_same(
    storage: Storage, stored: PlanIdentity, now: PlanIdentity, dataset: DatasetManifest
) -> None:
    """Return if a resumed run would take the same examples in the same order.

    Args:
        storage: The run's root.
        stored: The plan of the generation to resume from.
        now: The plan that the configuration and the files give.
        dataset: The dataset as scanned now.

    Raises:
        AdmissionRefused: Something that decides the data order changed; says what.
    """
    if stored.dataset_hash != now.dataset_hash:
        changes = _changes(storage, stored.dataset_hash, dataset)
        raise AdmissionRefused(
            f"the data is not the data that this run was trained on: {changes}",
            where="data.source.paths",
            remedy="restore the files, or start a new run under another run.root",
            details={"stored": stored.dataset_hash, "now": now.dataset_hash},
        )
    for name in ("order", "seed", "lanes", "global_batch", "microbatch", "examples"):
        before, after = getattr(stored, name), getattr(now, name)
        if before != after:
            raise AdmissionRefused(
                f"data.{name} is {after}, but this run was started with {before}: the updates "
                "would no longer take the same examples",
                where=f"data.{name}",
                remedy=f"set data.{name}: {before}, or start a new run under another run.root",
                details={"stored": before, "now": after},
            )


def _changes(storage: Storage, stored: Digest, dataset: DatasetManifest) -> str:
    try:
        data = read_bounded(storage, path_of(stored), _DATASET_BYTES)
        canonical.load(data)  # refuses what the parser below would let pass: a key twice
        before = _ADAPTER.validate_json(data)
    except (StorageError, ValueError):  # pydantic's errors are ValueErrors
        return f"its hash was {stored} and is {dataset.hash}"
    if before.hash != stored:
        return f"its hash was {stored} and is {dataset.hash}"
    found = differences(before, dataset)
    shown = "; ".join(found[:5]) or f"its hash was {stored} and is {dataset.hash}"
    return shown + (f"; and {len(found) - 5} more changes" if len(found) > 5 else "")
