"""A disk as a power cut sees it: operations go in, and every state that a cut may leave comes out.

Nothing here touches a file system: `coherent_ray.storage.testing.power` watches a real one and
tells this model. There are two of them, since which states are possible is a question of faith:

| model | names | bytes |
|---|---|---|
| `weak` | each change that no sync of *its directory* followed has happened or not, whatever \
happened to its neighbours; a rename is one change | as below |
| `ordered` | changes happen in their order, as in one journal: some first part of those since the \
last sync of anything (ext4, XFS) | as below |

Bytes that were not synced are there, or lost, or torn at a block's boundary; or the size is there
and the blocks hold nothing, or somebody else's bytes. `weak` is what POSIX promises, and what code
must bear: `ordered` forgives a missing sync of a directory for years.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Model = Literal["weak", "ordered"]

Image = dict[str, bytes | None]
"""What lies on a disk: paths below its root with their content; None for a directory."""

#: Bytes that a device writes as one, here: small, so that small files tear.
BLOCK_BYTES = 256


@dataclass(slots=True, eq=False)
class File:
    """A file's bytes, as a running system sees them, and as they are sure to be found."""

    content: bytes = b""
    synced: bytes = b""

    def possible(self) -> list[bytes]:
        """Return what may be found of its bytes: the worst first, the best last."""
        now, old = self.content, self.synced
        if now == old:
            return [now]
        edges = range(len(old) // BLOCK_BYTES * BLOCK_BYTES, len(now), BLOCK_BYTES)
        torn = [now[:edge] for edge in edges if edge > len(old)]
        middle = now[: (len(old) + len(now)) // 2]
        hollow = old + bytes(len(now) - len(old))
        garbage = old + bytes(byte ^ 0x5A for byte in now[len(old) :])
        holes = [
            now[:edge] + bytes(len(now[edge : edge + BLOCK_BYTES])) + now[edge + BLOCK_BYTES :]
            for edge in edges[1:]
        ]
        found = [old, *torn, middle, hollow, garbage, *holes, now]
        return list(dict.fromkeys(found))


@dataclass(slots=True, eq=False)
class Directory:
    """A directory's names, as a running system sees them, and as they are sure to be found."""

    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)


Node = File | Directory
Change = dict[str, Node | None]
"""Names with what they lead to from now on; all of it happens, or nothing."""


class Disk:
    """One file system from its root on.

    Attributes:
        root: Its topmost directory.
        model: Which states it allows.
    """

    def __init__(self, model: Model = "weak", unread: str = "\0") -> None:
        """Make an empty one.

        Args:
            model: Which states it allows.
            unread: Begins the names of files whose bytes nobody reads: what becomes of those bytes
                is not decided. Whether the names are there is.
        """
        self.model = model
        self._unread = unread
        self.root = Directory()
        self._journal: list[tuple[Directory, Change]] = []

    def change(self, directory: Directory, change: Change) -> None:
        """Change names in a directory; no power cut knows of it before a sync."""
        _apply(directory.names, change)
        self._journal.append((directory, change))

    def sync_file(self, file: File) -> None:
        """Make a file's bytes sure. Its name is its directory's."""
        file.synced = file.content
        if self.model == "ordered":
            self._commit()

    def sync_directory(self, directory: Directory) -> None:
        """Make a directory's names sure. What they lead to is not."""
        if self.model == "ordered":
            self._commit()
            return
        directory.synced = dict(directory.names)
        self._journal = [entry for entry in self._journal if entry[0] is not directory]

    def settle(self) -> None:
        """Make everything sure, as after a clean stop."""
        self._commit()
        for file in _files(self.root):
            file.synced = file.content

    def unsure(self) -> list[object]:
        """Return what no sync has made sure: changes of read names, and files. By identity."""
        changes = [
            change
            for _, change in self._journal
            if not all(name.startswith(self._unread) for name in change)
        ]
        return [*changes, *self._dirty()]

    def images(self, most: int | None = None, seed: int = 0) -> Iterator[Image]:
        """Yield what a power cut at this moment may leave; some of them may be the same.

        Args:
            most: Where there are more outcomes than this, draw so many: all lost and nothing lost
                first, then at random. None: all of them, whose number is exponential in what was
                not synced.
            seed: Of the draw.
        """
        ranges, files = self._decisions()
        outcomes: Iterator[tuple[int, ...]]
        if most is None or math.prod(ranges) <= most:
            outcomes = itertools.product(*map(range, ranges))
        else:
            outcomes = _drawn(ranges, most, random.Random(seed))
        for outcome in outcomes:
            yield self._image(outcome, files)

    # --- leaves -----------------------------------------------------------------------------------

    def _decisions(self) -> tuple[list[int], list[File]]:
        """Return how many ways each thing that is not sure can turn out, and whose bytes are so."""
        dirty = self._dirty()
        if self.model == "ordered":
            changes = [len(self._journal) + 1] if self._journal else []
        else:
            changes = [2] * len(self._journal)
        return changes + [len(file.possible()) for file in dirty], dirty

    def _dirty(self) -> list[File]:
        """Return the files whose bytes are not sure and may be read, under any of their names."""
        found: dict[int, File] = {}
        pending = [change for _, change in self._journal]
        stack: list[dict[str, Node] | Change] = [self.root.names, self.root.synced, *pending]
        walked: set[int] = set()
        while stack:
            for name, node in stack.pop().items():
                if isinstance(node, Directory):
                    if id(node) not in walked:
                        walked.add(id(node))
                        stack += [node.names, node.synced]
                elif (
                    node is not None
                    and node.content != node.synced
                    and not name.startswith(self._unread)
                ):
                    found[id(node)] = node
        return list(found.values())

    def _image(self, outcome: Sequence[int], files: Sequence[File]) -> Image:
        happened = list(self._happened(outcome))
        names: dict[int, dict[str, Node]] = {}
        for directory, change in happened:
            _apply(names.setdefault(id(directory), dict(directory.synced)), change)
        choices = outcome[len(outcome) - len(files) :]
        content = {id(file): file.possible()[at] for file, at in zip(files, choices, strict=True)}
        return dict(_paths(self.root, "", names, content))

    def _happened(self, outcome: Sequence[int]) -> Iterator[tuple[Directory, Change]]:
        if self.model == "ordered":
            yield from self._journal[: outcome[0] if self._journal else 0]
        else:
            yield from itertools.compress(self._journal, outcome)

    def _commit(self) -> None:
        for directory, change in self._journal:
            _apply(directory.synced, change)
        self._journal = []


def _apply(names: dict[str, Node], change: Change) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _files(directory: Directory) -> Iterator[File]:
    for node in directory.names.values():
        if isinstance(node, Directory):
            yield from _files(node)
        else:
            yield node


def _paths(
    directory: Directory,
    above: str,
    names: dict[int, dict[str, Node]],
    content: dict[int, bytes],
) -> Iterator[tuple[str, bytes | None]]:
    found = names.get(id(directory), directory.synced)
    for name in sorted(found):
        node, path = found[name], above + name
        if isinstance(node, Directory):
            yield path, None
            yield from _paths(node, path + "/", names, content)
        else:
            yield path, content.get(id(node), node.synced)


def _drawn(ranges: Sequence[int], most: int, draw: random.Random) -> Iterator[tuple[int, ...]]:
    yield tuple(0 for _ in ranges)
    yield tuple(count - 1 for count in ranges)
    for _ in range(most - 2):
        yield tuple(draw.randrange(count) for count in ranges)
