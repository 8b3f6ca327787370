"""The signing key of a root: where it is found, and what is done with it. It is never stored.

A configuration, a pickled storage and Ray's arguments carry the key's *place* alone, the name of an
environment variable or of a file; each process reads the key from its own. The key itself cannot be
pickled or printed.

HMAC-SHA256 (RFC 2104, https://www.rfc-editor.org/rfc/rfc2104) rather than keyed BLAKE3: it takes a
key of any length, and every language's standard library can check it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, runtime_checkable

from coherent_ray.errors import ConfigError
from coherent_ray.storage.base import Storage

#: Where commands that are given a root alone look for the key.
KEY_VARIABLE = "COHERENT_RAY_SIGNING_KEY"
#: Bytes that a key has at least, and at most.
SHORTEST, LONGEST = 16, 4096
#: The form of a signature.
PATTERN = r"hmac-sha256:[0-9a-f]{64}"


class SigningKey:
    """A secret that signs bytes."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "SigningKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key does not travel: each process reads its own")

    def sign(self, data: bytes) -> str:
        """Return the signature of some bytes."""
        return f"hmac-sha256:{hmac.new(self._secret, data, hashlib.sha256).hexdigest()}"

    def signed(self, data: bytes, signature: str) -> bool:
        """Return whether this key made a signature of some bytes; takes as long if it did not."""
        return hmac.compare_digest(self.sign(data).encode(), signature.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a key is found: exactly one of the two."""

    env: str | None = None
    """Name of an environment variable."""
    file: str | None = None
    """Absolute path of a file."""

    def __post_init__(self) -> None:
        if (self.env is None) == (self.file is None):
            raise ConfigError("needs exactly one of env and file", where="storage.signing_key")

    def read(self) -> SigningKey:
        """Return the key, without the white space round it.

        Raises:
            ConfigError: It is not there, or no key. Tells the place, never the key.
        """
        secret = self._secret().strip()
        if not SHORTEST <= len(secret) <= LONGEST:
            raise self._refused(f"has {len(secret)} bytes, a key {SHORTEST} to {LONGEST}")
        return SigningKey(secret)

    def _secret(self) -> bytes:
        if self.env is not None:
            value = os.environb.get(os.fsencode(self.env))
            if value is None:
                raise self._refused("is not set in this process")
            return value
        try:
            with Path(self.file or "").open("rb") as file:
                return file.read(LONGEST + 2)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else "it cannot be read"
            raise self._refused(f"cannot be read here: {reason}") from None

    def _refused(self, what: str) -> ConfigError:
        kind = "environment variable" if self.env is not None else "file"
        return ConfigError(
            f"the {kind} of the signing key {what}",
            where=str(self.env or self.file),
            remedy="Every machine that runs a driver, a worker or the coordinator, and every shell "
            "that looks at the run, needs the key in that place; `openssl rand -hex 32` makes one.",
        )


@runtime_checkable
class Signed(Protocol):
    """A storage that knows where the key of its root is found."""

    @property
    def key_place(self) -> KeyPlace | None:
        """None: what is stored is not signed."""


def key_of(storage: Storage) -> SigningKey | None:
    """Return the key that the records under a root are signed with; None: they are not.

    Raises:
        ConfigError: The storage says where the key is, and it is not there.
    """
    place = storage.key_place if isinstance(storage, Signed) else None
    return None if place is None else place.read()


def place_in_environment() -> KeyPlace | None:
    """Return where a command that was given a root alone finds the key; None: nowhere."""
    return KeyPlace(env=KEY_VARIABLE) if KEY_VARIABLE in os.environ else None
