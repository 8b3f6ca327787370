"""A disk that can lose its power: a file system in a file, on a loop device, cut by the kernel.

``FS_IOC_SHUTDOWN`` stops a mounted file system where it stands, in the middle of whatever it does.
What was not on the device by then is gone, as it is when the power goes; mounting it again replays
the journal. So this is no model of a file system: it is the file system.

Mounting needs root and loop devices. `why_not` says in words what is missing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coherent_ray.errors import StorageError

Kind = Literal["ext4", "xfs"]
Journal = Literal["nologflush", "logflush"]
"""
| the cut | what is on the device |
|---|---|
| nologflush | what was synced; the journal's end, which held the newest names, is lost as well |
| logflush | besides, names that nobody synced, without the bytes that they stand for |
"""

#: ``_IOR('X', 125, __u32)``, the same on both file systems.
_SHUTDOWN = 0x8004587D
_FLAGS: dict[Journal, int] = {"logflush": 1, "nologflush": 2}
_MAKE: dict[Kind, Sequence[str]] = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
#: xfs refuses to be made smaller.
_SIZE = 320 << 20
_PATIENCE_S = 10.0


class Disk:
    """A file system of one's own, mounted. Leaving the ``with`` block removes it."""

    def __init__(self, kind: Kind, folder: Path, size: int = _SIZE) -> None:
        """Name it; `__enter__` makes and mounts it.

        Args:
            kind: The file system.
            folder: An existing directory, for the image and the place where it is mounted.
            size: Bytes; the image is sparse.
        """
        self._kind: Kind = kind
        self._image = folder / f"{kind}.img"
        self._size = size
        self._mounted = False  # a disk that was cut does not even say whether it is mounted
        self.place = folder / f"{kind}.mounted"
        """The root of the file system, while it is mounted."""

    def __enter__(self) -> Disk:
        """Make the file system and mount it.

        Raises:
            StorageError: This machine does not allow it.
        """
        self.place.mkdir(exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(self._size)
        _command([*_MAKE[self._kind], str(self._image)])
        self.mount()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._mounted:
            _command(["umount", "-l", str(self.place)])
        self._image.unlink()
        self.place.rmdir()

    def mount(self, *options: str) -> None:
        """Mount it; a journal that was cut off is replayed.

        Raises:
            StorageError: It cannot be mounted, for instance because it is damaged.
        """
        chosen = ",".join(["loop", *options])
        _command(["mount", "-t", self._kind, "-o", chosen, str(self._image), str(self.place)])
        self._mounted = True

    def remount(self, *options: str) -> None:
        """Change the options of the mounted file system, for instance to ``ro``."""
        _command(["mount", "-o", ",".join(["remount", *options]), str(self.place)])

    def unmount(self, *, lazily: bool = False) -> None:
        """Take it away; `lazily`: at once, though files are open.

        Raises:
            StorageError: Somebody keeps using it.
        """
        if lazily:
            _command(["umount", "-l", str(self.place)])
            self._mounted = False
            return
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                _command(["umount", str(self.place)])
            except StorageError:  # a thread may still be closing its last file
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)
            else:
                self._mounted = False
                return

    def cut(self, journal: Journal = "nologflush") -> None:
        """Cut the power: from here on nothing is written any more, and every call fails."""
        directory = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", _FLAGS[journal]))
        finally:
            os.close(directory)


def why_not(kind: Kind, folder: Path) -> str | None:
    """Return what keeps this machine from cutting such a disk's power; None: nothing.

    Tries it, for only that tells: containers differ in what they allow.
    """
    for program in (_MAKE[kind][0], "mount", "umount"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            with Disk(kind, Path(scratch)) as disk:
                disk.cut()
                try:
                    (disk.place / "written").write_bytes(b"after the cut")
                except OSError as error:
                    return None if error.errno == errno.EIO else f"a cut {kind} says {error}"
                return f"{kind} can be written after FS_IOC_SHUTDOWN"
        except StorageError as error:
            return error.what
        except OSError as error:
            return f"FS_IOC_SHUTDOWN on {kind}: {error.strerror}"


def _command(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StorageError(
            f"{words[0]} failed: {done.stderr.strip() or done.returncode}", where=words[-1]
        )
