"""Test loss and top-1 accuracy, or mIoU, of the weights during training, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from steadygaze.data.confusion import confusion, miou
from steadygaze.errors import BadImage
from steadygaze.training.images.dataset import TrainingImages
from steadygaze.training.images.features import CachedFeatures
from steadygaze.training.losses.cross_entropy import cross_entropy
from steadygaze.training.losses.outputs import class_logits, model_outputs
from steadygaze.training.objective import Objective
from steadygaze.training.random_state import seeded


def _readable(samples: list[Any]) -> Any:
    """The samples of images that could be read as a batch; None if there are none."""
    kept = [sample for sample in samples if sample is not None]
    return default_collate(kept) if kept else None


def evaluate(
    model: nn.Module,
    objective: Objective,
    test: TrainingImages | CachedFeatures,
    accelerator: Any,
    batch_size: int,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """test_loss and test_top1, or test_miou for segmentation (both 0..1).

    The loss is the recipe's objective if `model` is the one it trains and the images have the masks it needs,
    otherwise cross-entropy.
    """
    use_objective = model is objective.model and (test.has_masks or not objective.needs_masks)
    indices = range(accelerator.process_index, len(test), accelerator.num_processes)
    keys = [(None, index) for index in indices]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    loader = DataLoader(test, batch_sampler=batches, generator=torch.Generator(), collate_fn=_readable)
    device, num_classes = accelerator.device, test.segmentation_classes
    # loss, number of images, then correct predictions or the confusion matrix
    sums = torch.zeros(2 + max(1, num_classes**2), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with seeded(*seed), accelerator.autocast():
        for batch in loader:
            if batch is None:
                continue
            images, labels, masks = batch
            images, labels = images.to(device), labels.to(device)
            with torch.set_grad_enabled(use_objective and objective.needs_gradients):
                if use_objective:
                    loss, _, logits = objective(images, labels, None, masks.to(device))
                else:
                    logits = class_logits(model_outputs(model(images)))
                    loss = cross_entropy(logits, labels)
            predicted = logits.argmax(1)
            if num_classes:
                counts = confusion(predicted, labels, num_classes).sum(0)
            else:
                counts = (predicted == labels).sum()
            batch_sums = [loss.detach().double() * len(labels), sums.new_tensor(len(labels))]
            sums += torch.cat([torch.stack(batch_sums), counts.double().flatten()])
    model.train(was_training)
    loss, num_images, *counts = accelerator.reduce(sums, reduction="sum").tolist()
    if not num_images:
        raise BadImage(f"data.test: none of the {len(test)} images can be read")
    if num_classes:
        matrix = torch.tensor(counts).long().view(num_classes, num_classes)
        return {"test_loss": loss / num_images, "test_miou": float(miou(matrix))}
    return {"test_loss": loss / num_images, "test_top1": counts[0] / num_images}
