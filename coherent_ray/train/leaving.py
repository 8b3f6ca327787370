"""Leaving: how a worker hears that its process must end, and how it goes.

SIGTERM is what a preempted machine, a container that is moved and a careful administrator send.
Ray's own handler ends the worker at once, in the middle of whatever it does. Here the first one is
a wish, while a session trains: the group publishes one more generation and starts again where there
is room. A second one, and one that comes while nothing trains, does what Ray has it do.

Python runs a handler in a process's main thread, and Ray Train trains in another one. So it is
installed by what Ray runs in the main thread, the admission.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray.exceptions import RayActorError

#: Why, as people read it.
SIGTERM = "SIGTERM"


class Listener:
    """This process's SIGTERM."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._pipe: int | None = None
        self._told: Callable[[], None] | None = None
        self.asked = False
        """Whether the process was told to end since `begin`."""

    def install(self) -> bool:
        """Put the handler in front of the one that is there; False: this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        found = signal.getsignal(signal.SIGTERM)
        if found == self._handle:
            return True
        self._previous = found
        if self._pipe is None:
            reading, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            threading.Thread(
                target=self._pass_on, args=(reading,), name="coherent-sigterm", daemon=True
            ).start()
        signal.signal(signal.SIGTERM, self._handle)
        return True

    def begin(self, told: Callable[[], None]) -> None:
        """From here on the first SIGTERM is a wish.

        Args:
            told: Called in a thread of its own when it comes.
        """
        self.asked = False
        self._told = told

    def end(self) -> None:
        """From here on SIGTERM is what it was."""
        self._told = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._told is not None and not self.asked:
            self.asked = True
            if self._pipe is not None:
                # All that a handler may safely do: whom it interrupts may hold any lock.
                os.write(self._pipe, b"!")
            return
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self, reading: int) -> None:
        while os.read(reading, 1):
            told = self._told
            if told is not None:
                told()


#: One process is one rank.
sigterm = Listener()


def farewell(words: str) -> RayActorError:
    """Return what every rank raises when the group leaves.

    To Ray Train it is the end of an actor whose node is reclaimed: the group starts again, and it
    does not count as a failure (``FailureConfig.max_preemption_failures``).

    Args:
        words: Why.
    """
    return RayActorError(error_msg=words, preempted=True)
