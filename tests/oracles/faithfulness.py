"""Faithfulness metrics by naive loops: one map, one image, one ratio, one pixel at a time."""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def ordered(values: list[float]) -> list[int]:
    """Indices by falling value, equal ones by index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def kept_logits(model, image: Tensor, keep: list[int]) -> Tensor:
    """Logits of a timm VisionTransformer with only the patches `keep`, without any view of ours."""
    x = model._pos_embed(model.patch_embed(image[None]))
    prefix = model.num_prefix_tokens
    x = model.norm_pre(x[:, list(range(prefix)) + [prefix + i for i in keep]])
    for block in model.blocks:
        x = block(x)
    return model.forward_head(model.norm(x))[0]


def trapezoid(curve: list[float], xs: list[float]) -> float:
    if len(xs) == 1:
        return curve[0]
    total = sum((xs[i + 1] - xs[i]) * (curve[i] + curve[i + 1]) / 2 for i in range(len(xs) - 1))
    return total / (xs[-1] - xs[0])


def removal(
    logits_of, image: Tensor, scores: Tensor, target: int, ratios: list[float], empty: bool = True
) -> dict:
    """The four scores of one map; logits_of(image, keep). empty=False: chance level without patches."""
    order = ordered(scores.flatten().tolist())
    p = len(order)
    whole = logits_of(image, list(range(p)))
    first = float(whole.softmax(0)[target])
    curves: dict[str, list[float]] = {"ia": [], "da": [], "ip": [], "dp": []}
    for ratio in ratios:
        k = int(ratio * p)
        for kind, keep in (("i", order[:k]), ("d", order[k:])):
            if not keep and not empty:
                right = probability = 1 / len(whole)
            else:
                logits = logits_of(image, keep)
                right, probability = float(int(logits.argmax()) == target), float(logits.softmax(0)[target])
            curves[kind + "a"].append(100 * right)
            curves[kind + "p"].append(100 * (first - probability))
    area = {name: trapezoid(curve, ratios) for name, curve in curves.items()}
    return {
        "insertion_accuracy": (area["ia"], curves["ia"]),
        "deletion_accuracy": (100 - area["da"], curves["da"]),
        "insertion_aopc": (100 - area["ip"], curves["ip"]),
        "deletion_aopc": (area["dp"], curves["dp"]),
    }


def bilinear(scores: Tensor, height: int, width: int) -> list[list[float]]:
    """Corners not aligned, edges held."""
    gh, gw = scores.shape
    out = []
    for y in range(height):
        row = []
        for x in range(width):
            sy, sx = max((y + 0.5) * gh / height - 0.5, 0), max((x + 0.5) * gw / width - 0.5, 0)
            y0, x0 = min(int(sy), gh - 1), min(int(sx), gw - 1)
            y1, x1, fy, fx = min(y0 + 1, gh - 1), min(x0 + 1, gw - 1), sy - y0, sx - x0
            top = (1 - fx) * float(scores[y0, x0]) + fx * float(scores[y0, x1])
            bottom = (1 - fx) * float(scores[y1, x0]) + fx * float(scores[y1, x1])
            row.append((1 - fy) * top + fy * bottom)
        out.append(row)
    return out


def painted(image: Tensor, pixels: list[float], count: int, paint: Tensor) -> Tensor:
    """The image with its first `count` pixels, by falling value, replaced."""
    image, width = image.clone(), image.shape[-1]
    for i in ordered(pixels)[:count]:
        image[:, i // width, i % width] = paint[:, i // width, i % width]
    return image


def diffmask(model, image: Tensor, pixels: list[float], noise: Tensor) -> dict[str, float]:
    """Areas of one image: accuracy and KL as in the paper (mean height) and as in the code (steps of 1)."""
    p0 = model(image[None])[0].softmax(0)
    c = int(p0.argmax())
    kl, accuracy, kl_code, accuracy_code = [], [], [], []
    for i in range(29):
        p = model(painted(image, pixels, len(pixels) * i // 28, noise)[None])[0].softmax(0)
        kl.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p0, p, strict=True)))
        accuracy.append(100.0 * (int(p.argmax()) == c))
        kl_code.append(-math.log(float(p[c])))
        accuracy_code.append(float(p[c]))
    steps = [i / 28 for i in range(29)]
    return {
        "kl": trapezoid(kl, steps),
        "accuracy": trapezoid(accuracy, steps),
        "kl_code": float(np.trapezoid(kl_code, dx=1)),
        "accuracy_code": float(np.trapezoid(accuracy_code, dx=1)),
    }


def swin_masked(model, image: Tensor, keep: Tensor) -> Tensor:
    """Logits of a one-stage timm Swin whose attention sees only the tokens `keep` (bool, on the grid)."""
    x = model.patch_embed(image[None])[0]  # (H, W, C)
    height, width, _ = x.shape
    there = [(i, j) for i in range(height) for j in range(width) if keep[i, j]]
    state = {position: x[position] for position in there}
    for block in model.layers[0].blocks:
        window, shift, attn = block.window_size[0], block.shift_size[0], block.attn
        table = attn.relative_position_bias_table

        def cell(position, w=window, s=shift):
            """(window, region that the shift joins, position in the window) after rolling by −shift."""
            rolled = [(p - s) % n for p, n in zip(position, (height, width), strict=True)]
            region = [
                0 if not s or r < n - w else 1 if r < n - s else 2
                for r, n in zip(rolled, (height, width), strict=True)
            ]
            return tuple(r // w for r in rolled), tuple(region), tuple(r % w for r in rolled)

        qkv = {p: attn.qkv(block.norm1(state[p])).view(3, attn.num_heads, -1) for p in there}
        after = {}
        for p in there:
            window_p, region_p, local_p = cell(p)
            keys = [k for k in there if cell(k)[:2] == (window_p, region_p)]
            heads = []
            for h in range(attn.num_heads):
                scores = []
                for k in keys:
                    local_k = cell(k)[2]
                    dy, dx = (a - b + window - 1 for a, b in zip(local_p, local_k, strict=True))
                    bias = table[dy * (2 * window - 1) + dx, h]
                    scores.append((qkv[p][0, h] * qkv[k][1, h]).sum() * attn.scale + bias)
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(w * qkv[k][2, h] for w, k in zip(weights, keys, strict=True)))
            y = state[p] + attn.proj(torch.cat(heads))
            after[p] = y + block.mlp(block.norm2(y))
        state = after
    pooled = torch.stack([model.norm(state[p]) for p in there]).mean(0)
    return model.head.fc(pooled)


def srg(logits_of, image: Tensor, scores: Tensor, target: int, ratios: list[float]) -> float:
    """Area between two removal curves of the probability, in percent: least important first, most first. Both
    remove int(r P) patches."""
    order = ordered(scores.flatten().tolist())
    p = len(order)

    def probability(keep: list[int]) -> float:
        return 100 * float(logits_of(image, keep).softmax(0)[target])

    most = [probability(order[int(r * p) :]) for r in ratios]
    least = [probability(order[: p - int(r * p)]) for r in ratios]
    return trapezoid(least, ratios) - trapezoid(most, ratios)


def saco(logits_of, image: Tensor, scores: Tensor, target: int, groups: int = 10) -> float:
    """The salience-guided faithfulness coefficient, pair by pair, as its algorithm is printed."""
    values = scores.flatten().tolist()
    order = ordered(values)
    p = len(order)
    groups = min(groups, p)
    sizes = [p // groups + (i < p % groups) for i in range(groups)]
    parts, start = [], 0
    for size in sizes:
        parts.append(order[start : start + size])
        start += size
    whole = float(logits_of(image, list(range(p))).softmax(0)[target])
    salience = [sum(values[j] for j in part) / len(part) for part in parts]
    lost = []
    for part in parts:
        rest = [j for j in range(p) if j not in part]
        lost.append(whole - float(logits_of(image, rest).softmax(0)[target]))
    coefficient = total = 0.0
    for i in range(groups):
        for j in range(i + 1, groups):
            weight = salience[i] - salience[j]
            weight = weight if lost[i] >= lost[j] else -weight
            coefficient += weight
            total += abs(weight)
    return coefficient / total


def removal_check(logits_of, image: Tensor, scores: Tensor, target: int, random: list[list[int]]) -> dict:
    """The check of one map, against these random orders, with one run for each subset."""
    order, ratios = ordered(scores.flatten().tolist()), [0.1, 0.3, 0.5, 0.7, 0.9]
    p = len(order)
    ratios = [r for r in ratios if int(min(r, 1 - r + 1e-9) * p) > 0]

    def probability(keep: list[int]) -> float:
        return float(logits_of(image, keep).softmax(0)[target])

    def curves(patches: list[int], at: list[float]) -> tuple[list[float], list[float]]:
        counts = [int(r * p) for r in at]
        return [probability(patches[:k]) for k in counts], [probability(patches[k:]) for k in counts]

    def gain(insertion: list[float], deletion: list[float], at: list[float]) -> float:
        return (trapezoid(insertion, at) - trapezoid(deletion, at)) / 2

    insertion, deletion = curves(order, ratios)
    fewer = ratios[::2]
    of_random = [curves(patches, fewer) for patches in random]
    measured = []
    for i in range(len(fewer)):
        removed = [d[i] for _, d in of_random] + [kept[-1 - i] for kept, _ in of_random]
        measured.append(sum(removed) / len(removed))
    chance = [measured[0]]
    for before, after in pairwise(measured):
        chance += [(before + after) / 2, after]
    return {
        "whole": probability(list(range(p))),
        "insertion": insertion,
        "deletion": deletion,
        "chance": chance,
        "versus_chance": gain(insertion, deletion, ratios),
        "spread": max(abs(gain(*pair, fewer)) for pair in of_random),
    }


def correlation(x: list[float], y: list[float]) -> float:
    """Pearson's."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return above / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def subset_scores(
    logits_of, image: Tensor, scores: Tensor, target: int, sets: list[list[int]]
) -> tuple[list[float], list[float]]:
    """Sum of the scores of each set of patches, and the probability that is lost without it."""
    values = scores.flatten().tolist()
    everything = range(len(values))
    whole = float(logits_of(image, list(everything)).softmax(0)[target])
    left = [logits_of(image, [j for j in everything if j not in hidden]) for hidden in sets]
    return [sum(values[j] for j in hidden) for hidden in sets], [
        whole - float(logits.softmax(0)[target]) for logits in left
    ]


def infidelity(attributed: list[float], lost: list[float], scaled: bool) -> float:
    beta = 1.0
    if scaled:
        beta = sum(a * d for a, d in zip(attributed, lost, strict=True)) / sum(a * a for a in attributed)
    return sum((beta * a - d) ** 2 for a, d in zip(attributed, lost, strict=True)) / len(lost)


def monotonicity(logits_of, image: Tensor, scores: Tensor, target: int, ratios: list[float]) -> float:
    """Share of steps without a loss, in percent, from the P − int(r P) least important patches to all."""
    order = ordered(scores.flatten().tolist())
    p = len(order)
    kept = [order[int(r * p) :] for r in sorted(ratios, reverse=True)] + [order]
    curve = [float(logits_of(image, keep).softmax(0)[target]) for keep in kept]
    return 100 * sum(b >= a for a, b in pairwise(curve)) / (len(curve) - 1)


def imputed(image: Tensor, hidden: Tensor) -> Tensor:
    """Each hidden pixel is the weighted mean of its neighbors: a dense system, equation by equation."""
    _, height, width = image.shape
    places = [(y, x) for y in range(height) for x in range(width) if hidden[y, x]]
    left = torch.zeros(len(places), len(places), dtype=torch.float64)
    right = torch.zeros(len(places), len(image), dtype=torch.float64)
    for row, (y, x) in enumerate(places):
        for ny in (y - 1, y, y + 1):
            for nx in (x - 1, x, x + 1):
                if (ny, nx) == (y, x) or not (0 <= ny < height and 0 <= nx < width):
                    continue
                weight = 1 / 6 if ny == y or nx == x else 1 / 12
                left[row, row] += weight
                if hidden[ny, nx]:
                    left[row, places.index((ny, nx))] -= weight
                else:
                    right[row] += weight * image[:, ny, nx].double()
    solution = torch.linalg.solve(left, right)
    out = image.clone().double()
    for (y, x), value in zip(places, solution, strict=True):
        out[:, y, x] = value
    return out


def gini(values: list[float]) -> float:
    """Mean absolute difference of all pairs over twice the mean, of absolute values."""
    v = [abs(x) for x in values]
    return sum(abs(a - b) for a in v for b in v) / (2 * len(v) * sum(v))


def entropy(values: list[float]) -> float:
    """Of the shares of absolute values, in nats."""
    total = sum(abs(x) for x in values)
    return -sum(abs(x) / total * math.log(abs(x) / total) for x in values if x)


def histogram_entropy(values: list[float], bins: int) -> float:
    low, high = min(values), max(values)
    counts = [0] * bins
    for x in values:
        counts[min(int((x - low) / (high - low) * bins), bins - 1)] += 1
    return entropy([float(c) for c in counts])


def relative_change(before: list[float], after: list[float]) -> float:
    above = math.sqrt(sum((a - b) ** 2 for a, b in zip(before, after, strict=True)))
    return above / math.sqrt(sum(a**2 for a in before))
