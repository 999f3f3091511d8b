"""AutoAttack, standard version: APGD-CE, APGD-T, FAB-T and Square, one after the other; L∞ and L2.

Croce & Hein, arXiv:2003.01690 (APGD, AutoAttack), arXiv:1907.02044 (FAB); Andriushchenko et al.,
arXiv:1912.00049 (Square). Each attack is given the images that survived those before it; an image is robust
if it is classified correctly, clean and after all four. No setting is left to choose.

| symbol | meaning | in code |
| --- | --- | --- |
| x, y | pixels in [0, 1], label | `clean`, `labels` |
| ε | radius of the ball around x | `epsilon` |
| z | logits | `logits` |
| x⁽ᵏ⁾, η | point and step size of APGD | `now`, `size` |
| w | interval between two checks of the step size | `interval` |
| t | target class: the second to the tenth most likely one of the clean image | `target` |
| w, d | gradient of z_t - z_y, distance of the hyperplane (FAB) | `normal`, `gap` |
| s | side of the squares (Square) | `side` |

Random numbers of an image follow from its own seed, in the order in which the authors' code draws them for a
single image, so its outcome does not depend on its neighbors.

Formulas: docs/equations.md#autoattack.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.robustness.attacks import Images, budget, checked_labels, pixels_of
from steadygaze.robustness.protocols import ATTACKS, QUERIES, STEPS, TARGETS, Norm
from steadygaze.target import at_least_float32
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.view import ViT

PerImage = Float[Tensor, " b"]
Labels = Int[Tensor, " b"]
Loss = Callable[[Tensor], Tensor]  # logits (b, classes) -> (b,)

RHO = 0.75  # APGD: share of steps that must raise the loss
MOMENTUM = 0.75
ALPHA_MAX, OVERSHOOT, BACK = 0.1, 1.05, 0.9  # FAB
SQUARES = 0.8  # Square: share of the image in the first squares
HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which that share is halved
TINY = 1e-12


@dataclass(frozen=True)
class AutoAttacked:
    """Outcome of AutoAttack.

    Attributes:
        images: (B, C, H, W), normalized: the adversarial image where one was found, otherwise the clean one.
        labels: (B,).
        predicted: "clean" and each attack -> (B,), the predicted classes after it.
    """

    images: Images
    labels: Labels
    predicted: dict[str, Labels]

    def robust(self, after: str = ATTACKS[-1]) -> Bool[Tensor, " b"]:
        """Which images are still classified correctly after this attack and all before it."""
        return self.predicted[after] == self.labels


def autoattack(
    model: nn.Module | ViT,
    images: Images,
    labels: Int[Tensor, " b"],
    *,
    norm: Norm,
    epsilon: float,
    mean: Sequence[float],
    std: Sequence[float],
    seeds: int | Sequence[int] = 0,
    steps: int = STEPS,
    queries: int = QUERIES,
) -> AutoAttacked:
    """Attack by the standard version of AutoAttack; each attack only what survived those before it.

    Args:
        model (nn.Module | ViT): any classifier with four classes or more.
        images (Tensor): (B, C, H, W), normalized.
        labels (Tensor): (B,), class indices.
        norm (str): "linf" or "l2".
        epsilon (float): radius, in pixels of range 0..1: largest change of a pixel, or length of the change.
        mean (Sequence[float]): of the normalization, one number per channel.
        std (Sequence[float]): of the normalization.
        seeds (int | Sequence[int]): of the random numbers: one for all images, or one for each.
        steps (int): of APGD and FAB; published: 100.
        queries (int): of Square; published: 5000.

    Returns:
        AutoAttacked: attacked images and predictions after each attack; `.robust()` for the survivors.

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.zeros(2, 3, 32, 32)
        >>> options = {"norm": "linf", "epsilon": 8 / 255, "mean": loaded.mean, "std": loaded.std}
        >>> result = autoattack(loaded.model, images, torch.tensor([3, 5]), steps=2, queries=2, **options)
        >>> list(result.predicted)
        ['clean', 'apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    if norm not in ("linf", "l2"):
        raise InputError(f"norm: expected linf or l2, got {norm!r}")
    epsilon = budget("epsilon", epsilon) if norm == "linf" else _radius(epsilon)
    for name, count in (("steps", steps), ("queries", queries)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name}: expected a whole number of 1 or more, got {count!r}")
    clean, m, s = pixels_of(images, mean, std)
    labels = checked_labels(labels, len(clean), clean.device)
    of_image = [seeds] * len(clean) if isinstance(seeds, int) else list(seeds)
    if len(of_image) != len(clean):
        raise InputError(f"seeds: expected one, or one for each of {len(clean)} images, got {len(of_image)}")
    with torch.inference_mode(False), evaluation_mode(model.model if isinstance(model, ViT) else model):
        attacker = _Attacker(lambda x: logits_of(model((x - m) / s)), norm, epsilon, steps, queries)
        found, predicted = attacker.run(clean.clone(), labels, of_image)
    return AutoAttacked(((found - m) / s).detach(), labels, predicted)


def _radius(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"epsilon: expected a number of 0 or more, such as 0.5, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class _Attacker:
    """predict: pixels in [0, 1] -> logits."""

    predict: Callable[[Tensor], Tensor]
    norm: Norm
    epsilon: float
    steps: int
    queries: int

    def run(self, clean: Images, labels: Labels, seeds: Sequence[int]) -> tuple[Images, dict[str, Labels]]:
        logits = self._logits(clean)
        classes = logits.shape[1]
        if classes < 4:
            raise InputError(
                f"autoattack: expected a model with 4 classes or more, which its loss needs, got {classes}"
            )
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            lowest, highest = int(labels.min()), int(labels.max())
            raise InputError(f"labels: expected classes 0..{classes - 1}, got {lowest}..{highest}")
        now = logits.argmax(1)
        ranked = logits.argsort(1, descending=True)
        found, predicted = clean.clone(), {"clean": now.clone()}
        attacks = (self._apgd_ce, self._apgd_t, self._fab_t, self._square)
        for name, attack in zip(ATTACKS, attacks, strict=True):
            left = (now == labels).nonzero()[:, 0]
            if len(left):
                draws = [torch.Generator().manual_seed(seeds[i]) for i in left.tolist()]
                targets = ranked[left, 1 : TARGETS + 1]
                attacked = attack(clean[left], labels[left], targets, draws)
                after = self._logits(attacked).argmax(1)
                fell = after != labels[left]
                found[left[fell]], now[left[fell]] = attacked[fell], after[fell]
            predicted[name] = now.clone()
        return found, predicted

    # -- APGD --------------------------------------------------------------------------------------

    def _apgd_ce(self, x: Images, y: Labels, targets: Tensor, draws: list[torch.Generator]) -> Images:
        adversarial, _ = self._apgd(x, y, draws, lambda logits: F.cross_entropy(logits, y, reduction="none"))
        return adversarial

    def _apgd_t(self, x: Images, y: Labels, targets: Tensor, draws: list[torch.Generator]) -> Images:
        return self._by_target(
            x,
            targets,
            lambda some, target: self._apgd(
                x[some],
                y[some],
                [draws[i] for i in some.tolist()],
                lambda logits: dlr_targeted(logits, y[some], target),
            ),
        )

    def _by_target(
        self,
        x: Images,
        targets: Int[Tensor, "b t"],
        attack: Callable[[Tensor, Tensor], tuple[Images, Bool[Tensor, " b"]]],
    ) -> Images:
        """Target after target, on the images that no target before has fooled."""
        found, standing = x.clone(), torch.ones(len(x), dtype=torch.bool, device=x.device)
        for rank in range(targets.shape[1]):
            some = standing.nonzero()[:, 0]
            if not len(some):
                break
            attacked, fooled = attack(some, targets[some, rank])
            found[some[fooled]] = attacked[fooled]
            standing[some[fooled]] = False
        return found

    def _apgd(
        self, x: Images, y: Labels, draws: list[torch.Generator], loss: Loss
    ) -> tuple[Images, Bool[Tensor, " b"]]:
        """Auto-PGD: momentum, and a step size that is halved where the loss has stopped rising."""
        now = (x + self.epsilon * self._unit(self._noise(x, draws))).clamp(0, 1)
        logits, value, slope = self._slope(now, loss)
        fooled = logits.argmax(1) != y
        adversarial, before = now.clone(), now
        best, best_value, best_slope = now.clone(), value.clone(), slope.clone()
        size = torch.full_like(value, 2 * self.epsilon)
        history = [torch.zeros_like(value)]  # the published code takes 0 as the loss before the first step
        checked_value, halved = best_value.clone(), torch.ones_like(fooled)
        interval, since = max(int(0.22 * self.steps), 1), 0
        for step in range(self.steps):
            direction = slope.sign() if self.norm == "linf" else self._unit(slope)
            ahead = self._into_ball(x, now + _wide(size) * direction)
            share = MOMENTUM if step else 1.0
            ahead = self._into_ball(x, now + share * (ahead - now) + (1 - share) * (now - before))
            before, now = now, ahead
            logits, value, slope = self._slope(now, loss)
            wrong = logits.argmax(1) != y
            fooled = fooled | wrong
            adversarial = torch.where(_wide(wrong), now, adversarial)
            history.append(value)
            better = value > best_value
            best, best_slope = (
                torch.where(_wide(better), new, old) for new, old in ((now, best), (slope, best_slope))
            )
            best_value = torch.where(better, value, best_value)
            since += 1
            if since == interval:
                recent = torch.stack(history[-interval - 1 :])
                rises = (recent[1:] > recent[:-1]).sum(0)
                stuck = ~halved & (checked_value >= best_value)
                halved = (rises <= RHO * interval) | stuck
                checked_value = best_value.clone()
                size = torch.where(halved, size / 2, size)
                now, slope = (
                    torch.where(_wide(halved), new, old) for new, old in ((best, now), (best_slope, slope))
                )
                interval = max(interval - max(int(0.03 * self.steps), 1), max(int(0.06 * self.steps), 1))
                since = 0
        return adversarial, fooled

    # -- FAB ---------------------------------------------------------------------------------------

    def _fab_t(self, x: Images, y: Labels, targets: Tensor, draws: list[torch.Generator]) -> Images:
        return self._by_target(x, targets, lambda some, target: self._fab(x[some], y[some], target))

    def _fab(self, x: Images, y: Labels, target: Labels) -> tuple[Images, Bool[Tensor, " b"]]:
        """Fast adaptive boundary attack: the smallest change that crosses the boundary to the target."""
        rows = torch.arange(len(x), device=x.device)
        now, found = x.clone(), x.clone()
        shortest = torch.full((len(x),), float("inf"), dtype=x.dtype, device=x.device)
        for _ in range(self.steps):
            _, gap, normal = self._slope(now, lambda logits: logits[rows, target] - logits[rows, y])
            from_now = self._to_hyperplane(now, normal, gap)
            from_clean = self._to_hyperplane(x, normal, gap + (normal * (x - now)).flatten(1).sum(1))
            a, b = (self._length(change).clamp(min=1e-8) for change in (from_now, from_clean))
            alpha = _wide((a / (a + b)).clamp(max=ALPHA_MAX))
            now = (1 - alpha) * (now + OVERSHOOT * from_now) + alpha * (x + OVERSHOOT * from_clean)
            now = now.clamp(0, 1)
            wrong = self._logits(now).argmax(1) != y
            length = self._length(now - x)
            shorter = wrong & (length < shortest)
            found = torch.where(_wide(shorter), now, found)
            shortest = torch.where(shorter, length, shortest)
            now = torch.where(_wide(wrong), x + BACK * (now - x), now)
        return found, shortest <= self.epsilon

    def _to_hyperplane(self, x: Images, normal: Images, gap: PerImage) -> Images:
        """The smallest d with 0 <= x + d <= 1 and gap + normal·d = 0; where there is none, the nearest to it.

        d moves each pixel by λ (L∞) or λ |normal| (L2) against the sign of the gap, up to its limit 0 or 1; λ
        is where these moves, a piecewise linear function of it, make up for the gap.
        """
        wide_normal = normal
        normal = (normal * _wide(torch.where(gap >= 0, 1.0, -1.0).to(gap))).flatten(1)
        pixels, weight = x.flatten(1), normal.abs()
        room = torch.where(normal > 0, pixels, torch.where(normal < 0, 1 - pixels, 0.0))
        speed = torch.ones_like(weight) if self.norm == "linf" else weight
        ends, order = (room / speed.clamp(min=TINY)).sort(1)  # λ at which a pixel reaches its limit
        at_limit = (weight * room).gather(1, order).cumsum(1)
        moving = (weight * speed).gather(1, order)
        still = moving.sum(1, keepdim=True) - moving.cumsum(1)  # of the pixels after this one
        reached = at_limit + ends * still
        first = (reached < gap.abs()[:, None]).sum(1, keepdim=True).clamp(max=ends.shape[1] - 1)
        of_first = (weight * room).gather(1, order).gather(1, first), moving.gather(1, first)
        rest = gap.abs()[:, None] - (at_limit.gather(1, first) - of_first[0])
        scale = rest / (still.gather(1, first) + of_first[1]).clamp(min=TINY)
        change = -normal.sign() * torch.minimum(scale * speed, room)
        return change.view_as(wide_normal)

    # -- Square ------------------------------------------------------------------------------------

    def _square(self, x: Images, y: Labels, targets: Tensor, draws: list[torch.Generator]) -> Images:
        """Square attack: random squares, kept where they lower the margin; no gradient."""
        channels, height, width = x.shape[1:]
        best = self._stripes(x, draws) if self.norm == "linf" else self._tiles(x, draws)
        margin = self._margin(best, y)
        count = channels + (2 if self.norm == "linf" else 5)
        numbers = _uniform(draws, (self.queries, count))
        for query in range(self.queries):
            some = (margin > 0).nonzero()[:, 0]
            if not len(some):
                break
            share = SQUARES / 2 ** sum(query > bound for bound in HALVED_AFTER)
            side = max(round(math.sqrt(share * height * width)), 1 if self.norm == "linf" else 3)
            if self.norm == "l2" and side % 2 == 0:
                side += 1
            side = min(side, height, width)
            own = numbers[some.cpu(), query]
            propose = self._new_square if self.norm == "linf" else self._new_bump
            candidate = propose(x[some], best[some], own.to(x), side)
            lower = self._margin(candidate, y[some])
            kept = lower < margin[some]
            best[some[kept]], margin[some[kept]] = candidate[kept], lower[kept]
        return best

    def _stripes(self, x: Images, draws: list[torch.Generator]) -> Images:
        signs = (2 * _uniform(draws, (x.shape[1], 1, x.shape[3])) - 1).sign().to(x)
        return (x + self.epsilon * signs).clamp(0, 1)

    def _new_square(self, x: Images, best: Images, numbers: Float[Tensor, "b n"], side: int) -> Images:
        inside = _windows(x, numbers[:, :2], side)
        signs = _wide2(numbers[:, 2:])
        return self._into_ball(x, best + 2 * self.epsilon * signs * inside)

    def _tiles(self, x: Images, draws: list[torch.Generator]) -> Images:
        """L2: a grid of five by five bumps, or a few more."""
        channels, height, width = x.shape[1:]
        side = max(height // 5, 1)
        margin = max((height - 5 * side) // 2, 0)
        change = torch.zeros_like(x)
        tops, lefts = (range(margin, margin + length // side * side, side) for length in (height, width))
        for top in tops:
            for left in lefts:
                numbers = _uniform(draws, (1 + channels,)).to(x)
                room = change[:, :, top : top + side, left : left + side]
                room += _bumps(numbers[:, :1], numbers[:, 1:], side)[:, :, : room.shape[2], : room.shape[3]]
        return (x + self.epsilon * self._unit(change)).clamp(0, 1)

    def _new_bump(self, x: Images, best: Images, numbers: Float[Tensor, "b n"], side: int) -> Images:
        """L2: a new bump in one window gets the length of the change in another one, which is erased.

        Lengths are those of each channel; what the whole change lacks of ε² is shared by the channels.
        """
        change = best - x
        here, there = (_windows(x, numbers[:, start : start + 2], side) for start in (0, 2))
        spare = (self.epsilon**2 - self._length(change) ** 2).clamp(min=0) / x.shape[1]
        in_windows = (change * (here | there)).square().sum((2, 3), keepdim=True)
        length = (_wide(spare) + in_windows).sqrt()
        old = change * here
        old = old / (TINY + old.square().sum((2, 3), keepdim=True).sqrt())
        bumps = _bumps(numbers[:, 4:5], numbers[:, 5:], side)
        placed = torch.zeros_like(x)
        placed[here.expand_as(x)] = bumps.flatten()  # a window is read row by row, as a bump is
        new = placed + old
        new = length * new / (TINY + new.square().sum((2, 3), keepdim=True).sqrt())
        change = torch.where(here, new, torch.where(there, torch.zeros_like(change), change))
        return (x + self.epsilon * self._unit(change)).clamp(0, 1)

    def _margin(self, x: Images, y: Labels) -> PerImage:
        logits = self._logits(x)
        of_label = logits.gather(1, y[:, None])[:, 0]
        return of_label - logits.scatter(1, y[:, None], -float("inf")).amax(1)

    # -- shared ------------------------------------------------------------------------------------

    def _logits(self, x: Images) -> Float[Tensor, "b classes"]:
        with torch.no_grad():
            return at_least_float32(self.predict(x))

    def _slope(self, x: Images, loss: Loss) -> tuple[Tensor, PerImage, Images]:
        """Logits, the loss of each image, and its gradient."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            logits = at_least_float32(self.predict(x))
            value = loss(logits)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return logits.detach(), value.detach(), slope

    def _noise(self, x: Images, draws: list[torch.Generator]) -> Images:
        if self.norm == "linf":
            return (2 * _uniform(draws, x.shape[1:]) - 1).to(x)
        return torch.stack([torch.randn(x.shape[1:], generator=g) for g in draws]).to(x)

    def _length(self, change: Images) -> PerImage:
        if self.norm == "linf":
            return change.abs().flatten(1).amax(1)
        return change.square().flatten(1).sum(1).sqrt()

    def _unit(self, change: Images) -> Images:
        return change / (_wide(self._length(change)) + TINY)

    def _into_ball(self, x: Images, point: Images) -> Images:
        """The point, moved into the ball around x and into the range of pixels."""
        if self.norm == "linf":
            return torch.minimum(torch.maximum(point, x - self.epsilon), x + self.epsilon).clamp(0, 1)
        change = point - x
        length = self._length(change).clamp(max=self.epsilon)
        return (x + _wide(length) * self._unit(change)).clamp(0, 1)


def dlr_targeted(logits: Float[Tensor, "b classes"], label: Labels, target: Labels) -> PerImage:
    """Targeted difference of logits ratio: how far the target is above the label, whatever the scale."""
    top = logits.sort(1, descending=True).values
    rows = torch.arange(len(logits), device=logits.device)
    spread = top[:, 0] - (top[:, 2] + top[:, 3]) / 2
    return (logits[rows, target] - logits[rows, label]) / (spread + TINY)


def _wide(values: Tensor) -> Tensor:
    """(b,) -> (b, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def _wide2(numbers: Float[Tensor, "b c"]) -> Float[Tensor, "b c 1 1"]:
    """The signs of numbers in 0..1 about one half, one for each channel."""
    return (2 * numbers - 1).sign()[:, :, None, None]


def _uniform(draws: list[torch.Generator], shape: Sequence[int]) -> Tensor:
    """U(0, 1), for each image from its own generator, on the CPU."""
    return torch.stack([torch.rand(tuple(shape), generator=g) for g in draws])


def _windows(x: Images, numbers: Float[Tensor, "b 2"], side: int) -> Bool[Tensor, "b 1 h w"]:
    """A square window in each image; numbers in 0..1 say where."""
    inside = []
    for axis, length in enumerate(x.shape[2:]):
        start = ((length - side) * numbers[:, axis]).long()[:, None]
        places = torch.arange(length, device=x.device)[None]
        inside.append((places >= start) & (places < start + side))
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def _bumps(
    turned: Float[Tensor, "b 1"], numbers: Float[Tensor, "b c"], side: int
) -> Float[Tensor, "b c s s"]:
    """Square attack, L2: a hill beside a hollow, of length 1, with a sign for each channel."""
    upper = side // 2
    bump = torch.cat([_hill(upper, side), -_hill(side - upper, side)]).to(numbers)
    bump = bump / bump.square().sum().sqrt()
    return torch.where(turned[:, :, None, None] > 0.5, bump.T, bump) * _wide2(numbers)


def _hill(rows: int, columns: int) -> Float[Tensor, "r c"]:
    """The sum of 1 / (k+1)² over the rings k around a pixel and beyond; of length 1."""
    down = (torch.arange(rows) - rows // 2).abs()[:, None]
    across = (torch.arange(columns) - columns // 2).abs()[None]
    rings = 1 / torch.arange(1, max(rows // 2, columns // 2) + 2, dtype=torch.float64).square()
    beyond = rings.flip(0).cumsum(0).flip(0)
    hill = beyond[torch.maximum(down, across)]
    return hill / hill.square().sum().sqrt() if rows else hill
