"""How to talk to an object store: plain values, the same in every process of a run.

No secret stands here. Credentials come from where the ecosystem keeps them: the environment of each
process (``AWS_ACCESS_KEY_ID``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY``),
or the role of the machine. What is None here is taken from the environment too
(``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AZURE_STORAGE_ACCOUNT_NAME``). Directories need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coherent_ray.errors import ConfigError
from coherent_ray.storage.signing import KeyPlace

#: Bytes of one part of a large object unless the user chooses.
PART_BYTES = 16 * 2**20
#: The most parts that an S3 or GCS object may have; Azure allows more.
MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of an object store; see the section ``storage`` of the configuration."""

    endpoint: str | None = None
    """The store's address, ``https://HOST``; None: the vendor's own, or the environment's."""
    region: str | None = None
    """S3 only; None: the environment's, or us-east-1."""
    account: str | None = None
    """Azure's storage account; None: the environment's."""
    allow_http: bool = False
    """Whether an endpoint without TLS may be used."""
    part_bytes: int = PART_BYTES
    """Bytes of one part of a large object. A smaller object is one request, and conditional."""
    parallel_parts: int = 4
    """Parts of one object that are sent at once; a writer holds one more in memory."""
    timeout_s: float = 60.0
    """Seconds that one request may take."""
    retries: int = 8
    """How often a request is sent again."""
    backoff_s: float = 0.1
    """Seconds before the first of these; each pause may be twice the one before."""
    direct_io: bool = True
    """Directories only: write large files past the page cache, where the file system takes it."""
    key_env: str | None = None
    """Environment variable that holds the key which signs records; for directories too."""
    key_file: str | None = None
    """File that holds it, instead."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: Names the first setting that is wrong.
        """
        for name, problem in conflicts(self.endpoint, allow_http=self.allow_http):
            raise ConfigError(problem, where=f"storage.{name}")
        for name, least in (("part_bytes", 1), ("parallel_parts", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"must be {least} or more", where=f"storage.{name}")
        if not self.timeout_s > 0 or not self.backoff_s > 0:
            raise ConfigError("seconds must be more than 0", where="storage.timeout_s")

    @property
    def key_place(self) -> KeyPlace | None:
        """Where the signing key is found; None: records are not signed."""
        if self.key_env is None and self.key_file is None:
            return None
        return KeyPlace(self.key_env, self.key_file)


def conflicts(endpoint: str | None, *, allow_http: bool) -> Iterator[tuple[str, str]]:
    """Yield ``(setting, what is wrong)`` for an endpoint that could never be used."""
    if endpoint is None:
        return
    scheme, separator, host = endpoint.partition("://")
    if scheme not in {"http", "https"} or not separator or not host.strip("/"):
        yield "endpoint", "is not an address: write https://HOST, or http://HOST:PORT"
    elif scheme == "http" and not allow_http:
        yield "endpoint", "is an address without TLS, which needs allow_http: true"
