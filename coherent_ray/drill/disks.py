"""A storage that can be filled: a small file system in memory, or a quota of the fault storage.

Mounting takes rights that not everybody has, and an object store cannot be mounted at all. Then the
fault storage refuses in the workers as a full disk would (`quota`), and the drill says so.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from coherent_ray.drill import quota
from coherent_ray.storage import Storage

BALLAST = "ballast"
_PIECE = bytes(2**20)


class Disk:
    """The run's storage under a quota; the base of one that is really small."""

    kind = "a quota of the fault storage: no small file system could be mounted here"

    def __init__(self, stage: Storage) -> None:
        """Tell the run's processes that there is a quota. Before they start.

        Args:
            stage: See `coherent_ray.drill.stage`.
        """
        self._stage = stage
        stage.create(quota.USED, b"")

    def fill(self) -> str:
        """Leave no room, and say where."""
        self._stage.create(quota.FULL, b"")
        return "the workers' storage"

    def free(self) -> str:
        """Make room again, and say where."""
        self._stage.create(quota.FREE, b"")
        return "the workers' storage"

    def close(self) -> None:
        """Take away what was mounted."""


class SmallDisk(Disk):
    """A file system in memory, mounted where the run lies."""

    kind = "a small tmpfs, filled with a ballast file"

    def __init__(self, place: Path, size: int) -> None:
        """Mount it.

        Args:
            place: An empty directory: the run's root.
            size: Bytes.

        Raises:
            OSError: This process may not.
        """
        self._place = place
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())

    def fill(self) -> str:
        """See `Disk.fill`."""
        path = self._place / BALLAST
        with path.open("wb", buffering=0) as file:
            for piece in (_PIECE, _PIECE[:4096]):
                try:
                    while file.write(piece):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        return f"{self._place}, by {path.stat().st_size:,} bytes"

    def free(self) -> str:
        """See `Disk.free`."""
        (self._place / BALLAST).unlink()
        return str(self._place)

    def close(self) -> None:
        """See `Disk.close`; what lies there is gone."""
        subprocess.run(["umount", "-l", str(self._place)], capture_output=True, check=False)


def disk_for(root: str, size: int, stage: Storage) -> Disk:
    """Return a storage for a run that can be filled.

    Args:
        root: The run's; nothing lies there yet.
        size: Bytes that the whole run needs.
        stage: The run's.
    """
    if "://" not in root and sys.platform == "linux" and os.geteuid() == 0:
        place = Path(root)
        place.mkdir(parents=True)
        try:
            return SmallDisk(place, 2 * size + 64 * 2**20)
        except OSError:
            place.rmdir()
    return Disk(stage)
