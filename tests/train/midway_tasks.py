"""Tasks for updates that are broken off; they draw no random numbers."""

from __future__ import annotations

from session_tasks import Plain
from torch import nn


class FrozenPlain(Plain):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return model
