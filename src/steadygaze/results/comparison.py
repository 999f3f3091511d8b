"""Attributions of several methods, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from steadygaze.errors import InputError
from steadygaze.notebook import figure, to_png
from steadygaze.results.attribution import (
    BARE_PIXELS,
    SHOWN_IN_NOTEBOOK,
    SHOWN_IN_PNG,
    Attribution,
    arrays,
    draw_figure,
    save_attributions,
)
from steadygaze.results.check import draw_check


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

    def figure(self, *, signed: bool = False, cell: int = 224) -> Image.Image:
        """One figure: a row for each image and target, a column for each method; see `Attribution.figure`."""
        return draw_figure(self, signed=signed, cell=cell)

    def save(self, path: str | Path, images: Any = None, names: Sequence[str] | None = None) -> list[Path]:
        """Write one figure into a file, or a PNG for each map and method, scores.npz and manifest.json.

        Args:
            path: A file such as "maps.png" (see `figure`), or a folder. In scores.npz of a folder, the scores
                of each method have its name.
            images: As for `Attribution.save`.
            names: As for `Attribution.save`.
        """
        if not self:
            raise InputError("expected at least one attribution to save, got none")
        shown = self if images is None else self.with_images(images)
        numbers = {name: arrays(att) for name, att in self.items()}
        scores = {name: of_method.pop("scores") for name, of_method in numbers.items()}
        shared = next(iter(numbers.values()))
        stored = {key: shared[key] for key in ("logits", "target") if key in shared}
        return save_attributions(path, shown, names, scores | stored)

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
        return to_png(draw_figure(self, rows=SHOWN_IN_PNG)) if self else None

    def _repr_html_(self) -> str:
        if not self:
            return escape(repr(self))
        first = next(iter(self.values()))
        lines = []
        for index in first.indices()[:SHOWN_IN_NOTEBOOK]:
            images = self._columns(index)
            named = zip(images, self._headings(len(images)), strict=True)
            figures = []
            for image, name in named:
                check = self[name].check if name in self else None
                curves = [] if check is None else [draw_check(check, index, width=BARE_PIXELS)]
                text = self[name].check_text(index) if check is not None else ""
                caption = ". ".join(filter(None, (name, text)))
                figures.append(figure([image, *curves], caption, alt=name, width=BARE_PIXELS))
            lines.append(f"<div><b>{escape(first.title(index))}</b></div><div>{''.join(figures)}</div>")
        rest = len(first.indices()) - SHOWN_IN_NOTEBOOK
        more = f"<div>and {rest} more</div>" if rest > 0 else ""
        return "".join(lines) + more
