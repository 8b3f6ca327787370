"""The state that the NVRx column saves: the product's basic one, but of tensors on the CPU.

A module of its own because the product's files are pickles: who reads them must find this class.
"""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class CpuStateDict(BasicTensorAwareStateDict):  # type: ignore[misc]
    """A state whose tensors stay where they are."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing."""
