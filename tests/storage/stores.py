"""Fixtures: servers of object stores on loopback, started once by whoever asks first.

A plugin of the whole test session (`tests/conftest.py` names it), because several layers are tried
on object stores. The servers are imported late: most tests need none.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from azure_server import AzureServer
    from gcs_server import GcsServer
    from s3_server import S3Server

_ROOTS = itertools.count(1)


@pytest.fixture
def prefix() -> str:
    """The prefix of a root that no other test has."""
    return f"run-{next(_ROOTS)}"


@pytest.fixture(scope="session")
def store_credentials() -> Iterator[None]:
    """Credentials that no real store knows, and nothing else of this machine's environment."""
    import azure_server
    import gcs_server

    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(gcs_server.ACCOUNT))
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure_server.KEY)
        yield


@pytest.fixture(scope="session")
def s3_session(store_credentials: None) -> Iterator[S3Server]:
    import s3_server

    with s3_server.started() as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server) -> S3Server:
    s3_session.faults.forget()
    return s3_session


@pytest.fixture(scope="session")
def gcs_session(store_credentials: None) -> Iterator[GcsServer]:
    import gcs_server

    with gcs_server.started() as server:
        yield server


@pytest.fixture
def gcs(gcs_session: GcsServer) -> GcsServer:
    gcs_session.faults.forget()
    return gcs_session


@pytest.fixture(scope="session")
def azure_session(store_credentials: None) -> Iterator[AzureServer]:
    import azure_server

    program = azure_server.find()
    if program is None:
        pytest.skip("azurite is not installed: bash scripts/azurite.sh installs it, with npm")
    with azure_server.started(program) as server:
        yield server


@pytest.fixture
def azure(azure_session: AzureServer) -> AzureServer:
    azure_session.faults.forget()
    return azure_session
