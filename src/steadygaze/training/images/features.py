"""Linear probe (`train = "head"`): the last linear layer of a frozen model, trained on cached features.

The features of an image are the input of that layer for the image's centre view, the one that is tested. They
are computed once, before the first step, so that an epoch costs one matrix product for each step. Random
augmentation would need the backbone again, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steadygaze.errors import BadImage, BadInput
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.training.images.dataset import Sample, TrainingImages
from steadygaze.training.losses.outputs import class_logits, model_outputs
from steadygaze.training.recipe import Augment


def head_name(model: nn.Module, size: tuple[int, int]) -> str:
    """The name of the linear layer whose output is the logits."""
    outputs: dict[str, Tensor] = {}

    def noted(name: str) -> Any:
        return lambda module, given, output: outputs.update({name: output})

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(noted(name)) for name, module in linear.items()]
    was_training, parameter = model.training, next(model.parameters())
    try:
        with torch.no_grad():
            image = torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
            logits = class_logits(model_outputs(model.eval()(image)))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    for name, output in reversed(outputs.items()):
        if output.shape == logits.shape and torch.equal(output, logits):
            return name
    raise BadInput(
        f"train: 'head' needs a model whose last layer is linear, and the logits of {type(model).__name__} "
        "are not the output of one (the mean of two heads, or no classifier at all). "
        "Use model.new_head = true if it has none, or train = 'all'."
    )


def unused_augmentation(augment: Augment) -> list[str]:
    """The keys of a recipe that ask for random augmentation, which cached features do not have."""
    off: dict[str, Any] = {"flip": 0.0, "color_jitter": 0.0, "rand_augment": None, "erase": 0.0}
    off |= {"crop": "none", "mixup": 0.0, "cutmix": 0.0, "repeats": 1}
    return [
        f"augment.{key}"
        for key in augment.model_fields_set
        if key in off and getattr(augment, key) != off[key]
    ]


class CachedFeatures(Dataset[Sample | None]):
    """The features of a set of images, with the interface of `TrainingImages`.

    features: (N, D)            readable: images that could be decoded
    """

    segmentation_classes = 0
    has_masks = False

    def __init__(
        self,
        features: Float[Tensor, "n d"],
        readable: Bool[Tensor, " n"],
        images: TrainingImages,
    ) -> None:
        if not bool(readable.any()):
            raise BadImage(f"none of the {len(images)} images can be read, such as {images.unreadable[0]}")
        self.features, self.readable, self._images = features, readable, images
        self.labels = torch.tensor([item.label for item in images.items])
        self._used = _next_readable(readable)

    @property
    def unreadable(self) -> list[str]:
        return self._images.unreadable

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, key: tuple[int | None, int]) -> Sample | None:
        view, index = key
        if view is None and not self.readable[index]:
            return None
        used = int(self._used[index])
        return self.features[used], int(self.labels[used]), torch.empty(0, dtype=torch.uint8)

    def batch(self, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and no masks of a micro-batch."""
        used = self._used[torch.tensor([index for _, index in keys])]
        return self.features[used], self.labels[used], torch.empty(len(keys), 0, dtype=torch.uint8)


def _next_readable(readable: Bool[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Each image, or the next one that can be read, as in `TrainingImages`."""
    used = torch.arange(len(readable))
    for index in (~readable).nonzero().flatten().tolist():
        later = torch.cat([readable[index:], readable[:index]]).nonzero()[0]
        used[index] = (index + int(later)) % len(readable)
    return used


def cache_features(
    model: nn.Module,
    head: nn.Linear,
    images: TrainingImages,
    accelerator: Any,
    *,
    batch_size: int,
    workers: int = 0,
    on_progress: OnProgress = ignore_progress,
    task: str = "features",
) -> CachedFeatures:
    """Run the model once over all images; several processes share them."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    own = range(rank, len(images), processes)
    batches = [list(own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
    loader = DataLoader(
        images,
        batch_sampler=[[(None, index) for index in batch] for batch in batches],
        num_workers=workers,
        generator=torch.Generator(),  # not the caller's
        collate_fn=list,
    )
    inputs: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach()))
    features = torch.zeros(len(images), head.in_features)
    readable = torch.zeros(len(images), dtype=torch.bool)
    done, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            for batch, samples in zip(batches, loader, strict=True):
                known = [(index, sample[0]) for index, sample in zip(batch, samples, strict=True) if sample]
                if known:
                    rows = torch.tensor([index for index, _ in known])
                    inputs.clear()
                    model(torch.stack([pixels for _, pixels in known]).to(accelerator.device))
                    features[rows], readable[rows] = inputs[-1].float().cpu(), True
                done += len(batch)
                on_progress(Progress(task, done, len(own), "images"))
    finally:
        hook.remove()
        model.train(was_training)
    if processes > 1:
        device = accelerator.device
        features = accelerator.reduce(features.to(device), reduction="sum").cpu()
        readable = accelerator.reduce(readable.long().to(device), reduction="sum").bool().cpu()
    return CachedFeatures(features, readable, images)
