"""The coordinator at scale: what a word, a publish and the opening of `latest` cost.

Three parts, each in processes of its own, so that memory is that of one scene:

- ``machine``: every rank's acknowledgement through the pure machine and its hands, over a local
  directory with files of the right sizes (sparse: nobody reads them);
- ``log``: how long the whole log takes to read, and its end, at up to 10^5 generations;
- ``actor``: the real actor on a local Ray, and as many calls that wait as there are ranks.

Run from the repository's root:

    python benchmarks/coordinator.py --out benchmarks/results/coordinator.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    Action,
    Answer,
    PublishAppended,
    RefreshHint,
    WriteManifest,
)
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog, PublishBody, record_path
from coherent_ray.commit.manifest import (
    Acknowledgement,
    DataPosition,
    GenerationHeader,
    PlanIdentity,
    ShardRecord,
    StateLayout,
    TensorSpec,
    dump,
    load,
    shard_path,
)
from coherent_ray.commit.performer import perform
from coherent_ray.commit.prints import prints_of
from coherent_ray.digests import digest_of
from coherent_ray.storage.local import LocalStorage

RUN = "bench"
#: Bytes of state that a rank writes, and of one block: five digests a shard.
SHARE = 64 * 2**20
BLOCK = 16 * 2**20
#: Ranks and tensors of the machine's scenes.
MACHINE = (
    (8, 1_000), (8, 100_000), (1_024, 1_000), (1_024, 10_000), (16_384, 1_000), (16_384, 10_000),
    (16_384, 100_000), (65_536, 1_000), (65_536, 100_000),
)  # fmt: skip
GENERATIONS = (1_000, 10_000, 100_000)
#: Up to so many the whole log is read as well, which takes a time that grows with its records.
WHOLE = 10_000
#: Calls that wait at once in the real actor.
WAITING = (8, 1_024, 4_096, 16_384)
#: Generations that the log's scenes keep.
KEEP = 5


def header_of(ranks: int, tensors: int) -> GenerationHeader:
    rows = max(ranks * SHARE // 4 // 1024 // tensors, 1)
    names = sorted(f"optimizer/layers.{i // 10}.attention.{i % 10}/exp_avg" for i in range(tensors))
    return GenerationHeader(
        format=1,
        run_id=RUN,
        number=1,
        attempt=1,
        claim="exact",
        ranks=ranks,
        position=DataPosition(0, 32, 1),
        plan=PlanIdentity(digest_of(b"data"), 10**9, 7, "feistel-v1", 2**20, 2**17, 8),
        layout=StateLayout(tuple(TensorSpec(name, "F32", (rows, 1024)) for name in names)),
        values={},
        environment={"torch": "2.13.0"},
        recipe={},
        receipt_tip=digest_of(b"tip"),
        receipts=None,
    )


def words(header: GenerationHeader, root: Path) -> Iterator[Acknowledgement]:
    """Yield every rank's acknowledgement; its file is there, in its size."""
    ranks, tensors = header.ranks, len(header.layout.tensors)
    cuts = header.layout.cuts(ranks)
    prints = prints_of(tuple(f"{index:016x}" for index in range(tensors)), ranks)
    about = digest_of(dump(header))
    (root / header.directory).mkdir(parents=True)
    for rank in range(ranks):
        size = 4096 + cuts[rank + 1] - cuts[rank]
        raw = [digest_of(b"%d %d" % (rank, at), "xxh3_128") for at in range(-(-size // BLOCK))]
        blocks = tuple(digest.partition(":")[2] for digest in raw)
        whole = digest_of(b"".join(map(bytes.fromhex, blocks)), "xxh3_128")
        path = shard_path(header.directory, rank, ranks)
        span = (size, cuts[rank], cuts[rank + 1], 4096)
        with (root / path).open("wb") as file:
            file.truncate(size)
        yield Acknowledgement(
            attempt=1,
            number=1,
            rank=rank,
            ranks=ranks,
            shard=ShardRecord(rank, path, *span, "xxh3_128", BLOCK, blocks, whole),
            header_digest=about,
            fingerprint=digest_of(b"state"),
            tensor_fingerprints=prints,
            header=header if rank == 0 else None,
        )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def machine(ranks: int, tensors: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(folder)
        log = CommitLog(storage)
        log.open_attempt(RUN, "token-1")
        header = header_of(ranks, tensors)
        said = words(header, Path(folder))
        found = Coordinator(RUN, log.settled())
        before, parse_s, handle_s, sent = peak_mib(), 0.0, 0.0, 0
        todo: list[Action] = []
        begun = last = 0.0
        for call, word in enumerate(said):
            data = dump(word)  # a rank's work, and the wire's
            begun = time.perf_counter()
            heard = load(Acknowledgement, data)
            last = time.perf_counter()
            todo += found.handle(AckReceived(heard, call), 1.0)
            if word.rank not in {0, ranks - 1}:
                sent, parse_s = sent + len(data), parse_s + last - begun
                handle_s += time.perf_counter() - last
        times: dict[str, float] = {"decide_s": time.perf_counter() - last}
        result: dict[str, Any] = {}
        while todo:
            action = todo.pop(0)
            if isinstance(action, Answer):
                continue
            at = time.perf_counter()
            event = perform(action, storage, log)
            if isinstance(action, WriteManifest):
                result["manifest_bytes"] = len(action.data)
            if event is not None:
                todo += found.handle(event, 1.0)
            if not isinstance(action, RefreshHint):
                times[f"{type(action).__name__}_s"] = time.perf_counter() - at
            if isinstance(event, PublishAppended):
                result["last_ack_to_publish_s"] = time.perf_counter() - last
        view = CommitLog(storage)
        begun = time.perf_counter()
        latest = view.read_end().latest
        assert latest is not None
        Generations(storage, view).manifest(latest)
        return {
            "ranks": ranks,
            "tensors": tensors,
            "ack_bytes": sent // (ranks - 2),
            "parse_ms_per_ack": 1000 * parse_s / (ranks - 2),
            "handle_ms_per_ack": 1000 * handle_s / (ranks - 2),
            "acks_per_s": (ranks - 2) / (parse_s + handle_s),
            **result,
            "parts": times,
            "open_manifest_s": time.perf_counter() - begun,
            "peak_mib": peak_mib(),
            "peak_before_mib": before,
        }


def write_log(root: Path, generations: int) -> int:
    """Write a log as a run with retention leaves it, without syncs; return its records."""
    storage = LocalStorage(root)
    opened = CommitLog(storage).open_attempt(RUN, "token-1")
    seq, tip = opened.seq, opened.digest

    def put(kind: str, **body: Any) -> None:
        nonlocal seq, tip
        seq += 1
        record = {"body": body, "kind": kind, "previous": tip, "seq": seq, "writer": "w"}
        inner = canonical.dump(record)
        tip = digest_of(inner)
        data = b'{"digest":"%s","format":1,"record":%s}' % (tip.encode(), inner)
        (root / record_path(seq)).write_bytes(data)

    for number in range(1, generations + 1):
        mark = {"number": number, "attempt": 1}
        more = {"update": number, "epoch": 0, "receipts": None, "manifest_size": 1000}
        path = f"generations/g{number}-a1/manifest.json"
        put("publish", **mark, **more, manifest=path, manifest_digest=digest_of(b"m"))
        if number > KEEP:
            put("retire", number=number - KEEP, attempt=1)
    storage.replace("latest.json", canonical.dump({"digest": tip, "seq": seq}))
    return seq


def log(generations: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        records = write_log(root, generations)
        storage = LocalStorage(root)
        ends = []
        for _ in range(9):
            begun = time.perf_counter()
            latest = Generations(storage).find("latest")
            ends.append(time.perf_counter() - begun)
            assert latest.number == generations
        told = {
            "generations": generations,
            "records": records,
            "open_latest_ms": 1000 * sorted(ends)[len(ends) // 2],
            "open_latest_longest_ms": 1000 * max(ends),
        }
        if generations > WHOLE:
            return told
        view = CommitLog(storage)
        before = peak_mib()
        begun = time.perf_counter()
        view.read()
        whole = time.perf_counter() - begun
        begun = time.perf_counter()
        view.open_attempt(RUN, "token-2")
        opened = time.perf_counter() - begun
        number = generations + 1
        path = f"generations/g{number}-a2/manifest.json"
        body = PublishBody(number, 2, number, 0, path, 1000, digest_of(b"m"), None)
        begun = time.perf_counter()
        view.append(body, 2)
        return {
            **told,
            "read_whole_s": whole,
            "open_attempt_s": opened,
            "append_s": time.perf_counter() - begun,
            "memory_mib": peak_mib() - before,
        }


def actor(ranks: int) -> dict[str, Any]:
    import ray

    from coherent_ray.train.actor import CoordinatorActor

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir="/tmp/cr-ray")
        try:
            options = {"num_cpus": 0, "max_concurrency": 100_000}
            made = ray.remote(CoordinatorActor).options(**options)
            handle = made.remote(RUN, folder, ack_timeout_s=600.0, read_back=False)
            ray.get(handle.open_attempt.remote("token-1"))
            ray.get(handle.acknowledge.remote(b""))  # what only the first word costs
            header = header_of(ranks, 1_000)
            said = [dump(word) for word in words(header, Path(folder))]
            begun = time.perf_counter()
            calls = [handle.acknowledge.remote(word) for word in said[:-1]]
            while True:
                status = ray.get(handle.status.remote())
                waits = status["in_flight"].get("g1-a1", "")
                if waits == f"the acknowledgement of rank {ranks - 1}":
                    break
                time.sleep(0.05)
            collected = time.perf_counter()
            fate = ray.get(handle.acknowledge.remote(said[-1]))
            published = time.perf_counter()
            fates = ray.get(calls)
            answered = time.perf_counter()
            assert fate["kind"] == "published"
            assert {fate["kind"] for fate in fates} == {"published"}
            status = ray.get(handle.status.remote())
            pid = ray.get(handle.ping.remote())["pid"]
            text = Path(f"/proc/{pid}/status").read_text()
            peak = next(line for line in text.splitlines() if line.startswith("VmHWM"))
            return {
                "ranks": ranks,
                "tensors": 1_000,
                "acks_per_s": (ranks - 1) / (collected - begun),
                "collect_s": collected - begun,
                "last_ack_to_publish_s": published - collected,
                "all_answered_s": answered - collected,
                "timings": status["generation"]["timings"],
                "peak_mib": int(peak.split()[1]) / 1024,
            }
        finally:
            ray.shutdown()


SCENES = {"machine": machine, "log": log, "actor": actor}


def alone(kind: str, *numbers: int) -> dict[str, Any]:
    """Run one scene in a process of its own."""
    command = [sys.executable, __file__, "--scene", kind, *map(str, numbers)]
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    print(done.stdout.splitlines()[-1], flush=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coordinator.json"))
    parser.add_argument("--only", choices=sorted(SCENES), help="one part; the others stay")
    parser.add_argument("--scene", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scene:
        kind, *numbers = options.scene
        print(json.dumps(SCENES[kind](*map(int, numbers))))
        return
    report = json.loads(options.out.read_text()) if options.out.exists() else {}
    report |= {
        "benchmark": "coordinator",
        "machine_facts": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
    }
    places: dict[str, Any] = {
        "machine": MACHINE,
        "log": [(count,) for count in GENERATIONS],
        "actor": [(count,) for count in WAITING],
    }
    for kind in SCENES if options.only is None else [options.only]:
        report[kind] = [alone(kind, *numbers) for numbers in places[kind]]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
