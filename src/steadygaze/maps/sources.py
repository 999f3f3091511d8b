"""Where `verify` gets maps that it does not compute: a folder of map files, or arrays in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.maps.names import MapName
from steadygaze.maps.reader import MapFolder, missing_message

Given = str | Path | Mapping[str, Any]  # a folder, or arrays by method: (N, h, w), or by image key


class MapSource(Protocol):
    """Maps by method and image key."""

    @property
    def names(self) -> tuple[MapName, ...]:
        """The methods."""
        ...

    @property
    def images(self) -> set[str]:
        """Every key."""
        ...

    @property
    def digest(self) -> str:
        """Identifies the maps in the settings of a run."""
        ...

    def has(self, name: MapName, image: str) -> bool: ...

    def check(self, name: MapName, image: str, target: int) -> None:
        """An error if there is no map of this class, or if there are different ones."""
        ...

    def read(self, name: MapName, image: str, target: int) -> tuple[Float[Tensor, "h w"], bool, str]:
        """A map in float32 or wider, whether it is broken, and where it comes from."""
        ...


@dataclass(frozen=True)
class StoredMethod:
    """A method whose maps are read, not computed."""

    maps: MapName
    source: MapSource = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """As written to rows."""
        return self.maps.in_rows

    def batch(
        self, images: Sequence[str], target: Sequence[int], grid: tuple[int, int], size: tuple[int, int]
    ) -> tuple[Float[Tensor, "b gh gw"], list[int]]:
        """The maps of these images on the patch grid, and positions of broken ones, which are zero.

        size: height and width of the images as the model takes them
        """
        maps, broken = [], []
        for position, (image, explained) in enumerate(zip(images, target, strict=True)):
            scores, is_broken, where = self.source.read(self.maps, image, explained)
            context = f"{where}: {self.maps} of {image!r}"
            maps.append(on_grid(scores, grid, size, context))
            if is_broken:
                broken.append(position)
                maps[-1] = torch.zeros_like(maps[-1])
            elif not torch.isfinite(scores).all():
                raise BadInput(
                    f"{context}: expected finite scores, got NaN or infinite ones. Check the method that "
                    "made the map, or leave the image out."
                )
        widest = max((m.dtype for m in maps), key=lambda dtype: torch.finfo(dtype).bits)
        return torch.stack([m.to(widest) for m in maps]), broken


def on_grid(
    scores: Float[Tensor, "h w"], grid: tuple[int, int], size: tuple[int, int], context: str
) -> Float[Tensor, "gh gw"]:
    """A map on the patch grid: as it is, or the mean over the pixels of each patch."""
    shape = tuple(scores.shape)
    if shape == grid:
        return scores
    if shape == size:
        return F.adaptive_avg_pool2d(scores[None], grid)[0]
    raise BadInput(
        f"{context}: expected {grid}, the model's patch grid, or {size}, the pixels of its input, got "
        f"{shape}. Make the map of the image as the model takes it, after resizing and cropping."
    )


def open_maps(given: Given) -> MapSource:
    """The maps of a folder, or of arrays by method."""
    if isinstance(given, (str, Path)):
        return MapFolder(given)
    if not isinstance(given, Mapping) or not given:
        raise BadInput(
            "maps: expected a folder, or a dict from the name of a method to its maps: (N, rows, columns), "
            f"or a dict by image key; got {str(given)[:80]}",
            option="maps",
        )
    return MapArrays(given)


class MapArrays:
    """Arrays in memory. An array (N, rows, columns) is for the images "0", "1", ... in order."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._maps = {MapName.parse(name): _by_image(name, maps) for name, maps in given.items()}

    @property
    def names(self) -> tuple[MapName, ...]:
        return tuple(self._maps)

    @property
    def images(self) -> set[str]:
        return {image for maps in self._maps.values() for image in maps}

    @cached_property
    def digest(self) -> str:
        hashed = hashlib.sha256()
        for name, maps in self._maps.items():
            for image, scores in maps.items():
                hashed.update(f"{name}\n{image}\n{scores.dtype} {tuple(scores.shape)}\n".encode())
                hashed.update(scores.contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()[:16]

    def has(self, name: MapName, image: str) -> bool:
        return image in self._maps[name]

    def check(self, name: MapName, image: str, target: int) -> None:
        pass  # arrays do not state a class

    def read(self, name: MapName, image: str, target: int) -> tuple[Float[Tensor, "h w"], bool, str]:
        if not self.has(name, image):
            raise BadInput(missing_message(name, [image], 1, set()))
        scores = self._maps[name][image]
        return scores.to(torch.promote_types(scores.dtype, torch.float32)), False, "maps"


def _by_image(name: str, maps: Any) -> dict[str, Tensor]:
    if not isinstance(maps, Mapping):
        stacked = _tensor(name, maps)
        if stacked.dim() != 3:
            raise BadInput(
                f"maps: {name}: expected (N, rows, columns), one map for each image in order, or a dict by "
                f"image key; got {tuple(stacked.shape)}",
                option="maps",
            )
        return {str(number): scores for number, scores in enumerate(stacked)}
    by_image = {str(image): _tensor(f"{name} of {image!r}", scores) for image, scores in maps.items()}
    for image, scores in by_image.items():
        if scores.dim() != 2:
            raise BadInput(
                f"maps: {name} of {image!r}: expected (rows, columns), got {tuple(scores.shape)}",
                option="maps",
            )
    return by_image


def _tensor(what: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"maps: {what}: expected an array of floats, got {str(values)[:80]}") from error
    if not tensor.is_floating_point():
        raise BadInput(f"maps: {what}: expected an array of floats, got {tensor.dtype}", option="maps")
    return tensor
