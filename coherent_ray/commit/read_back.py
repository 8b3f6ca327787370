"""Reading back: a rank reads another one's shard again, before the generation is published.

What a rank has hashed on the way to the storage says nothing of what lies there. With
``checkpoint.verify: read_back`` the shard of each rank is read again by the rank after it, so the
work is spread as the writing was, and where ranks lie on different nodes no cache of the writer's
node can answer. The rank is asked by its acknowledgement call, and answers by the same
acknowledgement with a `ReadBack` in it: whoever has that needs no other.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.inspection import shard_damage
from coherent_ray.commit.manifest import GenerationHeader, ReadBack, ShardRecord
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.uncached import from_device

#: Sentences about one shard that are sent; the rest is counted.
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class Request:
    """What an acknowledgement is answered where its rank must read a shard before."""

    shard: ShardRecord
    """What the shard's own rank has acknowledged."""

    def to_json(self) -> dict[str, Any]:
        """Return the request as plain JSON values."""
        return dict(TypeAdapter(Request).dump_python(self, mode="json"))


Reply = Fate | Request
"""What an acknowledgement is answered."""


def reply_from_json(value: dict[str, Any]) -> Reply:
    """Return the fate, or the request, that `to_json` gave.

    Raises:
        ValueError: The value is neither.
    """
    if "shard" in value:
        return TypeAdapter(Request).validate_json(canonical.dump(value))
    return Fate.from_json(value)


def read_back(storage: Storage, header: GenerationHeader, shard: ShardRecord) -> ReadBack:
    """Read a shard, from the device where the storage can do that, and compare every block.

    Never raises for what is wrong with the storage: all ranks wait for the word. Holds a few MiB
    of the shard at a time.

    Args:
        storage: The run's root.
        header: The generation's.
        shard: What was acknowledged.
    """
    try:
        damages = shard_damage(from_device(storage), header, shard, deep=True)
        problems = [f"{damage.where}: {damage.what}" for damage in damages]
    except CoherentRayError as error:
        problems = [f"{error.where or shard.path}: it cannot be read back: {error.what}"]
    more = len(problems) - _MOST_PROBLEMS
    if more > 0:
        problems[_MOST_PROBLEMS:] = [f"{shard.path}: {more} more blocks are wrong"]
    return ReadBack(shard.rank, shard.digest, tuple(problems))
