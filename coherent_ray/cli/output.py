"""What commands print: tables and fields for people, one JSON value for programs.

On a terminal, rich draws; elsewhere, plain aligned columns that ``awk`` can read. No command prints
by itself, and nothing here decides anything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from coherent_ray.errors import CoherentRayError

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

#: Control characters but the line's end; what turns the direction of writing; halves of pairs.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_HALVES = re.compile("[\ud800-\udfff]")
#: How Python shows the bytes 0x80 to 0xff of a name that is no UTF-8.
_NO_UTF8 = range(0xDC80, 0xDD00)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STYLES = {
    "latest": "bold green",
    "whole": "green",
    "published": "",
    "pinned": "cyan",
    "retired": "dim",
    "damaged": "bold red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    right: bool = False
    """Numbers stand on the right."""


def show_json(value: Any, *, lines: bool = False) -> None:
    """Print a JSON value; ``lines``: on one line, as one of many."""
    text = json.dumps(value, ensure_ascii=False, indent=None if lines else 2)
    # Half of a pair, as a file's name has it that is no UTF-8, can be written in JSON alone.
    click.echo(_HALVES.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def named(path: str) -> str:
    """Return a file's name as one line that harms no terminal, whatever bytes are in it."""
    return _plain(path).replace("\n", "\\n")


def _plain(text: str) -> str:
    """Return a text with all but its line ends made visible that moves a cursor or has no UTF-8.

    Names of files are anybody's, and messages quote them.
    """
    return _UNSEEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code in _NO_UTF8:
        return f"\\x{code - _NO_UTF8.start + 0x80:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their titles; a cell that is a state's name is coloured as such."""
    rows = [[named(cell) for cell in row] for row in rows]
    if _is_terminal():
        _show_drawn_table(columns, rows)
        return
    lines = [[column.title for column in columns], *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def show_fields(title: str, fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values under a title."""
    pairs = [(name, named(value)) for name, value in fields]
    width = max((len(name) for name, _ in pairs), default=0)
    click.secho(title, bold=True)
    for name, value in pairs:
        click.echo(f"  {click.style(name.ljust(width), dim=True)}  {value}")


def show_line(text: str, *, style: str = "") -> None:
    """Print one line; ``style``: good, bad or faint."""
    colours: dict[str, dict[str, Any]] = {
        "good": {"fg": "green"},
        "bad": {"fg": "red", "bold": True},
        "faint": {"dim": True},
    }
    click.secho(_plain(text), **colours.get(style, {}))


def show_warning(text: str) -> None:
    """Say on stderr what does not change the answer."""
    click.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    click.echo(_plain(text), err=True)


def show_text(text: str, language: str) -> None:
    """Print a text of a language, in colours where there is a terminal."""
    if not _is_terminal():
        click.echo(text)
        return
    from rich.syntax import Syntax

    _console().print(Syntax(text, language, theme="ansi_dark", background_color="default"))


def show_error(error: CoherentRayError, *, as_json: bool) -> None:
    """Print an error: JSON to standard output, or its sentences to standard error."""
    if as_json:
        show_json({"error": error_value(error)})
        return
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(_plain(str(error)), err=True)


def while_printing(error: OSError) -> bool:
    """Return whether an error came from writing to the terminal, the pipe or the file of output.

    Any other that gets as far as the command line is a bug.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in {"click.utils", "rich.console"}:
            return True
        trace = trace.tb_next
    return False


def show_output_lost(error: OSError) -> None:
    """Say that the output could not be written; only standard error is left to say it."""
    reason = (error.strerror or str(error)).lower()
    with suppress(OSError):
        show_error(
            CoherentRayError(
                f"the output could not be written: {reason}",
                remedy="Send it to a place that has room; nothing else was changed by this.",
            ),
            as_json=False,
        )


def drop_output() -> None:
    """Let what is still buffered go, or the interpreter would fail on it once more at its end."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def error_value(error: CoherentRayError) -> dict[str, Any]:
    """Return an error as a JSON value."""
    return {
        "type": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "remedy": error.remedy,
        "details": error.details,
        "exit_code": error.exit_code,
    }


def size_text(size: int) -> str:
    """Return a size in bytes as people read it: ``12.3 MiB``."""
    amount = float(size)
    for unit in _UNITS:
        if amount < 1000 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def count_text(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2 shards``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _show_drawn_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell.split(",")[0], "")) for cell in row))
    _console().print(table)
