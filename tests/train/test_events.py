"""The pipe between driver and supervisor: whole events arrive, torn ones are left out."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coherent_ray import errors
from coherent_ray.errors import CoherentRayError, DataError
from coherent_ray.train import events
from coherent_ray.train.events import Event

EVENTS = [
    Event("started", facts={"address": "local", "done": 3}),
    Event("progress", facts={"progress": {"update": 7, "loss": 0.1 + 0.2}, "attempt": 1}),
    Event("note", "zwei\nZeilen, ümläute and \u2028 separators"),
    Event("restarting", "the driver lost Ray"),
    Event("finished", facts={"stopped": False, "saves": []}),
]


def lines_of(*sent: Event) -> str:
    stream = io.StringIO()
    for event in sent:
        events.write(stream, event)
    return stream.getvalue()


def test_what_is_sent_arrives() -> None:
    text = lines_of(*EVENTS)
    assert text.count("\n") == len(EVENTS)
    assert list(events.read(io.StringIO(text))) == EVENTS


def test_they_are_plain_text_whatever_they_say() -> None:
    assert lines_of(*EVENTS).isascii()


def test_each_event_is_sent_at_once() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as out, os.fdopen(writing, "w") as stream:
        events.write(stream, EVENTS[0])
        assert json.loads(out.readline())["kind"] == "started"


def test_values_that_are_no_json_become_text() -> None:
    [event] = events.read(io.StringIO(lines_of(Event("note", facts={"path": Path("/x/y")}))))
    assert event.facts == {"path": "/x/y"}


def test_numbers_that_are_not_finite_arrive() -> None:
    [event] = events.read(io.StringIO(lines_of(Event("progress", facts={"loss": float("inf")}))))
    assert event.facts["loss"] == float("inf")


def test_a_torn_last_line_is_left_out_wherever_it_is_torn() -> None:
    text = lines_of(*EVENTS)
    start = text.rindex("\n", 0, -1) + 1
    for end in range(start, len(text) - 1):
        assert list(events.read(io.StringIO(text[:end]))) == EVENTS[:-1]
    assert list(events.read(io.StringIO(text[:-1]))) == EVENTS


@pytest.mark.parametrize(
    "line",
    ["", "null", "7", '"text"', "[1, 2]", "{}", '{"text": "no kind"}', '{"kind": "note", "x": 1}'],
)
def test_lines_that_are_no_events_are_left_out(line: str) -> None:
    text = f"{lines_of(EVENTS[0])}{line}\n{lines_of(EVENTS[1])}"
    assert list(events.read(io.StringIO(text))) == EVENTS[:2]


def test_a_supervisor_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    os.close(reading)
    events.write(stream, EVENTS[0])
    events.write(stream, EVENTS[1])
    with pytest.raises(BrokenPipeError):
        stream.close()
    events.write(stream, EVENTS[2])


def every_error() -> list[type[CoherentRayError]]:
    found, todo = [], [CoherentRayError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_crosses_the_pipe(kind: type[CoherentRayError]) -> None:
    error = kind("what", where="where", remedy="remedy", details={"ranks": [1, 2]})
    [event] = events.read(io.StringIO(lines_of(events.from_error(error))))
    assert event.kind == "error"
    again = events.to_error(event)
    assert type(again) is kind
    assert (again.what, again.where, again.remedy) == ("what", "where", "remedy")
    assert again.details == {"ranks": [1, 2]}
    assert again.exit_code == kind.exit_code


@pytest.mark.parametrize("name", ["Unheard", "annotations", "ClassVar", "_rebuild", "", None, 7])
def test_an_error_of_another_version_is_still_an_error(name: Any) -> None:
    event = Event("error", "what", {"type": name, "what": "what happened"})
    error = events.to_error(event)
    assert type(error) is CoherentRayError
    assert str(error) == "what happened"


def test_an_error_with_little_in_it_has_its_text() -> None:
    error = events.to_error(Event("error", "only a text", {"type": DataError.__name__}))
    assert type(error) is DataError
    assert (error.what, error.where, error.remedy, error.details) == ("only a text", "", "", {})
