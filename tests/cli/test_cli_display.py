"""What is shown while a run trains, and how values are put into words."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from coherent_ray.cli import display, output
from coherent_ray.cli.display import Bar, Display, Lines, begins, display_for, numbers
from coherent_ray.cli.output import Column, count_text, show_fields, show_table, size_text
from coherent_ray.train.events import Event

STARTED = {"run_id": "job", "updates": 120, "done": 40, "latest": "g4-a1", "address": "x"}


def progress(update: int, **facts) -> Event:
    values = {"update": update, "updates": 120, "loss": 3.25, "examples_per_s": 1234.5, **facts}
    return Event("progress", facts={"progress": values})


def test_how_a_run_begins():
    assert begins(STARTED) == "run job: resumes at g4-a1, update 40 of 120"
    assert begins(STARTED | {"latest": None}) == "run job: 120 updates, from the beginning"


def test_numbers():
    facts = progress(1).facts["progress"]
    assert numbers(facts) == "loss 3.2500  1,234 examples/s"
    saves = [{"name": "g1-a1", "update": 1_010, "stall_s": 0.0021}]
    shown = numbers(facts | {"generation": "g1-a1", "saves": saves})
    assert shown.endswith("g1-a1 of update 1,010 (stall 2.1 ms)")
    # The generation that was resumed from was not saved here.
    assert numbers(facts | {"generation": "g9-a1", "saves": saves}).endswith("g9-a1")
    assert numbers(facts | {"skipped": 2}).endswith("  2 saves skipped")


def test_lines_tell_each_generation_and_else_keep_quiet(capsys):
    now = [0.0]
    shown = Lines(lambda: now[0])
    shown(Event("started", facts=STARTED))
    for update in range(41, 61):
        now[0] += 1.0
        generation = f"g{update // 10}-a2"
        shown(progress(update, generation=generation))
        shown(progress(update, generation=generation))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"{begins(STARTED)}; workers are starting"
    assert [line.split()[1] for line in lines[1:]] == ["41", "50", "60"]


def test_lines_come_by_time_too(capsys):
    now = [0.0]
    shown = Lines(lambda: now[0])
    for update in range(1, 26):
        now[0] += 1.0
        shown(progress(update))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["10", "20"]


def test_lines_tell_notes(capsys):
    shown = Lines()
    shown(Event("note", "stopping"))
    shown(Event("restarting", "the driver died"))
    shown(Event("progress", facts={"progress": {}}))
    shown(Event("progress", facts={"progress": {"update": 3, "updates": 9}}))
    assert capsys.readouterr().err == "stopping\nthe driver died\n"


def test_the_bar_shows_numbers_and_notes():
    screen = io.StringIO()
    with Bar(Console(file=screen, force_terminal=True, width=120, color_system=None)) as bar:
        bar(progress(1))  # before it has begun: nothing to move
        bar(Event("started", facts=STARTED))
        bar(progress(57, generation="g5-a2"))
        bar(Event("note", "a [worker] died"))
        bar(Event("started", facts=STARTED))
    text = screen.getvalue()
    assert "57/120" in text
    assert "loss 3.2500  1,234 examples/s  g5-a2" in text
    assert "a [worker] died" in text


def test_nothing_is_shown_to_programs(capsys):
    with display_for(as_json=True) as shown:
        assert type(shown) is Display
        shown(Event("started", facts=STARTED))
        shown(progress(1))
        shown(Event("note", "x"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("terminal", "kind"), [(True, Bar), (False, Lines)])
def test_the_place_decides(monkeypatch, terminal, kind):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(display.sys, "stderr", sys.stderr)
    assert type(display_for(as_json=False)) is kind


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1024**2 * 12 + 1024**2 // 2, "12.5 MiB"),
        (1000 * 1024**2, "1.0 GiB"),
        (5 * 1024**5, "5.0 PiB"),
        (5000 * 1024**5, "5000.0 PiB"),
    ],
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_counts():
    assert count_text(1, "shard") == "1 shard"
    assert count_text(0, "shard") == "0 shards"
    assert count_text(1234, "update") == "1,234 updates"


def test_a_plain_table_is_aligned(capsys):
    columns = (Column("name"), Column("n", right=True), Column("state"))
    show_table(columns, [("a", "1", "latest"), ("longer", "1,000", "")])
    assert capsys.readouterr().out.splitlines() == [
        "name        n  state",
        "a           1  latest",
        "longer  1,000",
    ]


def test_a_drawn_table_has_colours(monkeypatch, capsys):
    monkeypatch.setattr(output, "_is_terminal", lambda: True)
    console = Console(force_terminal=True, width=60, color_system="standard", file=sys.stdout)
    monkeypatch.setattr(output, "_console", lambda: console)
    show_table((Column("generation"), Column("state")), [("g1-a1", "latest"), ("g2", "damaged")])
    text = capsys.readouterr().out
    assert "generation" in text
    assert "\x1b[1;32mlatest" in text
    assert "\x1b[1;31mdamaged" in text


def test_fields_are_aligned(capsys):
    show_fields("title", [("a", "1"), ("long", "2")])
    assert capsys.readouterr().out.splitlines() == ["title", "  a     1", "  long  2"]


def test_json_keeps_every_letter(capsys):
    output.show_json({"name": "Größe"})
    text = capsys.readouterr().out
    assert "Größe" in text
    assert json.loads(text) == {"name": "Größe"}
