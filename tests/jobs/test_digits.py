"""The digits are scikit-learn's, whole and in order."""

import sys

import numpy as np
import pytest

from coherent_ray.data.dataset import scan
from coherent_ray.data.sources import open_source
from coherent_ray.errors import DataError
from jobs.digits import prepare


def test_rows_are_the_digits(tmp_path):
    from sklearn.datasets import load_digits

    path = str(tmp_path / "digits.parquet")
    prepare(path)
    prepare(path)
    source = open_source([path], "parquet", None, scan([path], "parquet"))
    assert len(source) == 1797
    rows = source.rows(np.arange(1797))
    expected = load_digits()
    assert rows["image"].dtype == np.uint8
    assert np.array_equal(rows["image"], expected.data)
    assert np.array_equal(rows["label"], expected.target)


def test_without_scikit_learn_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="not installed") as caught:
        prepare(str(tmp_path / "digits.parquet"))
    assert "pip install scikit-learn" in caught.value.remedy
