"""APGD, FAB and Square for one image, slow and obvious, from the algorithms of the papers.

`model` maps one image (C,H,W) in [0, 1] to logits. Random numbers are given, so that others can use the same.
"""

from collections.abc import Callable
from math import ceil, sqrt

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]


def size_of(d: Tensor, norm: str) -> float:
    return float(d.abs().max()) if norm == "linf" else sqrt(float((d * d).sum()))


def project(x: Tensor, z: Tensor, norm: str, epsilon: float) -> Tensor:
    """z into the ball around x, then into [0, 1]."""
    d = z - x
    if norm == "linf":
        d = d.clip(-epsilon, epsilon)
    elif size_of(d, norm) > epsilon:
        d = d * epsilon / size_of(d, norm)
    return (x + d).clip(0, 1)


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, Tensor]:
    leaf = x.clone().requires_grad_()
    value = f(leaf)
    (g,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), g


def checkpoints(steps: int) -> list[int]:
    """Croce & Hein 2020, section 3.2: 0, 22 %, then each interval 3 % shorter, at least 6 %."""
    p = [0.0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    return [ceil(round(share * steps, 9)) for share in p]


def apgd(
    model: Model, f: Callable[[Tensor], Tensor], x: Tensor, y: int, noise: Tensor, norm: str, epsilon: float
) -> Tensor:
    """Algorithm 1 with 100 steps: the last point that is misclassified, else the start."""
    steps, eta, w = 100, 2 * epsilon, checkpoints(100)
    points = [(x + epsilon * noise / size_of(noise, norm)).clip(0, 1)]
    found = points[0]
    value, g = gradient(f, points[0])
    values = [0.0]  # of the authors' code: it compares the first step with 0
    best, best_value, best_g = points[0], value, g
    was_halved, best_at_check = True, best_value
    for k in range(steps):
        direction = g.sign() if norm == "linf" else g / size_of(g, norm)
        z = project(x, points[-1] + eta * direction, norm, epsilon)
        if k:
            z = project(
                x, points[-1] + 0.75 * (z - points[-1]) + 0.25 * (points[-1] - points[-2]), norm, epsilon
            )
        points.append(z)
        if int(model(z).argmax()) != y:
            found = z
        value, g = gradient(f, z)
        values.append(value)
        if value > best_value:
            best, best_value, best_g = z, value, g
        if k + 1 in w:
            start = w[w.index(k + 1) - 1]
            rises = sum(values[i + 1] > values[i] for i in range(start, k + 1))
            stuck = not was_halved and best_at_check == best_value
            was_halved = rises <= 0.75 * (k + 1 - start) or stuck
            best_at_check = best_value
            if was_halved:
                eta, g = eta / 2, best_g
                points[-1] = best
    return found


def to_hyperplane(x: Tensor, w: Tensor, b: float, norm: str) -> Tensor:
    """The smallest d with b + w·d = 0 and x + d in [0, 1], by bisection of its multiplier."""

    def change(multiplier: float) -> Tensor:
        against = -w.sign() if b >= 0 else w.sign()
        d = multiplier * against * (1 if norm == "linf" else w.abs())
        return (x + d).clip(0, 1) - x

    low, high = 0.0, 1.0
    while abs(float((w * change(high)).sum())) < abs(b) and high < 1e12:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        enough = abs(float((w * change(middle)).sum())) >= abs(b)
        low, high = (low, middle) if enough else (middle, high)
    return change(high)


def fab(model: Model, x: Tensor, y: int, target: int, norm: str, steps: int) -> Tensor:
    """Croce & Hein 2020a: the closest point that is misclassified, else x."""
    now, found, closest = x, x, float("inf")
    for _ in range(steps):
        b, w = gradient(lambda z: model(z)[target] - model(z)[y], now)
        here = to_hyperplane(now, w, b, norm)
        there = to_hyperplane(x, w, b + float((w * (x - now)).sum()), norm)
        alpha = min(size_of(here, norm) / (size_of(here, norm) + size_of(there, norm)), 0.1)
        now = ((1 - alpha) * (now + 1.05 * here) + alpha * (x + 1.05 * there)).clip(0, 1)
        if int(model(now).argmax()) != y:
            if size_of(now - x, norm) < closest:
                found, closest = now, size_of(now - x, norm)
            now = 0.1 * x + 0.9 * now
    return found


def bump(side: int, turned: bool) -> Tensor:
    """Andriushchenko et al. 2020, section 4.2: a hill above a hollow, of length 1; turned: beside it."""

    def hill(rows: int) -> Tensor:
        value = torch.zeros(rows, side, dtype=torch.float64)
        for r in range(rows):
            for c in range(side):
                distance = max(abs(r - rows // 2), abs(c - side // 2))
                value[r, c] = sum(1 / (k + 1) ** 2 for k in range(distance, max(rows // 2, side // 2) + 1))
        return value / value.norm() if rows else value

    value = torch.cat([hill(side // 2), -hill(side - side // 2)])
    return (value.T if turned else value) / value.norm()


def square(
    model: Model, x: Tensor, y: int, first: Tensor, numbers: Tensor, norm: str, epsilon: float
) -> Tensor:
    """Andriushchenko et al. 2020, algorithms 1 to 3, and the first change of section 4.

    first, numbers: in 0..1, of the first change (L∞: signs of stripes; L2: of each tile whether it is turned,
    and signs) and of each query (place, L2: of both windows and whether the bump is turned; signs).
    """

    def margin(z: Tensor) -> float:
        logits = model(z).detach()
        return float(logits[y] - max(logits[k] for k in range(len(logits)) if k != y))

    def of_length_epsilon(change: Tensor) -> Tensor:
        return (x + epsilon * change / change.norm()).clip(0, 1)

    channels, height, width = x.shape
    if norm == "linf":
        best = (x + epsilon * (2 * first - 1).sign()).clip(0, 1)
    else:
        side = max(height // 5, 1)
        margin_of_tiles = max((height - 5 * side) // 2, 0)
        change = torch.zeros_like(x)
        for tile, own in enumerate(first):
            row, column = divmod(tile, width // side)
            hills = bump(side, bool(own[0] > 0.5))
            for r in range(side):
                for c in range(side):
                    at = margin_of_tiles + row * side + r, margin_of_tiles + column * side + c
                    if at[0] < height and at[1] < width:
                        change[:, *at] = hills[r, c] * (2 * own[1:] - 1).sign()
        best = of_length_epsilon(change)
    for query, own in enumerate(numbers):
        if margin(best) <= 0:
            break
        share = 0.8 if query <= 10 else 0.4 if query <= 50 else 0.2 if query <= 200 else 0.1
        side = round(sqrt(share * height * width))
        side = max(side, 1) if norm == "linf" else max(side + 1 - side % 2, 3)
        side = min(side, height, width)
        corners = [
            (int((height - side) * float(own[k])), int((width - side) * float(own[k + 1]))) for k in (0, 2)
        ]
        here, there = ((slice(top, top + side), slice(left, left + side)) for top, left in corners)
        if norm == "linf":
            new = best.clone()
            for c in range(channels):
                new[c, *here] += 2 * epsilon * (1 if own[2 + c] > 0.5 else -1)
            new = project(x, new, "linf", epsilon)
        else:
            change, moved = best - x, best - x
            spare = max(epsilon**2 - float(change.norm()) ** 2, 0.0)
            moved[:, *there] = 0
            for c in range(channels):
                union = torch.zeros(height, width, dtype=torch.bool)
                union[here] = union[there] = True
                old, sign = change[c, *here], 1 if own[5 + c] > 0.5 else -1
                placed = sign * bump(side, bool(own[4] > 0.5)) + old / (old.norm() + 1e-12)
                length = sqrt(spare / channels + float(change[c][union].square().sum()))
                moved[c, *here] = length * placed / placed.norm()
            new = of_length_epsilon(moved)
        if margin(new) < margin(best):
            best = new
    return best
