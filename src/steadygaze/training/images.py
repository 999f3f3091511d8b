"""The images of a training run: selected, checked before the first step, and augmented with their masks.

What is random follows from (seed, view, index), where view numbers the augmented copies of an image: not from
a state that a killed run would lose, nor from the number of processes or workers.

A linear probe (`train = "head"`) trains the last linear layer of a frozen model on cached features: the input
of that layer for each image's center view, the one that is tested. They are computed once, before the first
step, so that an epoch costs one matrix product for each step. Random augmentation would need the backbone
again, and is left out.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steadygaze.data.folders import ClassLookup, Item
from steadygaze.data.images import SUFFIXES, image_size, read_image
from steadygaze.data.label_maps import IGNORED, SegmentationImages, find_label_maps
from steadygaze.data.masks import OBJECT, LabeledImages, find_labeled_images, read_mask
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import FilePart, StreamSpec, Unusable, is_stream
from steadygaze.data.streams import open_stream
from steadygaze.errors import ImageError, InputError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.training.losses.registry import class_logits, model_outputs
from steadygaze.training.recipe import Augment, Data
from steadygaze.training.run_files import seeded

ImageOperation = Callable[[Image.Image], Image.Image]
MAX_OPERATIONS = 100  # of RandAugment, for one image
RANDOM_INTERPOLATIONS = ("bilinear", "bicubic")


class Augmentation:
    """The operations of a recipe. With the same random state, an image and its mask get the same geometry.

    Attributes:
        mask_padding: Value of padded pixels of a mask.
    """

    def __init__(self, options: Augment, preprocess: Preprocess, mask_padding: int = 0) -> None:
        self.options, self.preprocess, self.mask_padding = options, preprocess, mask_padding
        assert self._color_operations is not None  # options that timm refuses are reported before training

    def random_crop(self, image: Image.Image, *, is_mask: bool = False) -> Image.Image:
        """A random crop and flip, at the size of the model."""
        from torchvision.transforms import RandomCrop, RandomResizedCrop
        from torchvision.transforms import functional as F

        o, interpolation = self.options, self._interpolation(is_mask)
        height, width = self.preprocess.size
        if o.crop == "resized":
            box = RandomResizedCrop.get_params(image, o.scale, o.ratio)
            image = F.resized_crop(image, *box, [height, width], interpolation)
        elif o.crop == "none":
            mask_or_pixels = self.preprocess.mask(image).numpy() if is_mask else self.preprocess.pixels(image)
            image = Image.fromarray(mask_or_pixels)  # the crop of testing
        else:
            if o.crop == "resize":
                image = F.resize(image, [o.resize, o.resize], interpolation)
            else:
                if image.size != (width, height):
                    image = F.resize(image, [height, width], interpolation)
                image = F.pad(image, [o.pad] * 4, fill=self.mask_padding if is_mask else 0)
            image = F.crop(image, *RandomCrop.get_params(image, (height, width)))
        return F.hflip(image) if torch.rand(()).item() < o.flip else image

    def recolor(self, image: Image.Image) -> Image.Image:
        """Color jitter and RandAugment; the latter moves pixels too, and is never used with masks."""
        for operation in self._color_operations:
            image = operation(image)
        return image

    def to_tensor(self, image: Image.Image) -> Tensor:
        """An image of the model's size as the model takes it, (3, H, W), normalized."""
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
        return self.preprocess.normalize(pixels.permute(2, 0, 1).contiguous())

    def erase(self, image: Tensor) -> Tensor:
        """Random erasing, of the normalized image."""
        return self._erase(image) if self.options.erase else image

    @cached_property
    def _color_operations(self) -> list[ImageOperation]:
        from torchvision.transforms import ColorJitter

        o = self.options
        operations: list[ImageOperation] = []
        if o.color_jitter:
            operations.append(ColorJitter(o.color_jitter, o.color_jitter, o.color_jitter))
        if o.rand_augment:
            side = min(self.preprocess.size)
            operations.append(rand_augment(o.rand_augment, self.preprocess.mean, side, o.interpolation))
        return operations

    @cached_property
    def _erase(self) -> Any:
        from timm.data.random_erasing import RandomErasing

        return RandomErasing(self.options.erase, mode="pixel", max_count=1, device="cpu")

    def _interpolation(self, is_mask: bool) -> Any:
        from torchvision.transforms import InterpolationMode

        if is_mask:
            return InterpolationMode.NEAREST
        name = self.options.interpolation or self.preprocess.interpolation
        return InterpolationMode(random.choice(RANDOM_INTERPOLATIONS) if name == "random" else name)


def rand_augment(config: str, mean: Sequence[float], side: int, interpolation: str | None = None) -> Any:
    """timm's RandAugment, on every version of Pillow.

    Args:
        config: The operations, in timm's notation.
        mean: Color of pixels moved in from outside.
        side: Side of the image, in pixels.
        interpolation: None or "random": bilinear or bicubic, drawn for each operation.
    """
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import str_to_pil_interp

    fill = tuple(min(255, round(255 * m)) for m in mean)
    options: dict[str, Any] = {"translate_const": int(side * 0.45), "img_mean": fill}
    if interpolation not in (None, "random"):
        options["interpolation"] = str_to_pil_interp(interpolation)
    try:
        transform = rand_augment_transform(config, options)
        if not 0 <= transform.num_layers <= MAX_OPERATIONS:
            raise ValueError(f"{transform.num_layers} operations")
    except Exception as error:  # timm's parser of the notation raises many kinds
        raise InputError(
            f"augment.rand_augment: expected timm's notation, such as rand-m9-mstd0.5-inc1, got {config!r}"
        ) from error
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterize
    return transform


def posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Keep the highest bits of every color; 0 bits, which timm uses and Pillow refuses, give black."""
    from timm.data.auto_augment import posterize as timm_posterize

    return timm_posterize(image, bits_to_keep) if bits_to_keep > 0 else Image.new(image.mode, image.size)


def class_folders(folder: str) -> tuple[str, ...] | None:
    """The class names of a new classifier; None if there is an index.csv.

    They are the sorted names of a folder's class folders, or the label names of shards.
    """
    if is_stream(folder):
        return StreamSpec.parse(folder).label_names
    root = Path(folder)
    if root.suffix == ".csv" and root.is_file():
        return None
    if not root.is_dir():
        reason = "a file" if root.exists() else "no such folder"
        raise InputError(f"data.train: expected a folder of images, got {folder!r}: {reason}")
    if (root / "index.csv").is_file():
        return None
    return tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))


def select_images(data: Data, part: str, classes: ClassLookup | None, masks: str | None) -> LabeledImages:
    """The labeled images of a recipe, for "train" or "test".

    Args:
        classes: Classes of the classifier; None for segmentation, whose images have label maps.
        masks: Folder of the masks, None if they are not needed.
    """
    prefix = "test_" if part == "test" else ""
    folder: str = getattr(data, part)
    only: list[str] | None = getattr(data, f"{prefix}only")
    class_range: list[int] | None = getattr(data, f"{prefix}classes")
    image_range: list[int] | None = getattr(data, f"{prefix}images")
    if classes is None:
        labeled: LabeledImages = find_label_maps(folder, masks, part)
    elif is_stream(folder):
        labeled = _listed_shards(StreamSpec.parse(folder), part, classes)
    else:
        labeled = find_labeled_images(folder, masks, classes)
    items = [item for item in labeled.items if item.label is not None]
    if masks is not None and not is_stream(folder):
        _check_masks_have_images(Path(masks), Path(folder), items)
    for item in items:
        if item.encoded is None and not item.path.is_file():
            with_mask = ", with a mask," if item.mask else ""
            raise InputError(f"data.{part}: {item.path} is listed{with_mask} but does not exist")
    if only is not None and classes is not None:
        wanted = {classes.index(text) for text in only}
        items = [item for item in items if item.label in wanted]
    if class_range is not None:
        labels = sorted({item.label for item in items if item.label is not None})
        chosen = set(labels[slice(*class_range)])
        items = [item for item in items if item.label in chosen]
    if image_range is not None:
        seen: Counter[int | None] = Counter()
        kept = []
        for item in items:
            if image_range[0] <= seen[item.label] < image_range[1]:
                kept.append(item)
            seen[item.label] += 1
        items = kept
    if not items:
        raise InputError(f"data.{part}: the recipe selects no image of {folder}")
    return replace(labeled, items=items)


def _listed_shards(spec: StreamSpec, part: str, classes: ClassLookup) -> LabeledImages:
    """All images of local shards: their places are listed once, and each is read when it is needed."""
    if spec.kind != "wds":
        raise InputError(f"data.{part}: expected a folder or local WebDataset shards (wds:...), got {spec}")
    stream = open_stream(spec, classes)
    items = []
    for item in stream:
        if isinstance(item.encoded, Unusable):
            raise InputError(f"data.{part}: {item.encoded.reason}")
        if not isinstance(item.encoded, FilePart):
            raise InputError(
                f"data.{part}: training reads images in random order: expected local tar archives that are "
                f"not compressed, got {item.path}"
            )
        items.append(item)
    if stream.damaged:
        raise InputError(f"data.{part}: {stream.damaged[0]}")
    return LabeledImages(items, stream.decode, layout=stream.layout)


def _check_masks_have_images(masks: Path, folder: Path, items: Sequence[Item]) -> None:
    """A mask without its image is an error: it would be overlooked."""
    if masks == folder or (masks / "index.csv").is_file():
        return
    used = {item.mask for item in items}
    for mask in sorted(masks.rglob("*.png")):
        expected = (folder / mask.relative_to(masks)).with_suffix("")
        exists = any(expected.with_suffix(suffix).is_file() for suffix in SUFFIXES)
        if mask not in used and mask.parent not in used and not exists:
            raise InputError(
                f"{mask} is a mask without an image: expected {expected}.jpg or another format. "
                "Remove it, or add the image."
            )


def check_masks(labeled: LabeledImages, on_progress: OnProgress = ignore_progress) -> None:
    """Check that every mask exists, decodes, has the size of its image and shows an object."""
    total = len(labeled.items)
    on_progress(Progress("check masks", 0, total, "masks"))
    for number, item in enumerate(labeled.items):
        if labeled.decode is not None and item.mask is not None:
            mask = read_mask(item, labeled.decode, image_size(item.source))
            check_mask_shows_object(mask, item, is_label_map=isinstance(labeled, SegmentationImages))
        on_progress(Progress("check masks", number + 1, total, "masks"))


def shows_object(mask: Image.Image, *, is_label_map: bool) -> bool:
    """Whether a mask has a pixel of the object, or a label map a pixel with a class."""
    extrema = mask.getextrema()
    return extrema[0] != IGNORED if is_label_map else OBJECT in extrema


def check_mask_shows_object(mask: Image.Image, item: Item, *, is_label_map: bool) -> None:
    if shows_object(mask, is_label_map=is_label_map):
        return
    reason = "has no pixel with a class" if is_label_map else "is background everywhere, without any object"
    raise ImageError(f"{item.mask}: the mask of {item.name} {reason}. Leave the image out.")


log = logging.getLogger(__name__)
CROP_ATTEMPTS = 10  # random crops until one shows the object

Sample = tuple[Tensor, int | Tensor, Tensor]


class TrainingImages(Dataset[Sample | None]):
    """(view, index) -> image (3, H, W), label, mask (H, W) uint8 (empty without masks).

    View None is the one of testing.

    The label is a class index. For images with label maps it is the map, (H, W); `segmentation_classes` is
    then their number of classes, otherwise 0.

    An image that cannot be decoded is skipped with a warning: in training the next one takes its place, in
    testing its sample is None.

    Attributes:
        generated_masks: Masks by image name, in place of mask files.
    """

    def __init__(self, labeled: LabeledImages, preprocess: Preprocess, augment: Augment, seed: int) -> None:
        self.items, self.decode = labeled.items, labeled.decode
        self.preprocess, self.seed = preprocess, seed
        self.segmentation_classes = labeled.classes if isinstance(labeled, SegmentationImages) else 0
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
            raise ImageError(
                f"none of the {len(self.items)} images can be read, such as {self.unreadable[0]}"
            )
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
        except ImageError as error:
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
            codes = torch.from_numpy(np.array(cropped, dtype=np.uint8))
        pixels = a.to_tensor(a.recolor(a.random_crop(image)))
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
    raise InputError(
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

    Attributes:
        features: (N, D), the input of the head for each image.
        readable: (N,), whether the image could be decoded.
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
            raise ImageError(f"none of the {len(images)} images can be read, such as {images.unreadable[0]}")
        self.features, self.readable, self._images = features, readable, images
        self.labels = torch.tensor([item.label for item in images.items])
        # each image, or the next one that can be read, as in `TrainingImages`
        self._used = torch.arange(len(readable))
        for index in (~readable).nonzero().flatten().tolist():
            later = torch.cat([readable[index:], readable[:index]]).nonzero()[0]
            self._used[index] = (index + int(later)) % len(readable)

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
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    features = torch.zeros(len(images), head.in_features)
    readable = torch.zeros(len(images), dtype=torch.bool)
    done, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            for batch, samples in zip(batches, loader, strict=True):
                decoded = [(index, sample[0]) for index, sample in zip(batch, samples, strict=True) if sample]
                if decoded:
                    rows = torch.tensor([index for index, _ in decoded])
                    inputs.clear()
                    model(torch.stack([pixels for _, pixels in decoded]).to(accelerator.device))
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
