"""Does what the coordinator asks of the storage, and decides nothing.

`perform` blocks and may be called from any thread, one call at a time for a run. It never raises:
whatever goes wrong becomes the event that says so, because a rank waits for the answer. All of it
may be done twice, by two processes at once: shards are only read, a manifest's bytes follow from
the acknowledgements, and the log holds one record for one generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coherent_ray.commit.events import (
    AppendFailed,
    AppendPublish,
    CheckShards,
    Event,
    ManifestFailed,
    ManifestWritten,
    PublishAppended,
    RefreshHint,
    ShardsChecked,
    StorageAction,
    WriteManifest,
)
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import MANIFEST_BYTES, ShardRecord
from coherent_ray.commit.shard_records import reuse_problem
from coherent_ray.errors import (
    AlreadyExists,
    CoherentRayError,
    Fenced,
    NotFound,
    SaveFailed,
    StorageError,
)
from coherent_ray.storage.base import Storage
from coherent_ray.storage.sizes import Sizes


def perform(action: StorageAction, storage: Storage, log: CommitLog) -> Event | None:
    """Do what an action asks for, and wait until it is done.

    Args:
        action: What the machine asked for.
        storage: The run's root.
        log: The run's commit log.

    Returns:
        The event to hand to the machine; None where it waits for none.
    """
    match action:
        case CheckShards(key, shards):
            sizes = Sizes(storage, (file.path for shard in shards for file in shard.files))
            problems = [text for shard in shards if (text := _problem(sizes, shard))]
            return ShardsChecked(key, tuple(problems or _base_problems(storage, log, shards)))
        case WriteManifest():
            return _write_manifest(action, storage)
        case AppendPublish():
            return _append_publish(action, log)
        case RefreshHint():
            _refresh_hint(log)
            return None


def _problem(sizes: Sizes, shard: ShardRecord) -> str:
    for file in shard.files:
        where = f"shard {file.path} of rank {shard.rank}"
        try:
            size = sizes.of(file.path, file.size)
        except NotFound:
            return f"{where} is missing"
        except Exception as error:
            return f"{where} cannot be read: {_reason(error)}"
        if size != file.size:
            return f"{where} has {size} bytes instead of {file.size}"
    return ""


def _base_problems(
    storage: Storage, log: CommitLog, shards: Sequence[ShardRecord]
) -> Iterator[str]:
    """Yield what is wrong with references to files of earlier generations.

    That the base is not retired is looked at here so that it is told well; what holds it is the
    log, which refuses such a publish whatever happens after this look.
    """
    referring = [shard for shard in shards if shard.reuse]
    if not referring or referring[0].reuse is None:
        return
    base = referring[0].reuse.base
    try:
        history = log.read_on()
        publish = history.publish_of(*base.key)
        if publish is None or base.key in history.retired:
            what = "is retired" if publish else "was never published"
            yield f"{base.name}, to which the shards refer, {what}"
            return
        manifest = Generations(storage, log).manifest(publish)
    except Exception as error:
        yield f"{base.name}, to which the shards refer, cannot be read: {_reason(error)}"
        return
    for shard in referring:
        if shard.rank >= len(manifest.shards):
            yield f"shard {shard.path} refers to {base.name}, which has no rank {shard.rank}"
        elif problem := reuse_problem(shard, manifest.shards[shard.rank]):
            yield f"shard {shard.path} refers to {base.name} wrongly: {problem}"


def _write_manifest(action: WriteManifest, storage: Storage) -> Event:
    if len(action.data) > MANIFEST_BYTES:
        what = f"the manifest has {len(action.data)} bytes; readers take {MANIFEST_BYTES} at most"
        return ManifestFailed(action.key, f"{what}: set a larger checkpoint.block_bytes")
    try:
        for last_try in (False, True):
            try:
                storage.create(action.path, action.data)
            except AlreadyExists:
                # A coordinator of the same attempt wrote it and died, or is about to. Its bytes
                # follow from the same acknowledgements: other bytes mean that something is wrong.
                if storage.read(action.path, 0, len(action.data) + 1) != action.data:
                    return ManifestFailed(action.key, f"{action.path} holds something else")
            except StorageError:
                # The answer may be lost and the file written. Only success or `AlreadyExists`
                # says that it is durable, so seeing it is a reason to ask again, no more.
                if last_try or not _holds(storage, action):
                    raise
                continue
            break
    except Exception as error:
        return ManifestFailed(action.key, _reason(error))
    return ManifestWritten(action.key)


def _holds(storage: Storage, action: WriteManifest) -> bool:
    try:
        return storage.read(action.path, 0, len(action.data) + 1) == action.data
    except StorageError:
        return False


def _append_publish(action: AppendPublish, log: CommitLog) -> Event:
    try:
        record = log.append(action.body, action.key.attempt)
    except Fenced as error:
        return AppendFailed(action.key, error.what, "fenced")
    except SaveFailed as error:
        return AppendFailed(action.key, error.what, "refused")
    except Exception as error:
        return AppendFailed(action.key, _reason(error), "unknown")
    return PublishAppended(action.key, record.seq)


def _refresh_hint(log: CommitLog) -> None:
    try:
        log.refresh_hint(log.read_on())
    except Exception:
        # The hint changes nothing but the time that a reader takes.
        return


def _reason(error: Exception) -> str:
    if isinstance(error, CoherentRayError):
        return f"{error.where}: {error.what}" if error.where else error.what
    return f"{type(error).__name__}: {error}"
