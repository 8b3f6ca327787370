"""Taking a name in an object store: a conditional put whose answer may be lost, late or doubled.

Each claim stamps what it writes with a word of its own, kept as the object's metadata. Whoever does
not know whether a claim came through reads the object back, and the stamp says whose it is:

| the put was answered with | the name then holds | so the claim |
|---|---|---|
| success | | has the name |
| taken (412, 409) | our stamp: an answer was lost, or the request doubled | has the name |
| taken | another stamp, or none | came too late |
| taken | nothing: another's put was about to happen, or was refused | is made again |
| no answer, or 5xx | our stamp | has the name |
| no answer, or 5xx | another stamp | came too late |
| no answer, or 5xx | nothing | is made again: the store lets only one of the two through |
| a definite refusal | | has failed |

A store that forgets metadata leaves no stamp. Then, and only if one of our requests went without an
answer, the very bytes decide: the name holds what was to be written, so nobody is told a falsehood.

Nothing here looks at a clock to decide, and nothing is guessed: a claim of which the store will not
say what became of it ends in an error, and the object may yet be found.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Literal

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from coherent_ray.errors import AlreadyExists, StorageError
from coherent_ray.storage.clients import Clients
from coherent_ray.storage.refusals import ANSWERS, explained, explanation, is_final

#: The metadata's name; letters only, which every store takes.
STAMP = "coherentray"

Holder = Literal["us", "them", "nobody"]


@dataclass(frozen=True, slots=True)
class Object:
    """What is under a name."""

    size: int
    """Bytes."""
    stamp: str | None
    """The claim that wrote it; None: it has none."""


def new_stamp() -> str:
    """Return a word that no other claim has."""
    return uuid.uuid4().hex


def claim(clients: Clients, path: str, data: memoryview) -> None:
    """Make an object that did not exist, or find out that it does; see this module's table.

    Args:
        clients: Of the root.
        path: Relative to the root, legal.
        data: The object's bytes, flat.

    Raises:
        AlreadyExists: The name is another's; what is stored is untouched.
        StorageError: The store refused, or did not say what became of the request.
    """
    where, stamp = clients.address.where(path), new_stamp()
    refusal = StorageError("nothing was tried", where=where)
    unanswered = 0
    for pause in clients.pauses():
        time.sleep(pause)
        try:
            obstore.put(
                clients.once,
                path,
                data,
                attributes={STAMP: stamp},
                mode="create",
                use_multipart=False,
            )
        except (AlreadyExistsError, PreconditionError) as error:
            refusal = explanation(error, where)
        except ANSWERS as error:
            refusal = _of_a_put(error, where)
            if is_final(error):
                raise refusal from error
            unanswered += 1
        else:
            return
        try:
            holder = _holder(clients, path, data, stamp, unanswered)
        except StorageError as error:
            refusal = error
            continue
        if holder == "us":
            return
        if holder == "them":
            raise AlreadyExists("the name is taken", where=where)
    raise _unknown(refusal, where, unanswered)


def look(clients: Clients, path: str) -> Object | None:
    """Return what is under a name, without its bytes; None: nothing.

    Raises:
        StorageError: The store does not say.
    """
    with explained(clients.address.where(path)):
        try:
            size = obstore.head(clients.patient, path)["size"]
            # Metadata come with bytes only, so one byte is asked for, where there is one.
            options = {"range": (0, 1)} if size else {}
            found = obstore.get(clients.patient, path, options=options)  # type: ignore[arg-type]
        except FileNotFoundError:
            return None
        return Object(found.meta["size"], found.attributes.get(STAMP))


def _holder(clients: Clients, path: str, data: memoryview, stamp: str, unanswered: int) -> Holder:
    where = clients.address.where(path)
    with explained(where):
        try:
            found = obstore.get(clients.patient, path)
        except FileNotFoundError:
            return "nobody"
        stored = found.attributes.get(STAMP)
        ours = stored == stamp or (stored is None and unanswered > 0)
        if not ours:
            return "them"
        # A stranger's object may be large; ours is not.
        same = found.meta["size"] == len(data) and memoryview(found.bytes()) == data
    if same:
        return "us"
    if stored is None:
        return "them"
    raise StorageError("the store holds other bytes than it was given", where=where)


def _of_a_put(error: Exception, where: str) -> StorageError:
    refusal = explanation(error, where)
    if isinstance(error, FileNotFoundError):
        # There is no name that a put could miss but the bucket's.
        return StorageError(
            "the bucket or container does not exist",
            where=where,
            remedy="Make it, or mend its name in the address.",
            details=refusal.details,
        )
    return refusal


def _unknown(refusal: StorageError, where: str, unanswered: int) -> StorageError:
    if isinstance(refusal, AlreadyExists):
        what = "the store says that the name is taken, and that nothing is stored there"
        return StorageError(what, where=where, remedy="Try again; another writer was at work.")
    return type(refusal)(
        refusal.what,
        where=where,
        remedy=refusal.remedy,
        details={**refusal.details, "unanswered": unanswered},
    )
