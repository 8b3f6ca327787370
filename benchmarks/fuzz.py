"""Fuzzes every reader of stored bytes, guided by coverage where atheris is installed.

``python benchmarks/fuzz.py --inputs 1000000 --seed 1`` writes ``benchmarks/results/fuzz.json``.
Each reader has a process of its own. Without atheris, seeded mutations alone are tried. atheris is
no dependency of the project: install it into an environment of its own that sees this one's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RESULT = PROJECT / "benchmarks" / "results" / "fuzz.json"
GUIDED = importlib.util.find_spec("atheris") is not None
#: Readers that do more for one input get fewer.
WEIGHTS = {"published manifest": 0.1, "log of re-hashed records": 0.3, "shard": 0.5}

sys.path[:0] = [str(PROJECT / "tests" / "fuzz"), str(PROJECT / "tests" / "commit"), str(PROJECT)]


def fuzz_one(name: str, inputs: int, seed: int, result: Path) -> None:
    """Fuzz one reader in this process, and write what came of it; may not return."""
    if GUIDED:
        import atheris

        with atheris.instrument_imports(include=["coherent_ray"]):
            import targets
    else:
        import targets
    from mutation import mutate

    target = targets.TARGETS[name]
    facts: dict[str, Any] = {"reader": name, "inputs": 0, "crashes": 0, "examples": []}
    begun = time.monotonic()

    def test(data: bytes) -> None:
        facts["inputs"] += 1
        error = targets.crash(target, data)
        if error is not None:
            facts["crashes"] += 1
            if len(facts["examples"]) < 5:
                facts["examples"].append({"input": data.hex()[:4000], "error": repr(error)[:300]})
        if facts["inputs"] == inputs:
            facts["seconds"] = round(time.monotonic() - begun, 1)
            facts["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            result.write_text(json.dumps(facts))

    if GUIDED:
        _guided(target, test, mutate, inputs, seed, result.parent)
    rng = random.Random(f"{seed} {name}")
    for _ in range(inputs):
        test(mutate(rng.choice(target.seeds), rng))


def _guided(target: Any, test: Any, mutate: Any, inputs: int, seed: int, scratch: Path) -> None:
    import atheris

    corpus = scratch / "corpus"
    corpus.mkdir()
    for index, data in enumerate(target.seeds):
        (corpus / str(index)).write_bytes(data)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, most)
        return mutate(data or rng.choice(target.seeds), rng)[:most]

    # A few more than are counted: the fuzzer ends the process itself, and may end it early.
    options = [f"-runs={inputs + 1000}", f"-seed={seed}", "-max_len=65536", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], test, custom_mutator=mutated)
    atheris.Fuzz()


def campaign(inputs: int, seed: int) -> dict[str, Any]:
    """Fuzz every reader in turn, each in its own process."""
    import targets

    names = list(targets.TARGETS)
    total = sum(WEIGHTS.get(name, 1.0) for name in names)

    def run(name: str) -> dict[str, Any]:
        count = int(inputs * WEIGHTS.get(name, 1.0) / total) + 1
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            result = Path(scratch) / "result.json"
            command = [
                *(sys.executable, __file__, "--one", name, "--inputs", str(count)),
                *("--seed", str(seed), "--result", str(result)),
            ]
            subprocess.run(command, check=False)
            facts: dict[str, Any] = json.loads(result.read_text())
        print(json.dumps(facts), flush=True)
        return facts

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, names))
    return {"seed": seed, "guided": GUIDED, "readers": runs}


def main() -> int:
    """Run the campaign, or one reader of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one", help="this reader alone, in this process")
    parser.add_argument("--result", type=Path, default=RESULT)
    chosen = parser.parse_args()
    if chosen.one:
        fuzz_one(chosen.one, chosen.inputs, chosen.seed, chosen.result)
        return 0
    result = campaign(chosen.inputs, chosen.seed)
    chosen.result.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(run["crashes"] for run in result["readers"]))


if __name__ == "__main__":
    sys.exit(main())
