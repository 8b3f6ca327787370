"""The driver process of a drilled run: the product's own, whose workers and coordinator are held.

They run the product's code to the letter; what is added is the hook that waits (`stage`). It also
gives a process the fault storage as its root where no small disk can be mounted.
"""

from __future__ import annotations

import sys
from typing import Any

from coherent_ray import config as config_
from coherent_ray.drill import quota
from coherent_ray.drill.stage import Actor, stage_of
from coherent_ray.storage import StorageOptions
from coherent_ray.train import driver, hooks
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.admit import current
from coherent_ray.train.loop import train


def held_train(values: dict[str, Any]) -> None:
    """Train as the product does, and wait where the drill says.

    Args:
        values: The whole configuration as plain values.
    """
    admitted = current()
    config = config_.build(values)
    stage = stage_of(config.run.root, config.storage.options)
    hooks.install(Actor(stage, admitted.rank, admitted.attempt))
    admitted.storage = quota.limited(admitted.storage, stage)
    train(values)


class HeldCoordinator(CoordinatorActor):
    """The product's coordinator, that waits where the drill says."""

    def __init__(self, run_id: str, root: str, **options: Any) -> None:
        """See `CoordinatorActor`."""
        stage = stage_of(root, StorageOptions(**(options.get("storage") or {})))
        hooks.install(Actor(stage, None, 0))
        super().__init__(run_id, root, **options)


class HeldDriver(driver.Driver):
    """The product's driver, over these workers and this coordinator."""

    function = staticmethod(held_train)
    # The gate finds it by its name, with the options that it would have asked for.
    actor = HeldCoordinator


if __name__ == "__main__":
    sys.exit(driver.main(HeldDriver))
