"""What an object store's client raises, in this project's words."""

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from coherent_ray.errors import AlreadyExists, NotFound, StorageError, StorageFull
from coherent_ray.storage.refusals import (
    explained,
    explanation,
    is_final,
    reason_of,
    status_of,
)

WHERE = "s3://bucket/run/log/1"
_SENT = "Error performing PUT http://host/bucket/run/log/1?sig=SECRET in 3ms, after 2 retries"


def said(status: str, code: str = "", message: str = "") -> str:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else ""
    answer = f"Generic S3 error: {_SENT} - Server returned non-2xx status code: {status}: {body}"
    return f"{answer}\n\nDebug source:\nGeneric {{ SECRET }}"


UNHEARD = f"Generic S3 error: {_SENT} - HTTP error: error sending request\n\nDebug source:\nx"


@pytest.mark.parametrize(
    ("error", "kind", "final"),
    [
        (GenericError(UNHEARD), StorageError, False),
        (GenericError(said("500 Internal Server Error")), StorageError, False),
        (GenericError(said("503 Service Unavailable", "SlowDown")), StorageError, False),
        (GenericError(said("429 Too Many Requests")), StorageError, False),
        (GenericError(said("408 Request Timeout")), StorageError, False),
        (GenericError(said("400 Bad Request", "InvalidRequest")), StorageError, True),
        (GenericError(said("501 Not Implemented", "NotImplemented")), StorageError, True),
        (GenericError(said("507 Insufficient Storage")), StorageFull, False),
        (GenericError(said("500 Error", "XMinioStorageFull")), StorageFull, False),
        (GenericError("x - HTTP error: builder error"), StorageError, True),
        (GenericError("x - Received redirect without LOCATION"), StorageError, True),
        (AlreadyExistsError(said("412 Precondition Failed")), AlreadyExists, False),
        (AlreadyExistsError(said("409 Conflict")), AlreadyExists, False),
        (PreconditionError(said("412 Precondition Failed")), AlreadyExists, False),
        (PermissionDeniedError(said("403 Forbidden", "AccessDenied")), StorageError, True),
        (UnauthenticatedError(said("401 Unauthorized")), StorageError, True),
        (InvalidPathError("empty segment"), StorageError, True),
        (FileNotFoundError(said("404 Not Found", "NoSuchKey")), NotFound, True),
        (FileNotFoundError(said("404 Not Found", "NoSuchBucket")), StorageError, True),
        (FileNotFoundError(said("404 Not Found", "ContainerNotFound")), StorageError, True),
        (OSError("Writer already closed."), StorageError, False),
    ],
)
def test_each_refusal_has_its_kind(error: Exception, kind: type, final: bool) -> None:
    found = explanation(error, WHERE)
    assert type(found) is kind
    assert found.where == WHERE
    assert is_final(error) is final
    assert "SECRET" not in str(found)
    assert "\n" not in found.what
    with pytest.raises(kind), explained(WHERE):
        raise error


def test_the_reason_is_the_stores_own() -> None:
    error = GenericError(said("503 Service Unavailable", "SlowDown", "Please reduce\nyour rate."))
    assert (
        reason_of(error) == "the store answered 503 Service Unavailable (SlowDown: Please reduce)"
    )
    assert status_of(error) == 503
    assert explanation(error, WHERE).details == {"status": 503}


def test_no_answer_is_said_to_be_none() -> None:
    error = GenericError(UNHEARD)
    assert reason_of(error) == "the store does not answer: HTTP error: error sending request"
    assert status_of(error) is None
    assert explanation(error, WHERE).details == {}


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (PermissionDeniedError(said("403 Forbidden")), "right to read"),
        (UnauthenticatedError(said("401 Unauthorized")), "credentials"),
        (GenericError("x - no credential found"), "credentials"),
        (FileNotFoundError(said("404 Not Found", "NoSuchBucket")), "Make the bucket"),
        (GenericError(said("404 Not Found", "NoSuchBucket")), "Make the bucket"),
        (GenericError("x - HTTP error: builder error"), "storage.allow_http"),
        (GenericError("x - Received redirect without LOCATION"), "storage.region"),
        (InvalidPathError("empty segment"), "prefix of its own"),
        (GenericError(said("507 Insufficient Storage")), "Make room"),
    ],
)
def test_a_refusal_that_a_person_can_mend_says_how(error: Exception, word: str) -> None:
    assert word in explanation(error, WHERE).remedy


def test_what_is_not_the_clients_passes() -> None:
    with pytest.raises(ZeroDivisionError), explained(WHERE):
        raise ZeroDivisionError


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
@pytest.mark.parametrize("kind", [GenericError, PermissionDeniedError])
def test_whoever_is_refused_hears_what_to_look_at(kind: type[Exception], status: str) -> None:
    # A listing's refusal has no kind of its own, only its status.
    remedy = explanation(kind(said(status)), WHERE).remedy
    for word in ("credentials", "region", "endpoint", "bucket"):
        assert word in remedy
