"""The 1,797 handwritten digits of scikit-learn (UCI, Alpaydin and Kaynak 1998), as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coherent_ray.errors import DataError
from jobs.parquet import keep_or_write


def prepare(path: str) -> None:
    """Make a Parquet file with ``image`` (64 bytes, 0 to 16) and ``label``, if it is not there.

    Args:
        path: The file to make.

    Raises:
        DataError: scikit-learn is not installed, or `path` holds something else.
    """
    keep_or_write(Path(path), {"images": "scikit-learn digits"}, _table)


def _table() -> Any:
    import numpy as np
    import pyarrow as pa

    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed",
            where="jobs.digits",
            remedy="pip install scikit-learn",
        ) from error
    data = load_digits()
    pixels = pa.array(data.data.astype(np.uint8).ravel())
    return pa.table(
        {
            "image": pa.FixedSizeListArray.from_arrays(pixels, 64),
            "label": pa.array(data.target.astype(np.int64)),
        }
    )
