"""Both backends pass the suite that third parties inherit."""

from pathlib import Path

import pytest

from coherent_ray.storage import LocalStorage
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.storage.testing.conformance import StorageConformance
from coherent_ray.storage.testing.faults import FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


class TestLocalStorage(StorageConformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "not" / "yet" / "there"

    def open(self) -> LocalStorage:
        return LocalStorage(self.root)

    def raw_read(self, path: str) -> bytes | None:
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def raw_write(self, path: str, data: bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def raw_paths(self) -> set[str]:
        return {str(p.relative_to(self.root)) for p in self.root.rglob("*") if not p.is_dir()}


class TestMemoryStorage(StorageConformance):
    @pytest.fixture(autouse=True)
    def _root(self) -> None:
        self.storage = MemoryStorage()

    def open(self) -> MemoryStorage:
        return self.storage

    def raw_read(self, path: str) -> bytes | None:
        return self.storage.files.get(path)

    def raw_write(self, path: str, data: bytes) -> None:
        self.storage.files[path] = data

    def raw_paths(self) -> set[str]:
        return set(self.storage.files)


class TestFaultyStorageWithoutFaults(TestMemoryStorage):
    """The wrapper changes nothing but what its script says."""

    def open(self) -> FaultyStorage:
        return FaultyStorage(self.storage)


class TestAttendedStorage(TestMemoryStorage):
    """The wrapper only remembers what has not come back."""

    def open(self) -> AttendedStorage:
        return AttendedStorage(self.storage)
