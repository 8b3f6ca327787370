"""Digests of whole data files, remembered between processes where that is safe.

Every rank of a node, and every restart, would hash the same bytes again. A digest is remembered
under the file's path, size, inode, device, modification and *change* time: no write to a file, and
no reset of its modification time, leaves its change time as it was. None of this enters a dataset's
identity; it only decides whether bytes are read again. A file that changed in the last seconds is
never remembered, because two writes may share one tick of the clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from coherent_ray import canonical
from coherent_ray.digests import Algorithm, Digest, algorithm_of, digest_of, new_hasher

_ALGORITHM: Algorithm = "blake3"
_BLOCK = 4 << 20
#: Seconds for which a file must have been left alone before its digest is remembered.
_SETTLED_S = 2.0


def cache_directory() -> Path:
    """Return where this user's derived data lies: ``$XDG_CACHE_HOME/coherent_ray`` or the like."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "coherent_ray"


def file_digest(path: Path) -> Digest:
    """Return the digest of a file's bytes, read in blocks.

    Raises:
        OSError: It cannot be read.
    """
    hasher = new_hasher(_ALGORITHM)
    block = bytearray(_BLOCK)
    view = memoryview(block)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            hasher.update(view[:count])
    return f"{_ALGORITHM}:{hasher.hexdigest()}"


@dataclass(frozen=True, slots=True)
class DigestCache:
    """Remembered digests, one small file each, under a directory that may not exist yet."""

    directory: Path

    def digest(self, path: Path) -> Digest:
        """Return the digest of a file's bytes, as remembered or as read now.

        Raises:
            OSError: The data file cannot be read. A cache that fails only costs time.
        """
        before = path.stat()
        entry = self.directory / f"{_name(path, before)}.digest"
        known = _load(entry)
        if known is not None:
            return known
        digest = file_digest(path)
        after = path.stat()
        settled = time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED_S
        if settled and _name(path, after) == _name(path, before):
            _store(entry, digest)
        return digest


def _name(path: Path, facts: os.stat_result) -> str:
    identity = [
        str(path.absolute()),
        facts.st_size,
        facts.st_dev,
        facts.st_ino,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
        _ALGORITHM,
    ]
    return canonical.digest(identity).partition(":")[2]


def _load(entry: Path) -> Digest | None:
    try:
        digest, check = entry.read_text("ascii").split("\n")
        algorithm_of(digest)
    except (OSError, ValueError):
        return None
    # A torn entry must not pass for a digest of other data: that would refuse a good resume.
    return digest if check == digest_of(digest.encode()) else None


def _store(entry: Path, digest: Digest) -> None:
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{uuid4().hex}.tmp")
        try:
            temporary.write_text(f"{digest}\n{digest_of(digest.encode())}", "ascii")
            temporary.replace(entry)
        finally:
            temporary.unlink(missing_ok=True)
