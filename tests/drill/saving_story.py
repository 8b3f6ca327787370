"""A process of its own that saves three generations, for judges that look from outside.

``python saving_story.py ROOT [files|directories]``: the second forgets syncs on purpose.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coherent_ray.drill.saves import Saves
from coherent_ray.drill.shutdowns import forgetting
from coherent_ray.storage import LocalStorage

SAVES = 3


def tell(root: Path, saves: int = SAVES) -> None:
    """Save a few generations with two ranks."""
    story = Saves(lambda: LocalStorage(root), 2, items=20_000)
    try:
        story.open()
        for _ in range(saves):
            assert [saved.fate.kind for saved in story.save()] == ["published"] * 2
    finally:
        story.close()


if __name__ == "__main__":
    with forgetting(sys.argv[2] if len(sys.argv) > 2 else "nothing"):  # type: ignore[arg-type]
        tell(Path(sys.argv[1]))
