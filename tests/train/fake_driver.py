"""A driver that does what a test says: a few lines of Python, told on its command line.

It speaks the pipe's language and knows nothing of the package, so that it starts at once. The lines
see `life` (from 0), `config` (as it came in), `tell(kind, text, **facts)`, and `folder`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

script, folder, pipe = sys.argv[1], Path(sys.argv[2]), os.fdopen(int(sys.argv[3]), "w")
count = folder / "lives"
life = int(count.read_text()) if count.exists() else 0
count.write_text(str(life + 1))


def tell(kind, text="", **facts):
    pipe.write(json.dumps({"kind": kind, "text": text, "facts": facts}) + "\n")
    pipe.flush()


def progress(*updates):
    for update in updates:
        tell("progress", progress={"update": update})


def finish(stopped=False):
    tell("finished", stopped=stopped, done=6, updates=6, complete=not stopped)
    sys.exit(0)


def wait_for_stop(seconds=30):
    """Return the signals that came, once one came."""
    seen = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: seen.append(signal.Signals(number).name))
    tell("started")
    until = time.monotonic() + seconds
    while not seen and time.monotonic() < until:
        time.sleep(0.01)
    return seen


if "config" in script:
    config = json.loads(sys.stdin.buffer.read())
exec(script)
