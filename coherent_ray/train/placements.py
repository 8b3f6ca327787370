"""The placement groups that a dead Train controller leaves behind, of which nobody else knows.

Ray takes back what a controller reserved only when its driver has gone too (or, where there is a
dashboard, by a helper of its own). A driver that goes on with a new controller would wait for those
resources for ever. The controller may die at any moment, so what it has told of its group may be
the one before, or nothing: what counts is what the cluster has of this driver's job.
"""

from __future__ import annotations

import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group


def release_all() -> list[str]:
    """Give back every placement group of this process's job.

    For a driver none of whose controllers lives.

    Returns:
        The ids of those that were given back, in hex.
    """
    # The id of a group ends with that of the job in which it was made.
    job = ray.get_runtime_context().get_job_id()
    held = [
        name
        for name, group in placement_group_table().items()
        if name.endswith(job) and group["state"] != "REMOVED"
    ]
    for name in held:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(name)))
    return held
