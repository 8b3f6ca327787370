"""A byte-level GPT: the smallest language model that learns real text, as a Coherent Ray task.

Rows have one column ``text`` of ``context + 1`` bytes. Run it: ``coherent-ray run
configs/quickstart.yaml``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from coherent_ray.data.columns import Rows


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape; no position sees a later one."""
        batch, time, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(mixed.reshape(batch, time, width)))
        forward: Tensor = self.dropout(self.down(gelu(self.up(self.norm_2(x)), approximate="tanh")))
        return x + forward


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes, with tied input and output embeddings."""

    def __init__(self, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes ``[batch, time]`` (int64) to the next byte's logits ``[batch, time, 256]``."""
        stream = self.blocks(self.embedding(text) + self.position[: text.shape[1]])
        logits: Tensor = self.head(self.norm(stream))
        return logits


class LanguageModelTask:
    """Predict every next byte."""

    def __init__(
        self, *, width: int = 192, depth: int = 4, heads: int = 6, context: int = 128,
        dropout: float = 0.05, lr: float = 2e-3, warmup: int = 10,
    ) -> None:  # fmt: skip
        """Keep the settings; `context` is in bytes, `warmup` in updates."""
        self.width, self.depth, self.heads, self.context = width, depth, heads, context
        self.dropout, self.lr, self.warmup = dropout, lr, warmup

    def build_model(self) -> nn.Module:
        """Return the model with initial weights."""
        return LanguageModel(self.width, self.depth, self.heads, self.context, self.dropout)

    def collate(self, rows: Rows) -> Tensor:
        """Return the texts as ``[batch, context + 1]``, int64."""
        return torch.as_tensor(rows["text"]).long()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        """Return the cross-entropy in nats, summed over all predicted bytes, and their number."""
        logits, targets = model(batch[:, :-1]), batch[:, 1:].flatten()
        return cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        """Decay matrices only, as is usual for transformers."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = {"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}
        return AdamW(list(groups), lr=self.lr, betas=(0.9, 0.95))

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        """Warm up, then fall along a line to a tenth."""
        return LambdaLR(
            optimizer,
            lambda done: min((done + 1) / self.warmup, 1.0, max(1.1 - done / updates, 0.1)),
        )
