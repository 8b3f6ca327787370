"""A lost worker in one sentence: what Ray knows of its end, without Ray's advice.

Ray tells a death in a page. What a person needs of it is the rank, the process, and the cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from coherent_ray.commit.fates import name_ranks

_PID = re.compile(r"\bpid: (\d+)")
_HOST = re.compile(r"\bip: (\S+)")
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\. Some common causes|\.\s*$|\n|$)", re.DOTALL)
_LONGEST = 200


def in_words(errors: Mapping[int, BaseException]) -> str:
    """Return which ranks failed, and how the first of them ended.

    Args:
        errors: By rank, as Ray Train reports them. A rank that only lost its peer is not the cause.
    """
    dead = {rank: error for rank, error in errors.items() if _is_death(error)}
    chosen = dead or dict(errors)
    if not chosen:
        return "a worker ended"
    return f"{name_ranks(sorted(chosen))}: {cause(chosen[min(chosen)])}"


def of_nodes(ranks: Sequence[int]) -> str:
    """Return that ranks are gone with their nodes."""
    whose = "its node was lost" if len(ranks) == 1 else "their nodes were lost"
    return f"{name_ranks(sorted(ranks))}: {whose}"


def cause(error: BaseException) -> str:
    """Return how one worker ended, as far as Ray knows."""
    own = _own(error)
    text = str(own).strip()
    if is_taken(own) and own.actor_id is None:
        return _short(text)  # its own words, see `leaving.farewell`
    if isinstance(own, OutOfMemoryError):
        return f"killed because its node ran out of memory: {_short(text)}"
    if not isinstance(own, RayError):
        return f"{type(own).__name__}: {_short(text)}"
    detail = _DETAIL.search(text)
    pid, host = _PID.search(text), _HOST.search(text)
    place = f" {pid[1]}" + (f" on {host[1]}" if host else "") if pid else ""
    what = _short(detail[1] if detail else text)
    return f"its process{place} ended by itself or was killed ({what})"


def is_taken(error: BaseException) -> TypeGuard[RayActorError]:
    """Return whether a worker ended since it was told to leave, or its node was reclaimed."""
    own = _own(error)
    return isinstance(own, RayActorError) and bool(own.preempted)


def pid_of(errors: Mapping[int, BaseException]) -> int | None:
    """Return the process id of the first rank that died; None: Ray does not say."""
    for rank in sorted(errors):
        own = _own(errors[rank])
        if isinstance(own, RayError) and (found := _PID.search(str(own))):
            return int(found[1])
    return None


def _own(error: BaseException) -> BaseException:
    """Return a worker's own end, without Ray Train's word for having noticed it."""
    inner = getattr(error, "health_check_failure", None)
    return inner if isinstance(inner, BaseException) else error


def _is_death(error: BaseException) -> bool:
    return isinstance(_own(error), RayError)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3].rstrip() + "..."
