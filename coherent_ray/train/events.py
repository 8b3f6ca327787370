"""What the driver process tells its supervisor: one JSON line an event.

The supervisor outlives the driver, and Ray with it: the driver may be killed, or end by itself
when the head node is gone for too long. So they share nothing but this pipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

from coherent_ray import errors
from coherent_ray.errors import CoherentRayError

Kind = Literal[
    "note", "found", "started", "progress", "restarting", "restarted", "finished", "error"
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the user may want to see."""

    kind: Kind
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON values; what they are depends on the kind."""


def write(stream: IO[str], event: Event) -> None:
    """Send an event; a supervisor that is gone is no error."""
    try:
        stream.write(json.dumps(asdict(event), default=str) + "\n")
        stream.flush()
    except (BrokenPipeError, ValueError):
        return


def read(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of a stream; what is none, as a torn last line, is left out."""
    for line in lines:
        try:
            event = Event(**json.loads(line))
        except (ValueError, TypeError):
            continue
        yield event


def from_error(error: CoherentRayError) -> Event:
    """Return the event that carries an error."""
    facts = {
        "type": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "remedy": error.remedy,
        "details": error.details,
    }
    return Event("error", error.what, facts)


def to_error(event: Event) -> CoherentRayError:
    """Return the error that an event carries."""
    kind = getattr(errors, str(event.facts.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, CoherentRayError)):
        kind = CoherentRayError
    return kind(
        event.facts.get("what", event.text),
        where=event.facts.get("where", ""),
        remedy=event.facts.get("remedy", ""),
        details=event.facts.get("details", {}),
    )
