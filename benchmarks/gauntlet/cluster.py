"""One local Ray cluster for all of Ray Train's cells, in a process of its own.

It outlives the drivers that are killed, as a cluster does. Its processes are known by their
temporary directory, which nobody else has, so that none is left and no other is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gauntlet.column import BENCHMARKS

CPUS = 8
PATIENCE_S = 600.0
#: What keeps Ray from writing into the home directory, from joining, starting or killing too much.
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
KEEPER = """
import pathlib, signal, sys, ray
ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
pathlib.Path(sys.argv[2]).write_text(ray.get_runtime_context().gcs_address)
signal.pause()
"""


@contextmanager
def cluster(python: str) -> Iterator[None]:
    """Have a cluster, which children find by their environment.

    Args:
        python: The interpreter that has Ray.
    """
    # Sockets have short names, so the directory has one, too.
    place = tempfile.mkdtemp(prefix="gr-")
    note = Path(place) / "address"
    path = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    environment = {**os.environ, **QUIET, "RAY_TMPDIR": place, "PYTHONPATH": path}
    keeper = subprocess.Popen(
        [python, "-c", KEEPER, str(CPUS), str(note)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + PATIENCE_S
        while not (note.exists() and note.read_text()):
            if keeper.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("no Ray cluster could be started")
            time.sleep(0.1)
        os.environ.update(QUIET, RAY_TMPDIR=place, GAUNTLET_CLUSTER=note.read_text())
        yield
    finally:
        os.environ.pop("GAUNTLET_CLUSTER", None)
        os.environ.pop("RAY_TMPDIR", None)
        keeper.kill()
        keeper.wait()
        _end_all_under(place)
        shutil.rmtree(place, ignore_errors=True)


def _end_all_under(place: str) -> None:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"RAY_TMPDIR={place}\0".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
