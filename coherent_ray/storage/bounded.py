"""Reading whole files that must be small: what is longer than it may be is not read into memory.

A file in the root is data from outside. Whoever expects a record of some hundred bytes may find ten
gigabytes there, so the bound comes first, in the same request as the bytes.
"""

from __future__ import annotations

from coherent_ray.storage.base import Storage


class TooLong(ValueError):
    """A file has more bytes than what it should be can have."""


def read_bounded(storage: Storage, path: str, most: int) -> bytes:
    """Return a file's bytes, of which there may be `most`.

    Never holds more than one byte beyond that in memory.

    Raises:
        TooLong: There are more.
        NotFound: There is no such file.
        StorageError: The storage failed.
    """
    data = storage.read(path, 0, most + 1)
    if len(data) > most:
        raise TooLong(f"it has more than {most} bytes")
    return data
