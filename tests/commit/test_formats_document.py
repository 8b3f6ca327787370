"""``docs/formats.md`` tells the truth: its examples are read, and its reader reads a run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Ranks, Shell

import coherent_ray
from coherent_ray import canonical
from coherent_ray.commit import generations, history, holds, manifest, records
from coherent_ray.storage import LocalStorage

DOCUMENT = Path(coherent_ray.__file__).parent.parent / "docs" / "formats.md"


def blocks(kind: str) -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


def test_the_records_on_the_page_are_records_of_one_history() -> None:
    pages = [text.encode() for text in blocks("json record")]
    decoded = [records.decode(data) for data in pages]
    assert [records.encode(record) for record in decoded] == pages
    told = history.History.of(decoded)
    assert {record.kind for record in told.records} == {"attempt", "publish", "pin", "retire"}


def test_the_manifest_on_the_page_is_the_one_that_its_record_publishes() -> None:
    (text,) = blocks("json manifest")
    data = canonical.dump(json.loads(text))
    loaded = manifest.load(manifest.Manifest, data)
    assert manifest.dump(loaded) == data
    publish = records.decode(blocks("json record")[1].encode()).body
    assert isinstance(publish, records.PublishBody)
    assert publish.manifest_size == len(data)
    assert publish.manifest_digest == coherent_ray.digests.digest_of(data)


def read(root: Path) -> subprocess.CompletedProcess[str]:
    (reader,) = blocks("python reader")
    return subprocess.run(
        [sys.executable, "-c", reader, str(root)], capture_output=True, text=True, check=False
    )


def test_the_reader_on_the_page_reads_a_run_and_finds_damage(tmp_path: Path) -> None:
    shell = Shell(LocalStorage(tmp_path))
    attempt = shell.open("token-1")
    for number in (1, 2):
        group = Ranks(ranks=2, number=number, attempt=attempt)
        group.write(shell.storage)
        shell.save(group)
    assert read(tmp_path).stdout == "generations/g2-a1/manifest.json\n"
    record = tmp_path / "log" / f"{2:020d}.json"
    record.write_bytes(record.read_bytes().replace(b'"epoch":0', b'"epoch":1'))
    assert "AssertionError" in read(tmp_path).stderr


@pytest.mark.parametrize(
    "record",
    [
        manifest.GenerationHeader,
        manifest.ShardRecord,
        manifest.PlanIdentity,
        records.PublishBody,
        holds.HoldRecord,
    ],
)
def test_every_field_of_a_record_is_on_the_page(record: type) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for field in record.__dataclass_fields__:  # type: ignore[attr-defined]
        assert f"`{field}`" in text, f"{record.__name__}.{field} is not described"


def test_every_kind_of_damage_is_on_the_page() -> None:
    source = "".join(
        Path(module.__file__ or "").read_text(encoding="utf-8")
        for module in (generations, sys.modules["coherent_ray.commit.inspection"])
    ) + Path(DOCUMENT.parent.parent, "coherent_ray/commit/verdicts.py").read_text("utf-8")
    kinds = set(re.findall(r'"kind": "(\w+)"', source))
    kinds |= set(re.findall(r'manifest_damaged\(publish, "(\w+)"', source))
    kinds |= set(re.findall(r'return "(\w+)", f?"is ', source))
    assert kinds >= {"missing", "no_file", "size", "digest", "foreign", "receipts"}
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in kinds | {"block", "unreadable"}:
        assert f"`{kind}`" in text
