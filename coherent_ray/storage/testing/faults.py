"""Faults by composition: a storage that fails where the script says, round one that works.

Every verb that is called is counted, a writer's `write` and `finish` too. A fault names the call
that it strikes, by its place among all calls or among those of one verb and path, so that a test
can enumerate every crash point of a protocol: run it once to count, then once for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar

from coherent_ray.digests import Buffer
from coherent_ray.errors import StorageError, StorageFull
from coherent_ray.storage.base import Entry, Storage, Writer
from coherent_ray.storage.signing import KeyPlace, Signed

Verb = Literal[
    "create", "replace", "open_writer", "write", "finish", "read", "read_into", "size", "list",
    "delete",
]  # fmt: skip
Effect = Literal["crash_before", "crash_after", "refuse", "lose_answer", "full", "flip"]
"""
| effect | what happens at the call |
|---|---|
| crash_before | the process dies, the verb has done nothing |
| crash_after | the verb is done and durable; then the process dies |
| refuse | `StorageError`, the verb has done nothing |
| lose_answer | the verb is done and durable; then `StorageError` |
| full | `StorageFull`, the verb has done nothing |
| flip | one bit of the data that goes in, or comes out, is turned |
"""

_Result = TypeVar("_Result")


class Crash(BaseException):
    """The process died here. No ``except Exception`` on the way may notice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the script."""

    effect: Effect
    at: int = 1
    """Which call, from 1, among those that match."""
    verb: Verb | None = None
    """None: any verb."""
    path: str = ""
    """Part of the path; empty: any path."""
    times: int = 1
    """How many matching calls in a row; after a crash nothing more is called anyway."""
    bit: int = 0
    """Which bit `flip` turns, modulo the data's length."""

    def matches(self, verb: Verb, path: str) -> bool:
        """Return whether a call counts for this fault."""
        return self.verb in {None, verb} and self.path in path


@dataclass(slots=True)
class FaultyStorage:
    """A `Storage` that passes calls on to another, except where a fault strikes."""

    inner: Storage
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[Verb, str]] = field(default_factory=list)
    """Every call so far, in order."""
    struck: list[Fault] = field(default_factory=list)
    """Every fault that has struck: a test asserts that its rare branch was reached."""
    crashed: bool = False

    @property
    def uri(self) -> str:
        """The inner root's address."""
        return self.inner.uri

    @property
    def key_place(self) -> KeyPlace | None:
        """The inner root's, where it has one."""
        return self.inner.key_place if isinstance(self.inner, Signed) else None

    def create(self, path: str, data: Buffer) -> None:
        """Pass on `Storage.create`."""
        self._put("create", path, data, lambda d: self.inner.create(path, d))

    def replace(self, path: str, data: Buffer) -> None:
        """Pass on `Storage.replace`."""
        self._put("replace", path, data, lambda d: self.inner.replace(path, d))

    def open_writer(self, path: str) -> FaultyWriter:
        """Pass on `Storage.open_writer`; what is written counts as calls of its own."""
        writer = self._call("open_writer", path, lambda: self.inner.open_writer(path))
        return FaultyWriter(self, path, writer)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Pass on `Storage.read`."""
        fault = self._strike("read", path)
        data = self._under(fault, path, lambda: self.inner.read(path, start, length))
        return flipped(data, fault.bit) if fault and fault.effect == "flip" else data

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Pass on `Storage.read_into`."""
        fault = self._strike("read_into", path)
        count = self._under(fault, path, lambda: self.inner.read_into(path, start, target))
        if fault and fault.effect == "flip":
            flat = target.cast("B")
            flat[:count] = flipped(bytes(flat[:count]), fault.bit)
        return count

    def size(self, path: str) -> int:
        """Pass on `Storage.size`."""
        return self._call("size", path, lambda: self.inner.size(path))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Pass on `Storage.list`, as one call."""
        return self._call("list", prefix, lambda: iter(tuple(self.inner.list(prefix))))

    def delete(self, path: str) -> None:
        """Pass on `Storage.delete`."""
        self._call("delete", path, lambda: self.inner.delete(path))

    # --- the script -------------------------------------------------------------------------------

    def _put(self, verb: Verb, path: str, data: Buffer, act: Callable[[Buffer], None]) -> None:
        fault = self._strike(verb, path)
        if fault and fault.effect == "flip":
            data = flipped(bytes(data), fault.bit)
        self._under(fault, path, lambda: act(data))

    def _call(self, verb: Verb, path: str, act: Callable[[], _Result]) -> _Result:
        return self._under(self._strike(verb, path), path, act)

    def _strike(self, verb: Verb, path: str) -> Fault | None:
        """Count a call, and return the fault that strikes it."""
        if self.crashed:
            raise Crash
        self.calls.append((verb, path))
        for fault in self.faults:
            matching = sum(fault.matches(*call) for call in self.calls)
            if fault.matches(verb, path) and fault.at <= matching < fault.at + fault.times:
                self.struck.append(fault)
                return fault
        return None

    def _under(self, fault: Fault | None, path: str, act: Callable[[], _Result]) -> _Result:
        """Do something under a fault."""
        match fault.effect if fault else None:
            case "crash_before":
                self.crashed = True
                raise Crash
            case "refuse":
                raise StorageError("injected: refused", where=path)
            case "full":
                raise StorageFull("injected: no space left", where=path)
        result = act()
        match fault.effect if fault else None:
            case "crash_after":
                self.crashed = True
                raise Crash
            case "lose_answer":
                raise StorageError("injected: the answer was lost", where=path)
        return result


class FaultyWriter:
    """A writer of a `FaultyStorage`."""

    def __init__(self, storage: FaultyStorage, path: str, inner: Writer) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    def write(self, data: Buffer, /) -> None:
        """Pass on `Writer.write`."""
        self._storage._put("write", self._path, data, self._inner.write)

    def finish(self) -> None:
        """Pass on `Writer.finish`."""
        self._storage._call("finish", self._path, self._inner.finish)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A dead process does not clean up either, but what it leaves has no name and is not listed.
        self._inner.__exit__(kind, error, trace)


def flipped(data: bytes, bit: int) -> bytes:
    """Return data with one bit turned.

    Args:
        data: Bytes; empty ones are returned as they are.
        bit: Which, from the first byte's lowest on, modulo the number of bits.
    """
    if not data:
        return data
    at = bit % (8 * len(data))
    result = bytearray(data)
    result[at // 8] ^= 1 << at % 8
    return bytes(result)
