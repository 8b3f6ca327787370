"""A small double of Google Cloud Storage's XML interface, as far as the client uses it.

Objects with generations and metadata, conditions on the generation, ranges, lists with pages,
multipart uploads. (The emulators that can be installed speak the JSON interface only.) Conditions
hold: a change looks and writes under one lock.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from faulty_server import FaultyServer, served

from coherent_ray.storage import StorageOptions
from coherent_ray.storage.object_store import ObjectStorage

BUCKET = "bucket"
#: A service account that needs no token.
ACCOUNT = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
PART_BYTES = 16 * 2**10
_META = "HTTP_X_GOOG_META_"
_DATE = "Sun, 29 Nov 2026 00:00:00 GMT"
_PAGE = 50


@dataclass
class Stored:
    data: bytes
    generation: int
    meta: dict[str, str]

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'

    def headers(self) -> list[tuple[str, str]]:
        return [
            ("ETag", self.tag),
            ("Last-Modified", _DATE),
            ("x-goog-generation", str(self.generation)),
            *((f"x-goog-meta-{name}", value) for name, value in self.meta.items()),
        ]


@dataclass
class Upload:
    key: str
    meta: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Store:
    """The WSGI application. `FaultyServer` in front calls changes one at a time."""

    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, key: str, data: bytes, meta: dict[str, str]) -> Stored:
        self.objects[key] = Stored(data, next(self._numbers), meta)
        return self.objects[key]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"].encode("latin-1").decode()
        _, bucket, *rest = path.split("/", 2)
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        key, method = "".join(rest), environ["REQUEST_METHOD"]
        if bucket != BUCKET:
            answer = _error("404 Not Found", "NoSuchBucket")
        elif not key:
            answer = self._list(query)
        elif "uploads" in query or "uploadId" in query:
            answer = self._multipart(method, key, query, body, environ)
        else:
            answer = self._object(method, key, body, environ)
        status, headers, data = answer
        start_response(status, [*headers, ("Content-Length", str(len(data)))])
        return [b"" if method == "HEAD" else data]

    def _object(self, method: str, key: str, body: bytes, environ: dict[str, Any]) -> Any:
        found = self.objects.get(key)
        if method == "PUT":
            wanted = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
            if wanted is not None and int(wanted) != (found.generation if found else 0):
                return _error("412 Precondition Failed", "PreconditionFailed")
            return "200 OK", self.put(key, body, _meta_of(environ)).headers(), b""
        if found is None:
            return _error("404 Not Found", "NoSuchKey")
        if method == "DELETE":
            del self.objects[key]
            return "204 No Content", [], b""
        return _ranged(found, environ.get("HTTP_RANGE"))

    def _multipart(
        self, method: str, key: str, query: dict[str, list[str]], body: bytes, environ: Any
    ) -> Any:
        if "uploads" in query:
            name = f"upload-{next(self._numbers)}"
            self.uploads[name] = Upload(key, _meta_of(environ))
            answer = f"<UploadId>{name}</UploadId>"
            return _xml("InitiateMultipartUploadResult", answer)
        name = query["uploadId"][0]
        upload = self.uploads.get(name)
        if upload is None:
            return _error("404 Not Found", "NoSuchUpload")
        if method == "PUT":
            upload.parts[int(query["partNumber"][0])] = body
            return "200 OK", [("ETag", f'"part-{len(body)}"')], b""
        del self.uploads[name]
        if method == "DELETE":
            return "204 No Content", [], b""
        numbers = [int(n) for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        stored = self.put(key, b"".join(upload.parts[n] for n in numbers), upload.meta)
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(stored.tag)}</ETag>")

    def _list(self, query: dict[str, list[str]]) -> Any:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        names = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
        page = names[:_PAGE]
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key>"
            "<LastModified>2026-11-29T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.objects[name].tag)}</ETag>"
            f"<Size>{len(self.objects[name].data)}</Size></Contents>"
            for name in page
        )
        if names[_PAGE:]:
            items += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return _xml("ListBucketResult", items)


@dataclass
class GcsServer:
    """A server, and what tests do with it."""

    faults: FaultyServer
    endpoint: str
    store: Store
    """For looking behind the backend's back."""

    def open(self, prefix: str, **changes: Any) -> ObjectStorage:
        values = {
            "endpoint": self.endpoint,
            "allow_http": True,
            "part_bytes": PART_BYTES,
            "timeout_s": 10.0,
            "retries": 4,
            "backoff_s": 0.01,
        }
        return ObjectStorage(f"gs://{BUCKET}/{prefix}", StorageOptions(**{**values, **changes}))

    def read(self, key: str) -> bytes | None:
        found = self.store.objects.get(key)
        return found.data if found else None

    def write(self, key: str, data: bytes) -> None:
        self.store.put(key, data, {})

    def keys(self, prefix: str) -> set[str]:
        keys = [*self.store.objects, *(upload.key for upload in self.store.uploads.values())]
        return {key.removeprefix(f"{prefix}/") for key in keys if key.startswith(f"{prefix}/")}


@contextmanager
def started() -> Iterator[GcsServer]:
    """Start a server with one bucket."""
    store = Store()
    faults = FaultyServer(store)
    with served(faults) as endpoint:
        yield GcsServer(faults, endpoint, store)


def _ranged(found: Stored, wanted: str | None) -> Any:
    if wanted is None:
        return "200 OK", found.headers(), found.data
    first, last = wanted.removeprefix("bytes=").split("-")
    start, size = int(first), len(found.data)
    stop = min(int(last) + 1, size) if last else size
    if start >= size:
        return _error("416 Requested Range Not Satisfiable", "InvalidRange")
    headers = [*found.headers(), ("Content-Range", f"bytes {start}-{stop - 1}/{size}")]
    return "206 Partial Content", headers, found.data[start:stop]


def _meta_of(environ: dict[str, Any]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(_META)}
    return {name.removeprefix(_META).lower().replace("_", "-"): v for name, v in found.items()}


def _xml(name: str, inner: str) -> Any:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'
    return "200 OK", [("Content-Type", "application/xml")], text.encode()


def _error(status: str, code: str) -> Any:
    text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return status, [("Content-Type", "application/xml")], text.encode()
