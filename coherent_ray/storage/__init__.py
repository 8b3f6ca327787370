"""Durable bytes: the Storage protocol and its backends."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coherent_ray.errors import ConfigError
from coherent_ray.storage.base import Entry, Storage, Writer
from coherent_ray.storage.local import LocalStorage
from coherent_ray.storage.options import StorageOptions
from coherent_ray.storage.signing import place_in_environment

__all__ = ["Entry", "LocalStorage", "Storage", "StorageOptions", "Writer", "open_storage"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """Return the storage that an address names; nothing is read or made yet.

    Args:
        uri: A path, absolute, relative or under ``~``; ``file:///an/absolute/path``; or a root in
            an object store: ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX``,
            ``az://CONTAINER/PREFIX``.
        options: How to talk to an object store, and where the signing key is found; None: as the
            environment says. Directories need but the latter.

    Raises:
        ConfigError: The address names no place that this version can use, or a file; or the options
            do not fit it.
    """
    if not uri.strip() or "\0" in uri:
        raise ConfigError("the root is empty or not a path", where=repr(uri))
    if options is None:
        key = place_in_environment()
        options = StorageOptions(key_env=key.env) if key else StorageOptions()
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return _directory(Path(uri).expanduser(), options)
    if scheme[1].lower() != "file":
        # Late: whoever stays in directories needs no client of object stores.
        from coherent_ray.storage.object_store import ObjectStorage

        return ObjectStorage(uri, options)
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise ConfigError(
            "a file address has no host and an absolute path",
            where=uri,
            remedy="Write file:///an/absolute/path, or the path alone.",
        )
    return _directory(Path(unquote(parts.path)), options)


def _directory(root: Path, options: StorageOptions) -> LocalStorage:
    """Return the storage in a directory, which need not exist but can be no file."""
    storage = LocalStorage(root, options.key_place, direct_io=options.direct_io)
    for place in (path := Path(storage.uri), *path.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue  # not there, or not to be looked at: told by whoever uses it
        if stat.S_ISDIR(mode):
            break
        raise ConfigError(
            "a root is a directory, and this is a file"
            if place == path
            else f"a root is a directory, and {place} above it is a file",
            where=storage.uri,
            remedy="Name the directory of the run.",
        )
    return storage
