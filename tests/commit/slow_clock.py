"""A clock for storages that hang in tests: it stands still, until a call that hangs moves it."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from coherent_ray.commit import service
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.train import saving


class SlowClock:
    """Seconds that have passed by, as `time.monotonic` would say."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def pass_by(self, seconds: float) -> None:
        """Let time pass, from any thread."""
        with self._lock:
            self._now += seconds

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ranks and coordinators here measure the storage's silence by this clock."""
        for module in (service, saving):
            monkeypatch.setattr(module, "AttendedStorage", partial(AttendedStorage, clock=self))
