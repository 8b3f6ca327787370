"""Every error of the tree pickles, prints, and knows its exit code."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator

import pytest

from coherent_ray import errors
from coherent_ray.errors import CoherentRayError, ConfigError

MISUSE = {"ConfigError", "TaskError", "DataError", "NotARun"}


def tree(root: type[CoherentRayError] = CoherentRayError) -> Iterator[type[CoherentRayError]]:
    yield root
    for branch in root.__subclasses__():
        yield from tree(branch)


TREE = sorted(set(tree()), key=lambda kind: kind.__name__)
parametrize = pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)


def full(kind: type[CoherentRayError]) -> CoherentRayError:
    return kind(
        "the shard is torn",
        where="generations/g12-a3/shard-00001-of-00002.safetensors",
        remedy="run `coherent-ray verify`",
        details={"rank": 1, "blocks": [3, 4], "nested": {"a": None}},
    )


def test_the_tree_is_all_that_the_module_defines():
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert defined <= {kind.__name__ for kind in TREE}
    assert len(TREE) >= 25


@parametrize
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_whole(kind, protocol):
    error = full(kind)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert (again.what, again.where) == (error.what, error.where)
    assert (again.remedy, again.details) == (error.remedy, error.details)
    assert str(again) == str(error)
    assert again.args == error.args


@parametrize
def test_prints_what_where_and_remedy(kind):
    text = str(full(kind))
    assert text.splitlines() == [
        "generations/g12-a3/shard-00001-of-00002.safetensors: the shard is torn",
        "What to do: run `coherent-ray verify`",
    ]


@parametrize
def test_prints_without_place_or_remedy(kind):
    assert str(kind("it happened")) == "it happened"
    assert str(kind("it happened", where="rank 3")) == "rank 3: it happened"
    assert str(kind("it happened", remedy="wait")) == "it happened\nWhat to do: wait"


@parametrize
def test_an_error_that_tells_another_says_what_to_do_once(kind):
    inner = kind("the loss has no gradient", where="task.py:7", remedy="return loss.sum()")
    outer = kind(f"update 2 failed: {inner}", where="rank 0", remedy="see the log")
    assert str(outer) == (
        "rank 0: update 2 failed: task.py:7: the loss has no gradient\n"
        "What to do: return loss.sum()"
    )
    assert str(kind(f"again: {outer}")).count("What to do") == 1
    assert outer.args == (outer.what,)


@parametrize
@pytest.mark.parametrize(
    ("where", "what", "text"),
    [
        ("rank 0", "rank 0: KeyError: 'x'", "rank 0: KeyError: 'x'"),
        ("rank 0", "rank 0 is late", "rank 0 is late"),
        ("rank 1", "rank 10 is late", "rank 1: rank 10 is late"),
        ("update 2", "update 2", "update 2"),
    ],
)
def test_a_place_is_said_once(kind, where, what, text):
    assert str(kind(what, where=where)) == text


@parametrize
def test_exit_code_is_two_for_misuse_alone(kind):
    assert kind.exit_code == (2 if kind.__name__ in MISUSE else 1)
    assert (kind.exit_code == 2) == issubclass(kind, ConfigError)


@parametrize
def test_says_what_it_is_for(kind):
    assert kind.__doc__
    assert kind.__doc__.strip().endswith(".") or kind is CoherentRayError


@parametrize
def test_details_are_not_shared(kind):
    first, second = kind("a"), kind("b")
    first.details["rank"] = 1
    assert second.details == {}


def test_a_cause_does_not_stop_pickling():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise errors.StorageFull("no space is left", where="/run") from error
    except errors.StorageFull as error:
        again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, errors.StorageFull)
    assert again.where == "/run"


def test_is_caught_by_its_branch():
    assert issubclass(errors.StorageFull, errors.StorageError)
    assert issubclass(errors.ShardDamaged, errors.Damage)
    assert issubclass(errors.ReplicaDiverged, errors.SaveFailed)
    assert issubclass(errors.ClaimRefused, errors.AdmissionRefused)
    # A time-out is retried and a refusal never is: neither may be caught as the other.
    assert not issubclass(errors.AdmissionTimeout, errors.AdmissionRefused)
    assert not issubclass(errors.AdmissionRefused, errors.AdmissionTimeout)
