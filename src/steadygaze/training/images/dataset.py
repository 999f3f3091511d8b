"""The dataset of a training run: images are read, augmented, and their masks move along.

What is random follows from (seed, view, index), where view numbers the augmented copies of an image: not from
a state that a killed run would lose, nor from the number of processes or workers.
"""

from __future__ import annotations

import logging
import random
from copy import copy

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from steadygaze.data.confusion import IGNORED
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.label_maps import SegmentationImages
from steadygaze.data.masks import LabelledImages, read_mask
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import BadImage
from steadygaze.training.images.augmentation import Augmentation, mask_to_tensor
from steadygaze.training.images.selection import check_mask_shows_object, shows_object
from steadygaze.training.random_state import seeded
from steadygaze.training.recipe import Augment

log = logging.getLogger(__name__)
CROP_ATTEMPTS = 10  # random crops until one shows the object

Sample = tuple[Tensor, int | Tensor, Tensor]


class TrainingImages(Dataset[Sample | None]):
    """(view, index) -> image (3, H, W), label, mask (H, W) uint8, empty without masks; view None: as in
    testing.

    The label is a class index. For images with label maps it is the map, (H, W); `segmentation_classes` is
    then their number of classes, otherwise 0. generated_masks: by image name, in place of mask files

    An image that cannot be decoded is skipped with a warning: in training the next one takes its place, in
    testing its sample is None.
    """

    def __init__(self, labelled: LabelledImages, preprocess: Preprocess, augment: Augment, seed: int) -> None:
        self.items, self.decode, self.preprocess, self.seed = (
            labelled.items,
            labelled.decode,
            preprocess,
            seed,
        )
        self.segmentation_classes = labelled.classes if isinstance(labelled, SegmentationImages) else 0
        self.generated_masks: dict[str, Tensor] | None = None
        self._unreadable = torch.zeros(len(self.items), dtype=torch.bool).share_memory_()  # also by workers
        self.augmentation = Augmentation(augment, preprocess, IGNORED if self.segmentation_classes else 0)

    @property
    def has_masks(self) -> bool:
        return self.decode is not None or self.generated_masks is not None

    @property
    def unreadable(self) -> list[str]:
        """Files that could not be decoded so far, by any worker."""
        return [str(self.items[int(index)].source) for index in self._unreadable.nonzero()]

    def first(self, count: int) -> TrainingImages:
        """The same without all but the first images."""
        fewer = copy(self)
        fewer.items = self.items[:count]
        return fewer

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: tuple[int | None, int]) -> Sample | None:
        view, index = key
        image = self._image(index)
        if image is None and view is None:
            return None
        position = index
        for _ in range(len(self.items)):
            if image is not None:
                break
            position = (position + 1) % len(self.items)
            image = self._image(position)
        if image is None:
            raise BadImage(f"none of the {len(self.items)} images can be read, such as {self.unreadable[0]}")
        item = self.items[position]
        image, mask = self.read(item, image)
        if view is None:
            pixels, codes = self.for_testing(image, mask)
        else:
            with seeded(self.seed, 1, view, index, devices=False):
                pixels, codes = self.augmented(image, mask)
        no_mask = torch.empty(0, dtype=torch.uint8)
        if self.segmentation_classes:
            assert codes is not None
            return pixels, codes.long(), no_mask
        assert item.label is not None
        return pixels, item.label, no_mask if codes is None else codes

    def _image(self, index: int) -> Image.Image | None:
        """The image, None if it cannot be decoded."""
        if self._unreadable[index]:
            return None
        try:
            return read_image(self.items[index].source)
        except BadImage as error:
            log.warning("skipped: %s", error)
            self._unreadable[index] = True
            return None

    def read(self, item: Item, image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
        """The image and its mask or label map; one without any object, or without any class, is an error."""
        if self.generated_masks is not None:
            generated = Image.fromarray(self.generated_masks[item.name].numpy())
            return image, generated.resize(image.size, Image.Resampling.NEAREST)
        if self.decode is None or item.mask is None:
            return image, None
        mask = read_mask(item, self.decode, image.size)
        check_mask_shows_object(mask, item, is_label_map=bool(self.segmentation_classes))
        return image, mask

    def for_testing(self, image: Image.Image, mask: Image.Image | None) -> tuple[Tensor, Tensor | None]:
        """The image, and the codes of its mask, as `verify` and `stress` see them."""
        return self.preprocess(image), None if mask is None else self.preprocess.mask(mask)

    def augmented(self, image: Image.Image, mask: Image.Image | None) -> tuple[Tensor, Tensor | None]:
        """A random view of the image and its mask; that of testing if no random crop shows the object."""
        a = self.augmentation
        codes = None
        if mask is not None:
            cropped = self._crop_with_object(mask)
            if cropped is None:
                return self.for_testing(image, mask)
            codes = mask_to_tensor(cropped)
        pixels = a.to_tensor(a.recolour(a.random_crop(image)))
        return a.erase(pixels), codes

    def _crop_with_object(self, mask: Image.Image) -> Image.Image | None:
        """The first random crop of the mask that shows the object, None if no attempt does.

        The random state is left as it was before that crop, so that the crop of the image is the same.
        """
        for _ in range(CROP_ATTEMPTS):
            python_state, torch_state = random.getstate(), torch.get_rng_state()
            cropped = self.augmentation.random_crop(mask, is_mask=True)
            if shows_object(cropped, is_label_map=bool(self.segmentation_classes)):
                random.setstate(python_state)
                torch.set_rng_state(torch_state)
                return cropped
        return None
