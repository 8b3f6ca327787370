"""A run on a cluster of its own, of which a node is drained: ``drained.py ROOT DATA``."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import leavers
import ray
import tiny
from test_told_to_leave import waited_for

from coherent_ray.drill.clusters import ground
from coherent_ray.train import coordinators, drains
from coherent_ray.train.coordinators import answer
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.trainer import make_trainer

SECONDS = 120
#: Ray's DrainNodeReason for a machine that is reclaimed.
PREEMPTION = 2


def main(root: str, data: str) -> None:
    """Train, drain the node of one of the ranks, and let the run go on elsewhere."""
    config = tiny.configured(
        Path(root),
        Path(data),
        training__updates=5000,
        checkpoint__every_updates=5000,
        cluster__max_failures=0,
    )
    with ground(2, None, apart=True) as place, ThreadPoolExecutor(1) as pool:
        fitted = pool.submit(tiny.fit, make_trainer(config, leavers.slow))
        coordinator = waited_for(config)
        node = worker_nodes()[0]
        place.add()
        drain(place.address, node)
        while answer(coordinator.status.remote())["leave"] is None:
            time.sleep(0.2)
        while answer(coordinator.status.remote())["progress"].get("attempt") != 2:
            time.sleep(0.2)
        status = answer(coordinator.status.remote())
        told: dict[str, Any] = {key: status[key] for key in ("leave", "failures", "attempt")}
        told |= {"drained": node, "nodes": worker_nodes()}
        while not fitted.done():
            coordinator.request.remote("stop")
            time.sleep(0.5)
        fitted.result()
        coordinators.stop(run_id_of(config))
        told["published"] = tiny.published(root)
    print(json.dumps(told))


def worker_nodes() -> list[str]:
    """Return the nodes on which training workers live."""
    actors = ray._private.state.state.actor_table(None).values()
    return sorted(
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RayTrainWorker"
    )


def drain(address: str, node: str) -> None:
    """Tell Ray that a node will be gone soon."""
    client = ray._raylet.GcsClient(address=address)
    deadline_ms = int((time.time() + SECONDS) * 1000)
    accepted, reason = client.drain_node(node, PREEMPTION, "a drill", deadline_ms)
    if not accepted:
        raise RuntimeError(reason)
    while node not in drains.draining():
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
