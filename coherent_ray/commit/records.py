"""The records of the commit log: attempt, publish, retire, pin; and their bytes. No I/O.

With a signing key, a record's file is signed as a whole, over its canonical bytes without the
signature: the chain of digests is the same with it or without it.

A record names the record before it by digest, so the log is a chain. Its file also carries a digest
of the record itself, so that no byte of the newest record, which nothing names yet, can change
unseen. Bytes that are not exactly what `encode` would make are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.commit.manifest import (
    FORMAT,
    RECORD_FORMAT,
    Count,
    Positive,
    ReceiptSegment,
    RunId,
    generation_name,
    manifest_path,
    reason_of,
    refuse_later,
)
from coherent_ray.commit.shard_records import Base
from coherent_ray.digests import Digest, digest_of
from coherent_ray.storage.signing import PATTERN as SIGNATURE
from coherent_ray.storage.signing import SigningKey

_STRICT = ConfigDict(strict=True, extra="forbid")

#: Where the records lie, under the run's root.
DIRECTORY = "log"
#: No record is longer; whoever meets a longer file does not read it.
RECORD_BYTES = 64 * 2**10

_KEYS = {"digest", "format", "record"}
_SIGNED = re.compile(rf',"signature":"{SIGNATURE}"\}}$'.encode())

Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$")]
Kind = Literal["attempt", "publish", "retire", "pin"]


@dataclass(frozen=True, slots=True, config=_STRICT)
class AttemptBody:
    """An attempt opens: from here on, no older attempt can publish."""

    attempt: Positive
    run_id: RunId
    token: Token
    """Unique to this opening: whoever repeats it after a lost answer finds it by this."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class PublishBody:
    """The commit point of a generation."""

    number: Positive
    attempt: Positive
    update: Count
    """Optimizer steps that are done in it."""
    epoch: Count
    manifest: str
    """Path of the manifest, relative to the run's root."""
    manifest_size: Positive
    """Bytes."""
    manifest_digest: Digest
    receipts: ReceiptSegment | None
    base: Base | None = None
    """The generation whose files it refers to; None, which no document says: it refers to none."""

    def __post_init__(self) -> None:
        if self.manifest != manifest_path(self.number, self.attempt):
            raise ValueError(f"the manifest of {self.name} cannot be {self.manifest!r}")

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        if self.base is None:
            del found["base"]
        return found

    @property
    def name(self) -> str:
        """The generation's name, ``g12-a3``."""
        return generation_name(self.number, self.attempt)


@dataclass(frozen=True, slots=True, config=_STRICT)
class RetireBody:
    """A published generation is given up: from here on, its files may be deleted."""

    number: Positive
    attempt: Positive
    """The attempt that published it."""

    @property
    def name(self) -> str:
        """The generation's name, ``g12-a3``."""
        return generation_name(self.number, self.attempt)


@dataclass(frozen=True, slots=True, config=_STRICT)
class PinBody:
    """A published generation is kept whatever retention says, or no longer so."""

    number: Positive
    attempt: Positive
    """The attempt that published it."""
    pinned: bool

    @property
    def name(self) -> str:
        """The generation's name, ``g12-a3``."""
        return generation_name(self.number, self.attempt)


Body = AttemptBody | PublishBody | RetireBody | PinBody
_KINDS: dict[type, Kind] = {
    AttemptBody: "attempt",
    PublishBody: "publish",
    RetireBody: "retire",
    PinBody: "pin",
}


def record_path(seq: int) -> str:
    """Return where a record lies, relative to the run's root."""
    return f"{DIRECTORY}/{seq:020d}.json"


def kind_of(body: Body) -> Kind:
    """Return the kind of record that a body makes."""
    return _KINDS[type(body)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class Record:
    """One record of the commit log."""

    seq: Positive
    previous: Digest | None
    """Digest of the record before it; None in the first."""
    writer: Token
    """Unique to its writer: tells one's own record from another's."""
    kind: Kind
    body: Body

    def __post_init__(self) -> None:
        if self.kind != kind_of(self.body):
            raise ValueError(f"kind {self.kind!r} with the body of {kind_of(self.body)!r}")
        if (self.seq == 1) != (self.previous is None):
            raise ValueError("the first record, and no other, has none before it")

    @property
    def digest(self) -> Digest:
        """Digest of the record's canonical JSON: what the next record calls `previous`."""
        return digest_of(_canonical(self))


_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


class WrongSignature(ValueError):
    """A record is not signed with the key that was given."""


def encode(record: Record, key: SigningKey | None = None) -> bytes:
    """Return the bytes of a record's file: canonical JSON of the record and its digest.

    Args:
        record: The record.
        key: Signs the file; None: it is not signed.
    """
    value = _ADAPTER.dump_python(record, mode="json")
    file = {"digest": canonical.digest(value), "format": _format_of(record), "record": value}
    if key is not None:
        file["signature"] = key.sign(_to_sign(file))
    return canonical.dump(file)


def is_signed(data: bytes) -> bool:
    """Return whether the bytes of a record's file, which `decode` has accepted, are signed."""
    return _SIGNED.search(data[-100:]) is not None


def decode(data: bytes, key: SigningKey | None = None) -> Record:
    """Return the record of a file's bytes, which must be exactly what `encode` makes of it.

    Args:
        data: The file.
        key: Must have signed it; None: a signature is passed over.

    Raises:
        WrongSignature: They are not signed with this key. Nothing else was believed by then.
        LaterFormat: A later version of this software wrote them, as far as they say.
        ValueError: They are not; the message says why.
    """
    value = canonical.load(data)
    refuse_later(value)
    if not isinstance(value, dict) or value.keys() - {"signature"} != _KEYS:
        raise ValueError("it is not a record with its digest")
    _check_signature(value, key)
    if type(value["format"]) is not int or value["format"] not in {FORMAT, RECORD_FORMAT}:
        raise ValueError(f"it has format {canonical.shown(value['format'])}, not {FORMAT}")
    inner = canonical.dump(value["record"])
    # The record is most of it, and is needed by itself: it is not made canonical twice.
    rest = canonical.dump({**value, "record": None})
    if data != rest.replace(b',"record":null', b',"record":' + inner, 1):
        raise ValueError("it is not canonical JSON")
    if digest_of(inner) != value["digest"]:
        raise ValueError("the record does not hash to the digest beside it")
    try:
        record = _ADAPTER.validate_json(inner)
    except ValidationError as error:
        raise ValueError(reason_of(error, "record")) from error
    if value["format"] != _format_of(record):
        raise ValueError(f"format {value['format']} is not that of such a record")
    return record


def _format_of(record: Record) -> int:
    """Return a record's format: a version that knows no bases would delete what is needed."""
    has_base = isinstance(record.body, PublishBody) and record.body.base is not None
    return RECORD_FORMAT if has_base else FORMAT


def _check_signature(file: dict[str, canonical.Json], key: SigningKey | None) -> None:
    """Check what stands under ``signature``, by its form alone where there is no key."""
    signature = file.get("signature")
    if "signature" in file and not (
        isinstance(signature, str) and re.fullmatch(SIGNATURE, signature)
    ):
        raise ValueError("its signature is none")
    if key is None:
        return
    if signature is None:
        raise WrongSignature("it is not signed, and a signing key was given")
    if not key.signed(_to_sign(file), signature):
        raise WrongSignature("it is not signed with the key that was given")


def _to_sign(file: dict[str, canonical.Json]) -> bytes:
    # The words before it keep this signature from standing for anything else under the same key.
    rest = {name: value for name, value in file.items() if name != "signature"}
    return b"coherent-ray log record\n" + canonical.dump(rest)


def _canonical(record: Record) -> bytes:
    return canonical.dump(_ADAPTER.dump_python(record, mode="json"))
