"""Training functions whose workers are told to go. Imported in workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from coherent_ray.train import coordinators, hooks, leaving, spares
from coherent_ray.train.admit import current
from coherent_ray.train.coordinators import answer
from coherent_ray.train.loop import train
from coherent_ray.train.update import Update

#: The rank that is told, and the last update that it finishes before.
TOLD_RANK = 1
BEFORE = 4
PATIENCE_S = 120.0


def terminated(values: dict[str, Any]) -> None:
    """The product's training function; one rank gets SIGTERM in the first attempt."""
    _at_update(BEFORE, _terminate)
    train(values)


def cut_off(values: dict[str, Any]) -> None:
    """The same, and it is killed before the next update ends."""

    def strike() -> None:
        _terminate()
        coordinator = coordinators.find(current().run_id)
        _until(lambda: answer(coordinator.status.remote())["leave"] is not None)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)  # the signal is delivered in between

    _at_update(BEFORE, strike)
    train(values)


def slow(values: dict[str, Any]) -> None:
    """The product's training function; an update takes a tenth of a second."""
    hooks.install(lambda point: time.sleep(0.1) if point.startswith("update@") else None)
    train(values)


def _at_update(update: int, strike: Any) -> None:
    def at(point: str) -> None:
        if point == f"update@{update}":
            strike()

    if current().rank == TOLD_RANK and current().attempt == 1:
        hooks.install(at)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    _until(lambda: leaving.sigterm.asked)


def _until(happened: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("it never happened")
        time.sleep(0.01)


def plain(values: dict[str, Any]) -> None:
    """The product's training function, as it is."""
    train(values)


def terminated_midway(values: dict[str, Any]) -> None:
    """The same; one rank gets SIGTERM while it computes a microbatch, in the first attempt."""
    _in_microbatch(BEFORE + 1, 2, 1, _terminate)
    train(values)


def stopped_midway(values: dict[str, Any]) -> None:
    """The same; one rank hears of a wish to stop when half of its last lane is done."""

    def stop() -> None:
        # As `coherent-ray run` asks, and this rank hears it from its beacon.
        answer(coordinators.find(current().run_id).request.remote("stop"))
        time.sleep(6.0)

    _in_microbatch(3, 3, 1, stop)
    train(values)


def _in_microbatch(update: int, lane: int, index: int, strike: Any) -> None:
    """Strike behind a microbatch's backward pass, on the rank that computes it."""
    backward = Update.backward

    def struck(self: Update, loss_sum: Any, count: int) -> None:
        backward(self, loss_sum, count)
        if (self.number, self._lane, self._tally.done(lane)) == (update, lane, index):
            strike()

    if current().attempt == 1:
        Update.backward = struck  # type: ignore[method-assign]


def killed_beside_spares(values: dict[str, Any]) -> None:
    """The product's training function; one rank kills itself once its node's spares wait.

    Beside the run's root lie the process ids of the spares, and of the workers that came after.
    """
    root, run_id = values["run"]["root"], current().run_id

    def strike() -> None:
        # A spare that has registered has another name than one that is starting.
        _until(lambda: len(_named_idle(spares.idle(run_id))) == 2)
        Path(f"{root}.spares").write_text("\n".join(map(str, spares.idle(run_id))))
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)

    if current().attempt == 2:
        with Path(f"{root}.workers").open("a") as file:
            file.write(f"{os.getpid()}\n")
    _at_update(BEFORE, strike)
    train(values)


def _named_idle(pids: list[int]) -> list[int]:
    return [p for p in pids if Path(f"/proc/{p}/cmdline").read_bytes().startswith(b"ray::IDLE")]
