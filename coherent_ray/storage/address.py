"""Addresses of roots in object stores: ``s3://BUCKET/PREFIX``, ``gs://...``, ``az://CONTAINER/...``.

A root is everything below one prefix. The prefix is made of plain names, as a path is, so that what
an address names does not depend on how a client would tidy it up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from coherent_ray.errors import ConfigError, StorageError
from coherent_ray.storage.base import checked_path

Vendor = Literal["s3", "gs", "az"]

VENDORS: dict[str, Vendor] = {"s3": "s3", "gs": "gs", "az": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9$](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"


@dataclass(frozen=True, slots=True)
class Address:
    """A root in an object store."""

    vendor: Vendor
    bucket: str
    """Bucket, or Azure's container."""
    prefix: str
    """Names joined by slashes, without one at either end; empty: the whole bucket."""

    @property
    def uri(self) -> str:
        """The address as the user may type it."""
        root = f"{self.vendor}://{self.bucket}"
        return f"{root}/{self.prefix}" if self.prefix else root

    def where(self, path: str) -> str:
        """Return a file's own address."""
        return f"{self.uri}/{path}"


def parse_address(uri: str) -> Address:
    """Return what an address names.

    Args:
        uri: Begins with a scheme. Slashes at its end mean nothing.

    Raises:
        ConfigError: The scheme is not one of an object store, or the rest is not made as it must
            be.
    """
    scheme, slashes, rest = uri.partition("://")
    vendor = VENDORS.get(scheme)
    if not slashes:
        raise ConfigError("an address has two slashes", where=uri, remedy=f"Write {_FORMS}.")
    if vendor is None:
        raise ConfigError(
            f"{scheme} is no kind of storage that this version knows",
            where=uri,
            remedy=f"Write {_FORMS}, or a path on a file system that every node can reach.",
        )
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError("the address names no bucket", where=uri, remedy=f"Write {_FORMS}.")
    try:
        return Address(vendor, bucket, checked_path(prefix) if prefix else "")
    except StorageError as error:
        raise ConfigError(
            f"the prefix cannot be used: {error.what}", where=uri, remedy=f"Write {_FORMS}."
        ) from error
