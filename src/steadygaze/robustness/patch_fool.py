"""Patch-Fool: one patch of the image replaced so that the model attends to it and errs.

Fu et al., ICLR 2022, arXiv:2203.08392; constants and forms of the authors' code (RICE-EIC/Patch-Fool).

    J_l   = mean over queries i of log (mean over heads h of A^l_hip),  l = 1 .. L/2 − 1
    g     = ∂J/∂E,  g_l = ∂J_l/∂E,  where g·g_l < 0:  g_l ← g_l − (g·g_l / ‖g‖) g
    E     ← clip(E + Adam(g + α Σ_l g_l)),  the step size falls by 5 % every ten steps

| symbol | meaning | in code |
| --- | --- | --- |
| E | pixels of the attacked patch, normalized; any color is allowed | `now`, `inside` |
| p | the attacked patch: given, random, most attended (layer 4) or most relevant | `place` |
| J | cross-entropy with the label | `_gradient` |
| J_l | how much tokens attend to p in layer l, A^l after softmax | `_gradient` |
| α | weight of attention, 0.002 | `weight` |

The published code, which is followed here, divides by ‖g‖ where gradient surgery (Yu et al.,
arXiv:2001.06782) divides by ‖g‖². Random numbers of an image follow from its own seed.

Formulas: docs/equations.md#patch-fool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.look.drawing import cell_image, checked_index, draw_frame, overlay
from steadygaze.methods.explain import explain_batch
from steadygaze.methods.registry import parse_method
from steadygaze.results.drawing import Row, robust_scale, tile, to_pil_image
from steadygaze.robustness.attacks import Images, checked_labels, pixels_of
from steadygaze.robustness.attention import walk
from steadygaze.robustness.protocols import PATCH_FOOL_STEPS
from steadygaze.target import at_least_float32
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.adapt import adapt
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.view import ViT

Labels = Int[Tensor, " b"]
Place = str | tuple[int, int] | Tensor

STEP, WEIGHT = 0.22, 0.002  # as published
DECAY, DECAY_EVERY = 0.95, 10
ATTENDED_LAYER = 4  # its attention chooses the patch
MOMENTUM, SQUARES, TINY = 0.9, 0.999, 1e-8  # Adam
CELL = 160  # pixels of an image of the figure


@dataclass(frozen=True)
class PatchFooled:
    """Outcome of Patch-Fool.

    Attributes:
        clean: (B, C, H, W), the images, normalized.
        images: (B, C, H, W), the attacked images, normalized like `clean`; they differ in one patch.
        labels: (B,).
        predicted: (B,), the predicted classes of the attacked images.
        places: (B, 2), row and column of the attacked patch.
        steps: (B,), steps until the first wrong prediction, 0 if that of the clean image, or with noise as
            the patch, is wrong; the number of all steps if there was none.
        before: (B, L, rows, columns), the attention that each patch receives in the clean image: mean over
            heads and queries, in even shares (1: as much as the average token).
        after: (B, L, rows, columns), the same for the attacked images.
        mean: Of the normalization.
        std: Of the normalization.
    """

    clean: Images
    images: Images
    labels: Labels
    predicted: Labels
    places: Int[Tensor, "b 2"]
    steps: Int[Tensor, " b"]
    before: Float[Tensor, "b l h w"]
    after: Float[Tensor, "b l h w"]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def robust(self) -> Bool[Tensor, " b"]:
        """Which attacked images are classified correctly."""
        return self.predicted == self.labels

    def at_place(self, received: Float[Tensor, "b l h w"]) -> Float[Tensor, "b l"]:
        """`before` or `after` at the attacked patch, by layer."""
        rows, columns = self.places.unbind(1)
        return received[torch.arange(len(received), device=received.device), :, rows, columns]

    def figure(self, image: int = 0, *, layers: Sequence[int] | None = None) -> Image.Image:
        """Draw one image before and after the attack, and the attention that its patches receive.

        Both rows share the color scale of a column.

        Args:
            image (int): number of the image in the batch.
            layers (Sequence[int]): layers to draw; by default four, evenly spread.
        """
        image = checked_index("image", image, len(self.images))
        depth, grid = self.before.shape[1], (self.before.shape[2], self.before.shape[3])
        spread = sorted({round(k * (depth - 1) / 3) for k in range(4)})
        shown = [checked_index("layer", layer, depth) for layer in (spread if layers is None else layers)]
        place = int(self.places[image, 0]), int(self.places[image, 1])
        scales = [
            max(robust_scale(r[image, layer].cpu().double().numpy()) for r in (self.before, self.after))
            for layer in shown
        ]
        rows = []
        for title, images, received in (
            ("before", self.clean, self.before),
            ("after", self.images, self.after),
        ):
            pixels, _, _ = pixels_of(images[image : image + 1], self.mean, self.std)
            picture = to_pil_image(pixels[0].cpu())
            cells = [cell_image([picture], 0, grid, CELL, mark=place)]
            for layer, full in zip(shown, scales, strict=True):
                cell = overlay(received[image, layer], cell_image([picture], 0, grid, CELL), full=full)
                draw_frame(cell, grid, place)
                cells.append(cell)
            on_patch = self.at_place(received)[image]
            note = f"the framed patch receives {float(on_patch.mean()):.1f} times an even share of attention"
            if title == "after":
                note += f"; label {int(self.labels[image])}, predicted class {int(self.predicted[image])}"
            rows.append(Row(cells, title, note))
        return tile(rows, ["image", *(f"layer {layer}" for layer in shown)], cell=CELL, legend="attention")


def patch_fool(
    model: nn.Module | ViT,
    images: Images,
    labels: Int[Tensor, " b"],
    *,
    place: Place = "attention",
    mean: Sequence[float],
    std: Sequence[float],
    steps: int = PATCH_FOOL_STEPS,
    step: float = STEP,
    weight: float = WEIGHT,
    seeds: int | Sequence[int] = 0,
    stop_early: bool = False,
) -> PatchFooled:
    """Replace one patch of each image so that tokens attend to it and the prediction is wrong.

    Args:
        model (nn.Module | ViT): a vision transformer with attention over all tokens.
        images (Tensor): (B, C, H, W), normalized.
        labels (Tensor): (B,), class indices.
        place (str | tuple[int, int] | Tensor): which patch: "attention", the one that receives most attention
            in layer 4, as published; "random"; the name of an attribution method, for the patch with the
            highest score for the label; (row, column); or maps (B, rows, columns), for the highest patch.
        mean (Sequence[float]): of the normalization, one number per channel.
        std (Sequence[float]): of the normalization.
        steps (int): number of steps.
        step (float): first step size of Adam, in normalized units.
        weight (float): of the attention in the loss; 0: cross-entropy alone.
        seeds (int | Sequence[int]): of the random numbers: one for all images, or one for each.
        stop_early (bool): End the attack of an image at its first wrong prediction, which may be that of the
            clean image. As published, all steps are taken.

    Returns:
        PatchFooled: attacked images, predictions, and attention before and after; `.figure()` draws it.

    Raises:
        MethodUnavailableError: If the model has no attention over all tokens.

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.zeros(1, 3, 32, 32)
        >>> norm = {"mean": loaded.mean, "std": loaded.std}
        >>> result = patch_fool(loaded.model, images, torch.tensor([3]), place=(2, 5), steps=2, **norm)
        >>> result.places.tolist(), int((result.images != images).any(1).sum())  # a patch has 4 x 4 pixels
        ([[2, 5]], 16)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps: expected a whole number of 1 or more, got {steps!r}")
    for name, value in (("step", step), ("weight", weight)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InputError(f"{name}: expected a number of 0 or more, got {value!r}")
    vit = adapt(model)
    _, m, s = pixels_of(images, mean, std)
    labels = checked_labels(labels, len(images), images.device)
    of_image = [seeds] * len(images) if isinstance(seeds, int) else list(seeds)
    if len(of_image) != len(images):
        raise InputError(f"seeds: expected one, or one for each of {len(images)} images, got {len(of_image)}")
    draws = [torch.Generator().manual_seed(seed) for seed in of_image]
    with torch.inference_mode(False), without_autocast(vit.model), evaluation_mode(vit.model):
        clean = images.detach().clone()
        before, logits = _received(vit, clean)
        classes = logits.shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            lowest, highest = int(labels.min()), int(labels.max())
            raise InputError(f"labels: expected classes 0..{classes - 1}, got {lowest}..{highest}")
        patches = _places(vit, clean, labels, place, before, draws)
        attack = _Attack(vit, (0 - m) / s, (1 - m) / s, (before.shape[2], before.shape[3]), step, weight)
        attacked, taken = attack.run(clean, labels, logits, patches, draws, steps, stop_early)
        after, logits = _received(vit, attacked)
    columns = before.shape[3]
    return PatchFooled(
        clean,
        attacked,
        labels,
        logits.argmax(1),
        torch.stack([patches // columns, patches % columns], 1),
        taken,
        before,
        after,
        tuple(mean),
        tuple(std),
    )


def _received(vit: ViT, images: Images) -> tuple[Float[Tensor, "b l h w"], Float[Tensor, "b classes"]]:
    """The attention that patches receive in each layer, in even shares; and the logits."""
    layers: list[Tensor] = []

    def see(layer: int, a: Float[Tensor, "b heads n n"]) -> None:
        layers.append(a.shape[-1] * at_least_float32(a).mean((1, 2))[:, vit.prefix :])

    (logits,) = walk(vit, [images], see)
    with torch.no_grad():
        grid = vit.layout(vit.embed(images[:1])).grid
    return torch.stack(layers, 1).unflatten(2, grid), at_least_float32(logits)


def _places(
    vit: ViT,
    images: Images,
    labels: Labels,
    place: Place,
    received: Float[Tensor, "b l h w"],
    draws: list[torch.Generator],
) -> Int[Tensor, " b"]:
    """The patch to attack in each image, in raster order."""
    rows, columns = received.shape[2:]
    if isinstance(place, Tensor):
        if place.shape != (len(images), rows, columns) or not torch.isfinite(place).all():
            raise InputError(
                f"place: expected finite maps ({len(images)}, {rows}, {columns}), got {tuple(place.shape)}"
            )
        return place.flatten(1).argmax(1).to(images.device)
    if isinstance(place, tuple):
        if len(place) != 2:
            raise InputError(f"place: expected (row, column), got {place!r}")
        row, column = checked_index("place", place[0], rows), checked_index("place", place[1], columns)
        return torch.full((len(images),), row * columns + column, device=images.device)
    if not isinstance(place, str):
        raise InputError(
            "place: expected attention, random, the name of an attribution method, (row, column) or maps, "
            f"got {place!r}"
        )
    if place == "attention":
        return received[:, min(ATTENDED_LAYER, received.shape[1] - 1)].flatten(1).argmax(1)
    if place == "random":
        drawn = [int(torch.randint(rows * columns, (1,), generator=g)) for g in draws]
        return torch.tensor(drawn, device=images.device)
    method = parse_method(place)
    clean = CleanForward.of(vit, images)
    scores = explain_batch(clean, labels, [method], None, allow_partial=False)[method.name].scores
    if scores.shape[1:] != (rows, columns):
        scores = F.interpolate(scores[:, None], (rows, columns), mode="bilinear")[:, 0]
    return scores.flatten(1).argmax(1)


@dataclass(frozen=True)
class _Attack:
    """low, high: (1, c, 1, 1), black and white after normalization."""

    vit: ViT
    low: Tensor
    high: Tensor
    grid: tuple[int, int]
    step: float
    weight: float

    def run(
        self,
        clean: Images,
        labels: Labels,
        logits: Float[Tensor, "b classes"],
        patches: Int[Tensor, " b"],
        draws: list[torch.Generator],
        steps: int,
        stop_early: bool,
    ) -> tuple[Images, Int[Tensor, " b"]]:
        """The attacked images, and the number of steps until the first wrong prediction."""
        noise = torch.stack([torch.rand(clean.shape[1:], generator=g, dtype=clean.dtype) for g in draws])
        inside = self._inside(clean, patches)
        start = self.low + noise.to(clean) * (self.high - self.low)
        now = torch.where(inside, start, clean)
        taken = torch.full_like(labels, steps)
        wrong = logits.argmax(1) != labels
        taken[wrong] = 0
        going = torch.arange(len(clean), device=clean.device)
        if stop_early:
            now[wrong] = clean[wrong]
            going = going[~wrong]
        first, second = torch.zeros_like(clean), torch.zeros_like(clean)
        for t in range(steps):
            if not len(going):
                break
            logits, slope = self._gradient(now[going], labels[going], patches[going], inside[going])
            missed = logits.argmax(1) != labels[going]
            self._note(taken, going, missed, t)
            if stop_early:
                going, slope = going[~missed], slope[~missed]
            first[going] = MOMENTUM * first[going] + (1 - MOMENTUM) * slope
            second[going] = SQUARES * second[going] + (1 - SQUARES) * slope.square()
            mean, square = (
                moment[going] / (1 - rate ** (t + 1))
                for moment, rate in ((first, MOMENTUM), (second, SQUARES))
            )
            size = self.step * DECAY ** (t // DECAY_EVERY)
            moved = now[going] + size * mean / (square.sqrt() + TINY)
            moved = torch.minimum(torch.maximum(moved, self.low), self.high)
            now[going] = torch.where(inside[going], moved, clean[going])
        with torch.no_grad():
            if len(going):
                missed = self.vit(now[going]).argmax(1) != labels[going]
                self._note(taken, going, missed, steps)
        return now, taken

    @staticmethod
    def _note(taken: Tensor, going: Tensor, missed: Bool[Tensor, " k"], steps: int) -> None:
        """Images that are misclassified for the first time were so after these steps."""
        taken[going[missed]] = taken[going[missed]].clamp(max=steps)

    def _inside(self, images: Images, patches: Int[Tensor, " b"]) -> Bool[Tensor, "b 1 h w"]:
        """The pixels of each image's patch."""
        height, width = images.shape[-2:]
        rows, columns = self.grid
        if height % rows or width % columns:
            raise InputError(
                f"patch_fool: expected images whose sides are multiples of the grid {rows} x {columns}, got "
                f"{height} x {width}"
            )
        down = torch.arange(height, device=images.device) // (height // rows)
        across = torch.arange(width, device=images.device) // (width // columns)
        return (down[:, None] * columns + across == patches[:, None, None])[:, None]

    def _gradient(
        self, images: Images, labels: Labels, patches: Int[Tensor, " b"], inside: Bool[Tensor, "b 1 h w"]
    ) -> tuple[Float[Tensor, "b classes"], Images]:
        """Logits, and the direction that raises the cross-entropy and the attention to the patch."""
        layers = range(1, len(self.vit.blocks) // 2) if self.weight else range(0)
        attention: list[Tensor] = []
        with torch.enable_grad():
            images = images.detach().requires_grad_()
            x = self.vit.embed(images)
            for layer, block in enumerate(self.vit.blocks):
                if layer not in layers:
                    x = block(x)
                    continue
                with Seam(want=Want(attention=True)) as seam:
                    record = seam.next_record()
                    x = block(x)
                a = torch.cat([found.a for found in record.attention], 1).mean(1)
                keys = (patches + self.vit.prefix)[:, None, None].expand(-1, a.shape[1], 1)
                attention.append(a.gather(2, keys)[..., 0].log().mean(1))
            logits = at_least_float32(self.vit.head(x))
            loss = F.cross_entropy(logits, labels, reduction="sum")

            def slope_of(value: Tensor) -> Images:
                (slope,) = torch.autograd.grad(value, images, retain_graph=True)
                return slope * inside

            slope = slope_of(loss)
            total = slope.clone()
            for value in attention:
                total += self.weight * _without_conflict(slope_of(value.sum()), slope)
        return logits.detach(), total


def _without_conflict(slope: Images, main: Images) -> Images:
    """The gradient, less its share along `main` where it points against it."""
    product = (slope * main).flatten(1).sum(1)
    length = main.flatten(1).norm(dim=1)
    share = torch.where(product < 0, product / length, torch.zeros_like(product))
    return slope - share[:, None, None, None] * main
