"""The suite `mosaics` of `verify`: does a map find the explained class among the images of a mosaic?

Mosaics have 2 x 2 cells and the size of the model's input (docs/equations.md#mosaics). All images are of the
given folder, and the model classifies each of them correctly by itself.

| metric        | cells                                                       | source                   |
| focus         | two of the explained class, two of two others, all shuffled | Arias-Duart et al. 2022  |
| grid_pointing | four of four classes, one of which is explained             | Böhle et al. 2021        |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from steadygaze.data.folders import ClassLookup
from steadygaze.data.images import EncodedImage, read_image
from steadygaze.data.masks import OBJECT, find_labeled_images
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.errors import ImageError, InputError
from steadygaze.faithfulness.inputs import BACKGROUND
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.prepare import named_by_data, number_of_classes
from steadygaze.runs.request import DEFAULT_METRICS, VerifyRequest
from steadygaze.runs.rows import Rows, joined
from steadygaze.runs.shards import World
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode

SIDE = 2  # cells on a side
MOSAICS = 40  # of each kind
OWN = {"focus": 2, "grid_pointing": 1}  # cells of the explained class


@dataclass(frozen=True)
class Mosaics:
    """Mosaics as the model takes them; masks: 255 where the explained class is."""

    images: Float[Tensor, "b 3 h w"]
    labels: Int[Tensor, " b"]
    masks: UInt8[Tensor, "b h w"]


def compose(cells: Float[Tensor, "n 3 h w"], side: int = SIDE) -> Float[Tensor, "3 h w"]:
    """One image of side · side images in raster order, each at 1/side of its size."""
    height, width = cells.shape[-2:]
    rows, columns = (torch.tensor_split(torch.arange(length), side) for length in (height, width))
    mosaic = torch.empty_like(cells[0])
    for number, cell in enumerate(cells):
        row, column = rows[number // side], columns[number % side]
        small = F.interpolate(cell[None], (len(row), len(column)), mode="bilinear", antialias=True)
        mosaic[:, row[0] : row[-1] + 1, column[0] : column[-1] + 1] = small[0]
    return mosaic


def cell_mask(own: Sequence[bool], size: tuple[int, int], side: int = SIDE) -> UInt8[Tensor, "h w"]:
    """255 in the cells of the explained class."""
    cells = torch.tensor(own).view(side, side)
    rows, columns = (
        torch.cat([torch.full((len(part),), k) for k, part in enumerate(torch.arange(n).tensor_split(side))])
        for n in size
    )
    return torch.where(cells[rows][:, columns], OBJECT, BACKGROUND).to(torch.uint8)


def known_images(loaded: LoadedModel, request: VerifyRequest, count: int) -> dict[int, list[Tensor]]:
    """Images that the model classifies correctly, by class, in random order: enough for `count` mosaics."""
    place = request.place
    if isinstance(place, StreamSpec):
        raise InputError(f"data: expected a folder of labeled images, got {place}")
    classes = number_of_classes(loaded.model, loaded.size)
    lookup = ClassLookup(named_by_data(loaded, place, classes).class_names, classes)
    sources: dict[int, list[Path | EncodedImage]] = {}
    for item in find_labeled_images(place, None, lookup).items:
        if item.label is not None:
            sources.setdefault(item.label, []).append(item.source)
    generator = torch.Generator().manual_seed(request.seed)
    each = max(2, -(-2 * count // max(1, len(sources))))  # candidates of a class
    vit = adapt(loaded)
    device = next(vit.model.parameters()).device
    known: dict[int, list[Tensor]] = {}
    labels = sorted(sources)
    for label in (labels[i] for i in torch.randperm(len(labels), generator=generator).tolist()):
        order = torch.randperm(len(sources[label]), generator=generator)[:each].tolist()
        images = []
        for number in order:
            with suppress(ImageError):
                images.append(loaded.preprocess(read_image(sources[label][number])))
        if not images:
            continue
        with torch.no_grad(), evaluation_mode(vit.model):
            predicted = vit(torch.stack(images).to(device)).argmax(1).tolist()
        correct = [image for image, p in zip(images, predicted, strict=True) if p == label]
        if correct:
            known[label] = correct
        if len(known) >= SIDE**2 and sum(len(own) > 1 for own in known.values()) >= count:
            break
    return known


def draw(kind: str, known: Mapping[int, Sequence[Tensor]], count: int, seed: int) -> Mosaics:
    """Mosaics of the metric `kind` of these images by class; each class is explained equally often."""
    own = OWN[kind]
    rest = SIDE**2 - own
    explained = [label for label, images in known.items() if len(images) >= own]
    if not explained or len(known) <= rest:
        raise InputError(
            f"data: expected {rest + 1} classes or more with images that the model classifies correctly, one "
            f"of them with {own}, got {len(known)} classes. Give more images.",
            option="data",
        )
    generator = torch.Generator().manual_seed(seed)

    def some(values: Sequence[Any], number: int) -> list[Any]:
        return [values[k] for k in torch.randperm(len(values), generator=generator)[:number].tolist()]

    height, width = known[explained[0]][0].shape[1:]
    size = (height, width)
    images, labels, masks = [], [], []
    for number in range(count):
        label = explained[number % len(explained)]
        others = some([other for other in known if other != label], rest)
        cells = [(image, label) for image in some(known[label], own)]
        cells += [(some(known[other], 1)[0], other) for other in others]
        cells = some(cells, len(cells))
        images.append(compose(torch.stack([image for image, _ in cells])))
        masks.append(cell_mask([shown == label for _, shown in cells], size))
        labels.append(label)
    return Mosaics(torch.stack(images), torch.tensor(labels), torch.stack(masks))


def run_mosaics(
    request: VerifyRequest,
    run: Callable[[VerifyRequest], Rows],
    on_progress: OnProgress = ignore_progress,
) -> Rows:
    """Run the suite: `run` executes a request. With `request.out`, each metric has a folder in it."""
    if request.shard:
        raise InputError(f"shard: expected none, got {request.shard}: the suite {request.suite} is short")
    if request.in_memory:
        raise InputError("data: expected a folder of labeled images, got batches in memory", option="data")
    loaded = request.load(World())
    count = request.limit or MOSAICS
    known = known_images(loaded, request, count)
    more = () if tuple(request.metrics) == DEFAULT_METRICS else tuple(request.metrics)
    parts = []
    for number, kind in enumerate(OWN):
        on_progress(Progress("mosaics", number, len(OWN), "metrics"))
        drawn = draw(kind, known, count, request.seed)
        size = request.batch_size
        pieces = zip(drawn.images.split(size), drawn.labels.split(size), drawn.masks.split(size), strict=True)
        one = replace(
            request,
            suite=None,
            model=loaded,
            words=None,
            data=list(pieces),
            metrics=(kind, *more),
            limit=None,
            out=None if request.out is None else request.out / kind,
        )
        parts.append(run(one))
    on_progress(Progress("mosaics", len(OWN), len(OWN), "metrics"))
    return joined(parts)
