"""The state plane against the raw limits and against others, in one interleaved run.

A replicated state (1 GiB: parameters and Adam's moments in fp32), at one rank and at two. In every
round each product saves, saves while training goes on, and loads, cold and warm; and the same bytes
are copied, written and read raw. Figures are ratios to the raw ones of the same round, and medians
over the rounds. What each product is set to is said in `benchmarks/plane/`; everything of ours is
on: fingerprints, digests, acknowledgements, manifest, publish, pruning. Others that this project
does not bring come from an environment of their own. Run on a quiet machine, for about an hour:

    python -m venv VENV && VENV/bin/pip install -r benchmarks/rivals.txt
    python benchmarks/state_plane.py --python VENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "benchmarks"))
sys.path.insert(0, str(PROJECT))

from figures.costs import state_plane  # noqa: E402
from gauntlet.cluster import cluster  # noqa: E402
from plane.group import Group, met, processes, started  # noqa: E402
from plane.group import listening as calls  # noqa: E402

HOME = ("ours", "torch_save", "dcp", "dcp_thread", "dcp_process")
NAMES = {
    "ours": "Coherent Ray",
    "torch_save": "torch.save + fsync",
    "dcp": "DCP, sync",
    "dcp_thread": "DCP, async thread",
    "dcp_process": "DCP, async process",
    "checkpointing": "torch-checkpointing + fsync",
    "ray_train": "Ray Train report (not durable)",
}
CHANGED = 0.01
#: Other ways to write the same bytes; see `plane.raw`.
WAYS = ("write_behind", "write_direct_small", "write_direct_large", "write_direct_two")
Figures = dict[str, list[float]]


def raw_round(group: Group, found: Figures, *, ways: bool) -> dict[str, float]:
    """Do what the system itself can do, and return the slowest rank's seconds.

    Args:
        group: Whose ranks do it.
        found: Takes the figures.
        ways: Also write in the ways that are not the reference.
    """
    copies = group.all("raw", "copy")
    raw = {"copy_cpu_s": sum(c["cpu_s"] for c in copies), "copy_s": slowest(copies)}
    for verb in (*(WAYS if ways else ()), "write_direct", "write"):  # what the last wrote is read
        group.all("drop", "raw", None)
        raw[f"{verb}_s"] = slowest(group.all("raw", verb))
    for heat in ("cold", "warm"):
        raw[f"read_{heat}_s"] = slowest(group.all("load", "raw", 0, heat == "cold"))
    for name, value in raw.items():
        found[name].append(value)
    return raw


def product_round(group: Group, key: str, step: int, raw: dict[str, float], found: Figures) -> None:
    """Have one product do everything once; four steps are its own."""

    def note(name: str, value: float) -> None:
        found[name].append(value)

    group.all("change", 1.0)  # what is as it was would not be written by who looks
    if not (saves := group.try_all("save", key, step)):
        return
    note("stall_copies", sum(s["stall_cpu_s"] for s in saves) / raw["copy_cpu_s"])
    note("stall_wall_copies", slowest(saves, "stall_s") / raw["copy_s"])
    if "fingerprint_cpu_s" in saves[0]:
        prints = sum(s["fingerprint_cpu_s"] for s in saves)
        note("fingerprint_copies", prints / raw["copy_cpu_s"])
    note("cpu_copies", sum(s["cpu_s"] for s in saves) / raw["copy_cpu_s"])
    note("durable_to_write", slowest(saves) / raw["write_s"])
    note("durable_to_direct", slowest(saves) / raw["write_direct_s"])
    note("durable_s", slowest(saves))
    for heat in ("cold", "warm"):
        if loads := group.try_all("load", key, step, heat == "cold"):
            note(f"load_{heat}", slowest(loads) / raw[f"read_{heat}_s"])
    if key == "ours":
        # The newest two generations share nothing, so it is the second such save that refers.
        for at in (step + 1, step + 3):
            group.all("change", CHANGED)
            changed = group.try_all("save", key, at)
        if changed:
            note("changed_cpu", sum(s["cpu_s"] for s in changed) / sum(s["cpu_s"] for s in saves))
            note("changed_time", slowest(changed) / slowest(saves))
            sizes = [group.all("written", key, at)[0]["bytes"] for at in (step, step + 3)]
            note("changed_bytes", sizes[1] / sizes[0])
    group.all("drop", key, step)
    group.all("change", 1.0)
    if training := group.try_all("save_training", key, step + 2):
        note("lost_copies", max(t["lost_s"] for t in training) / raw["copy_s"])
        pairs = [t["during"] / t["pace"] for t in training]
        note("pace_during", min(pairs))
        group.all("drop", key, step + 2)


def first_round(group: Group, key: str, size: int, facts: dict[str, Any]) -> None:
    """Let a product make what it keeps; see what that takes, and that what it saves comes back."""
    group.all("trim")
    with group.memory() as grown:
        group.try_all("start", key)
        for step in (1, 2):
            group.try_all("save", key, step)
            if step == 1 and (written := group.try_all("written", key, step)):
                facts["written_to_state"] = round(written[0]["bytes"] / size, 4)
            if step == 1:
                group.try_all("drop", key, step)
        shares = len(group.pids) * group.share
        facts["memory_shares"] = round(grown() / shares, 3)
        facts["memory_over_one_share_mib"] = round((grown() - shares) / len(group.pids) / 2**20, 1)
    if checked := group.try_all("check", key, 2):
        facts["comes_back"] = all(answer["same"] for answer in checked)
    group.try_all("drop", key, 2)


@contextmanager
def in_ray(place: Path, ranks: int, size: int) -> Iterator[Group]:
    """Have the ranks inside a training function of Ray Train, in a cluster of its own."""
    place.mkdir()

    def train_all() -> None:
        import ray
        from ray.train import CheckpointConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        path = os.pathsep.join((str(PROJECT / "benchmarks"), str(PROJECT)))
        ray.init(
            address=os.environ["GAUNTLET_CLUSTER"],
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )
        keep = CheckpointConfig(num_to_keep=2)
        TorchTrainer(
            _in_worker,
            train_loop_config={"socket": str(place / "call")},
            scaling_config=ScalingConfig(num_workers=ranks),
            run_config=RunConfig(name="run", storage_path=str(place), checkpoint_config=keep),
        ).fit()
        ray.shutdown()

    with cluster(sys.executable), calls(place) as listener:
        thread = threading.Thread(target=train_all)
        thread.start()
        group = met(listener, place, ranks, size, place / "store")
        yield group
        group.all("close")
        group.leave()
        thread.join()


def _in_worker(config: dict[str, Any]) -> None:
    from plane.rank import join
    from ray import train

    join(config["socket"], train.get_context().get_world_rank())


def measured(
    groups: list[tuple[Group, tuple[str, ...]]], rounds: int, size: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the raw limits and each product's figures, all taken in turns."""
    raw: Figures = defaultdict(list)
    found: dict[str, Figures] = defaultdict(lambda: defaultdict(list))
    facts: dict[str, dict[str, Any]] = defaultdict(dict)
    for group, keys in groups:
        for key in keys:
            first_round(group, key, size, facts[key])
    for number in range(1, rounds + 1):
        for group, keys in groups:
            for key in keys if number % 2 else keys[::-1]:
                limits = raw_round(group, raw, ways=key == "ours")
                product_round(group, key, 10 * number, limits, found[key])
        print(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    for group, keys in groups:
        for key in keys:
            facts[key] |= summed(found[key])
            if key in group.broken:
                facts[key]["fails"] = group.broken[key]
    return summed(raw), dict(facts)


def summed(figures: Figures) -> dict[str, Any]:
    """Return the medians, and beside each the least and the most."""
    return {
        name: {
            "median": round(statistics.median(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
            "times": len(values),
        }
        for name, values in sorted(figures.items())
    }


def at_ranks(ranks: int, options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Return the figures at one rank count."""
    size = options.mib * 2**20
    home = tuple(key for key in HOME if key in options.products)
    with ExitStack() as stack:
        (place / "h").mkdir()
        if "ours" in home:
            (place / "h/ours").mkdir()
            coordinator = started(sys.executable, "plane.ours", place / "h/ours", ranks)
            stack.callback(coordinator.wait)
            stack.callback(coordinator.terminate)
        groups = [(stack.enter_context(processes(sys.executable, place / "h", ranks, size)), home)]
        if options.python and "checkpointing" in options.products:
            other = stack.enter_context(processes(options.python, place / "o", ranks, size))
            groups.append((other, ("checkpointing",)))
        raw, products = measured(groups, options.rounds, size)
    result = {"ranks": ranks, "raw": raw, "products": products}
    if "ray_train" in options.products:
        # By itself: a cluster never rests, and would be in everybody's figures.
        with in_ray(place / "r", ranks, size) as group:
            beside, found = measured([(group, ("ray_train",))], options.rounds, size)
        result["raw_beside_ray"] = beside
        products |= found
    return result


def slowest(answers: list[dict[str, Any]], name: str = "s") -> float:
    return float(max(answer[name] for answer in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/state_plane.json")
    parser.add_argument("--python", help="the interpreter that has benchmarks/rivals.txt")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--products", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--root", type=Path, help="where files are written; else a temporary place")
    options = parser.parse_args()
    begun, load = time.monotonic(), os.getloadavg()[0]
    report: dict[str, Any] = {
        "benchmark": "state_plane",
        "names": {key: NAMES[key] for key in options.products},
        "state_mib": options.mib,
        "rounds": options.rounds,
        "at": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for ranks in options.ranks:
        place = Path(tempfile.mkdtemp(prefix="sp-", dir=options.root))
        try:
            report["at"].append(at_ranks(ranks, options, place))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        report["machine"] = {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
            "threads_per_rank": 1,
            "seconds": round(time.monotonic() - begun),
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(state_plane(report))


if __name__ == "__main__":
    main()
