"""Inventory: the names that writers give are known; every other name is foreign."""

from __future__ import annotations

import pytest
from ranks import Ranks

from coherent_ray.commit import findings, profiles
from coherent_ray.commit.inventory import DIRECTORIES, generation_of, item_of
from coherent_ray.commit.log import HINT, record_path
from coherent_ray.commit.manifest import manifest_path

HEX32 = "0123456789abcdef" * 2

OURS = {
    record_path(1): ("record", None),
    record_path(10**19): ("record", None),
    HINT: ("hint", None),
    findings.PATH: ("scrub", None),
    manifest_path(12, 3): ("manifest", (12, 3)),
    Ranks(ranks=4, number=12, attempt=3).shard(2).path: ("shard", (12, 3)),
    "generations/g1-a1/shard-123456-of-200000.safetensors": ("shard", (1, 1)),
    f"receipts/{1:012d}-{20:012d}-g12-a3.jsonl": ("receipts", (12, 3)),
    f"holds/g12-a3-{HEX32}.json": ("hold", (12, 3)),
    profiles.path_of("g12-a3"): ("timings", (12, 3)),
    f"datasets/blake3-{HEX32 * 2}.json": ("dataset", None),
    f"probe/{HEX32}": ("probe", None),
    "checkpoint_manager_snapshot.json": ("ray", None),
    ".validate_storage_marker": ("ray", None),
}

FOREIGN = [
    "", "notes.txt", "scrub.json.old", "log/scrub.json",
    "log", "log/1.json", "log/readme", f"log/{1:020d}.json.bak",
    f"log/{1:021d}.json",
    f"old/log/{1:020d}.json", "latest.json~", "Latest.json", "sub/latest.json",
    "generations/g12-a3", "generations/g12-a3/notes.txt", "generations/g12-a3/manifest.json.orig",
    "generations/g12-a3/manifest.json/x", "generations/g012-a3/manifest.json",
    "generations/g0-a1/manifest.json", "generations/g1-a0/manifest.json",
    "generations/g1/manifest.json", "generations/g1-a1-copy/manifest.json",
    "generations/g\u0661-a1/manifest.json", "backup/generations/g1-a1/manifest.json",
    "generations/g1-a1/shard-1-of-2.safetensors", "generations/g1-a1/shard-00000-of-00002.pt",
    "generations/g1-a1/shard-00000-of-00002.safetensors ", "generations/g1-a1/model.safetensors",
    "generations/g1-a1/extra/shard-00000-of-00002.safetensors",
    "timings/g1-a1.jsonl", "timings/plot.png", "timings/g1.json",
    "receipts/1-2-g1-a1.jsonl", f"receipts/{1:012d}-{2:012d}.jsonl", "receipts/plot.png",
    "holds/g1-a1.json", f"holds/{HEX32}.json", f"holds/g1-a1-{HEX32.upper()}.json",
    "datasets/data.parquet", "datasets/blake3-12.json", "probe/x", "probe/" + HEX32 + "0",
    f"log/{1:020d}.json\n",
]  # fmt: skip


@pytest.mark.parametrize("path", OURS)
def test_what_writers_write_is_known(path: str) -> None:
    item = item_of(path)
    assert item is not None
    assert (item.kind, item.generation) == OURS[path]


@pytest.mark.parametrize("path", FOREIGN)
def test_whatever_else_is_foreign(path: str) -> None:
    assert item_of(path) is None


def test_every_kind_is_covered() -> None:
    kinds = {kind for kind, _ in OURS.values()}
    assert len(kinds) == 11


@pytest.mark.parametrize(
    ("name", "key"),
    [("g1-a1", (1, 1)), ("g12-a30", (12, 30)), ("g01-a1", None), ("g1-a1.bak", None), ("x", None),
     ("g1", None), ("", None), ("g1-a1/x", None)],
)  # fmt: skip
def test_a_generation_s_directory(name: str, key: tuple[int, int] | None) -> None:
    assert generation_of(name) == key


def test_every_directory_of_ours_is_looked_at_for_temporaries() -> None:
    above = {path.rpartition("/")[0] for path in OURS}
    assert {name for name in above if not name.startswith("generations/")} <= set(DIRECTORIES)
