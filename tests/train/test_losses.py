"""A loss that is no pair is told with the line of the user's own function, and voted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import Left, Tiny, config_for, train
from torch import nn

from coherent_ray.errors import TrainingFailed
from coherent_ray.train import losses


class Returns(Tiny):
    """A task whose loss returns something else."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, count = super().loss(model, batch)
        return {
            "no count": total,
            "three": (total, count, 1),
            "nothing": None,
            "dict": {"loss": total},
            "no gradient": (total.detach(), count),
            "bool": (total, True),
            "negative": [total, -1],
            "mean": (total.reshape(1).repeat(3), count),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no count", "must return a pair, the summed loss and a count, not a tensor of shape ()"),
        ("three", "must return a pair, the summed loss and a count, not a tuple of 3"),
        ("nothing", "must return a pair, the summed loss and a count, not a NoneType"),
        ("dict", "must return a pair, the summed loss and a count, not a dict"),
        ("no gradient", "a scalar tensor with a gradient, not a tensor of shape ()"),
        ("bool", "a whole number, at least 0, not True"),
        ("negative", "a whole number, at least 0, not -1"),
        ("mean", "a scalar tensor with a gradient, not a tensor of shape (3,)"),
    ],
)
def test_the_user_s_line_is_named(tmp_path: Path, what: str, words: str) -> None:
    config = config_for(tmp_path, task__factory="test_losses:Returns", task__args={"what": what})
    with pytest.raises(TrainingFailed) as caught:
        train(config)
    error = caught.value
    # By the vote: a rank that raised by itself would leave the others waiting.
    assert error.what.startswith("update 1 failed on rank 0: TaskError: ")
    line = Returns.loss.__code__.co_firstlineno
    assert f"test_losses.py:{line}: " in error.what
    assert words in error.what
    assert error.remedy.startswith("return the loss *summed*")
    assert str(error).count("What to do") == 1
    assert Left(config).generations == []


def test_lists_and_whole_numbers_of_any_kind_are_fine() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert losses.pair_of([loss, 3], test_the_user_s_line_is_named) == (loss, 3)
    for count in (3, 3.0, torch.tensor(3), torch.tensor([3.0])):
        assert losses.check(loss, count, loss.device, "") == 3
    assert losses.place_of(len) == ""
