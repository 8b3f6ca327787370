"""Jobs of every kind that the claims are made for, each as small as it can be."""

from __future__ import annotations

import torch
from parity_jobs import Scheduled
from torch import Tensor, nn

SIDE = 6
#: Of an example, as one row.
WIDTH = SIDE * SIDE


class ConvolutionsModel(nn.Module):
    """Convolution, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.2)
        self.last = nn.Linear(4 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, SIDE, SIDE)
        return self.last(self.drop(torch.relu(self.norm(self.first(image)))).flatten(1))


class RecurrentModel(nn.Module):
    """A long short-term memory over rows, with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(SIDE, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.memory(x.view(-1, SIDE, SIDE))[0][:, -1])


class AttentionModel(nn.Module):
    """A causal transformer layer over tokens; its embedding is its output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.places = nn.Embedding(WIDTH, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 2).round().long().clamp(-4, 3) + 4
        places = torch.arange(tokens.shape[1], device=x.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        hidden = self.layer(self.tokens(tokens) + self.places(places), mask, is_causal=True)
        return self.last(hidden[:, -1])[:, :2]


class FrozenModel(nn.Module):
    """Some layers do not train, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.tied(torch.tanh(self.frozen(x))))
        return self.last(nn.functional.dropout(hidden @ self.tied.weight, 0.1, self.training))


class Convolutions(Scheduled):
    def build_model(self) -> nn.Module:
        return ConvolutionsModel()


class Recurrent(Scheduled):
    def build_model(self) -> nn.Module:
        return RecurrentModel()


class Attention(Scheduled):
    def build_model(self) -> nn.Module:
        return AttentionModel()


class Frozen(Scheduled):
    def build_model(self) -> nn.Module:
        return FrozenModel()
