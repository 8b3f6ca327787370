"""What ``run`` shows while it trains: a bar on a terminal, a line now and then elsewhere.

A display is told events and never asks. It writes to standard error, so that what the command
answers in the end stands alone on standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from coherent_ray.cli.output import count_text
from coherent_ray.train.events import Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

#: Seconds between two lines where there is no terminal.
LINE_EVERY_S = 10.0


class Display(AbstractContextManager["Display"]):
    """Shows nothing; the base of those that do."""

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        match event.kind:
            case "started":
                self.started(event.facts)
            case "progress":
                if progress := event.facts.get("progress"):
                    self.progress(progress)
            case "note" | "restarting":
                self.note(event.text)

    def started(self, facts: dict[str, Any]) -> None:
        """Ray is there; ``facts``: run_id, updates, done, latest, address."""

    def progress(self, facts: dict[str, Any]) -> None:
        """Rank 0's newest numbers; see `coherent_ray.train.progress`."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the display."""


class Lines(Display):
    """A line for each generation, and one every `LINE_EVERY_S` seconds at most besides."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at = clock()
        self._shown: tuple[int, str | None] = (0, None)

    def started(self, facts: dict[str, Any]) -> None:
        """Say what begins, or goes on."""
        click.echo(f"{begins(facts)}; workers are starting", err=True)

    def progress(self, facts: dict[str, Any]) -> None:
        """Say how far it is, where that is news."""
        update, generation = facts["update"], facts.get("generation")
        is_due = generation != self._shown[1] or self._clock() - self._shown_at >= LINE_EVERY_S
        if update == self._shown[0] or "loss" not in facts or not is_due:
            return
        self._shown, self._shown_at = (update, generation), self._clock()
        click.echo(f"update {update:,} of {facts['updates']:,}  {numbers(facts)}", err=True)

    def note(self, text: str) -> None:
        """Print it."""
        click.echo(text, err=True)


class Bar(Display):
    """A progress bar; notes scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("[bold]update"),
            TextColumn("{task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=console or Console(stderr=True, highlight=False),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Return the display."""
        return self

    def started(self, facts: dict[str, Any]) -> None:
        """Begin the bar where the history ends."""
        self.note(begins(facts))
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(
                "", total=facts["updates"], completed=facts["done"], numbers="workers are starting"
            )

    def progress(self, facts: dict[str, Any]) -> None:
        """Move the bar: back, too, where a restarted group repeats what was not published."""
        if self._task is None:
            return
        text = numbers(facts) if "loss" in facts else "workers are starting"
        self._progress.update(
            self._task, completed=facts["update"], total=facts["updates"], numbers=text
        )

    def note(self, text: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(text, markup=False, style="dim")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def display_for(*, as_json: bool) -> Display:
    """Return the display that suits the place: none for programs, a bar on a terminal, lines."""
    if as_json:
        return Display()
    return Bar() if sys.stderr.isatty() else Lines()


def begins(facts: dict[str, Any]) -> str:
    """Return how a run begins, in words."""
    if facts.get("latest") is None:
        return f"run {facts['run_id']}: {facts['updates']:,} updates, from the beginning"
    return (
        f"run {facts['run_id']}: resumes at {facts['latest']}, "
        f"update {facts['done']:,} of {facts['updates']:,}"
    )


def _about(save: dict[str, Any]) -> str:
    # It is older than the numbers beside it: a save is published behind the training.
    return f" of update {save['update']:,} (stall {save['stall_s'] * 1000:.1f} ms)"


def numbers(facts: dict[str, Any]) -> str:
    """Return loss, speed, the last published generation with its stall, and saves left out."""
    parts = [f"loss {facts['loss']:.4f}", f"{facts['examples_per_s']:,.0f} examples/s"]
    if generation := facts.get("generation"):
        save = next((s for s in facts.get("saves", []) if s["name"] == generation), None)
        parts.append(f"{generation}{_about(save)}" if save else str(generation))
    if skipped := facts.get("skipped"):
        parts.append(f"{count_text(skipped, 'save')} skipped")
    return "  ".join(parts)
