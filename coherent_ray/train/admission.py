"""Admission: what every rank must pass before it may enter a collective. Pure; no Ray, no torch.

Each rank, alone, derives a `Ticket` from what it sees. `judge` compares all tickets with one
another and with what the coordinator says, and names the first disagreement: the rank, the two
values and what to do. A rank that fails on its own still hands in a ticket, with its refusal in it,
so that the user reads the reason and not a time-out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coherent_ray.commit.fates import name_ranks
from coherent_ray.commit.manifest import DataPosition, PlanIdentity
from coherent_ray.data.plan import Plan
from coherent_ray.errors import AdmissionRefused, CoherentRayError


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one rank found out by itself."""

    rank: int
    ranks: int
    node: str
    """Address of the rank's node, for the user to find it."""
    node_id: str = ""
    """Ray's id of it."""
    run_id: str | None = None
    attempt: int = 0
    """The newest attempt in the commit log, as this rank reads it."""
    generation: str | None = None
    """The generation that it would resume from; None: the run has none yet."""
    manifest_digest: str | None = None
    dataset_hash: str = ""
    sampler_digest: str = ""
    origin: dict[str, str] = field(default_factory=dict)
    """What it read of the weights that a new run starts from, or the history tells of them."""
    state_spec: str = ""
    """Digest of names, dtypes and shapes of the model; empty: known only once it is tracked."""
    code: dict[str, str] = field(default_factory=dict)
    """Digest of each module of the user's that the job computes from."""
    environment: dict[str, str] = field(default_factory=dict)
    next_number: int = 0
    """Number of the next generation."""
    position: DataPosition | None = None
    plan: PlanIdentity | None = None
    notes: tuple[str, ...] = ()
    """What the user should know although it is no reason to refuse."""
    damaged: tuple[str, ...] = ()
    """Generations that it passed over, since it found them damaged."""
    refusal: CoherentRayError | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What the coordinator and the controller say."""

    run_id: str
    attempt: int
    ranks: int


def damaged_for_some(tickets: Sequence[Ticket]) -> tuple[str, ...]:
    """Return the generations that some rank has found damaged and another would go on from.

    A rank of a sharded model reads its own part alone, so damage may be seen by one rank only.
    """
    if any(t.refusal is not None for t in tickets) or len({t.generation for t in tickets}) < 2:
        return ()
    return tuple(sorted({name for t in tickets for name in t.damaged}))


_REMEDIES: dict[str, str] = {
    "run id": "do all nodes see the same storage under run.root? This one sees another run there",
    "attempt": "do all nodes see the same storage under run.root? This rank reads an older or "
    "newer log",
    "generation": "do all nodes see the same storage under run.root? This rank reads an older or "
    "newer log, or could not verify what the others could",
    "manifest": "do all nodes see the same storage under run.root? `coherent-ray verify` finds "
    "the damage",
    "dataset": "put the same files under data.source.paths on every node",
    "data position": "report this: the same history gave two positions",
    "sampler": "install the same version of coherent-ray and numpy on every node",
    "model": "the task must build the same model on every rank: look for a rank-dependent size",
    "initial weights": "does init_from.source name the same weights on every node? "
    "init_from.digest says which are meant",
    "code": "put the same version of the task's source on every node",
    "environment": "use the same software and hardware on every node, or run.claim: statistical",
}


def judge(tickets: Sequence[Ticket], expected: Expected, *, same_environment: bool) -> None:
    """Return if every rank agrees with all others and with the coordinator.

    Args:
        tickets: One a rank, in order of rank.
        expected: What the coordinator and the controller say.
        same_environment: Refuse ranks whose environment fingerprints differ.

    Raises:
        AdmissionRefused: They do not agree; or a subclass, where a rank refused by itself.
    """
    _raise_refusals(tickets)
    _require(tickets, "run id", lambda t: t.run_id, expected.run_id)
    _require(tickets, "attempt", lambda t: t.attempt, expected.attempt)
    _require(tickets, "rank count", lambda t: t.ranks, expected.ranks)
    _require_each_rank_once(tickets)
    _agree(tickets, "generation", lambda t: t.generation or "none")
    _agree(tickets, "manifest", lambda t: t.manifest_digest or "none")
    _agree(tickets, "next generation", lambda t: t.next_number)
    _agree(tickets, "dataset", lambda t: t.dataset_hash)
    _agree(tickets, "data position", lambda t: (t.plan, t.position))
    _agree_on_samplers(tickets)
    _agree_by_name(tickets, "code", lambda t: t.code)
    _agree_by_name(tickets, "initial weights", lambda t: t.origin)
    _agree(tickets, "model", lambda t: t.state_spec or "none")
    if same_environment:
        _agree_by_name(tickets, "environment", lambda t: t.environment)


def _raise_refusals(tickets: Sequence[Ticket]) -> None:
    refused = [t for t in tickets if t.refusal is not None]
    if not refused:
        return
    first = refused[0].refusal
    assert first is not None
    same = [t.rank for t in refused if str(t.refusal) == str(first)]
    who = "every rank" if len(same) == len(tickets) else name_ranks(same)
    if len(same) < len(tickets):
        who += f" (on {refused[0].node})"
    raise type(first)(
        f"{who} refused to start: {first.what}",
        where=first.where,
        remedy=first.remedy,
        details={**first.details, "ranks": same},
    )


def _require(
    tickets: Sequence[Ticket], what: str, value: Callable[[Ticket], Any], wanted: object
) -> None:
    for ticket in tickets:
        if value(ticket) != wanted:
            _refuse(ticket, what, value(ticket), f"the coordinator has {wanted}")


def _require_each_rank_once(tickets: Sequence[Ticket]) -> None:
    """Refuse two processes that would carry the same lanes, and a rank that nobody is."""
    seen: set[int] = set()
    for ticket in tickets:
        if ticket.rank in seen or not 0 <= ticket.rank < len(tickets):
            _refuse(ticket, "rank", ticket.rank, "every rank from 0 on must be there once")
        seen.add(ticket.rank)


def _agree(tickets: Sequence[Ticket], what: str, value: Callable[[Ticket], Any]) -> None:
    """Refuse the ranks that differ from the most; rank 0's side wins a tie."""
    votes = Counter(value(t) for t in tickets)
    common = max(votes, key=lambda v: (votes[v], v == value(tickets[0])))
    for ticket in tickets:
        if value(ticket) != common:
            with_common = [t.rank for t in tickets if value(t) == common]
            _refuse(
                ticket,
                what,
                value(ticket),
                f"{name_ranks(with_common)} {_have(with_common)} {common}",
            )


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _agree_on_samplers(tickets: Sequence[Ticket]) -> None:
    """Derive every rank's sampler again, here, and refuse the one that derived another."""
    for ticket in tickets:
        if ticket.plan is None or ticket.position is None:
            _refuse(ticket, "data position", "none", "every rank must have one")
            return
        try:
            own = Plan(ticket.plan).sampler_digest(ticket.position, ticket.rank, ticket.ranks)
        except ValueError as error:
            _refuse(ticket, "data position", ticket.position, f"but {error}")
            return
        if ticket.sampler_digest != own:
            _refuse(ticket, "sampler", ticket.sampler_digest, f"the controller derives {own}")


def _agree_by_name(
    tickets: Sequence[Ticket], what: str, facts: Callable[[Ticket], dict[str, str]]
) -> None:
    for name in sorted({name for t in tickets for name in facts(t)}):
        _agree(
            tickets,
            what,
            lambda t, n=name: f"{n}={facts(t).get(n, 'absent')}",  # type: ignore[misc]
        )


def _refuse(ticket: Ticket, what: str, value: object, other: str) -> None:
    raise AdmissionRefused(
        f"rank {ticket.rank} does not agree on the {what}: it has {value}, {other}",
        where=f"rank {ticket.rank} on {ticket.node}",
        remedy=_REMEDIES.get(what, "look at what is special about this rank's node"),
        details={"rank": ticket.rank, "what": what, "value": str(value)},
    )
