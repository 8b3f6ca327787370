"""The clients of an object store: one that never asks twice, and one that does.

A conditional put must never be repeated behind our back: the second answer to one's own write is
"taken". So it goes through `Clients.once`, and `coherent_ray.storage.claim` does the repeating.
Everything else may be repeated without harm and goes through `Clients.patient`.

Credentials, and all that the options leave open, come from the environment as the vendors name it.
A profile of the AWS configuration files (``AWS_PROFILE``) is read by boto3, where it is installed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from coherent_ray.errors import ConfigError
from coherent_ray.storage.address import Address
from coherent_ray.storage.options import StorageOptions

#: Seconds between two tries at most.
_LONGEST_PAUSE_S = 5.0
#: Seconds after which a request is not sent again. Its signature would be too old.
_LONGEST_RETRY_S = 240.0


@dataclass(frozen=True, slots=True)
class Clients:
    """A root's clients, and how patient they are."""

    address: Address
    options: StorageOptions
    once: ObjectStore
    """Sends each request once."""
    patient: ObjectStore
    """Sends a request again where nothing is known of its fate, or the store asks for time."""

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each try of a request; the first is 0.

        Drawn at random, up to twice as long as the one before: many ranks meet one busy store.
        """
        yield 0.0
        longest = self.options.backoff_s
        for _ in range(self.options.retries):
            yield random.uniform(longest / 2, longest)
            longest = min(2 * longest, _LONGEST_PAUSE_S)


def connect(address: Address, options: StorageOptions) -> Clients:
    """Return a root's clients; no request is sent yet.

    Raises:
        ConfigError: The options and the environment do not make a client.
    """
    try:
        return Clients(
            address,
            options,
            once=_client(address, options, retries=0),
            patient=_client(address, options, retries=options.retries),
        )
    except ConfigError:
        raise
    except Exception as error:  # the client has many types for one thing
        raise ConfigError(
            f"the store's settings cannot be used: {str(error).partition(chr(10))[0]}",
            where=address.uri,
            remedy="See the section storage of the configuration, and the environment's "
            f"{_FAMILY[address.vendor]}_... variables.",
        ) from error


_FAMILY = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


def _client(address: Address, options: StorageOptions, *, retries: int) -> ObjectStore:
    shared: dict[str, Any] = {
        "prefix": address.prefix or None,
        "client_options": {
            "timeout": timedelta(seconds=options.timeout_s),
            "allow_http": options.allow_http or _allowed_http(address),
        },
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=_LONGEST_RETRY_S),
            "backoff": {
                "init_backoff": timedelta(seconds=options.backoff_s),
                "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                "base": 2,
            },
        },
    }
    given: dict[str, Any] = {
        ("base_url" if address.vendor == "gs" else "endpoint"): options.endpoint
    }
    match address.vendor:
        case "s3":
            # One object at a time is deleted, and not every store knows the bulk request.
            given |= {"region": options.region, "disable_bulk_delete": True}
            shared["credential_provider"] = _profile()
            return S3Store(address.bucket, config=_set(given), **shared)
        case "gs":
            return GCSStore(address.bucket, config=_set(given), **shared)
        case "az":
            given["account_name"] = options.account
            return AzureStore(address.bucket, config=_set(given), **shared)


def _allowed_http(address: Address) -> bool:
    # The client reads this variable itself, but not beside options of ours.
    value = os.environ.get(f"{_FAMILY[address.vendor]}_ALLOW_HTTP", "")
    return value.lower() in {"1", "true", "on", "yes"}


def _set(values: dict[str, Any]) -> Any:
    return {name: value for name, value in values.items() if value is not None}


def _profile() -> Any:
    """Return boto3's credentials for ``AWS_PROFILE``; None where it is not set."""
    profile = os.environ.get("AWS_PROFILE")
    if not profile or "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            f"AWS_PROFILE names {profile!r}, and boto3, which reads profiles, is not installed",
            where="AWS_PROFILE",
            remedy="pip install boto3; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from None
    return Boto3CredentialProvider()
