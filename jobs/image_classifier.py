"""A small convolutional network with batch norm and dropout, as a Coherent Ray task.

Rows have a column ``image`` of ``side * side`` bytes and a column ``label``. Run it with
``coherent-ray run configs/digits.yaml``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from coherent_ray.data.columns import Rows

Batch = dict[str, Tensor]


class ImageClassifierTask:
    """Tell which of some classes a grey image shows."""

    def __init__(
        self,
        *,
        side: int = 8,
        classes: int = 10,
        width: int = 32,
        dropout: float = 0.2,
        shift: int = 1,
        lr: float = 0.05,
    ) -> None:
        """Keep the settings.

        Args:
            side: Height and width of an image, in pixels; a multiple of 4.
            classes: Number of classes.
            width: Channels of the first layer.
            dropout: Share of features that are dropped in training.
            shift: Augmentation: images move by up to so many pixels, each epoch elsewhere.
            lr: Learning rate.
        """
        self.side, self.classes, self.width = side, classes, width
        self.dropout, self.shift, self.lr = dropout, shift, lr

    def build_model(self) -> nn.Module:
        """Return the network with initial weights."""
        width, side = self.width, self.side
        return nn.Sequential(
            *_stage(1, width),
            nn.MaxPool2d(2),
            *_stage(width, 2 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * width * (side // 4) ** 2, self.classes),
        )

    def collate(self, rows: Rows) -> Batch:
        """Return images ``[batch, 1, side, side]`` in [0, 1] and labels ``[batch]``."""
        images = np.asarray(rows["image"], np.float32).reshape(-1, self.side, self.side) / 16
        for image, seed in zip(images, rows["_seed"], strict=True):
            random = np.random.Generator(np.random.Philox(int(seed)))
            image[:] = np.roll(image, random.integers(-self.shift, self.shift + 1, 2), (0, 1))
        labels = torch.as_tensor(np.asarray(rows["label"], np.int64))
        return {"images": torch.from_numpy(images).unsqueeze(1), "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the cross-entropy in nats, summed over the images, and their number."""
        summed = cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")
        return summed, len(batch["labels"])

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        """Plain momentum."""
        return SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        """Fall along a cosine to nothing."""
        return CosineAnnealingLR(optimizer, updates)


def _stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()
