"""What a drill injects, and what it saw of it: records, no deeds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from coherent_ray.drill.stage import Hold

Target = Literal[
    "worker", "coordinator", "controller", "driver", "node", "storage", "shard", "run", "head"
]
Act = Literal[
    "kill", "stop", "go on", "remove", "lose", "join", "freeze", "fill", "free", "flip", "part",
    "restart",
]  # fmt: skip
"""
| act | what is done |
|---|---|
| kill | SIGKILL; the coordinator: `ray.kill`, which lets Ray start it again |
| stop | SIGSTOP |
| go on | SIGCONT to all that was stopped, once a later attempt has published |
| remove | every process of the node is killed at once; another node joins |
| lose | every process of the node is killed at once; none joins |
| join | another node joins, and the run has heard that it will grow |
| freeze | SIGSTOP of the node's raylet and of the worker on it; another node joins |
| fill | the storage has no room any more |
| free | it has room again |
| flip | one byte of a shard of the newest generation, and SIGKILL of the worker |
| restart | SIGKILL of the cluster's head service; another starts some seconds later |
| part | SIGSTOP of all processes of the run; the same command in another Ray; then SIGCONT |
"""


@dataclass(frozen=True, slots=True)
class Injection:
    """One thing that is done to a run, and at which point."""

    hold: Hold
    """Who is held while it is done."""
    target: Target
    act: Act = "kill"
    let_go: bool = False
    """Who is held goes on right before, so that it falls anywhere behind the point."""
    or_later: bool = False
    """Where another strike has ended who is held, it waits for a later attempt and takes another
    process of its target; else it has found no moment."""
    selects: int | None = None
    """Update of the generation that readers must select right after; None: any that is whole."""


@dataclass(slots=True)
class Injected:
    """An injection that was carried out."""

    injection: Injection
    victim: str
    """Process ids, node or path."""
    update: int
    """The last update that was known to be done."""
    attempt: int
    """The attempt that was struck; 0: it is not known."""
    after_s: float
    """Seconds from the start of the drilled run."""
    selected: str | None
    """The generation that a reader selected right after; None: none was published yet."""
    selected_update: int
    damages: int
    """What is wrong with that generation."""
    lost: int = 0
    """Updates that were done, belonged to no published generation, and were done again."""
    next_update_s: float | None = None
    """Seconds until the next update was seen to be done."""
    says: str = ""
    """What else was seen."""

    @property
    def disturbs(self) -> bool:
        """Whether training has to find its way again."""
        return self.injection.act not in {"go on", "fill", "free"}

    @property
    def ends_attempt(self) -> bool:
        """Whether only a later attempt can go on: what the struck one still says is no news."""
        return self.injection.target not in {"coordinator", "head"}

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = asdict(self)
        del values["injection"]
        injection = self.injection
        return {
            "point": injection.hold.point,
            "target": injection.target,
            "act": injection.act,
            **values,
        }
