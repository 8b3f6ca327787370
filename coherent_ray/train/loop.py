"""The training function of a configured task: what `coherent-ray run` runs in every worker.

It is written against the public session and nothing else, so it is also the example for a training
function of one's own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from coherent_ray import config as config_
from coherent_ray.config import Config
from coherent_ray.errors import ConfigError
from coherent_ray.train import losses
from coherent_ray.train.admit import build_model, current
from coherent_ray.train.session import Session, session
from coherent_ray.train.task import (
    Task,
    WithAverage,
    WithInitialWeights,
    WithOptimizer,
    WithScheduler,
)


def train(values: dict[str, Any]) -> None:
    """Train the configured task from where its published history ends to its last update.

    Args:
        values: The whole configuration as plain values.
    """
    admitted = current()
    task = admitted.task
    if task is None:
        raise ConfigError("no task is configured", where="task", remedy="set task.factory")
    with session(config_.build(values)) as run:
        model = take_model(task, run)
        optimizer = make_optimizer(task, model, run.config)
        scheduler = make_scheduler(task, optimizer, run.updates_total)
        run.track(model, optimizer, scheduler, average=make_average(task, model))
        for update in run.updates():
            for micro in update.microbatches():
                loss_sum, count = losses.pair_of(task.loss(run.model, micro.batch), task.loss)
                losses.check(loss_sum, count, run.device, losses.place_of(task.loss))
                update.backward(loss_sum, count)
            update.step()


def take_model(task: Task, run: Session) -> nn.Module:
    """Return the task's model on the run's device, in training mode; sharded if configured."""
    admitted = current()
    model = admitted.model if admitted.model is not None else build_model(task, run.plan)
    admitted.model = None
    sharded = run.shard(model, task)
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.device.type == "meta" for tensor in tensors):
        give_memory(model, run.device)
        torch.manual_seed(run.plan.seed_for("model", *([run.rank] if sharded else [])))
        cast(WithInitialWeights, task).init_weights(model)
    return model.to(run.device).train()


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, which holds anything; tied tensors stay tied."""
    places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(tensor, []).append((module, key))
    model.to_empty(device=device)
    for (owner, name), *others in places.values():
        for module, key in others:
            setattr(module, key, getattr(owner, name))


def make_optimizer(task: Task, model: nn.Module, config: Config) -> Optimizer:
    """Return the task's optimizer, or the configuration's AdamW."""
    if hasattr(task, "configure_optimizer"):
        return cast(WithOptimizer, task).configure_optimizer(model)
    settings = config.optimizer
    trainable = [p for p in model.parameters() if p.requires_grad]
    first, second = settings.betas
    return AdamW(
        trainable,
        lr=settings.lr,
        betas=(first, second),
        weight_decay=settings.weight_decay,
    )


def make_scheduler(task: Task, optimizer: Optimizer, updates: int) -> LRScheduler | None:
    """Return the task's scheduler; None where it has none."""
    if not hasattr(task, "configure_scheduler"):
        return None
    return cast(WithScheduler, task).configure_scheduler(optimizer, updates)


def make_average(task: Task, model: nn.Module) -> AveragedModel | None:
    """Return the task's average of the model's weights; None where it keeps none."""
    if not hasattr(task, "configure_average"):
        return None
    return cast(WithAverage, task).configure_average(model)
