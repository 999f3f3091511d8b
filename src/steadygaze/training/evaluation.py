"""How good the weights are while they are trained: loss and top-1, or mIoU, on the test pictures, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from steadygaze.data.confusion import confusion, miou
from steadygaze.training.data import Pictures, drawn_from
from steadygaze.training.differentiable_maps import joined
from steadygaze.training.learner import Learner
from steadygaze.training.losses.losses import cross_entropy, outputs_of


def evaluate(
    model: nn.Module, learner: Learner, test: Pictures, place: Any, size: int, seed: tuple[int, ...]
) -> dict[str, float]:
    """test_loss, and test_top1 or, of label maps, test_miou (0..1). The loss is the recipe's own where the pictures have what it
    needs, else cross-entropy."""
    masked = test.decode is not None or test.made is not None
    needs = bool(learner.losses.need_masks)
    own = model is learner.model and (masked or not needs)
    keys = [(None, i) for i in range(place.process_index, len(test), place.num_processes)]
    batches = [keys[i : i + size] for i in range(0, len(keys), size)]
    loader = DataLoader(test, batch_sampler=batches, generator=torch.Generator())
    was = model.training
    sums = torch.zeros(
        2 + max(1, test.classes**2), dtype=torch.float64, device=place.device
    )  # loss, pictures; right, or a confusion
    model.eval()
    with drawn_from(*seed), place.autocast():
        for images, labels, masks in loader:
            images, labels = images.to(place.device), labels.to(place.device)
            with torch.set_grad_enabled(own and needs):
                if own:
                    loss, _, logits = learner(images, labels, None, masks.to(place.device))
                else:
                    logits = joined(outputs_of(model(images)))
                    loss = cross_entropy(logits, labels)
            said = logits.argmax(1)
            right = confusion(said, labels, test.classes).sum(0) if test.classes else (said == labels).sum()
            sums += torch.cat(
                [
                    torch.stack([loss.detach().double() * len(labels), sums.new_tensor(len(labels))]),
                    right.double().flatten(),
                ]
            )
    model.train(was)
    loss, count, *found = place.reduce(sums, reduction="sum").tolist()
    if test.classes:
        counts = torch.tensor(found).long().view(test.classes, test.classes)
        return {"test_loss": loss / count, "test_miou": float(miou(counts))}
    return {"test_loss": loss / count, "test_top1": found[0] / count}
