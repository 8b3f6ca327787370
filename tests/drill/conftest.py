"""What tests of drills share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync nothing to the device: the power is not cut here, and disks are slow."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
