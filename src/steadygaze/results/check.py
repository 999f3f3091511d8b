"""RemovalCheck: what happens to the explained quantity when the patches of a map are removed, against chance.

Equations: docs/equations.md#removal-check.

    deletion(r)   quantity without the top k = int(r·P) patches     insertion(r)  with the top k alone
    chance(r)     mean over the random orders of (deletion(r) + insertion(1 − r)) / 2: as many are removed
    versus_chance = (area of insertion − area of deletion) / 2
                  = ½ · area of (insertion(r) − chance(1 − r)) + ½ · area of (chance(r) − deletion(r))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.results.drawing import INK, PAPER, QUIET, load_font, wrap_text
from steadygaze.results.manifest import MANIFEST
from steadygaze.target import Outputs, number_text
from steadygaze.untrusted import read_json

HidingMode = Literal["remove", "mask", "fill"]
Verdict = Literal["better", "level", "worse"]
ACTIONS: dict[HidingMode, tuple[str, str]] = {  # what is done to patches: the verb, and how
    "remove": ("Removing", ""),
    "mask": ("Hiding", " from attention"),
    "fill": ("Painting", " in the mean color"),
}
VERDICTS: dict[Verdict, str] = {
    "better": "",
    "level": "On the whole, the map does no better than chance.",
    "worse": "On the whole, the map does worse than chance.",
}
MARGIN = 1.5  # spreads; one in fifteen random maps is that much better by luck (docs/choosing.md)
CURVES = ("insertion", "deletion", "chance")  # of a manifest's entry
NUMBERS = ("whole", "spread")


def area(curve: Float[Tensor, "*b r"], ratios: Sequence[float]) -> Float[Tensor, "*b"]:
    """Trapezoid over the ratios divided by their span: the mean height of the curve."""
    curve = curve.double()
    if len(ratios) == 1:
        return curve[..., 0]
    x = torch.tensor(ratios, dtype=torch.float64, device=curve.device)
    height = torch.trapezoid(curve, x, dim=-1) / (x[-1] - x[0])
    return height.clamp(curve.amin(-1), curve.amax(-1))  # rounding must not leave the curve's range


@dataclass(frozen=True, eq=False)
class RemovalCheck:
    """Whether maps name the patches that matter: removal curves of each map, and of random orders.

    The curves are of the probability of the explained class or label, of the explained value, or of what a
    callable target returns. Leading axes are those of the attribution: (B,), or (B, K) for K targets.

    Attributes:
        ratios: Shares r of the patches, increasing; at each, k = int(r · patches) patches are meant.
        whole: The quantity on the whole image.
        insertion: The quantity with the k brightest patches alone; higher is better.
        deletion: The quantity without the k brightest patches; lower is better.
        chance: The quantity without k patches of a random order, measured at every second ratio, with
            straight lines between. With k patches of one alone, it is this curve from right to left.
        spread: The largest magnitude of `versus_chance` that a random order reached.
        patches: Number of patches of an image.
        hiding: How patches were left out: "remove" (their tokens), "mask" (hidden from attention, where a
            model needs all tokens) or "fill" (painted in the mean color, where neither is possible).
        outputs: What the quantity is: of "classes" and "labels" a probability.

    Examples:
        >>> import steadygaze as sg, torch
        >>> loaded = sg.load_model("embedded")
        >>> check = sg.explain(loaded, torch.zeros(2, 3, 32, 32), target=0, check=True).check
        >>> check.insertion.shape, check.versus_chance.shape
        (torch.Size([2, 5]), torch.Size([2]))
    """

    ratios: tuple[float, ...]
    whole: Float[Tensor, "*b"]
    insertion: Float[Tensor, "*b r"]
    deletion: Float[Tensor, "*b r"]
    chance: Float[Tensor, "*b r"]
    spread: Float[Tensor, "*b"]
    patches: int
    hiding: HidingMode = "remove"
    outputs: Outputs = "classes"

    @property
    def versus_chance(self) -> Float[Tensor, "*b"]:
        """How much better than a random order, the mean of both curves, in the unit of the quantity.

        0 is the chance level, higher is better; of probabilities in -0.5..0.5.
        """
        return (area(self.insertion, self.ratios) - area(self.deletion, self.ratios)) / 2

    def verdict(self, index: Any = 0) -> Verdict:
        """Whether a map is clearly "better" or "worse" than random orders: by 1.5 times their `spread`.

        "level" otherwise. A random map is called better or worse in about one of five images.
        """
        gain, limit = float(self.versus_chance[index]), MARGIN * float(self.spread[index])
        return "better" if gain > limit else "worse" if gain < -limit else "level"

    def sentence(self, index: Any = 0, name: str = "it") -> str:
        """What removing a tenth of the patches does; and if the map fails, a second sentence that says so.

        Args:
            index: Which image, or (image, target) where there are several targets.
            name: Of the explained class or value.
        """
        count = int(self.ratios[0] * self.patches)
        verb, how = ACTIONS[self.hiding]
        before, after, random = (
            _in_words(self.outputs, float(number))
            for number in (self.whole[index], self.deletion[index][0], self.chance[index][0])
        )
        change = f"leaves {name} at {after}"
        if before != after:
            rises = self.deletion[index][0] > self.whole[index]
            change = f"{'raises' if rises else 'lowers'} {name} from {before} to {after}"
        brightest = "brightest patch" if count == 1 else f"{count} brightest patches"
        ones = "a random one" if count == 1 else f"{count} random ones"
        failure = VERDICTS[self.verdict(index)]
        return f"{verb} the {brightest}{how} {change}; {ones}: {random}. {failure}".rstrip()

    def __repr__(self) -> str:
        gains = [f"{gain:+.3f}" for gain in self.versus_chance.flatten()[:3].tolist()]
        more = ", ..." if self.whole.numel() > 3 else ""
        shares = ", ".join(f"{ratio:g}" for ratio in self.ratios)
        return f"RemovalCheck(versus chance {', '.join(gains)}{more}; ratios {shares})"

    def each(self, change: Callable[[Tensor], Tensor]) -> RemovalCheck:
        """The same check with every tensor changed, such as moved or sliced."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in (*CURVES, *NUMBERS)}
        return replace(self, **changed)

    def entry(self, index: Any, text: str) -> dict[str, Any]:
        """The manifest's entry of one map. text: the sentence about it."""

        return {
            "text": text,
            "versus_chance": _stored(self.versus_chance[index]),
            "verdict": self.verdict(index),
            "hiding": self.hiding,
            "outputs": self.outputs,
            "patches": self.patches,
            "ratios": list(self.ratios),
            **{name: [_stored(number) for number in getattr(self, name)[index]] for name in CURVES},
            **{name: _stored(getattr(self, name)[index]) for name in NUMBERS},
        }

    @classmethod
    def load(cls, folder: str | Path) -> dict[str, RemovalCheck]:
        """Read the checks that `Attribution.save(folder)` or `steadygaze explain --check` stored, by method.

        Numbers are stored with six digits. Methods without a check are left out.

        Raises:
            InputError: If there is no manifest in the folder, or it is damaged.
        """
        try:
            content = read_json(Path(folder), MANIFEST)
            entries = _Manifest.model_validate(content).images
            methods = dict.fromkeys(method for image in entries for method in image.checks)
            return {method: _joined([image.checks[method] for image in entries]) for method in methods}
        except FileNotFoundError as error:
            raise InputError(f"expected a folder with {MANIFEST}, as Attribution.save writes it") from error
        except (ValidationError, KeyError, RuntimeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{Path(folder) / MANIFEST}: the checks cannot be read ({error})") from error


def _in_words(outputs: Outputs, number: float) -> str:
    """A number of a sentence; small probabilities of classes with one digit, so that changes are seen."""
    share = 100 * number
    if outputs != "classes" or not 0 < share < 0.1:
        return number_text(outputs, number)
    return f"{share:.1g} %" if share >= 0.001 else "under 0.001 %"


def _stored(number: Tensor) -> float | None:
    """A number with six digits; None if it is not finite, which JSON does not have."""
    value = float(number)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _loaded(number: float | None) -> float:
    return math.nan if number is None else number


Number = Annotated[float | None, AfterValidator(_loaded)]


class _Entry(BaseModel):
    hiding: HidingMode
    outputs: Outputs
    patches: int = Field(ge=2)
    ratios: list[float] = Field(min_length=1)
    insertion: list[Number]
    deletion: list[Number]
    chance: list[Number]
    whole: Number
    spread: Number


class _Image(BaseModel):
    checks: dict[str, list[_Entry]] = {}


class _Manifest(BaseModel):
    images: list[_Image]


def _joined(images: Sequence[Sequence[_Entry]]) -> RemovalCheck:
    """One check from the entries of the targets of each image."""
    first = images[0][0]

    def tensor(name: str) -> Tensor:
        values = torch.tensor([[getattr(entry, name) for entry in entries] for entries in images])
        return values if len(images[0]) > 1 else values[:, 0]

    return RemovalCheck(
        ratios=tuple(first.ratios),
        **{name: tensor(name) for name in (*CURVES, *NUMBERS)},
        patches=first.patches,
        hiding=first.hiding,
        outputs=first.outputs,
    )


def concatenate_checks(checks: Sequence[RemovalCheck]) -> RemovalCheck:
    """Join checks of different images by one method into one."""
    names = (*CURVES, *NUMBERS)
    joined: dict[str, Any] = {name: torch.cat([getattr(check, name) for check in checks]) for name in names}
    return replace(checks[0], **joined)


# -- the figure

BRIGHTEST, DIMMEST, RANDOM = "#c1440e", "#1c4fa0", "#94a3b8"
SMOOTH = 3  # lines are drawn this much larger, then reduced
TICKS = (1, 2, 2.5, 5, 10)


def draw_check(
    check: RemovalCheck,
    index: Any = 0,
    *,
    width: int = 224,
    font_size: int | None = None,
    limits: tuple[float, float] | None = None,
) -> Image.Image:
    """The removal curves of one map: the quantity over the share of patches that are removed.

    Insertion is drawn as what it also is, removal of the dimmest patches first, so that chance is one curve,
    and the area between the two others is `versus_chance`, twice.

    Args:
        font_size: In pixels; by default as it fits the width.
        limits: Ends of the vertical axis; by default `axis_limits` of this map.
    """
    font = load_font(font_size or max(10, width // 18))
    line = math.ceil(font.size * 1.35)
    height = round(0.52 * width)
    deletion, chance, insertion = _curves(check, index)
    low, high = limits or axis_limits([check], index)
    texts = [f"{100 * end:g} %" if check.outputs == "classes" else f"{end:.4g}" for end in (low, high)]
    left = math.ceil(max(font.getlength(text) for text in texts)) + 6
    right, top, bottom = width - 4, line // 2 + 2, line // 2 + 2 + height
    sheet = Image.new("RGB", (width, bottom + 3 * line + 6), PAPER)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        share, y = point
        return left + share * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    stroke = max(2.0, width / 112)
    plot = Image.new("RGB", (sheet.width * SMOOTH, sheet.height * SMOOTH), PAPER)
    pen = ImageDraw.Draw(plot)
    for y in (low, (low + high) / 2, high):
        ends = (place((0, y)), place((1, y)))
        pen.line([(x * SMOOTH, y * SMOOTH) for x, y in ends], "#e2e2e6", round(SMOOTH * stroke / 2))
    for curve, color in ((chance, RANDOM), (insertion, DIMMEST), (deletion, BRIGHTEST)):
        points = [tuple(SMOOTH * v for v in place(p)) for p in curve if math.isfinite(p[1])]
        pen.line(points, color, round(SMOOTH * stroke), joint="curve")
        radius = 1.1 * stroke * SMOOTH
        for x, y in points[1:]:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    sheet = plot.resize(sheet.size, Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(sheet)
    for text, y in zip(texts, (low, high), strict=True):
        pen.text((left - 5, place((0, y))[1]), text, QUIET, font, anchor="rm")
    for text, share, anchor in (("0", 0.0, "lt"), ("50 %", 0.5, "mt"), ("100 %", 1.0, "rt")):
        pen.text((place((share, low))[0], bottom + 4), text, QUIET, font, anchor=anchor)
    action = {"remove": "removed", "mask": "hidden", "fill": "painted over"}[check.hiding]
    pen.text((left, bottom + 4 + line), f"patches {action}, first the", QUIET, font, anchor="lt")
    x = float(left)
    for word, color in (("brightest", BRIGHTEST), ("dimmest", DIMMEST), ("random", RANDOM)):
        y = bottom + 4 + 2 * line
        pen.text((x, y), word, color, font, anchor="lt")
        x += font.getlength(word) + 0.7 * font.size
    return sheet


def _curves(check: RemovalCheck, index: Any) -> tuple[list[tuple[float, float]], ...]:
    """Points (share of patches removed, quantity): brightest first, at random, dimmest first."""
    whole = (0.0, float(check.whole[index]))
    deletion = [whole, *zip(check.ratios, check.deletion[index].tolist(), strict=True)]
    chance = [whole, *zip(check.ratios, check.chance[index].tolist(), strict=True)]
    removed = [1 - ratio for ratio in reversed(check.ratios)]
    insertion = [whole, *zip(removed, check.insertion[index].flip(-1).tolist(), strict=True)]
    return deletion, chance, insertion


def axis_limits(checks: Sequence[RemovalCheck], index: Any = 0) -> tuple[float, float]:
    """The ends of one vertical axis for the curves of several methods on one image: round numbers around
    them; probabilities begin at 0.
    """
    points = [point for check in checks for curve in _curves(check, index) for point in curve]
    heights = [y for _, y in points if math.isfinite(y)]
    probability = all(check.outputs in ("classes", "labels") for check in checks)
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    low = 0.0 if probability else low
    span = max(high - low, 1e-6)
    step = 10 ** math.floor(math.log10(span))
    step = next(tick * step for tick in TICKS if tick * step >= span) / 4
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return low, min(high, 1.0) if probability else high


def draw_sentence(text: str, *, width: int, color: str = INK) -> Image.Image:
    """A sentence in lines of at most this width."""
    font = load_font(max(11, width // 16))
    line = math.ceil(font.size * 1.35)
    lines = wrap_text(text, font, width - 4)
    sheet = Image.new("RGB", (width, line * len(lines) + 4), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, words in enumerate(lines):
        pen.text((0, 2 + number * line), words, color, font, anchor="lt")
    return sheet


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Images below one another, aligned to the left."""
    sheet = Image.new(
        "RGB", (max(image.width for image in images), sum(image.height for image in images)), PAPER
    )
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return sheet
