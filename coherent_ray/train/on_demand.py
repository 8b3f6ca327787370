"""A generation on demand: wish it of a run that trains somewhere in this cluster, and wait for it.

The wish goes to the run's coordinator and from there to the ranks, which vote it at their next
boundary. It is asked again and again, with one token: whoever died and came back has forgotten it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody
from coherent_ray.errors import ClusterError, SaveFailed
from coherent_ray.storage.base import Storage
from coherent_ray.train import coordinators
from coherent_ray.train.wishes import TOKENS

#: Seconds between two times that one wish is asked.
_ASK_EVERY_S = 2.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was known when a generation was wished."""

    seq: int
    """Of the newest record."""
    attempt: int
    update: int
    """The last that was finished."""


def save_now(
    run_id: str,
    storage: Storage,
    timeout_s: float,
    *,
    find: Callable[[str], Any] = coordinators.find,
    ask: Callable[[Any], Any] = coordinators.answer,
) -> PublishBody:
    """Have a run publish one more generation, and return it.

    Args:
        run_id: The run.
        storage: Its root.
        timeout_s: Seconds to wait.
        find: Finds the coordinator; for tests.
        ask: Waits for its answer; for tests.

    Raises:
        ClusterError: Nobody trains the run in this cluster.
        SaveFailed: Nothing was published in time; says what it waited for.
    """
    log = CommitLog(storage)
    token = 1 + secrets.randbelow(TOKENS - 1)
    handle = _trained(run_id, find(run_id))
    status = ask(handle.status.remote())
    progress = status["progress"]
    done = int(progress.get("update", 0)) if progress.get("attempt") == status["attempt"] else 0
    asked = _Asked(len(log.read().records), status["attempt"], done)
    until = time.monotonic() + timeout_s
    again = 0.0
    while True:
        found = _newer(log, asked)
        if found is not None:
            return found
        now = time.monotonic()
        handle = _trained(run_id, find(run_id))
        if now >= until:
            raise _late(ask(handle.status.remote()), timeout_s)
        if now >= again:
            ask(handle.request.remote("save", token))
            again = now + _ASK_EVERY_S
        time.sleep(_POLL_S)


def _trained(run_id: str, handle: Any) -> Any:
    if handle is None:
        raise ClusterError(
            f"run {run_id} has no coordinator in this Ray cluster: nobody trains it here",
            remedy="name the cluster that it trains in: --address; a run that ended has its last "
            "generation",
        )
    return handle


def _newer(log: CommitLog, asked: _Asked) -> PublishBody | None:
    """Return the first generation that was published since, of a boundary that is no older."""
    for record in log.read_on().records[asked.seq :]:
        body = record.body
        # One that was in flight when it was asked for may be older than what was trained by then.
        if isinstance(body, PublishBody) and (
            body.attempt != asked.attempt or body.update >= asked.update
        ):
            return body
    return None


def _late(status: dict[str, Any], timeout_s: float) -> SaveFailed:
    if status["admitted"] != status["attempt"] or status["whereabouts"] is None:
        why = "its workers do not train at the moment"
    elif status["in_flight"]:
        why = "; ".join(f"{name} waits for {what}" for name, what in status["in_flight"].items())
    else:
        why = "no update has ended since"
    error = status["last_error"]
    return SaveFailed(
        f"no generation was published within {timeout_s:g} s: {why}"
        + (f"; the last error: {error}" if error else ""),
        remedy="the wish stands as long as the workers train; `coherent-ray ls` shows it when it "
        "is there, and --timeout waits longer",
        details={"attempt": status["attempt"], "in_flight": status["in_flight"]},
    )
