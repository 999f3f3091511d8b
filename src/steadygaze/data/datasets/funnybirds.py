"""FunnyBirds: the test images, their part maps and their interventions, in the layout of its authors.

R. Hesse, S. Schaub-Meyer, S. Roth: FunnyBirds: A Synthetic Vision Dataset for a Part-Based Analysis of
Explainable AI Methods, ICCV 2023 (github.com/visinf/funnybirds-framework).

| file | content |
| --- | --- |
| `parts.json` | {part: [its variants]} |
| `classes.json` | [{class_idx, parts: {part: variant}}], in the order of `class_idx` |
| `dataset_test.json` | [{class_idx, bg_...: text with one integer for each background object, ...}] |
| `test/CLASS/IMAGE.png` | an image; IMAGE has six digits: its position in `dataset_test.json` |
| `test_part_map/CLASS/IMAGE.png` | its part map, one color for each part (`COLORS`) and background object |
| `test_interventions/CLASS/IMAGE/body_PART_PART.png` | the image with these parts only, sorted by name |
| `test_interventions/CLASS/IMAGE/background_interventions/K.png` | the image without background object K |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field

from steadygaze.data.datasets.tree import abbreviated, require_folder
from steadygaze.data.images import read_image
from steadygaze.errors import InputError
from steadygaze.untrusted import read_json, read_record

DATASET = "FunnyBirds"
LAYOUT = (
    "a folder with parts.json, classes.json, dataset_test.json, test, test_part_map and test_interventions"
)
# color in a part map -> part; a part may have two pieces
COLORS = {
    (255, 255, 253): "eye",
    (255, 255, 254): "eye",
    (255, 255, 0): "beak",
    (255, 0, 1): "foot",
    (255, 0, 2): "foot",
    (0, 255, 1): "wing",
    (0, 255, 2): "wing",
    (0, 0, 255): "tail",
}
PARTS = tuple(dict.fromkeys(COLORS.values()))
OBJECTS = 50  # background objects that a part map can have: object k has the color (204, 204, 204 + k)
OBJECT_COLOR = 204
FIRST_OBJECT = 1 + len(COLORS)  # codes of `part_map`: 0 none, 1.. the colors in order, then the objects


class _Class(BaseModel):
    class_idx: int
    parts: dict[str, int]


class _Image(BaseModel, extra="allow"):
    class_idx: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class FunnyBirds:
    """The test part of the data set.

    Attributes:
        parts: Names of the parts, in the order of `parts.json`.
        classes: For each class, the variant of each part.
        labels: Class of each image.
        objects: Number of background objects of each image.
    """

    folder: Path
    parts: tuple[str, ...]
    classes: tuple[dict[str, int], ...]
    labels: tuple[int, ...]
    objects: tuple[int, ...]

    @property
    def subsets(self) -> list[tuple[str, ...]]:
        """Every subset of the parts, from none to all."""
        sizes = range(len(self.parts) + 1)
        return [subset for size in sizes for subset in combinations(self.parts, size)]

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / kind / str(self.labels[number]) / f"{number:06d}"

    def image_file(self, number: int) -> Path:
        """The image."""
        return self._path("test", number).with_suffix(".png")

    def part_map_file(self, number: int) -> Path:
        """Its part map."""
        return self._path("test_part_map", number).with_suffix(".png")

    def part_file(self, number: int, kept: Iterable[str]) -> Path:
        """The image with the parts `kept` only."""
        return self._path("test_interventions", number) / f"body_{'_'.join(sorted(kept))}.png"

    def object_file(self, number: int, k: int) -> Path:
        """The image without background object k."""
        return self._path("test_interventions", number) / "background_interventions" / f"{k}.png"

    def part_map(self, number: int) -> Image.Image:
        """The part map of an image as codes (mode L): 0 none, 1.. `COLORS` in order, then the objects."""
        pixels = np.asarray(read_image(self.part_map_file(number))).astype(np.int64)
        code = np.zeros(pixels.shape[:2], np.uint8)
        for position, color in enumerate(COLORS, 1):
            code[(pixels == color).all(-1)] = position
        k = pixels[..., 2] - OBJECT_COLOR
        found = (pixels[..., :2] == OBJECT_COLOR).all(-1) & (k >= 0) & (k < OBJECTS)
        code[found] = FIRST_OBJECT + k[found]
        return Image.fromarray(code)

    def check_files(self, numbers: Iterable[int]) -> None:
        """Raise InputError if a file of one of these images is missing."""
        for number in numbers:
            files = [self.image_file(number), self.part_map_file(number)]
            files += [self.part_file(number, subset) for subset in self.subsets]
            files += [self.object_file(number, k) for k in range(self.objects[number])]
            missing = [str(file.relative_to(self.folder)) for file in files if not file.is_file()]
            if missing:
                raise InputError(
                    f"{DATASET}: expected {len(files)} files of test image {number} in {self.folder} "
                    f"(image, part map, every subset of the parts, each background object removed), lacks "
                    f"{abbreviated(missing)}. Incomplete download?",
                    option="data",
                )


def read_funnybirds(root: str | Path) -> FunnyBirds:
    """Read the descriptions of the test part; images are read when they are used."""
    root = require_folder(root, DATASET, LAYOUT)
    names = ("parts.json", "classes.json", "dataset_test.json")
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise InputError(f"{DATASET}: expected {LAYOUT}; {root} lacks {abbreviated(missing)}", option="data")
    contents = [read_json(root, name) for name in names]
    files = [str(root / name) for name in names]
    variants = read_record(dict[str, list[Any]], contents[0], files[0])
    classes = read_record(list[_Class], contents[1], files[1])
    images = read_record(list[_Image], contents[2], files[2])
    parts = tuple(variants)
    if not parts or not set(parts) <= set(PARTS):
        raise InputError(f"{root}/parts.json: expected parts of {', '.join(PARTS)}, got {abbreviated(parts)}")
    for number, one in enumerate(classes):
        if one.class_idx != number or set(one.parts) != set(parts):
            raise InputError(
                f"{root}/classes.json: expected class_idx {number} with a variant of {', '.join(parts)}, got "
                f"class_idx {one.class_idx} with {abbreviated(one.parts)}"
            )
    for number, image in enumerate(images):
        if image.class_idx >= len(classes):
            raise InputError(
                f"{root}/dataset_test.json: expected class_idx below {len(classes)}, the number of classes, "
                f"got {image.class_idx} for image {number}"
            )
    return FunnyBirds(
        root,
        parts,
        tuple(one.parts for one in classes),
        tuple(image.class_idx for image in images),
        tuple(_objects(image.model_extra or {}, number, root) for number, image in enumerate(images)),
    )


def _objects(described: dict[str, Any], number: int, root: Path) -> int:
    """The number of background objects: that of the integers in the first field `bg_...`."""
    text = next((value for key, value in described.items() if key.startswith("bg_")), "")
    count = len(re.findall(r"\b\d+\b", str(text)))
    if count > OBJECTS:
        raise InputError(
            f"{root}/dataset_test.json: expected at most {OBJECTS} background objects, got {count} for image "
            f"{number}"
        )
    return count
