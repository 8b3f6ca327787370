"""The invariants: what must be true of a run's root whatever has died, each with a name.

They look at the files themselves, as JSON and bytes, and not through the code that they judge; only
`no_reader_selects_what_is_torn_or_foreign` asks that code for its word, and then compares. A
`Witness` remembers what was promised to somebody: that is what no crash may take back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import CoherentRayError, NoGeneration, NotFound
from coherent_ray.storage.base import Storage

_GENERATION = re.compile(r"/g(\d+)-a(\d+)/")
_RECORD = re.compile(r"^log/(\d{20})\.json$")


class Broken(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: Its name.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


@dataclass(slots=True)
class Witness:
    """What was promised, by those to whom it was."""

    shards: dict[str, bytes] = field(default_factory=dict)
    """Files that a rank was told are durable: path and every byte."""
    published: list[str] = field(default_factory=list)
    """Generations that somebody was told are published."""
    attempts: dict[int, str] = field(default_factory=dict)
    """Attempts that somebody was told are open, with the token that opened each."""

    def copy(self) -> Witness:
        """Return an independent copy."""
        return Witness(dict(self.shards), list(self.published), dict(self.attempts))

    @property
    def promises(self) -> tuple[object, ...]:
        """All of it, as a key."""
        return (
            tuple(self.shards.items()), tuple(self.published), tuple(self.attempts.items())
        )  # fmt: skip


Invariant = Callable[[Storage, Witness], None]


def invariant(check: Invariant) -> Invariant:
    """Make whatever a check raises bear the check's name."""

    @functools.wraps(check)
    def named(storage: Storage, witness: Witness) -> None:
        try:
            check(storage, witness)
        except Broken:
            raise
        except Exception as error:
            raise Broken(check.__name__, f"{type(error).__name__}: {error}") from error

    return named


@invariant
def the_log_chain_holds(storage: Storage, witness: Witness) -> None:
    """Records have no gap, each names the one before it, and no fenced attempt publishes."""
    attempt, published = 0, set()
    for record in _records(storage):
        body = record["body"]
        name = f"g{body.get('number')}-a{body['attempt']}"
        match record["kind"]:
            case "attempt":
                assert body["attempt"] > attempt, f"attempt {body['attempt']} after {attempt}"
                attempt = body["attempt"]
            case "publish":
                assert body["attempt"] == attempt, f"{name} is published in attempt {attempt}"
                assert name not in published, f"{name} is published twice"
                published.add(name)
            case "retire" | "pin":
                assert name in published, f"{name} was never published"


@invariant
def latest_is_whole(storage: Storage, witness: Witness) -> None:
    """What is published and not retired is there to the last byte, as its ranks wrote it."""
    for body in _live(storage):
        data = storage.read(body["manifest"])
        found = (len(data), digest_of(data))
        assert found == (body["manifest_size"], body["manifest_digest"]), body["manifest"]
        for shard in canonical.load(data)["shards"]:
            _check_shard(storage, witness, shard)


@invariant
def latest_never_goes_back(storage: Storage, witness: Witness) -> None:
    """What anybody was told is published is in the log, retired or not."""
    published = {_name(record["body"]) for record in _records(storage, "publish")}
    lost = [name for name in witness.published if name not in published]
    assert not lost, f"{', '.join(lost)} was answered as published, and the log does not know it"


@invariant
def attempts_are_given_once(storage: Storage, witness: Witness) -> None:
    """An attempt that somebody works for is in the log, opened by the token that he gave."""
    opened = {r["body"]["attempt"]: r["body"]["token"] for r in _records(storage, "attempt")}
    for attempt, token in witness.attempts.items():
        found = opened.get(attempt)
        assert found == token, f"attempt {attempt} was given to {token}, and the log says {found}"


@invariant
def acknowledgements_are_true(storage: Storage, witness: Witness) -> None:
    """A shard that a rank may vouch for is there while its generation can still be published."""
    attempts = [record["body"]["attempt"] for record in _records(storage, "attempt")]
    newest = attempts[-1] if attempts else 0
    bodies = [record["body"] for record in _records(storage, "publish")]
    past = max((b["number"] for b in bodies if b["attempt"] == newest), default=0)
    for path, data in witness.shards.items():
        name = _GENERATION.search(path)
        if name and int(name[2]) == newest and int(name[1]) > past:
            assert storage.read(path) == data, f"{path} is not what was written"


@invariant
def no_reader_selects_what_is_torn_or_foreign(storage: Storage, witness: Witness) -> None:
    """The generation that a reader is given is live, the newest, and as its ranks wrote it."""
    live = _live(storage)
    try:
        selected = Generations(storage).select("fall_back")
    except NoGeneration:
        assert not live, "there are live generations, and a reader is given none"
        return
    if selected is None:
        assert not live, "there are live generations, and a reader is given none"
        return
    publish, manifest = selected.publish, selected.manifest
    assert publish.name == _name(live[-1]), f"a reader is given {publish.name}"
    header = manifest.header
    assert (header.number, header.attempt) == (publish.number, publish.attempt), "a foreign one"
    for path in sorted(manifest.files):
        known = witness.shards.get(path)
        assert known is None or storage.read(path) == known, f"{path} is torn"


@invariant
def the_hint_is_not_ahead(storage: Storage, witness: Witness) -> None:
    """A hint that can be read tells of a record that is there: else nothing could be pruned."""
    try:
        hint = canonical.load(storage.read("latest.json"))
    except (NotFound, ValueError):
        return
    records = _records(storage)
    assert hint["seq"] <= len(records), f"it tells of record {hint['seq']} of {len(records)}"
    if hint["seq"]:
        record = records[hint["seq"] - 1]
        assert canonical.digest(record) == hint["digest"], "it tells of another record"


@invariant
def damage_is_never_selected(storage: Storage, witness: Witness) -> None:
    """Of a root that somebody has damaged a reader takes what is as it was written, or nothing."""
    try:
        selected = Generations(storage).select("fall_back")
    except CoherentRayError:
        return
    assert _broken(the_log_chain_holds, storage, witness) is None, "a reader believes the log"
    for path in sorted(selected.manifest.files) if selected else ():
        assert storage.read(path) == witness.shards[path], f"{path} is damaged"


#: All that need nothing but a root; in this order, so that the cause is named before its effects.
INVARIANTS: tuple[Invariant, ...] = (
    the_log_chain_holds,
    latest_never_goes_back,
    attempts_are_given_once,
    acknowledgements_are_true,
    latest_is_whole,
    no_reader_selects_what_is_torn_or_foreign,
    the_hint_is_not_ahead,
)


def check_all(storage: Storage, witness: Witness | None = None) -> None:
    """Check every invariant.

    Args:
        storage: A run's root.
        witness: What was promised; None: nothing that is known here.

    Raises:
        Broken: The first one that does not hold.
    """
    for check in INVARIANTS:
        check(storage, witness or Witness())


# --- reading without the code that is judged ------------------------------------------------------


def _records(storage: Storage, kind: str = "") -> list[dict[str, Any]]:
    found = [entry.path for entry in storage.list("log") if _RECORD.match(entry.path)]
    records, previous = [], None
    for seq, path in enumerate(sorted(found), 1):
        assert int(_RECORD.sub(r"\1", path)) == seq, f"record {seq} is missing"
        stored = canonical.load(storage.read(path))
        record = stored["record"]
        assert stored["digest"] == canonical.digest(record), f"record {seq} is torn"
        assert record["previous"] == previous, f"record {seq} does not follow from the one before"
        previous = stored["digest"]
        records.append(record)
    return [record for record in records if kind in {"", record["kind"]}]


def _broken(check: Invariant, storage: Storage, witness: Witness) -> Broken | None:
    try:
        check(storage, witness)
    except Broken as broken:
        return broken
    return None


def _live(storage: Storage) -> list[dict[str, Any]]:
    retired = {_name(record["body"]) for record in _records(storage, "retire")}
    bodies = [record["body"] for record in _records(storage, "publish")]
    return [body for body in bodies if _name(body) not in retired]


def _name(body: dict[str, Any]) -> str:
    return f"g{body['number']}-a{body['attempt']}"


def _check_shard(storage: Storage, witness: Witness, shard: dict[str, Any]) -> None:
    path = shard["path"]
    reuse = shard.get("reuse") or {
        "written": shard["size"], "files": [], "runs": [[shard["size"], 0, 0]],
    }  # fmt: skip
    files = [{"path": path, "size": reuse["written"]}, *reuse["files"]]
    contents = [_checked_file(storage, witness, **file) for file in files]
    content = b"".join(contents[file][at : at + size] for size, file, at in reuse["runs"])
    assert len(content) == shard["size"], f"{path} has {len(content)} bytes of {shard['size']}"
    assert list(_blocks(content, shard)) == shard["blocks"], f"{path} is damaged"


def _checked_file(storage: Storage, witness: Witness, path: str, size: int) -> bytes:
    content = storage.read(path)
    assert len(content) == size, f"{path} has {len(content)} bytes of {size}"
    if path in witness.shards:
        assert content == witness.shards[path], f"{path} is not what its rank wrote"
    return content


def _blocks(content: bytes, shard: dict[str, Any]) -> Iterator[str]:
    for at in range(0, len(content), shard["block_bytes"]):
        hasher = new_hasher(shard["algorithm"])
        hasher.update(content[at : at + shard["block_bytes"]])
        yield hasher.hexdigest()
