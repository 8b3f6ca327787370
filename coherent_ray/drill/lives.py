"""How a case is lived: on real Ray, with real kills, or in this process, without Ray.

Each way takes a configuration that lies under a root of its own, and comes back when the run has
reached its last update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coherent_ray.config import Config
from coherent_ray.drill.cases import Blow, Case, Leg, Where
from coherent_ray.drill.clusters import Ground
from coherent_ray.drill.injections import Injection, Target
from coherent_ray.drill.patching import Patch
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.drill.scene import Scene
from coherent_ray.drill.stage import Hold, Stage, stage_of
from coherent_ray.errors import TrainingFailed

Tell = Callable[[str], None]


class Way(Protocol):
    """How runs are run."""

    name: str
    """In words, for the report."""

    def live(self, config: Config, case: Case, seed: int) -> list[str]:
        """Run a case to its end, and return what was done to it, in words.

        Raises:
            Interrupted: Somebody asked to stop.
            CoherentRayError: It did not reach its end.
        """


class InProcess:
    """Ranks are threads; a kill ends all of them. Coordinators live and die with them."""

    name = "in one process, without Ray: ranks are threads, and a kill is the end of all of them"

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        """Make it; `patches` are in force while runs run."""
        self._patches = patches

    def live(self, config: Config, case: Case, seed: int) -> list[str]:
        """See `Way.live`."""
        done = []
        for leg in case.legs:
            for blow in leg.blows:
                point = _IN_PROCESS.get(blow.where)
                if point is None:
                    continue
                if not rehearse(config, Life(leg.ranks, None, (point, blow.update)), self._patches):
                    done.append(f"all ranks killed: {blow}")
            if not rehearse(config, Life(leg.ranks, leg.until), self._patches):
                raise TrainingFailed("the run died by itself")
            if leg.until is not None:
                done.append(f"stopped after update {leg.until} at {_ranks(leg)}")
        return done


#: Points at which a process can be ended as a whole.
_IN_PROCESS: dict[Where, str] = {"worker in mid-shard": "shard:half-written", "worker": "update"}


#: Where a process is held that is killed, and whose process it is.
_ON_RAY: dict[Where, tuple[str, Target]] = {
    "worker in mid-shard": ("shard:half-written", "worker"),
    "coordinator before publish": ("publish:begin", "coordinator"),
    "coordinator after publish": ("publish:end", "coordinator"),
    "worker": ("update", "worker"),
}


class OnRay:
    """Worker processes and the coordinator are killed while they are held at a point."""

    name = "on Ray: workers are processes, killed by SIGKILL, the coordinator by ray.kill"

    def __init__(self, ground: Ground, tell: Tell) -> None:
        """Make it.

        Args:
            ground: The cluster, that this process is connected to.
            tell: Gets a line for each thing that is done.
        """
        self._ground = ground
        self._tell = tell

    def live(self, config: Config, case: Case, seed: int) -> list[str]:
        """See `Way.live`."""
        done: list[str] = []
        for index, leg in enumerate(case.legs):
            done += self._leg(config, leg, index)
        return done

    def _leg(self, config: Config, leg: Leg, index: int) -> list[str]:
        injections = [_injection(blow, n, leg.ranks) for n, blow in enumerate(leg.blows, 1)]
        # A leg that is to end early loses its driver, and nobody may start another.
        if leg.until is not None:
            injections.append(Injection(Hold("resize", "update", leg.until, 0), "driver"))
        failures = 0 if leg.until is not None else -1
        changes = {"address": self._ground.address, "workers": leg.ranks, "max_failures": failures}
        cluster = config.cluster.model_copy(update=changes)
        config = config.model_copy(update={"cluster": cluster})
        storage = stage_of(config.run.root, config.storage.options)
        for entry in list(storage.list()):
            storage.delete(entry.path)
        stage = Stage(storage, [injection.hold for injection in injections])
        scene = Scene(config, self._ground, stage, injections, self._tell)
        scene.play(ends="TrainingFailed" if leg.until is not None else None)
        if scene.left:
            raise TrainingFailed(f"no moment was found for: {', '.join(scene.left)}")
        if leg.until is not None and scene.error is None:
            raise TrainingFailed(f"the run was not ended after update {leg.until}")
        words = [f"killed: {blow}" for blow in leg.blows]
        if leg.until is not None:
            words.append(f"the driver killed after update {leg.until} at {_ranks(leg)}")
        return words


def _injection(blow: Blow, number: int, ranks: int) -> Injection:
    point, target = _ON_RAY[blow.where]
    rank = {"worker in mid-shard": ranks - 1, "worker": blow.update % ranks}.get(blow.where)
    hold = Hold(f"kill-{number:03}", point, blow.update, rank)
    return Injection(hold, target, or_later=True)


def _ranks(leg: Leg) -> str:
    return f"{leg.ranks} rank{'s' if leg.ranks > 1 else ''}"
