"""Models around a tiny vision transformer, as people build them."""

from typing import Any

import torch
from torch import Tensor, nn

from oracles.models import tiny

MEAN, STD = 0.45, 0.22


class Normalize(nn.Module):
    """Images of 0..1 to what the model was trained on."""

    def forward(self, images: Tensor) -> Tensor:
        return (images - MEAN) / STD


class Lit(nn.Module):
    """A LightningModule by shape: the model, a loss and a metric as children, and training steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss, self.accuracy = model, nn.CrossEntropyLoss(), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])


class OwnHead(nn.Module):
    """A backbone without a head, its tokens pooled in a way of one's own, and an MLP."""

    def __init__(self, pool: str, classes: int = 4, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = tiny("class", num_classes=0, global_pool="")
        width = self.backbone.embed_dim * (2 if pool == "both" else 1)
        self.head = nn.Sequential(
            nn.Dropout(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, classes)
        ).double()
        self.pool, self.frozen = pool, frozen

    def features(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.features(images)
        if self.pool == "both":
            return self.head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1))
        rows = {"class": tokens[:, :1], "mean": tokens[:, 1:], "all": tokens}[self.pool]
        return self.head(rows.mean(1))
