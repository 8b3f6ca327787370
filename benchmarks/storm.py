"""The storm: fifty kills in one run, from a seed, against one that nothing strikes.

The same as ``coherent-ray drill configs/digits.yaml --scenario storm --kills 50 --seed 1``, with
enough updates that every kill has a stretch of the run to itself; the result is kept as JSON. With
``--s3`` the run lies in an S3 server, behind a proxy that loses every eleventh change's answer.
Takes about a quarter of an hour on 2 cores.

    python benchmarks/storm.py --out benchmarks/results/storm.json
    python benchmarks/storm.py --s3 --out benchmarks/results/storm_s3.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CONFIG = "configs/digits.yaml"
#: Changes of which the proxy loses one answer.
EVERY = 11


def main() -> int:
    """Run the storm; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/storm.json")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--s3", action="store_true", help="the run lies in an S3 server")
    options = parser.parse_args()
    os.chdir(PROJECT)

    from coherent_ray import config
    from coherent_ray.drill.campaign import Drill, drill

    overrides = [
        "training.epochs=null",
        f"training.updates={options.updates}",
        f"checkpoint.every_updates={options.every}",
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as scratch, place(options, scratch) as found:
        root, more = found
        settings = config.load(CONFIG, [*overrides, *more]).resolved()
        plan = Drill(settings, root, ("storm",), kills=options.kills, seed=options.seed)
        result = drill(plan, lambda text: print(text, file=sys.stderr, flush=True))
    report = {
        "benchmark": "storm",
        "storage": "S3 server, every 11th change loses its answer" if options.s3 else "POSIX",
        "config": CONFIG,
        "kills": options.kills,
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - begun),
        **result.as_json(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for verdict in result.verdicts:
        for promise in verdict.promises:
            print(f"{'kept' if promise.kept else 'BROKEN'}: {promise.name} {promise.says}")
    return 0 if result.good else 1


@contextlib.contextmanager
def place(options: argparse.Namespace, scratch: str) -> Iterator[tuple[str, list[str]]]:
    """Give a root for the runs, and the settings that it needs."""
    if not options.s3:
        yield scratch, []
        return
    sys.path.insert(0, str(PROJECT / "tests" / "storage"))
    import s3_server
    from faulty_server import Strike

    changes = itertools.count(1)

    def strike(method: str, target: str) -> Strike | None:
        lose = method == "PUT" and next(changes) % EVERY == 0
        return Strike("lose") if lose else None

    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
    with s3_server.started() as server:
        server.faults._strike = strike
        more = [f"storage.endpoint={server.endpoint}", "storage.allow_http=true"]
        yield f"s3://{s3_server.BUCKET}/storm", more
    print(f"{(next(changes) - 1) // EVERY} answers were lost")


if __name__ == "__main__":
    sys.exit(main())
