"""Starts jobs from a process that has imported everything: a tenth of a second instead of seven.

A judge starts the job hundreds of times, and importing torch would take nearly all of that. So the
judge is given `client.py`, which needs nothing, as the command. It asks this process for a fork,
lends it its output, waits, and ends as the job ended. Where the client is gone (the judge has given
it up), the job ends too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from judged import job

#: Where a client finds this process.
ADDRESS_VARIABLE = "COHERENT_RAY_JUDGED"
CLIENT = Path(__file__).parent / "client.py"
_LONGEST_REQUEST = 2**20


def command(arguments: list[str]) -> list[str]:
    """Return the command that runs the job with these arguments."""
    return [sys.executable, "-S", "-E", str(CLIENT), *arguments]


@contextmanager
def listening(address: Path) -> Iterator[socket.socket]:
    """Listen for clients, under an address that is free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen()
        listener.settimeout(0.1)
        yield listener


def serve(listener: socket.socket, judge: subprocess.Popen[bytes]) -> None:
    """Fork a job for whoever asks, until the judge has ended."""
    children: set[int] = set()
    while judge.poll() is None:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(None)
                children.add(_fork(connection))
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in children:
        os.waitpid(pid, 0)


def _fork(connection: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _run(connection)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code % 256]))
            os._exit(code % 256)
    return pid


def _run(connection: socket.socket) -> int:
    """Be the job that a client asked for."""
    request, files, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 2)
    asked = json.loads(request)
    for standard, lent in zip((1, 2), files, strict=True):
        os.dup2(lent, standard)
        os.close(lent)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    # The judge tells its commands where it lies.
    sys.path.extend(filter(None, asked["environment"].get("PYTHONPATH", "").split(os.pathsep)))
    return job.main(asked["arguments"], lifeline=connection)
