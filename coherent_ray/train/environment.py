"""The environment fingerprint: every fact about a process that can change the bits of an update.

What changes bits on one machine was measured: thread count, CPU capability, the dispatch settings
of oneDNN and MKL, the device. What does not (a fresh process, ``OMP_NUM_THREADS`` under a set
thread count) stays out. No path and no host name enters: a fingerprint says what computes, not
where.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch

#: Environment variables that choose kernels.
DISPATCH_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OPENBLAS_CORETYPE",
)


#: Facts that are versions of what the task imports.
LIBRARY = "library:"


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return the facts that decide the bits of an update on a device, by name."""
    facts = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": device.type,
    }
    facts |= {f"env:{name}": os.environ[name] for name in DISPATCH_VARIABLES if name in os.environ}
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        }
    return facts


def versions(libraries: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that the packages a task imports are, by name.

    Args:
        libraries: Their versions.
    """
    return {f"{LIBRARY}{name}": version for name, version in libraries.items()}


def prepare(device: torch.device, *, threads: int, deterministic: bool) -> None:
    """Fix what the fingerprint tells: thread count and deterministic mode.

    Ray sets ``OMP_NUM_THREADS`` from a worker's CPUs, so the thread count of a run would follow its
    placement; here it follows the configuration.

    Args:
        device: Where the run computes.
        threads: Intra-op threads of each rank.
        deterministic: Refuse operators that have no deterministic form.
    """
    torch.set_num_threads(threads)
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
