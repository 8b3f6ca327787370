"""The thread behind training: it runs one save at a time, and never more than one is in flight.

There is one snapshot buffer, so the next save must wait for the last. That wait is the price of
saving too often; it is counted, in seconds, and reported as stall. A save that failed says so
through its own future and is then forgotten: it cannot spoil the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class BackgroundWriter:
    """One thread, one job in flight. `submit`, `wait` and `close` are for one calling thread."""

    def __init__(self, name: str = "coherent-ray-writer") -> None:
        self._state = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self._closed = False
        self._stall = 0.0
        # A daemon: a storage that hangs must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job is in flight."""
        return self._busy

    @property
    def stall_seconds(self) -> float:
        """Seconds that callers have waited for jobs in flight so far, all together."""
        return self._stall

    def wait(self, timeout: float | None = None) -> float:
        """Wait until no job is in flight; how the job went is its future's to say.

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Returns:
            The seconds waited, which also count as stall.

        Raises:
            TimeoutError: The job is still in flight.
        """
        begin = time.monotonic()
        with self._state:
            idle = self._state.wait_for(lambda: not self._busy, timeout)
        waited = time.monotonic() - begin
        self._stall += waited
        if not idle:
            raise TimeoutError(f"a save is still in flight after {timeout} s")
        return waited

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a job in the thread, after waiting for the one in flight, if there is one.

        Returns:
            The job's future; it carries whatever the job raised.

        Raises:
            RuntimeError: The writer is closed.
        """
        self.wait()
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._state:
            if self._closed:
                raise RuntimeError("the background writer is closed")
            self._busy = True
            self._job = lambda: _settle(future, job)
            self._state.notify_all()
        return future

    def close(self, timeout: float | None = None) -> bool:
        """Let the job in flight finish, and end the thread. Closing again does nothing.

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Returns:
            Whether the thread has ended.
        """
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._job is not None or self._closed)
                job, self._job = self._job, None
            if job is None:
                return
            job()
            del job  # A finished job must not keep its snapshot or its error alive.
            with self._state:
                self._busy = False
                self._state.notify_all()


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # The thread must live; the error is the future's.
        future.set_exception(error)
