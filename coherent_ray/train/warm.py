"""What a worker process runs first where ``cluster.spare_workers`` is on: its slow imports.

Ray starts it as ``python -m coherent_ray.train.warm PROGRAM ARGUMENTS...`` instead of
``python PROGRAM ARGUMENTS...``. When the imports are done, Ray's own program takes over, and the
process waits for work as any other; see `coherent_ray.train.spares`.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from importlib import import_module
from pathlib import Path

#: What takes seconds; torch's compiler is imported by the first optimizer that is made.
SLOW = ("torch", "ray.train.torch", "torch._dynamo", "coherent_ray.train.loop")


def main() -> None:
    """Import, and become the program that the command line names."""
    for name in SLOW:
        # Whatever is wrong with one, the worker says it where it is missed.
        with contextlib.suppress(Exception):
            import_module(name)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
