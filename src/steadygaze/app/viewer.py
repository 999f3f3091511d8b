"""What the page asks of a model, for one picture: what it says, what it looks at, whether that is true, and what if patches go.

Every answer starts from the picture again, so that nothing has to be kept between two clicks but the picture and a list of patches.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadygaze.data.images import to_rgb
from steadygaze.drawing import struck_out
from steadygaze.errors import BadInput, DegenerateMap
from steadygaze.explainer import explain
from steadygaze.faithfulness.removal import RATIOS, CachedForward, ranking, removal
from steadygaze.heatmap import Attribution, percent
from steadygaze.loading.load import Loaded
from steadygaze.method_registry import Method
from steadygaze.methods.diffmask import with_gates
from steadygaze.runs.verify.plan import choose
from steadygaze.target import chances
from steadygaze.vit import ViT, adapt
from steadygaze.vit.subsets import HidingMode, can_mask, subset_logits

SIDE = 448  # pixels of the longer side that is shown
RANDOM = "random"
WAYS = {"remove": "taken out", "mask": "hidden from attention", "fill": "painted in the mean colour"}


@dataclass(frozen=True)
class Truth:
    """How the class fares on one picture while patches go or come by a method's ranking; curves of (share of the patches, probability)."""

    method: str
    deletion: tuple[tuple[float, float], ...]
    insertion: tuple[tuple[float, float], ...]
    scores: dict[str, float]  # the four removal scores, in percent


@dataclass(frozen=True, eq=False)
class Viewer:
    """One model, and the questions that can be asked of it. gates: a file of `steadygaze diffmask train`."""

    loaded: Loaded
    gates: Path | None = None

    @cached_property
    def vit(self) -> ViT:
        return adapt(self.loaded.model)

    @cached_property
    def methods(self) -> list[str]:
        """Names of the methods that this model serves."""
        return [m.name for m in choose(self.vit, ["all"])] + (["diffmask"] if self.gates else [])

    @cached_property
    def classes(self) -> list[str]:
        """The classes by name, each with its number before it."""
        count = self._logits(torch.zeros(1, *self.vit.plan.input_size, device=self._device)).shape[1]
        names = self.loaded.classes or ("",) * count
        return [f"{number} {name}".strip() for number, name in enumerate(names)]

    @cached_property
    def way(self) -> HidingMode:
        """How patches go: "remove", or the best that the model allows."""
        if self.vit.plan.removable:
            return "remove"
        blank = torch.zeros(1, *self.vit.plan.input_size, device=self._device)
        return "mask" if can_mask(self.vit, self.vit.embed(blank)) else "fill"

    def answers(self, picture: Image.Image, without: Collection[int] = ()) -> dict[str, float]:
        """Class -> probability, without some patches (numbers in raster order)."""
        image = self._image(picture)
        logits = self._reduced(image, without) if without else self._logits(image)
        return dict(zip(self.classes, chances(logits[0].double()).tolist(), strict=True))

    def maps(self, picture: Image.Image, methods: Sequence[str], target: str | None = None,
             score: str | None = None) -> dict[str, Attribution]:  # fmt: skip
        """The maps of several methods. target: a class as `classes` writes it, its number or its name; None is the predicted one."""
        if not methods:
            raise BadInput("expected at least one method, got none: choose one from the list")
        asked: list[str | Method] = with_gates(list(methods), self.gates if "diffmask" in methods else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateMap)  # an empty map is seen
            found = explain(self.vit, self._image(picture), self._class(target), method=asked, score=score)
        return {name: attribution.to("cpu") for name, attribution in found.items()}

    def overlays(
        self, picture: Image.Image, maps: dict[str, Attribution], signed: bool = False
    ) -> list[tuple[Image.Image, str]]:
        """Every map over what the model sees, with the method's name and the class."""
        shown = self.shown(picture)
        return [
            (one.overlay(shown, signed=signed), f"{name}: {one.title(0, self._short)}")
            for name, one in maps.items()
        ]

    def truths(self, picture: Image.Image, maps: dict[str, Attribution]) -> list[Truth]:
        """Removal curves and scores of every map on this picture, and of a random ranking."""
        image = self._image(picture)
        known = {**maps, **self.maps(picture, [RANDOM])} if RANDOM not in maps else maps
        first = next(iter(maps.values()))
        assert first.target is not None
        target = first.target.to(image.device)
        stack = torch.stack([one.scores.to(image) for one in known.values()])
        with torch.no_grad():
            whole = CachedForward(self.vit, image)
            values = removal(whole, stack, target, RATIOS)
        start = float(whole.probabilities[0, target[0]])
        found = []
        for row, name in enumerate(known):
            curve = {
                kind: values[f"{kind}_aopc"].detail for kind in ("deletion", "insertion")
            }  # 100 (p_whole - p_left)
            left = {
                kind: [start - at / 100 for at in lost[row, 0].tolist()]
                for kind, lost in curve.items()
                if lost is not None
            }
            deletion = zip((0.0, *RATIOS), (start, *left["deletion"]), strict=True)
            insertion = zip((*RATIOS, 1.0), (*left["insertion"], start), strict=True)
            scores = {metric: float(value.value[row, 0]) for metric, value in values.items()}
            found.append(Truth(name, tuple(deletion), tuple(insertion), scores))
        return found

    def split(self, attribution: Attribution, share: float) -> tuple[list[int], list[int]]:
        """The most relevant patches of a map, this share of all of them, and the others."""
        order = ranking(attribution.scores)[0].tolist()
        count = round(share * len(order))
        return order[:count], order[count:]

    def shown(self, picture: Image.Image, without: Iterable[int] = ()) -> Image.Image:
        """What the model sees, enlarged; patches that are gone are struck out."""
        seen = self.loaded.picture(self._image(picture)[0])
        scale = SIDE / max(seen.size)
        smooth = Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.LANCZOS
        seen = seen.resize((round(seen.width * scale), round(seen.height * scale)), smooth)
        gone = np.zeros(self.vit.grid, dtype=bool)
        gone.reshape(-1)[list(without)] = True
        return struck_out(seen, gone) if gone.any() else seen

    def patch_at(self, picture: Image.Image, x: float, y: float) -> int:
        """The patch under a pixel of `shown`."""
        rows, columns = self.vit.grid
        width, height = self.shown(picture).size
        return min(int(y / height * rows), rows - 1) * columns + min(int(x / width * columns), columns - 1)

    def words(self, picture: Image.Image, without: Collection[int]) -> str:
        """In a sentence: how many patches are gone, and what that did to the answer."""
        rows, columns = self.vit.grid
        before, after = self.answers(picture), self.answers(picture, without)
        said, now = (max(answers, key=lambda name: answers[name]) for answers in (before, after))
        kept = "still says" if said == now else "now says"
        first = f"{len(without)} of {rows * columns} patches {WAYS[self.way]}. The model {kept} **{now}** ({percent(after[now])})."
        return f"{first} Before: {said}, {percent(before[said])} → {percent(after[said])}."

    # -- below: tensors -----------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    @property
    def _short(self) -> list[str] | None:
        return None if self.loaded.classes is None else [name.split(",")[0] for name in self.loaded.classes]

    def _class(self, target: str | None) -> int | None:
        if target is None:
            return None
        return self.classes.index(target) if target in self.classes else self.loaded.class_index(target)

    def _image(self, picture: Image.Image) -> Tensor:
        if picture is None:
            raise BadInput("expected a picture, got none: drop one on the page or take an example")
        return self.loaded.preprocess(to_rgb(picture))[None].to(self._device)

    @torch.no_grad()
    def _logits(self, image: Tensor) -> Tensor:
        return self.vit(image)

    @torch.no_grad()
    def _reduced(self, image: Tensor, without: Collection[int]) -> Tensor:
        tokens = self.vit.embed(image)
        keep = torch.ones(1, self.vit.grid[0] * self.vit.grid[1], dtype=torch.bool, device=image.device)
        keep[0, list(without)] = False
        return subset_logits(
            self.vit, image, tokens, keep, torch.zeros(1, dtype=torch.long, device=image.device), self.way
        )
