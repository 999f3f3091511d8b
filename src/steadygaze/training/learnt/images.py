"""Preprocessed images for training, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from steadygaze.data.images import read_image
from steadygaze.errors import BadImage
from steadygaze.loading.loaded import LoadedModel

MEMORY = 1 << 30  # bytes of preprocessed images that are kept in memory


class ImageCache:
    """Preprocessed images in an order that depends on the seed alone; kept in memory if they fit."""

    def __init__(self, files: list[Path], loaded: LoadedModel) -> None:
        self.files, self.loaded = files, loaded
        self.unreadable: dict[Path, str] = {}
        self._images: dict[Path, Tensor] = {}
        height, width = loaded.size
        self._keep = len(files) * 12 * height * width <= MEMORY  # 3 channels of float32

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The images of a step, (b, 3, H, W), without unreadable ones."""
        steps_per_epoch = max(
            1, len(self.files) // size
        )  # images that fill no batch are left to the next order
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.files), generator=generator)
        chosen = order[step_in_epoch * size : (step_in_epoch + 1) * size]
        return self.load([self.files[int(index)] for index in chosen])

    def load(self, files: list[Path]) -> Tensor:
        """These images, stacked; unreadable ones are left out and recorded."""
        images = [image for file in files if (image := self._image(file)) is not None]
        if not images:
            raise BadImage(
                f"none of {len(files)} images could be read; the first because: {self.unreadable[files[0]]}"
            )
        return torch.stack(images)

    def _image(self, file: Path) -> Tensor | None:
        if file in self.unreadable:
            return None
        if file in self._images:
            return self._images[file]
        try:
            image = self.loaded.preprocess(read_image(file))
        except BadImage as error:
            self.unreadable[file] = str(error)
            return None
        if self._keep:
            self._images[file] = image
        return image
