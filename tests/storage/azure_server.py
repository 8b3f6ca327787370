"""Azurite, Microsoft's emulator of Azure Blob Storage, with faults in front.

It is a Node program: `scripts/azurite.sh` installs it with npm, where that is there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from faulty_server import FaultyServer, served

from coherent_ray.storage import StorageOptions
from coherent_ray.storage.object_store import ObjectStorage

CONTAINER = "container"
ACCOUNT = "devstoreaccount1"
#: The emulator's only account has this key, which is no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PART_BYTES = 16 * 2**10
PROGRAM = "azurite-blob"
INSTALLED = Path(__file__).parents[2] / ".venv" / "azurite" / "node_modules" / ".bin" / PROGRAM
_VERSION = "2021-08-06"
_FLAGS = "--blobPort 0 --inMemoryPersistence --silent --disableTelemetry --skipApiVersionCheck"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


def find() -> str | None:
    """Return the emulator's path; None where it is not installed."""
    return shutil.which(PROGRAM) or (str(INSTALLED) if INSTALLED.exists() else None)


@dataclass
class Forward:
    """A WSGI application that asks another server."""

    host: str

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        target = quote(environ["PATH_INFO"].encode("latin-1"), safe="/:~!$&'()*+,;=@")
        if environ.get("QUERY_STRING"):
            target += f"?{environ['QUERY_STRING']}"
        # The signature is over the path as it was sent.
        target = environ.get("RAW_URI") or environ.get("REQUEST_URI") or target
        headers = {
            name[5:].replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_") and name != "HTTP_HOST"
        }
        if environ.get("CONTENT_TYPE"):
            headers["content-type"] = environ["CONTENT_TYPE"]
        body = environ["wsgi.input"].read()
        if body or environ.get("CONTENT_LENGTH"):
            headers["content-length"] = str(len(body))
        status, answered, data = _ask(self.host, environ["REQUEST_METHOD"], target, headers, body)
        kept = [(k, v) for k, v in answered if k.lower() not in _HOP_BY_HOP]
        start_response(status, kept)
        return [data]


@dataclass
class AzureServer:
    """A server, and what tests do with it."""

    faults: FaultyServer
    endpoint: str
    host: str

    def open(self, prefix: str, **changes: Any) -> ObjectStorage:
        values = {
            "endpoint": f"{self.endpoint}/{ACCOUNT}",
            "account": ACCOUNT,
            "allow_http": True,
            "part_bytes": PART_BYTES,
            "timeout_s": 20.0,
            "retries": 4,
            "backoff_s": 0.01,
        }
        return ObjectStorage(f"az://{CONTAINER}/{prefix}", StorageOptions(**{**values, **changes}))

    def read(self, key: str) -> bytes | None:
        status, data = self.ask("GET", f"/{CONTAINER}/{quote(key)}")
        return data if status == 200 else None

    def write(self, key: str, data: bytes) -> None:
        status, said = self.ask("PUT", f"/{CONTAINER}/{quote(key)}", data=data)
        assert status == 201, said

    def keys(self, prefix: str) -> set[str]:
        status, data = self.ask("GET", f"/{CONTAINER}", {"comp": "list", "restype": "container"})
        assert status == 200, data
        names = map(unescape, re.findall(r"<Name>([^<]*)</Name>", data.decode()))
        return {n.removeprefix(f"{prefix}/") for n in names if n.startswith(f"{prefix}/")}

    def ask(
        self, method: str, path: str, query: dict[str, str] | None = None, data: bytes = b""
    ) -> tuple[int, bytes]:
        """Send a request that is signed with the account's key."""
        query = query or {}
        headers = {
            "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "x-ms-version": _VERSION,
        }
        if method == "PUT" and not query:
            headers["x-ms-blob-type"] = "BlockBlob"
        length = str(len(data)) if data else ""
        lines = [method, "", "", length, "", "", "", "", "", "", "", ""]
        lines += [f"{name}:{headers[name]}" for name in sorted(headers)]
        resource = f"/{ACCOUNT}/{ACCOUNT}{path}"
        resource += "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        text = "\n".join([*lines, resource]).encode()
        signed = hmac.new(base64.b64decode(KEY), text, hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
        headers["content-length"] = str(len(data))
        target = f"/{ACCOUNT}{path}"
        if query:
            target += "?" + "&".join(f"{name}={value}" for name, value in query.items())
        status, _, answer = _ask(self.host, method, target, headers, data)
        return int(status.split()[0]), answer


@contextmanager
def started(program: str) -> Iterator[AzureServer]:
    """Start the emulator, with one container, and the faults before it."""
    process = subprocess.Popen(
        [program, *_FLAGS.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        host = _host_of(process)
        faults = FaultyServer(Forward(host))
        with served(faults) as endpoint:
            server = AzureServer(faults, endpoint, host)
            assert server.ask("PUT", f"/{CONTAINER}", {"restype": "container"})[0] == 201
            yield server
    finally:
        process.terminate()
        process.wait()


def _host_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"listens on (\S+)", line):
            return urlsplit(found[1]).netloc
    raise RuntimeError("azurite ended before it listened")


def _ask(
    host: str, method: str, target: str, headers: dict[str, str], body: bytes
) -> tuple[str, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    return f"{answer.status} {answer.reason}", answer.getheaders(), data
