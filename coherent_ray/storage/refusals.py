"""An object store's refusals, in this project's words, and whether a request may have been done.

| a request ended with | was it carried out? |
|---|---|
| success | yes |
| a definite refusal: no rights, no bucket, a bad request | no |
| anything else: no answer, a time-out, 5xx | nobody knows; whoever must know looks |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from coherent_ray.errors import AlreadyExists, NotFound, StorageError, StorageFull

#: What the client may raise. `FileNotFoundError` and other `OSError` come from it as well.
ANSWERS = (BaseError, OSError, ValueError)

_STATUS = re.compile(r"status code: (\d{3})([^:\n]*):?\s*(.*)", re.DOTALL)
_XML = re.compile(r"<(Code|Message)>\s*([^<]*?)\s*</\1>")
#: Statuses below 500 that say "not now", not "no".
_PASSING = {408, 409, 412, 425, 429}
#: Statuses above that say "no".
_FINAL = {501, 505}
_FULL_CODES = ("InsufficientStorage", "QuotaExceeded", "StorageFull", "AccountBeingFull")
_SECRETS = re.compile(r"\?[^\s)]+")

_RIGHTS = (
    "See that the bucket's name, storage.region and storage.endpoint are right, that the "
    "environment or the machine's role has the credentials for it, and that the machine's clock is "
    "right; and give these credentials the right to read, write, list and delete under the root."
)
_CREDENTIALS = "Set the credentials in the environment of every node, or give the machines a role."
_BUCKET = "Make the bucket or container, or mend its name in the address."
_HTTP = "An endpoint without TLS needs storage.allow_http: true."
_REGION = "Set storage.region, or AWS_REGION, to where the bucket is."
_LISTED = "Give the run a prefix of its own, or remove the object with that name."


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn what the client raises inside the block into this project's errors.

    Args:
        where: The address that it is about.

    Raises:
        NotFound: There is no such object.
        StorageFull: No space or quota is left.
        StorageError: Any other refusal, or no answer.
    """
    try:
        yield
    except ANSWERS as error:
        raise explanation(error, where) from error


def explanation(error: Exception, where: str) -> StorageError:
    """Return the error that a user should see for one of the client's.

    Args:
        error: One of `ANSWERS`.
        where: The address that it is about.
    """
    status, reason = status_of(error), reason_of(error)
    details: dict[str, object] = {"status": status} if status is not None else {}
    if status == 507 or any(code in reason for code in _FULL_CODES):
        remedy = "Make room, or raise the quota; what is published is untouched."
        return StorageFull(reason, where=where, remedy=remedy, details=details)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in reason:
        if "ContainerNotFound" not in reason:
            return NotFound("nothing is stored here", where=where, details=details)
        return StorageError(reason, where=where, remedy=_BUCKET, details=details)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return AlreadyExists("the name is taken", where=where, details=details)
    return StorageError(reason, where=where, remedy=_remedy(error, reason), details=details)


def is_final(error: Exception) -> bool:
    """Return whether a request was certainly not carried out, and would not be another time."""
    if isinstance(
        error,
        FileNotFoundError
        | PermissionDeniedError
        | UnauthenticatedError
        | InvalidPathError
        | NotSupportedError,
    ):
        return True
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return False
    status = status_of(error)
    if status is None:
        misdirected = any(word in str(error) for word in ("builder error", "redirect"))
        return misdirected or not isinstance(error, GenericError | OSError)
    return status in _FINAL or (status < 500 and status not in _PASSING)


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that the store answered with; None: it did not answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def reason_of(error: Exception) -> str:
    """Return what the store, or the way to it, had to say, in one line without addresses."""
    text = str(error).partition("\n\nDebug source")[0]
    found = _STATUS.search(text)
    if found is None:
        last = text.rpartition(" - ")[2] or type(error).__name__
        return f"the store does not answer: {_SECRETS.sub('', _one_line(last))}"
    said = dict(_XML.findall(found[3]))
    words = ": ".join(filter(None, (said.get("Code"), _one_line(said.get("Message", "")))))
    answer = f"the store answered {found[1]}{found[2].rstrip()}"
    return f"{answer} ({_SECRETS.sub('', words)})" if words else answer


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _remedy(error: Exception, reason: str) -> str:
    known = [
        (isinstance(error, PermissionDeniedError), _RIGHTS),
        (isinstance(error, UnauthenticatedError) or "credential" in reason.lower(), _CREDENTIALS),
        (isinstance(error, InvalidPathError), _LISTED),
        ("NoSuchBucket" in reason or "ContainerNotFound" in reason, _BUCKET),
        (status_of(error) in {401, 403}, _RIGHTS),
        ("redirect" in reason, _REGION),
        ("builder error" in reason, _HTTP),
    ]
    return next((remedy for holds, remedy in known if holds), "")
