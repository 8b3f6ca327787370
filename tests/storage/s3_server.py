"""An S3 server in the test's process (moto), with faults before it and boto3 behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
import moto.s3.models
from botocore.config import Config as BotoConfig
from faulty_server import App, FaultyServer, served
from moto.server import DomainDispatcherApplication, create_backend_app

from coherent_ray.storage import StorageOptions
from coherent_ray.storage.object_store import ObjectStorage

BUCKET = "bucket"
#: Small, so that small files have several parts.
PART_BYTES = 16 * 2**10


@dataclass
class S3Server:
    """A server, and what tests do with it."""

    faults: FaultyServer
    endpoint: str
    client: Any
    """boto3's: for looking behind the backend's back."""

    def options(self, **changes: Any) -> StorageOptions:
        values = {
            "endpoint": self.endpoint,
            "allow_http": True,
            "region": "us-east-1",
            "part_bytes": PART_BYTES,
            "timeout_s": 10.0,
            "retries": 4,
            "backoff_s": 0.01,
        }
        return StorageOptions(**{**values, **changes})

    def open(self, prefix: str, **changes: Any) -> ObjectStorage:
        return ObjectStorage(f"s3://{BUCKET}/{prefix}", self.options(**changes))

    def read(self, key: str) -> bytes | None:
        try:
            return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None

    def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def keys(self, prefix: str) -> set[str]:
        """Every object below a prefix, relative to it; uploads that are under way, too."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        keys = [item["Key"] for item in listed] + self.uploads(prefix)
        return {key.removeprefix(f"{prefix}/") for key in keys}

    def uploads(self, prefix: str) -> list[str]:
        """The keys of multipart uploads that were neither completed nor aborted."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [item["Key"] for item in found if item["Key"].startswith(f"{prefix}/")]


def moto_app() -> App:
    # S3 wants parts of 5 MiB; the tests want many parts in little time.
    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1
    return DomainDispatcherApplication(create_backend_app)


def client_of(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=BotoConfig(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )


@contextmanager
def started() -> Iterator[S3Server]:
    """Start a server with one bucket."""
    faults = FaultyServer(moto_app())
    with served(faults) as endpoint:
        client = client_of(endpoint)
        client.create_bucket(Bucket=BUCKET)
        yield S3Server(faults, endpoint, client)
