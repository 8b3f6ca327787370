"""What a driver says of a run that it watches, beside its progress: who is waited for, and why.

Everything here is told from what the coordinator and Ray answer; nothing decides about the run. One
`Watch` lasts for one Ray Train controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table

from coherent_ray.commit.findings import finding_from_json
from coherent_ray.config.sections import Cluster
from coherent_ray.train import departures
from coherent_ray.train.whereabouts import Silence

#: Seconds that workers may take to begin before it is said that the cluster is too small for them,
#: and where it is large enough, that others hold its resources.
TOO_SMALL_S = 4.0
HELD_S = 20.0
#: The class of Ray Train's workers, as Ray lists actors.
WORKER_CLASS = "RayTrainWorker"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster has, by Ray's names."""

    all: dict[str, float]
    free: dict[str, float]
    asked_for: bool
    """Whether somebody has asked for some and not got them yet."""


class Watch:
    """Turns the coordinator's statuses into words, each said once, and now and then again."""

    def __init__(
        self,
        cluster: Cluster,
        attempt: int,
        *,
        stale: dict[str, Any] | None = None,
        resources: Callable[[], Resources] | None = None,
        processes: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch.

        Args:
            cluster: The configuration's cluster section.
            attempt: The newest attempt before this controller was started.
            stale: The failures that the coordinator knew of by then: of earlier controllers.
            resources: Asks what the cluster has; None: asks Ray.
            processes: Asks how many workers' processes are up; None: asks Ray.
            clock: Seconds.
        """
        self._cluster = cluster
        self._before = attempt
        self._stale = stale
        self._resources = resources or rays_resources
        self._processes = processes or rays_workers
        self._clock = clock
        self._begun = clock()
        self._attempt = attempt
        self._opened = self._begun
        self._admitted = 0
        self._silence = Silence(cluster.quiet_warning_s, cluster.collective_timeout_s)
        self._waits_s = TOO_SMALL_S
        self._slow_s = cluster.quiet_warning_s
        self._unadmitted_s = cluster.quiet_warning_s
        self.failures: dict[str, Any] = {"count": 0, "last": "", "taken": 0}
        """Of the worker group: how many, how many more that do not count, the last in words."""
        self._leaving = self._departure_told = attempt
        self.training = False
        """Whether workers of the newest attempt were admitted."""
        self._told_damage: set[tuple[str, str]] = set()
        self._ranks = 0

    def look(self, status: dict[str, Any] | None) -> Iterator[str]:
        """Yield what there is to say.

        Args:
            status: The coordinator's, see `CoordinatorActor.status`; None: there is no coordinator.
        """
        now = self._clock()
        status = self._own(status)
        attempt = max(status["attempt"], self._attempt) if status else self._before
        same = attempt == self._attempt
        if status and self.training and same and self._grown(status):
            # Its workers are gone: from here on, the next attempt is waited for.
            self._before, self._begun, self._waits_s = attempt, now, TOO_SMALL_S
            self._slow_s = self._cluster.quiet_warning_s
        if not same:
            self._attempt, self._opened = attempt, now
            self._unadmitted_s = self._cluster.quiet_warning_s
        # A coordinator that was started again has forgotten whom it admitted.
        self._admitted = max(self._admitted, status["admitted"] if status else 0)
        self.training = attempt > self._before and self._admitted == attempt
        if status and self.training and self._cluster.elastic:
            yield from self._sized(status.get("ranks", 0))
        if attempt <= self._before:
            yield from self._waiting(now - self._begun)
        if status is None:
            return
        departed = list(self._departed(status))
        yield from departed
        yield from self._failed(status["failures"], departed=bool(departed))
        yield from self._damaged(status.get("scrub") or {})
        if self.training:
            facts = status["whereabouts"]
            if facts and facts["attempt"] == attempt and (words := self._silence.words(facts)):
                yield words
        elif attempt > self._before:
            yield from self._admission(now - self._opened)

    @property
    def ends(self) -> int:
        """How often the worker group has ended under this controller."""
        return _ends(self.failures)

    def _own(self, status: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a status without failures of earlier controllers: each counts from 0."""
        if status is None or self._stale is None:
            return status
        if status["failures"] != self._stale:
            self._stale = None
            return status
        return status | {"failures": self.failures}

    def _waiting(self, waited_s: float) -> Iterator[str]:
        """Say what no worker can start without."""
        if waited_s < self._waits_s:
            return
        there = self._resources()
        has, free = there.all, there.free
        wants = self._cluster.needs
        short = any(has.get(name, 0.0) < amount for name, amount in wants.items())
        if not short and (waited_s < HELD_S or not there.asked_for):
            self._waits_s = max(self._waits_s, min(HELD_S, waited_s + 1.0))
            yield from self._slow(waited_s)
            return
        self._waits_s = waited_s + max(waited_s, 30.0)
        asks = ", ".join(f"{amount:g} {name}" for name, amount in wants.items())
        found = ", ".join(
            f"{has.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)" for name in wants
        )
        fewest = self._cluster.fewest
        who = f"{fewest} workers ask" if not self._cluster.elastic else (
            f"{fewest} workers at least ask" if fewest > 1 else "1 worker at least asks"
        )  # fmt: skip
        yield (
            f"waiting for resources: {who} for {asks}; the cluster "
            f"has {found}. It goes on when they are there; Ctrl-C ends the waiting"
        )

    def _sized(self, ranks: int) -> Iterator[str]:
        """Say how many workers there are, where that follows the cluster."""
        if ranks and ranks != self._ranks:
            self._ranks = ranks
            most = "" if ranks == self._cluster.most else f", of {self._cluster.most} at most"
            yield f"now {ranks} worker{'s' if ranks > 1 else ''}{most}"

    def _slow(self, waited_s: float) -> Iterator[str]:
        """Say that workers have what they need, and take long to start all the same."""
        if waited_s < self._slow_s:
            return
        self._slow_s = 2 * waited_s
        up = self._processes()
        match up:
            case None:
                there = "their processes are waited for; each loads Ray and torch"
            case 0:
                there = "Ray Train's controller, or the first process, is waited for; each loads "
                there += "Ray and torch"
            case self._cluster.most:
                there = f"all {up} processes are up, and load Ray and torch"
            case _:
                of = "" if self._cluster.elastic else f" of {self._cluster.most}"
                there = f"{up}{of} processes are up; each loads Ray and torch"
        yield (
            f"the workers have been starting for {waited_s:.0f} s: {there}, which takes long on an "
            "overloaded machine"
        )

    def _grown(self, status: dict[str, Any]) -> bool:
        return _ends(status["failures"]) > _ends(self.failures)

    def _departed(self, status: dict[str, Any]) -> Iterator[str]:
        """Say that ranks were told to leave; and how it ended, once their group has."""
        leave = status["leave"]
        if leave is None or leave["attempt"] < self._leaving:
            return
        if leave["attempt"] > self._leaving:
            self._leaving = leave["attempt"]
            yield departures.told_in_words(leave)
        gone = self._grown(status) or status["attempt"] > leave["attempt"]
        if gone and leave["attempt"] > self._departure_told:
            self._departure_told = leave["attempt"]
            latest = status["generation"]
            yield departures.end_in_words(leave, latest["name"] if latest else None)

    def _failed(self, failures: dict[str, Any], *, departed: bool) -> Iterator[str]:
        if _ends(failures) <= _ends(self.failures):
            return
        before, self.failures = self.failures, failures
        if failures["taken"] > before["taken"]:
            if not departed:
                yield f"{failures['last']}; it does not count as a failure, the workers start again"
            return
        allowed = self._cluster.max_failures
        count = f"failure {failures['count']}"
        if allowed < 0:
            yield f"{failures['last']}; {count}, the workers start again"
        elif failures["count"] <= allowed:
            yield f"{failures['last']}; {count} of {allowed} allowed, the workers start again"

    def _damaged(self, scrub: dict[str, Any]) -> Iterator[str]:
        """Say what a scrub has found, once a scrub."""
        for value in scrub.get("damaged", ()):
            scrubbed = (value["generation"], value["at"])
            if scrubbed in self._told_damage:
                continue
            self._told_damage.add(scrubbed)
            words = finding_from_json(value).words()
            yield (
                f"scrub: {words}. Training goes on; `coherent-ray verify RUN@{scrubbed[0]}` names "
                "all of it and what to do"
            )

    def _admission(self, open_s: float) -> Iterator[str]:
        if open_s < self._unadmitted_s:
            return
        self._unadmitted_s = open_s + max(open_s, 30.0)
        yield (
            f"the workers started {open_s:.0f} s ago and are not all admitted yet: they check data "
            f"and state. cluster.admission_timeout_s ({self._cluster.admission_timeout_s:g} s) "
            "gives up on those that hang"
        )


def _ends(failures: dict[str, Any]) -> int:
    """Return how often the worker group has ended."""
    return int(failures["count"]) + int(failures["taken"])


def rays_resources() -> Resources:
    """Return what Ray says of the cluster that this process is connected to."""
    groups = placement_group_table().values()
    # One that is PREPARED has its resources already: they are no longer free, and not waited for.
    pending = any(group["state"] == "PENDING" for group in groups)
    return Resources(ray.cluster_resources(), ray.available_resources(), pending)


def rays_workers() -> int | None:
    """Return how many workers' processes of this process's job are up; None: Ray does not say."""
    from ray._private.state import actors

    job = ray.get_runtime_context().get_job_id()
    try:
        known = actors().values()
        states = [
            actor["State"]
            for actor in known
            if actor["ActorClassName"] == WORKER_CLASS and actor["JobID"] == job
        ]
    except (KeyError, AttributeError):
        return None  # not a public name, and no more than a word depends on it
    return states.count("ALIVE")
