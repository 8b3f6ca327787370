"""How long a start takes, and what it waits for: words of the supervisor, while its driver cannot.

A driver that starts Ray waits in one call of Ray's, so what is late there only another process can
say. Once Ray is up, the driver has words of its own: see `coherent_ray.train.watch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from coherent_ray.config.sections import Cluster

Phase = Literal["driver", "ray", "up"]


class Starting:
    """The start of one driver."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        """Begin.

        Args:
            cluster: The configuration's cluster section.
            now: Seconds, on the clock of all calls.
        """
        self._cluster = cluster
        self._phase: Phase = "driver"
        self._since = now
        self._next_s = cluster.quiet_warning_s

    def note(self, kind: str, now: float) -> None:
        """Take in the kind of an event that the driver sent."""
        match kind:
            case "found":
                self._enter("ray", now)
            case "started" | "progress" | "finished" | "error":
                self._enter("up", now)

    def words(self, now: float) -> Iterator[str]:
        """Yield what to say: after ``quiet_warning_s``, and again when that has doubled."""
        lasted = now - self._since
        if self._phase == "up" or lasted < self._next_s:
            return
        self._next_s = 2 * lasted
        address = self._cluster.address
        if self._phase == "driver":
            yield (
                f"the driver has been starting for {lasted:.0f} s: it loads its packages and looks "
                "at task, data and storage"
            )
        elif address is None:
            yield (
                f"Ray has been starting for {lasted:.0f} s: its processes on this machine, and the "
                "coordinator, are waited for. Is the machine overloaded?"
            )
        else:
            yield (
                f"connecting to Ray at {address} has taken {lasted:.0f} s: its head node, and the "
                "coordinator there, are waited for"
            )

    def _enter(self, phase: Phase, now: float) -> None:
        self._phase, self._since = phase, now
        self._next_s = self._cluster.quiet_warning_s
