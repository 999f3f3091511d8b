"""Attributions of several methods, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from PIL import Image

from steadygaze.errors import InputError
from steadygaze.notebook import figure, to_png
from steadygaze.results.attribution import BARE_PIXELS, SHOWN_IN_NOTEBOOK, SHOWN_IN_PNG, Attribution
from steadygaze.results.drawing import Row, enlarged, tile, to_pil_image


class Attributions(dict[str, Attribution]):
    """Attributions of the same images by several methods: a dict by name that a notebook shows as a grid.

    Examples:
        >>> import steadygaze as sg, torch
        >>> loaded = sg.load_model("embedded")
        >>> both = sg.explain(loaded, torch.zeros(2, 3, 32, 32), target=0, method=["gae", "cat"])
        >>> list(both), both["gae"].scores.shape
        (['gae', 'cat'], torch.Size([2, 8, 8]))
    """

    def with_images(self, images: Any, classes: Sequence[str] | None = None) -> Attributions:
        """The same attributions with images and class names for display, as `Attribution.with_images`."""
        return Attributions({name: att.with_images(images, classes) for name, att in self.items()})

    def __repr__(self) -> str:
        lines = [f"  {name!r}: {att!r}," for name, att in self.items()]
        return "\n".join(["Attributions({", *lines, "})"]) if lines else "Attributions({})"

    def _columns(self, index: Any) -> list[Image.Image]:
        """Image and overlays of one map, or only the maps where there is no image."""
        first = next(iter(self.values()))
        original = first.display_image(index)
        if original is None:
            return [att.bare(index) for att in self.values()]
        return [original, *(att.overlay(original, index) for att in self.values())]

    def _headings(self, columns: int) -> list[str]:
        return [*self] if columns == len(self) else ["image", *self]

    def _repr_png_(self) -> bytes | None:
        if not self:
            return None
        first = next(iter(self.values()))
        drawn = [(self._columns(index), first.title(index)) for index in first.indices()[:SHOWN_IN_PNG]]
        drawn = [row for row in drawn if len(row[0]) == len(drawn[0][0])]
        rows = [Row(images, title) for images, title in drawn]
        headings = self._headings(len(rows[0].images))
        return to_png(tile(rows, headings, legend="positive", noun=first.noun))

    def _repr_html_(self) -> str:
        if not self:
            return escape(repr(self))
        first = next(iter(self.values()))
        lines = []
        for index in first.indices()[:SHOWN_IN_NOTEBOOK]:
            images = self._columns(index)
            named = zip(images, self._headings(len(images)), strict=True)
            figures = [figure([image], name, alt=name, width=BARE_PIXELS) for image, name in named]
            lines.append(f"<div><b>{escape(first.title(index))}</b></div><div>{''.join(figures)}</div>")
        rest = len(first.indices()) - SHOWN_IN_NOTEBOOK
        more = f"<div>and {rest} more</div>" if rest > 0 else ""
        return "".join(lines) + more


def comparison_grid(
    images: Sequence[Any],
    attributions: Mapping[str, Attribution],
    *,
    classes: Sequence[str] | None = None,
    notes: Sequence[str] | None = None,
    signed: bool = False,
    cell: int = 224,
) -> Image.Image:
    """Compare methods: one row per image (and target), the image first and then one column per method.

    Args:
        images: As for `overlay`, one for each map.
        classes: Class names for the titles of the rows; by default those of the attributions.
        notes: Small print beside the title of a row, such as a file name.
        signed: As for `overlay`.
        cell: Width of a column in pixels.
    """
    if not attributions:
        raise InputError("expected at least one attribution to draw, got none")
    first = next(iter(attributions.values()))
    if any(other.scores.shape[:-2] != first.scores.shape[:-2] for other in attributions.values()):
        raise InputError("expected attributions of the same images and targets in every column")
    originals = [to_pil_image(image) for image in images]
    if len(originals) != len(first):
        raise InputError(f"expected {len(first)} images, one per map, got {len(originals)}")
    # small images are drawn on an enlarged copy, so that the map is smooth over their visible pixels
    originals = [enlarged(original, cell) for original in originals]
    rows = []
    for index in first.indices():
        image = index if isinstance(index, int) else index[0]
        drawn = [att.overlay(originals[image], index, signed=signed) for att in attributions.values()]
        note = notes[image] if notes else ""
        rows.append(Row([originals[image], *drawn], first.title(index, classes), note))
    legend, noun = "signed" if signed else "positive", first.noun
    return tile(rows, ["image", *attributions], cell=cell, legend=legend, noun=noun)
