"""How good the weights are while they are trained: loss and top-1 on the test pictures, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from steadygaze.train.data import Pictures, drawn_from
from steadygaze.train.learner import Learner
from steadygaze.train.losses import outputs_of
from steadygaze.train.maps import joined


def evaluate(model: nn.Module, learner: Learner, test: Pictures, place: Any, size: int, seed: tuple[int, ...]) -> dict[str, float]:
    """test_loss and test_top1 (0..1). The loss is the recipe's own where the pictures have what it needs, else cross-entropy."""
    masked = test.decode is not None or test.made is not None
    needs = bool(learner.losses.need_masks)
    own = model is learner.model and (masked or not needs)
    keys = [(None, i) for i in range(place.process_index, len(test), place.num_processes)]
    batches = [keys[i : i + size] for i in range(0, len(keys), size)]
    loader = DataLoader(test, batch_sampler=batches, generator=torch.Generator())
    was = model.training
    sums = torch.zeros(3, dtype=torch.float64, device=place.device)
    model.eval()
    with drawn_from(*seed), place.autocast():
        for images, labels, masks in loader:
            images, labels = images.to(place.device), labels.to(place.device)
            with torch.set_grad_enabled(own and needs):
                if own:
                    loss, _, logits = learner(images, labels, None, masks.to(place.device))
                else:
                    logits = joined(outputs_of(model(images)))
                    loss = nn.functional.cross_entropy(logits, labels)
            right = (logits.argmax(-1) == labels).sum()
            sums += torch.stack([loss.detach().double() * len(labels), right.double(), sums.new_tensor(len(labels))])
    model.train(was)
    total = place.reduce(sums, reduction="sum").tolist()
    return {"test_loss": total[0] / total[2], "test_top1": total[1] / total[2]}
