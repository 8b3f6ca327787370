"""Taps: where the product tells a recorder what it does. None of it knows that it is recorded.

They go round the methods through which every update passes, and change nothing of what these do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from coherent_ray.drill.patching import Patch
from coherent_ray.drill.recording import Recorder
from coherent_ray.train import buffers, reduce, session, update


def patches(recorder: Callable[[], Recorder]) -> list[Patch]:
    """Return what makes the product tell a recorder what it does.

    Args:
        recorder: Returns the one of this thread.
    """

    def around(
        tell: Callable[..., Any], *, after: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def told(*arguments: Any, **named: Any) -> Any:
                if not after:
                    tell(*arguments, **named)
                result = original(*arguments, **named)
                if after:
                    tell(result, *arguments, **named)
                return result

            return told

        return wrap

    def backward(original: Callable[..., None]) -> Callable[..., None]:
        def told(self: update.Update, loss: Tensor, count: int) -> None:
            with recorder().backward(loss, count):
                original(self, loss, count)

        return told

    def summed(result: reduce.Reduced, reducer: reduce.LaneReducer, *_: Any) -> None:
        if recorder().is_on:
            recorder().summed(result.loss_sum, reducer._parameters)

    def lane_done(reducer: reduce.LaneReducer, lane: int) -> None:
        if recorder().is_on:
            recorder().lane_done(reducer._parameters)

    def lane_begin(_: None, __: buffers.LaneBuffers, lane: int) -> None:
        if recorder().is_on:
            recorder().lane_begin(lane)

    def step_begins(*_: Any) -> None:
        if recorder().is_on:
            recorder().step_begins()

    def moved(batch: Any, device: torch.device) -> None:
        if recorder().is_on:
            recorder().batch(batch)

    return [
        (reduce.LaneReducer, "begin", around(lambda _, number, *__: recorder().begin(number))),
        (reduce.LaneReducer, "lane_done", around(lane_done)),
        (reduce.LaneReducer, "finish", around(summed, after=True)),
        (buffers.LaneBuffers, "lane_begin", around(lane_begin, after=True)),
        (buffers.LaneBuffers, "finish", around(step_begins, after=True)),
        (update, "to_device", around(moved)),
        (update.Update, "backward", backward),
        (session.Session, "track", around(lambda _, model, *__, **___: recorder().know(model))),
    ]


@contextmanager
def modules_told(recorder: Callable[[], Recorder]) -> Iterator[None]:
    """Let recorders know in which module of a model a forward pass is, for a while."""
    handles = [
        modules.register_module_forward_pre_hook(lambda m, _: recorder().enter(m)),
        modules.register_module_forward_hook(lambda *_: recorder().leave()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
