"""Interleavings: several writers over one storage, one verb at a time, in a given order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from coherent_ray.digests import Buffer
from coherent_ray.storage.base import Entry, Storage, Writer

_Result = TypeVar("_Result")


class Turns:
    """Whose verb comes next. A writer that has ended gives its turns away."""

    def __init__(self, writers: int, order: Sequence[int]) -> None:
        self._order = list(order)
        self._alive = list(range(writers))
        self._change = threading.Condition()

    def take(self, writer: int, verb: Callable[[], _Result]) -> _Result:
        """Wait for a writer's turn, and call a verb in it."""
        with self._change:
            assert self._change.wait_for(lambda: self._next() == writer, timeout=20)
            try:
                return verb()
            finally:
                if self._order:
                    self._order.pop(0)
                self._change.notify_all()

    def leave(self, writer: int) -> None:
        """Say that a writer calls no more verbs."""
        with self._change:
            self._alive.remove(writer)
            self._change.notify_all()

    def _next(self) -> int:
        while self._order and self._order[0] not in self._alive:
            self._order.pop(0)
        return self._order[0] if self._order else self._alive[0]


class Turned:
    """A `Storage` whose every verb waits for its writer's turn."""

    def __init__(self, inner: Storage, turns: Turns, writer: int) -> None:
        self._inner, self._turns, self._writer = inner, turns, writer

    @property
    def uri(self) -> str:
        return self._inner.uri

    def create(self, path: str, data: Buffer) -> None:
        self._take(lambda: self._inner.create(path, data))

    def replace(self, path: str, data: Buffer) -> None:
        self._take(lambda: self._inner.replace(path, data))

    def open_writer(self, path: str) -> Writer:
        return self._take(lambda: self._inner.open_writer(path))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self._take(lambda: self._inner.read(path, start, length))

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        return self._take(lambda: self._inner.read_into(path, start, target))

    def size(self, path: str) -> int:
        return self._take(lambda: self._inner.size(path))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self._take(lambda: iter(tuple(self._inner.list(prefix))))

    def delete(self, path: str) -> None:
        self._take(lambda: self._inner.delete(path))

    def _take(self, verb: Callable[[], _Result]) -> _Result:
        return self._turns.take(self._writer, verb)


def interleave(
    storages: Sequence[Storage],
    actions: Sequence[Callable[[Storage], object]],
    order: Sequence[int],
) -> list[object]:
    """Run one action a writer, verb by verb in this order.

    Args:
        storages: What each writer sees; the same storage below.
        actions: What each does with it.
        order: Writers; when it ends, the first writer that is not done goes on.

    Returns:
        What each action returned, or the exception that it raised.
    """
    turns = Turns(len(actions), order)
    results: list[object] = [None] * len(actions)

    def run(writer: int) -> None:
        try:
            results[writer] = actions[writer](Turned(storages[writer], turns, writer))
        except BaseException as error:
            results[writer] = error
        finally:
            turns.leave(writer)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
