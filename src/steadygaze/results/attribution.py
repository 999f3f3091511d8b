"""Attribution: the result of an explanation, which draws, saves, and shows itself in a notebook."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.files import FIGURE_FORMATS, write_figure, write_npz, write_png
from steadygaze.notebook import figure, to_png
from steadygaze.results.check import (
    RemovalCheck,
    axis_limits,
    concatenate_checks,
    draw_check,
    draw_sentence,
    stack,
)
from steadygaze.results.drawing import Row, enlarged, paint, robust_scale, tile, to_pil_image
from steadygaze.results.manifest import image_entry, write_manifest
from steadygaze.results.map_files import MapName, MapWriter
from steadygaze.target import (
    NOUNS,
    Outputs,
    at_least_float32,
    describe,
    output_name,
    predictions,
    task_of_outputs,
)

Index = int | tuple[int, int]
BARE_PIXELS = 224  # longer side of a map that is drawn without its image
SHOWN_IN_NOTEBOOK = 12  # maps
SHOWN_IN_PNG = 4  # maps
TITLES = 3  # of maps in the text of an attribution
FIGURE_ROWS = 64  # of one figure
VECTOR_SUFFIXES = (".svg", ".eps", ".ps")  # nobody means a folder


@dataclass(frozen=True, eq=False)
class Attribution:
    """One signed score per patch, not normalized: positive is evidence for the class, negative against it.

    In a notebook it shows the images with their overlays and the explained classes.

    Attributes:
        scores: (B, rows, columns), or (B, K, rows, columns) for K targets of each image.
        target: The class explained, (B,) or (B, K); None where the target was a callable, and for methods
            that need no class, on a model without a classifier.
        logits: The model's output, (B, C).
        method: Name of the method.
        score: The quantity that is explained, such as "logit"; "none" where there is none.
        images: What the model saw, for display: `explain` keeps it, `with_images` sets other images.
        names: A name for each image, such as the stem of its file; "0", "1", ... where nothing is known.
        classes: Class names for display.
        outputs: What the logits are: "classes", "labels" (multi-label), "values" (regression) or "features".
        words: Words of a question about the image.
        word_scores: Their scores, (B, W) or (B, K, W).
        unattributed: The part of the explained quantity that the method gives to no patch (prefix tokens,
            biases, a baseline), (B,) or (B, K); None if the method accounts for no quantity.
        parts: For input x gradient at the input of block 0, {"content": ..., "position": ...}: the maps of
            the embedded patches and of the position embeddings, whose sum is `scores`; None for other
            methods, and for models whose tokens are not the sum of the two.
        check: Removal curves of these maps against random orders, if `explain` was called with check=True.
    """

    scores: Float[Tensor, "b gh gw"] | Float[Tensor, "b k gh gw"]
    target: Int[Tensor, "b"] | Int[Tensor, "b k"] | None
    logits: Float[Tensor, "b c"]
    method: str
    score: str
    images: tuple[Image.Image, ...] | None = None
    classes: tuple[str, ...] | None = None
    outputs: Outputs = "classes"
    words: tuple[str, ...] = ()
    word_scores: Float[Tensor, "b w"] | Float[Tensor, "b k w"] | None = None
    unattributed: Float[Tensor, "b"] | Float[Tensor, "b k"] | None = None
    parts: dict[str, Tensor] | None = None
    names: tuple[str, ...] = ()
    check: RemovalCheck | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """(grid_h, grid_w): patches down and across."""
        return self.scores.shape[-2], self.scores.shape[-1]

    def __len__(self) -> int:
        """Number of images B."""
        return self.scores.shape[0]

    def __getitem__(self, which: SupportsIndex | slice) -> Attribution:
        """The attribution of one image, or of a slice of them; the batch axis stays."""
        if not isinstance(which, slice):
            at = operator.index(which)
            if not -len(self) <= at < len(self):
                raise IndexError(f"expected an index into {len(self)} images, got {at}")
            which = slice(at, at + 1 or None)
        images = None if self.images is None else self.images[which]
        return replace(self._each(lambda tensor: tensor[which]), images=images, names=self.names[which])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Attribution:
        """The same attribution with every tensor changed."""
        names = ("scores", "target", "logits", "word_scores", "unattributed")
        tensors = {name: getattr(self, name) for name in names}
        parts = None if self.parts is None else {name: change(part) for name, part in self.parts.items()}
        changed: dict[str, Any] = {k: None if t is None else change(t) for k, t in tensors.items()}
        check = None if self.check is None else self.check.each(change)
        return replace(self, **changed, parts=parts, check=check)

    def __repr__(self) -> str:
        titles = [title for index in self.indices()[:TITLES] if (title := self.title(index))]
        rest = ["..."] if titles and len(self.indices()) > TITLES else []
        explained = f", explains {', '.join([*titles, *rest])}" if titles else ""
        shape = tuple(self.scores.shape)
        return f"Attribution({self.method}{self._quantity}, scores {shape}{explained})"

    @property
    def noun(self) -> str:
        """What a map is evidence for: a class, label or value; "" where nothing of that kind is explained."""
        return "" if self.score == "none" else NOUNS[self.outputs]

    @property
    def _quantity(self) -> str:
        return "" if self.score == "none" else f" of the {self.score}"

    def to(self, device: torch.device | str) -> Attribution:
        """The same attribution on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def part(self, name: str) -> Attribution:
        """One of the parts as an attribution of its own, to draw and save: "content" or "position"."""
        if self.parts is None:
            raise InputError(
                f"{self.method}: only input x gradient at the input of block 0 has parts, on a model whose "
                f"tokens are patch + position. Use ixg, decompx, attnlrp or libra_ixg."
            )
        if name not in self.parts:
            raise UnknownNameError("part", name, self.parts)
        method = f"{self.method}.{name}"
        return replace(
            self, scores=self.parts[name], method=method, unattributed=None, parts=None, check=None
        )

    def with_images(self, images: Any, classes: Sequence[str] | None = None) -> Attribution:
        """The same attribution with the images (and class names) that notebooks, `save` and titles show.

        Args:
            images: One for each map, of any kind `overlay` takes, or a float tensor (B, 3, H, W) in [0, 1].
        """
        originals = tuple(
            to_pil_image(image) for image in ([images] if isinstance(images, Image.Image) else images)
        )
        if len(originals) != len(self):
            raise InputError(f"expected {len(self)} images, one per map, got {len(originals)}")
        if classes is not None and len(classes) != self.logits.shape[1]:
            raise InputError(f"expected {self.logits.shape[1]} class names, got {len(classes)}")
        return replace(self, images=originals, classes=self.classes if classes is None else tuple(classes))

    def upsample(self, size: int | tuple[int, int], mode: str = "bilinear") -> Tensor:
        """Scores per pixel, (B, H, W) or (B, K, H, W), signed and unnormalized; size: (H, W) or one side."""
        return resized(self.scores.detach(), (size, size) if isinstance(size, int) else size, mode)

    def normalized(self) -> Tensor:
        """Scores of each map divided by its largest magnitude: in [-1, 1], zero stays zero."""
        largest = self.scores.abs().amax(dim=(-2, -1), keepdim=True)
        return self.scores / torch.where(largest > 0, largest, torch.ones_like(largest))

    def overlay(
        self,
        image: Any = None,
        index: Index | SupportsIndex = 0,
        *,
        signed: bool = False,
        mode: str = "bicubic",
        percentile: float = 99.0,
        opacity: float = 0.78,
    ) -> Image.Image:
        """The map drawn over its image, as large as the image that was given.

        Args:
            image: PIL, uint8 (H, W, 3), or float (3, H, W) in [0, 1]: the input of the model, after resizing
                and cropping, so that patches and pixels match. By default the image that `explain` kept.
            index: Which image, or (image, target) where there are several targets.
            signed: Whether negative scores are drawn too, in cool colors. A map whose scores are all positive
                is drawn relative to its smallest score.
            percentile: Percentile of the magnitudes that gets the strongest color; 100 lets one outlier dim
                the rest of the map.
            opacity: Opacity of the strongest color, in [0, 1].
        """
        if not 0 <= percentile <= 100:
            raise InputError(f"percentile: expected a number in 0..100, got {percentile!r}")
        original = self._own_image(index) if image is None else to_pil_image(image)
        values = self._display(index, (original.height, original.width), mode, signed, percentile)
        return paint(values, original, signed=signed, opacity=opacity)

    def _own_image(self, index: Index | SupportsIndex) -> Image.Image:
        if self.images is None:
            raise InputError(
                "image: expected an image, since this attribution has none of its own. Give one, or use "
                "bare() for the map alone",
                option="image",
            )
        return self.images[self._place(index)[0]]

    def bare(self, index: Index = 0, *, signed: bool = False, mode: str = "bicubic") -> Image.Image:
        """The map alone, its longer side 224 pixels."""
        scale = BARE_PIXELS / max(self.grid)
        size = max(1, round(self.grid[0] * scale)), max(1, round(self.grid[1] * scale))
        return paint(self._display(index, size, mode, signed, 99.0), None, signed=signed)

    def _display(
        self, index: Index | SupportsIndex, size: tuple[int, int], mode: str, signed: bool, percentile: float
    ) -> Float[np.ndarray, "h w"]:
        """Values for drawing, in [-1, 1]: scaled by a percentile over patches, then resized."""
        place = self._place(index)
        scores = self.scores[place].detach().to("cpu", torch.float64)
        if scores.min() > 0:  # no zero to keep, as in attention rollout: what stands out is shown
            scores = scores - scores.min()
        scores = scores if signed else scores.clamp(min=0)
        scores = (scores / (robust_scale(scores.numpy(), percentile) or 1.0)).clamp(-1, 1)
        return resized(scores, size, mode).clamp(-1, 1).numpy()

    def _place(self, index: Index | SupportsIndex) -> tuple[int, ...]:
        lead = self.scores.shape[:-2]
        try:  # whole numbers of numpy and torch too
            place = tuple(operator.index(i) for i in (index if isinstance(index, tuple) else (index,)))
        except TypeError:
            raise InputError(f"expected an index into {tuple(lead)} maps, got {index!r}") from None
        if len(place) < len(lead):
            place += (0,) * (len(lead) - len(place))
        if len(place) != len(lead) or any(not -n <= i < n for i, n in zip(place, lead, strict=True)):
            raise InputError(f"expected an index into {tuple(lead)} maps, got {index!r}")
        return place

    def probability(self, index: Index = 0) -> float | None:
        """The model's probability of the class or label that this map explains.

        None for a value (regression) and for a callable target.
        """
        return self.prediction(index) if self.outputs in ("classes", "labels") else None

    def prediction(self, index: Index = 0) -> float | None:
        """The probability, or the value, of what this map explains; None for a callable target."""
        if self.target is None:
            return None
        place = self._place(index)
        return predictions(self.outputs, self.logits[place[0]].detach().double())[self.target[place]].item()

    def title(self, index: Index = 0, classes: Sequence[str] | None = None) -> str:
        """What is explained, in words: "tabby cat 62 %", "cat 0.93" (a label), "age 37.2" (a value).

        "" for a callable target.
        """
        number = self.prediction(index)
        if self.target is None or number is None:
            return ""
        which, names = int(self.target[self._place(index)]), classes or self.classes
        return describe(self.outputs, which, number, names, alone=self.logits.shape[1] == 1)

    def check_text(self, index: Index = 0, classes: Sequence[str] | None = None) -> str:
        """What removing the brightest patches does, in one sentence; a second one if the map fails.

        "Removing the 19 brightest patches lowers laptop from 15 % to 2 %; 19 random ones: 13 %." It is "" if
        nothing was checked.

        Args:
            classes: Class names; by default its own. Names are cut at their first comma.
        """
        if self.check is None:
            return ""
        place = self._place(index)
        if self.target is None:
            return self.check.sentence(place, "the target")
        which, names, alone = int(self.target[place]), classes or self.classes, self.logits.shape[1] == 1
        name = output_name(self.outputs, which, names, alone=alone)
        return self.check.sentence(place, name.split(",")[0])

    def check_entries(self, image: int, classes: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The checks of one image for a manifest, one for each target; [] if nothing was checked."""
        if self.check is None:
            return []
        places = [
            index for index in self.indices() if (index if isinstance(index, int) else index[0]) == image
        ]
        return [self.check.entry(self._place(at), self.check_text(at, classes)) for at in places]

    def indices(self) -> list[Index]:
        """Every index there is: i for one target an image, (i, k) for several."""
        if self.scores.ndim == 3:
            return list(range(len(self)))
        return [(image, k) for image in range(len(self)) for k in range(self.scores.shape[1])]

    def figure(self, *, signed: bool = False, cell: int = 224) -> Image.Image:
        """One figure of all maps: a row for each image and target, with the image, its overlay and a title;
        below them the removal curves and a sentence, if the maps were checked.

        Args:
            signed: As for `overlay`.
            cell: Width of a column in pixels.

        Raises:
            InputError: If there are more than 64 maps.
        """
        return draw_figure({self.method: self}, signed=signed, cell=cell)

    def save(self, path: str | Path, images: Any = None, names: Sequence[str] | None = None) -> list[Path]:
        """Write one figure into a file, or one PNG per map, scores.npz and manifest.json into a folder.

        Args:
            path: A file such as "map.png" (see `figure`), or a folder.
            images: As for `with_images`; without them, and without images of its own, bare maps are drawn.
            names: A name for each image, for names of files; by default its own.

        Returns:
            The paths of the files.
        """
        shown = self if images is None else self.with_images(images, self.classes)
        return save_attributions(path, {self.method: shown}, names, arrays(self))

    def save_maps(self, folder: str | Path, names: Sequence[str] | None = None) -> Path:
        """Store the maps in float16, as `verify(maps=folder)` reads them (docs/maps.md); returns the file.

        Args:
            names: The key of each image; "0", "1", ... by default.
        """
        names = [str(number) for number in range(len(self))] if names is None else list(names)
        if len(names) != len(self):
            raise InputError(f"expected {len(self)} names, one for each image, got {len(names)}")
        return store_maps(folder, names, {self.method: self})

    def display_image(self, index: Index = 0) -> Image.Image | None:
        """The image of a map as a notebook shows it, small ones enlarged; None if it is not kept."""
        return None if self.images is None else enlarged(self._own_image(index), BARE_PIXELS)

    def _shown(self, count: int) -> list[tuple[str, list[Image.Image]]]:
        """Caption, and image, overlay and curves, of the first maps; no image where there is none."""
        shown = []
        for index in self.indices()[:count]:
            original = self.display_image(index)
            drawn = [self.bare(index)] if original is None else [original, self.overlay(original, index)]
            if self.check is not None:
                drawn.append(draw_check(self.check, self._place(index), width=BARE_PIXELS))
            shown.append((". ".join(filter(None, (self.title(index), self.check_text(index)))), drawn))
        return shown

    def _repr_png_(self) -> bytes:
        return to_png(draw_figure({self.method: self}, rows=SHOWN_IN_PNG))

    def _repr_html_(self) -> str:
        figures = "".join(
            figure(drawn, title, alt=title or self.method, width=BARE_PIXELS)
            for title, drawn in self._shown(SHOWN_IN_NOTEBOOK)
        )
        rest = len(self.indices()) - SHOWN_IN_NOTEBOOK
        more = f"<div>and {rest} more</div>" if rest > 0 else ""
        rows, columns = self.grid
        head = f"<b>{escape(self.method)}</b>{escape(self._quantity)}, {rows} x {columns} patches"
        return f"<div>{head}</div><div>{figures}</div>{more}"


def comparison_grid(
    images: Sequence[Any] | None,
    attributions: Mapping[str, Attribution],
    *,
    classes: Sequence[str] | None = None,
    notes: Sequence[str] | None = None,
    signed: bool = False,
    cell: int = 224,
    rows: int | None = None,
) -> Image.Image:
    """Compare methods: one row per image (and target), the image first and then one column per method.

    Args:
        images: As for `overlay`, one for each map; None for maps alone.
        classes: Class names for the titles of the rows; by default those of the attributions.
        notes: Small print beside the title of a row, such as a file name.
        signed: As for `overlay`.
        cell: Width of a column in pixels.
        rows: At most this many rows.
    """
    if not attributions:
        raise InputError("expected at least one attribution to draw, got none")
    first = next(iter(attributions.values()))
    if any(other.scores.shape[:-2] != first.scores.shape[:-2] for other in attributions.values()):
        raise InputError("expected attributions of the same images and targets in every column")
    if images is not None and len(images) != len(first):
        raise InputError(f"expected {len(first)} images, one per map, got {len(images)}")
    # small images are drawn on an enlarged copy, so that the map is smooth over their visible pixels
    originals = [enlarged(to_pil_image(image), cell) for image in images or ()]
    drawn = []
    for index in first.indices()[:rows]:
        image = index if isinstance(index, int) else index[0]
        if images is None:
            columns = [att.bare(index, signed=signed) for att in attributions.values()]
        else:
            overlays = [att.overlay(originals[image], index, signed=signed) for att in attributions.values()]
            columns = [originals[image], *overlays]
        below = _checks_below(attributions, index, classes, cell, with_image=images is not None)
        drawn.append(Row(columns, first.title(index, classes), notes[image] if notes else "", below))
    headings = [*attributions] if images is None else ["image", *attributions]
    legend, noun = "signed" if signed else "positive", first.noun
    return tile(drawn, headings, cell=cell, legend=legend, noun=noun)


def _checks_below(
    attributions: Mapping[str, Attribution],
    index: Index,
    classes: Sequence[str] | None,
    cell: int,
    *,
    with_image: bool,
) -> list[Image.Image | None]:
    """What stands under the columns of a row: curves and a sentence; [] if nothing was checked.

    All curves of a row have one vertical scale, so that methods can be compared by eye.
    The sentence about a single map is under the image, where there is room.
    """
    if all(att.check is None for att in attributions.values()):
        return []
    place = next(iter(attributions.values()))._place(index)
    limits = axis_limits([att.check for att in attributions.values() if att.check is not None], place)
    curves, texts = [], []
    for att in attributions.values():
        drawn = None if att.check is None else draw_check(att.check, place, width=cell, limits=limits)
        curves.append(drawn)
        texts.append(draw_sentence(att.check_text(index, classes), width=cell))
    if with_image and len(curves) == 1:
        return [texts[0], curves[0]]
    both = [None if a is None else stack([a, b]) for a, b in zip(curves, texts, strict=True)]
    return [None, *both] if with_image else both


def draw_figure(
    attributions: Mapping[str, Attribution],
    *,
    signed: bool = False,
    cell: int = 224,
    rows: int | None = None,
) -> Image.Image:
    """`comparison_grid` of attributions with their own images and names; see `Attribution.figure`.

    Args:
        rows: At most this many rows; None draws all, and is an error for more than 64.
    """
    if not attributions:
        raise InputError("expected at least one attribution to draw, got none")
    first = next(iter(attributions.values()))
    count = len(first.indices())
    if rows is None and count > FIGURE_ROWS:
        raise InputError(
            f"expected at most {FIGURE_ROWS} maps in one figure, got {count}. Save into a folder, or draw "
            f"some of the images, such as attribution[:{FIGURE_ROWS}]"
        )
    numbered = all(name.isdecimal() for name in first.names)
    notes = None if numbered or len(first.names) != len(first) else first.names
    return comparison_grid(first.images, attributions, notes=notes, signed=signed, cell=cell, rows=rows)


def resized(
    scores: Float[Tensor, "*lead gh gw"], size: tuple[int, int], mode: str
) -> Float[Tensor, "*lead h w"]:
    """Resized maps, in their own dtype; computed in at least float32."""
    if mode not in ("bilinear", "bicubic", "nearest"):
        raise InputError(f"expected mode 'bilinear', 'bicubic' or 'nearest', got {mode!r}")
    flat = at_least_float32(scores.reshape(-1, 1, *scores.shape[-2:]))
    # "nearest-exact" is the one that does not shift patches when sizes do not divide
    how: dict[str, Any] = (
        {"mode": "nearest-exact"} if mode == "nearest" else {"mode": mode, "align_corners": False}
    )
    return F.interpolate(flat, size=size, **how).reshape(*scores.shape[:-2], *size).to(scores.dtype)


def concatenate(parts: Sequence[Attribution]) -> Attribution:
    """Join attributions of different images by one method into one."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def joined(name: str) -> Tensor | None:
        tensors = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
        return torch.cat(tensors) if tensors else None

    shown = [part.images for part in parts if part.images is not None]
    shares = [part.parts for part in parts if part.parts is not None]
    checks = [part.check for part in parts if part.check is not None]
    return replace(
        first,
        scores=torch.cat([part.scores for part in parts]),
        target=joined("target"),
        logits=torch.cat([part.logits for part in parts]),
        unattributed=joined("unattributed"),
        word_scores=joined("word_scores"),
        images=tuple(image for images in shown for image in images) if len(shown) == len(parts) else None,
        names=tuple(name for part in parts for name in part.names),
        check=concatenate_checks(checks) if len(checks) == len(parts) else None,
        parts={name: torch.cat([share[name] for share in shares]) for name in shares[0]} if shares else None,
    )


def store_maps(folder: str | Path, names: Sequence[str], attributions: Mapping[str, Attribution]) -> Path:
    """Store maps of the same images and targets in one file of `folder`."""
    first = next(iter(attributions.values()))
    several = first.scores.shape[1] if first.scores.ndim == 4 else 1
    return MapWriter(folder).write(
        [name for name in names for _ in range(several)],
        {
            MapName(attribution.method, attribution.score): attribution.scores.flatten(0, -3)
            for attribution in attributions.values()
        },
        None if first.target is None else first.target.flatten().tolist(),
    )


def overlay_name(image: str, method: str, index: Index = 0) -> str:
    """File name of an overlay: image, method, and the index of the target if there are several."""
    slug = re.sub(r"[^A-Za-z0-9.+_=-]+", "-", method)
    return f"{image}.{slug}.png" if isinstance(index, int) else f"{image}.{slug}.{index[1]}.png"


def arrays(attribution: Attribution) -> dict[str, np.ndarray]:
    """The numbers of an attribution as float32 and int64 arrays."""
    numbers = {"scores": attribution.scores, "logits": attribution.logits, **(attribution.parts or {})}
    out = {name: tensor.detach().float().cpu().numpy() for name, tensor in numbers.items()}
    return out if attribution.target is None else {**out, "target": attribution.target.cpu().numpy()}


def save_attributions(
    path: str | Path,
    attributions: Mapping[str, Attribution],
    names: Sequence[str] | None,
    numbers: Mapping[str, np.ndarray],
) -> list[Path]:
    """Write a figure, or a folder, of the same images and targets by one or several methods.

    Args:
        numbers: What is stored in scores.npz of a folder.
    """
    path = Path(path)
    if path.suffix.lower() in FIGURE_FORMATS and not path.is_dir():
        return [write_figure(path, draw_figure(attributions))]
    if path.suffix.lower() in VECTOR_SUFFIXES:
        raise InputError(
            f"expected a folder or a file with one of the suffixes {', '.join(FIGURE_FORMATS)}, got {path}"
        )
    first = next(iter(attributions.values()))
    names = list(first.names or map(str, range(len(first)))) if names is None else list(names)
    if len(names) != len(first):
        raise InputError(f"expected {len(first)} names, one for each image, got {len(names)}")
    if len(set(names)) < len(names) or any(Path(name).name != name for name in names):
        raise InputError(
            f"names: expected a different file name for each image, without folders, got {names}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"expected a folder to save into, got a file, {path}") from error
    overlays: list[dict[str, list[str]]] = [{} for _ in names]
    for method, attribution in attributions.items():
        for index in attribution.indices():
            image = index if isinstance(index, int) else index[0]
            drawn = (
                attribution.bare(index) if attribution.images is None else attribution.overlay(None, index)
            )
            file = overlay_name(names[image], attribution.method, index)
            write_png(path / file, drawn)
            overlays[image].setdefault(method, []).append(file)
    write_npz(path / "scores.npz", {**numbers, "names": np.array(names)})
    entries = [
        image_entry(
            name,
            first.logits[image],
            None if first.target is None else first.target[image],
            overlays[image],
            class_names=first.classes,
            outputs=first.outputs,
            checks={method: att.check_entries(image) for method, att in attributions.items()},
        )
        for image, name in enumerate(names)
    ]
    manifest = write_manifest(
        path,
        methods={method: attribution.score for method, attribution in attributions.items()},
        grid=first.grid,
        images=entries,
        task=task_of_outputs(first.outputs),
    )
    files = [path / file for by_method in overlays for drawn in by_method.values() for file in drawn]
    return [*files, path / "scores.npz", manifest]
