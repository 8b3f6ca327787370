"""Which nodes Ray is about to lose: it has been told to drain them.

An autoscaler, a cloud's preemption notice or ``ray drain-node`` says so beforehand, mostly with a
deadline. `ray.train.get_preemption_info` would tell as well, but it is a barrier of all ranks, and
Ray looks every 5 s; so Ray's table of nodes is asked here, off the update path, by one process for
all ranks. A private name: ``tests/cluster/test_ray_internals.py`` guards it.
"""

from __future__ import annotations

import time

import ray._private.state

#: Why, as people read it.
DRAINED = "its node is being drained"
#: Seconds between two looks.
LOOK_EVERY_S = 2.0


def draining() -> dict[str, float | None]:
    """Return the nodes that are being drained, by id: seconds that are left; None: nobody said.

    Raises:
        RuntimeError: Ray does not answer.
    """
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    now = time.time()
    return {
        node: max(deadline_ms / 1000 - now, 0.0) if deadline_ms else None
        for node, deadline_ms in found.items()
    }
