"""S3, Google Cloud Storage and Azure pass the suite that third parties inherit; so do their parts.

Against real servers, started here on loopback. Writers are tried twice: with small objects, which
are one conditional put, and with parts of a few bytes, so that every object is sent in parts.
"""

from typing import Any

import azure_server
import gcs_server
import pytest
import s3_server

from coherent_ray.storage.object_store import ObjectStorage
from coherent_ray.storage.testing.conformance import Reach, StorageConformance, WriterConformance


class ObjectReach(Reach):
    #: Bytes of a part; None: what the servers' tests use.
    part_bytes: int | None = None

    server: Any
    prefix: str

    def open(self) -> ObjectStorage:
        return self.server.open(
            self.prefix, **({"part_bytes": self.part_bytes} if self.part_bytes else {})
        )

    def raw_read(self, path: str) -> bytes | None:
        return self.server.read(f"{self.prefix}/{path}")

    def raw_write(self, path: str, data: bytes) -> None:
        self.server.write(f"{self.prefix}/{path}", data)

    def raw_paths(self) -> set[str]:
        return self.server.keys(self.prefix)


class OnS3(ObjectReach):
    @pytest.fixture(autouse=True)
    def _root(self, s3: s3_server.S3Server, prefix: str) -> None:
        self.server, self.prefix = s3, prefix


class OnGcs(ObjectReach):
    @pytest.fixture(autouse=True)
    def _root(self, gcs: gcs_server.GcsServer, prefix: str) -> None:
        self.server, self.prefix = gcs, prefix


class OnAzure(ObjectReach):
    @pytest.fixture(autouse=True)
    def _root(self, azure: azure_server.AzureServer, prefix: str) -> None:
        self.server, self.prefix = azure, prefix


class TestS3(OnS3, StorageConformance):
    directories = False


class TestS3InParts(OnS3, WriterConformance):
    part_bytes = 3


class TestGcs(OnGcs, StorageConformance):
    directories = False


class TestGcsInParts(OnGcs, WriterConformance):
    part_bytes = 3


class TestAzure(OnAzure, StorageConformance):
    directories = False


class TestAzureInParts(OnAzure, WriterConformance):
    part_bytes = 3
