"""A drill: one reference run that nothing strikes, and a drilled run for each scenario.

All lie under one scratch root and are compared bit for bit, so the run must claim bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coherent_ray.config import Config
from coherent_ray.drill.clusters import Ground, ground
from coherent_ray.drill.disks import Disk, disk_for
from coherent_ray.drill.replay import with_root
from coherent_ray.drill.scenarios import SCENARIOS, Scenario, course_of
from coherent_ray.drill.scene import Scene
from coherent_ray.drill.stage import Stage, stage_of
from coherent_ray.drill.verdicts import Ended, Verdict, broken, ended, judge
from coherent_ray.errors import CoherentRayError, ConfigError, Interrupted
from coherent_ray.train.supervisor import Supervisor

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Drill:
    """What is drilled, and how."""

    config: Config
    root: str
    """Scratch root, absolute, empty, seen by every node; a path or an address."""
    scenarios: tuple[str, ...]
    address: str | None = None
    """Of a Ray cluster; None: one is started."""
    kills: int = 10
    seed: int = 0


@dataclass(slots=True)
class Result:
    """How a drill ended."""

    seed: int
    reference: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return bool(self.verdicts) and all(verdict.good for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "good": self.good,
            "seed": self.seed,
            "reference": self.reference,
            "scenarios": [verdict.as_json() for verdict in self.verdicts],
        }


def chosen(names: Sequence[str], address: str | None, config: Config) -> tuple[str, ...]:
    """Return the scenarios that names mean, in their own order.

    Args:
        names: Of scenarios; ``all`` or none: every one that the run and the cluster allow.
        address: Of a given cluster; None: one is started.
        config: The run.

    Raises:
        ConfigError: There is no such scenario, or the run or a given cluster does not allow it.
    """
    possible = [n for n, scenario in SCENARIOS.items() if address is None or not scenario.own]
    if not names or "all" in names:
        return tuple(name for name in possible if not SCENARIOS[name].why_not(config))
    for name in names:
        if name not in SCENARIOS:
            raise ConfigError(
                f"there is no scenario {name!r}",
                where="--scenario",
                remedy=f"choose of: all, {', '.join(SCENARIOS)}",
            )
        if name not in possible:
            raise ConfigError(
                f"the scenario {name} takes away nodes or freezes all of a run, which is only done "
                "to a cluster that the drill starts",
                where="--scenario",
                remedy="leave out --address",
            )
        if why := SCENARIOS[name].why_not(config):
            raise ConfigError(
                f"the scenario {name} is not for this run: {why}",
                where="--scenario",
                remedy="leave it out, or change that with --set",
            )
    return tuple(name for name in SCENARIOS if name in names)


def drill(plan: Drill, tell: Tell) -> Result:
    """Run the reference and every scenario, and judge them.

    Args:
        plan: What to do.
        tell: Gets a line for each thing that happens.

    Raises:
        Interrupted: Somebody asked to stop; nothing is left running.
        ConfigError: The run cannot be drilled.
        CoherentRayError: The reference run failed.
    """
    if plan.config.run.claim == "statistical":
        raise ConfigError(
            "a drill compares bits, and run.claim: statistical promises none",
            where="run.claim",
            remedy="--set run.claim=invariant",
        )
    result = Result(plan.seed)
    reference: Ended | None = None
    for apart in (False, True):
        todo = [SCENARIOS[n] for n in plan.scenarios if SCENARIOS[n].apart == apart]
        if not todo:
            continue
        with ground(plan.config.cluster.most, plan.address, apart=apart) as place:
            if reference is None:
                tell("reference: a run that nothing strikes")
                reference = _reference(plan, place, result)
                course_of(plan.config, len(reference.history), plan.kills, plan.seed)
            for scenario in todo:
                tell(f"{scenario.name}: begins")
                begun = time.monotonic()
                verdict = _verdict(plan, place, scenario, reference, tell)
                result.verdicts.append(verdict)
                word = "all promises kept" if verdict.good else "BROKEN"
                tell(f"{scenario.name}: {word}, {time.monotonic() - begun:.0f} s")
    return result


def _reference(plan: Drill, place: Ground, result: Result) -> Ended:
    config = _drilled(plan, place, "reference", None)
    begun = time.monotonic()
    outcome = Supervisor(config, lambda event: None).run()
    if outcome.stopped:
        raise Interrupted("the drill was interrupted", remedy="start it again")
    found = ended(config.run.root, config.storage.options)
    result.reference = {
        "updates": len(found.history),
        "workers": config.cluster.workers,
        "receipts": found.tip,
        "state": found.state,
        "seconds": round(time.monotonic() - begun, 1),
    }
    return found


def _verdict(
    plan: Drill, place: Ground, scenario: Scenario, reference: Ended, tell: Tell
) -> Verdict:
    """Drill one scenario; a run that does not reach its end is a verdict too."""
    try:
        return _drill(plan, place, scenario, reference, tell)
    except Interrupted:
        raise
    except CoherentRayError as error:
        return broken(scenario.name, error)


def _drill(plan: Drill, place: Ground, scenario: Scenario, reference: Ended, tell: Tell) -> Verdict:
    config = _drilled(plan, place, scenario.name, scenario)
    course = course_of(config, len(reference.history), plan.kills, plan.seed)
    injections = scenario.plan(course)
    storage = stage_of(config.run.root, config.storage.options)
    stage = Stage(storage, [injection.hold for injection in injections])
    disk: Disk | None = None
    if scenario.small_disk:
        disk = disk_for(config.run.root, reference.size, storage)
    try:
        scene = Scene(config, place, stage, injections, tell)
        if disk is not None:
            scene.put_on(disk)
        seconds = scene.play(ends=scenario.ends)
        verdict = judge(scene, scenario, reference)
        return replace(verdict, seconds=seconds)
    finally:
        if disk is not None:
            disk.close()


def _drilled(plan: Drill, place: Ground, name: str, scenario: Scenario | None) -> Config:
    """Return a run's configuration: its own root and cluster, and what the scenario sets."""
    config = plan.config
    config = with_root(config, f"{plan.root}/{name}", config.cluster.most)
    changes: dict[str, dict[str, object]] = {
        "run": {"run_id": None},
        # Failures are what a drill is for: none may be one too many.
        "cluster": {"address": place.address, "num_cpus": None, "max_failures": -1},
    }
    for section, values in (scenario.settings_for(config) if scenario else {}).items():
        changes[section] = {**changes.get(section, {}), **values}
    updated = {
        section: getattr(config, section).model_copy(update=values)
        for section, values in changes.items()
    }
    return config.model_copy(update=updated)
