"""Paths of the configuration become the same files, in the same order, on every machine."""

import pytest

from coherent_ray.data.files import expand, relative_names
from coherent_ray.errors import DataError


@pytest.fixture
def tree(tmp_path):
    for name in ("b.parquet", "a.parquet", "deep/c.parquet", "deep/d.arrow", "notes.txt", "t.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def names(files):
    return [f.name for f in files]


def test_files_keep_the_users_order(tree):
    paths = [str(tree / "b.parquet"), str(tree / "a.parquet")]
    assert names(expand(paths, "parquet")) == ["b.parquet", "a.parquet"]


def test_a_directory_gives_its_formats_files_sorted(tree):
    found = expand([str(tree)], "parquet")
    assert names(found) == ["a.parquet", "b.parquet", "c.parquet"]
    assert names(expand([str(tree)], "arrow")) == ["d.arrow"]
    assert names(expand([str(tree)], "tokens")) == ["t.bin"]


def test_a_glob_gives_its_files_sorted(tree):
    assert names(expand([str(tree / "*.parquet")], "parquet")) == ["a.parquet", "b.parquet"]
    assert len(expand([str(tree / "**/*.parquet")], "parquet")) == 3


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tree):
    odd = tree / "part[0].parquet"
    odd.write_bytes(b"x")
    assert expand([str(odd)], "parquet") == [odd]


def test_names_are_relative_to_the_common_directory(tree):
    assert relative_names([tree / "a.parquet"]) == ["a.parquet"]
    assert relative_names(expand([str(tree)], "parquet")) == [
        "a.parquet",
        "b.parquet",
        "deep/c.parquet",
    ]
    assert relative_names([tree / "deep/c.parquet", tree / "deep/d.arrow"]) == [
        "c.parquet",
        "d.arrow",
    ]


@pytest.mark.parametrize(
    ("paths", "what", "remedy"),
    [
        ([], "no data files", "data.source.paths"),
        (["{}/a.parqet"], "does not exist", "did you mean {}/a.parquet?"),
        (["{}/nowhere/a.parquet"], "does not exist", "the directory {}/nowhere does not exist"),
        (["{}/zzzzzz"], "does not exist", "data.prepare"),
        (["{}/*.json"], "no file matches", "data.source.paths"),
        (["{}/a.parquet", "{}/b.parquet", "{}/a.parquet"], "named twice", "each file once"),
        (["{}", "{}/deep/c.parquet"], "named twice", "each file once"),
    ],
)
def test_what_leads_nowhere_is_one_clear_error(tree, paths, what, remedy):
    with pytest.raises(DataError, match=what) as caught:
        expand([p.format(tree) for p in paths], "parquet")
    assert remedy.format(tree) in caught.value.remedy
    assert caught.value.exit_code == 2


def test_an_empty_directory_says_what_it_lacks(tree):
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.arrow or \.feather file"):
        expand([str(tree / "empty")], "arrow")


def test_a_link_to_a_file_already_named_is_found(tree):
    (tree / "link.parquet").symlink_to(tree / "a.parquet")
    with pytest.raises(DataError, match="twice"):
        expand([str(tree / "a.parquet"), str(tree / "link.parquet")], "parquet")
