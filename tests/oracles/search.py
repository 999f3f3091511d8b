"""Black-box methods, one run and one patch at a time, on plain timm VisionTransformers.

`f(model, image, keep, c)` is the probability of class c with only the patches of the list `keep`; maps are
(P,) of one image.
"""

from itertools import combinations
from math import acos, comb, exp, pi, sqrt
from math import log as logarithm
from typing import Any
from zlib import crc32

import torch
from torch import Tensor


def tokens_of(model: Any, image: Tensor) -> Tensor:
    """x^0 of one image, (N,d), before norm_pre."""
    return model._pos_embed(model.patch_embed(image[None]))[0].detach()


def answer(model: Any, tokens: Tensor) -> Tensor:
    """Logits (C,) of the tokens (N,d), as many as there are."""
    x = model.norm_pre(tokens[None])
    for block in model.blocks:
        x = block(x)
    return model.forward_head(model.norm(x))[0].detach()


def logits(model: Any, image: Tensor, keep: list[int], hide: str = "remove") -> Tensor:
    side, (_, columns), prefix = (
        model.patch_embed.patch_size[0],
        model.patch_embed.grid_size,
        model.num_prefix_tokens,
    )
    if hide == "fill":
        painted = torch.zeros_like(image)
        for j in keep:
            r, c = j // columns * side, j % columns * side
            painted[:, r : r + side, c : c + side] = image[:, r : r + side, c : c + side]
        return model(painted[None])[0].detach()
    if not keep and model.global_pool == "avg":
        return torch.zeros(model.num_classes, dtype=torch.float64)
    x = tokens_of(model, image)
    return answer(model, torch.cat([x[:prefix], *(x[prefix + j][None] for j in sorted(keep))]))


def f(model: Any, image: Tensor, keep: list[int], c: int, hide: str = "remove") -> float:
    y = logits(model, image, keep, hide)
    return float(y[c].exp() / y.exp().sum())


def patches(model: Any) -> int:
    return model.patch_embed.grid_size[0] * model.patch_embed.grid_size[1]


def draws(image: Tensor, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(str(seed).encode() + image.double().numpy().tobytes()))
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def halves(model: Any, image: Tensor, budget: int, seed: int) -> list[list[int]]:
    return [
        [j for j in range(patches(model)) if row[j] < 0.5]
        for row in draws(image, seed, budget, patches(model))
    ]


def occlusion(model: Any, image: Tensor, c: int, hide: str = "remove") -> Tensor:
    everything = list(range(patches(model)))
    whole = f(model, image, everything, c, hide)
    return torch.tensor(
        [whole - f(model, image, [k for k in everything if k != j], c, hide) for j in everything],
        dtype=torch.float64,
    )


def rise(model: Any, image: Tensor, c: int, budget: int, seed: int = 0, hide: str = "remove") -> Tensor:
    """A patch that was in no half has the mean of them."""
    answers, sets = [], [keep for keep in halves(model, image, budget, seed) if keep]
    for keep in sets:
        answers.append(f(model, image, keep, c, hide))
    scores = []
    for j in range(patches(model)):
        own = [p for p, keep in zip(answers, sets, strict=True) if j in keep] or answers
        scores.append(sum(own) / len(own))
    return torch.tensor(scores, dtype=torch.float64)


def lime(model: Any, image: Tensor, c: int, budget: int, seed: int = 0, hide: str = "remove") -> Tensor:
    """Ridge with an intercept, by its normal equations: the intercept is one more column without penalty."""
    P = patches(model)
    sets = halves(model, image, budget, seed)
    sets[0] = list(range(P))
    Z, y, w = torch.zeros(budget, P + 1, dtype=torch.float64), [], []
    for m, keep in enumerate(sets):
        Z[m, keep] = 1
        Z[m, P] = 1
        y.append(f(model, image, keep, c, hide))
        w.append(exp(-((1 - sqrt(len(keep) / P)) ** 2) / 0.25**2))
    penalty = torch.eye(P + 1, dtype=torch.float64)
    penalty[P, P] = 0
    W = torch.diag(torch.tensor(w, dtype=torch.float64))
    return torch.linalg.solve(Z.T @ W @ Z + penalty, Z.T @ W @ torch.tensor(y, dtype=torch.float64))[:P]


def shapley_sets(model: Any, image: Tensor, budget: int, seed: int = 0) -> list[list[int]]:
    P, sets = patches(model), []
    kernel = [
        (P - 1) / (comb(P, s) * s * (P - s)) * comb(P, s) for s in range(1, P)
    ]  # of all sets of a size together
    for i, row in enumerate(draws(image, seed, -(-budget // 2), P + 1).tolist()):
        size, mass = 1, kernel[0]
        while mass < row[0] * sum(kernel) and size < P - 1:
            size += 1
            mass += kernel[size - 1]
        chosen = sorted(sorted(range(P), key=lambda j, row=row: row[1 + j])[:size]) if i else list(range(P))
        sets += [chosen, [j for j in range(P) if j not in chosen]]
    return sets[:budget]


def kernel_shap(
    model: Any, image: Tensor, c: int, budget: int, seed: int = 0, hide: str = "remove"
) -> Tensor:
    """Least squares under Σ φ = f(all) − f(none), by Lagrange multipliers. Needs enough samples."""
    P = patches(model)
    sets = shapley_sets(model, image, budget, seed)
    y = torch.tensor([f(model, image, keep, c, hide) for keep in sets], dtype=torch.float64)
    Z = torch.zeros(budget, P, dtype=torch.float64)
    for m, keep in enumerate(sets):
        Z[m, keep] = 1
    Z, b = Z[2:], y[2:] - y[1]
    A = torch.ones(P + 1, P + 1, dtype=torch.float64)
    A[:P, :P], A[P, P] = Z.T @ Z, 0
    return torch.linalg.solve(A, torch.cat([Z.T @ b, y[:1] - y[1]]))[:P]


def exact_shapley(model: Any, image: Tensor, c: int) -> Tensor:
    """By definition, over all 2^P sets, absent patches set to zero; all images in one batch."""
    P, side = patches(model), model.patch_embed.patch_size[0]
    cells = torch.tensor(
        [[float(keep >> j & 1) for j in range(P)] for keep in range(2**P)], dtype=torch.float64
    )
    cells = (
        cells.view(-1, 1, *model.patch_embed.grid_size).repeat_interleave(side, 2).repeat_interleave(side, 3)
    )
    value = model(cells * image).detach().softmax(1)[:, c].tolist()
    phi = torch.zeros(P, dtype=torch.float64)
    for keep, v in enumerate(value):
        for j in range(P):
            if not keep >> j & 1:
                phi[j] += (value[keep | 1 << j] - v) / (P * comb(P - 1, keep.bit_count()))
    return phi


def pami(model: Any, image: Tensor, c: int, hide: str = "remove") -> Tensor:
    rows, columns = model.patch_embed.grid_size
    answers: list[list[float]] = [[] for _ in range(rows * columns)]
    for side in range((max(rows, columns) + 1) // 2, 1, -1):
        for shift in (0, side // 2):
            cells: dict[tuple[int, int], list[int]] = {}
            for j in range(rows * columns):
                cells.setdefault(((j // columns + shift) // side, (j % columns + shift) // side), []).append(
                    j
                )
            for cell in cells.values():
                for j in cell:
                    answers[j].append(f(model, image, cell, c, hide))
    return torch.tensor([sum(a) / len(a) for a in answers], dtype=torch.float64)


def hsic(
    model: Any,
    image: Tensor,
    c: int,
    budget: int,
    seed: int = 0,
    output: str = "distribution",
    hide: str = "remove",
) -> Tensor:
    sets = halves(model, image, budget, seed)
    out = torch.stack([logits(model, image, keep, hide).softmax(0) for keep in sets])
    out = out if output == "distribution" else out[:, c : c + 1]
    distance = torch.tensor([[float((a - b).norm()) for b in out] for a in out], dtype=torch.float64)
    apart = sorted(float(distance[a, b]) for a in range(budget) for b in range(budget) if a != b)
    width = apart[(len(apart) - 1) // 2]
    L = (-(distance**2) / (2 * width**2)).exp()
    H = torch.eye(budget, dtype=torch.float64) - 1 / budget
    scores = []
    for j in range(patches(model)):
        K = torch.tensor([[float((j in a) == (j in b)) for b in sets] for a in sets], dtype=torch.float64)
        scores.append((K @ H @ L @ H).trace() / (budget - 1) ** 2)
    return torch.stack(scores)


def channels(model: Any, image: Tensor) -> Tensor:
    """Patch tokens at the input of the last block, (P,d)."""
    x = model.norm_pre(tokens_of(model, image)[None])
    for block in model.blocks[:-1]:
        x = block(x)
    return x[0, model.num_prefix_tokens :].detach()


def to_one(a: Tensor) -> Tensor:
    return (a - a.min()) / (a.max() - a.min())


def weighed(model: Any, image: Tensor, mask: Tensor, c: int, rest: Tensor | None = None) -> float:
    """Probability with patch token j times mask_j, and (1 − mask_j) of `rest`."""
    x, prefix = tokens_of(model, image), model.num_prefix_tokens
    for j in range(len(mask)):
        x[prefix + j] = mask[j] * x[prefix + j] + (0 if rest is None else (1 - mask[j]) * rest[prefix + j])
    return float(answer(model, x).softmax(0)[c])


def scorecam(model: Any, image: Tensor, c: int, softmax: bool = True, budget: int | None = None) -> Tensor:
    a = channels(model, image)
    a = a[:, a.std(0).argsort(descending=True)[:budget]]
    weight = torch.tensor([weighed(model, image, to_one(k), c) for k in a.T], dtype=torch.float64)
    weight = weight.exp() / weight.exp().sum() if softmax else weight
    return (a * weight).sum(1).clamp(min=0)


def vit_cx(
    model: Any, image: Tensor, c: int, clusters: list[list[int]], noise: float = 0.1, seed: int = 0
) -> Tensor:
    a, x = channels(model, image), tokens_of(model, image)
    generator = torch.Generator().manual_seed(crc32(str(seed).encode() + image.double().numpy().tobytes()))
    rest = noise * x.flatten().std() * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    total, count = torch.zeros(2, len(a), dtype=torch.float64)
    for members in clusters:
        mask = torch.stack([to_one(a[:, k]) for k in members]).mean(0)
        total += weighed(model, image, mask, c, rest) * mask
        count += mask
    return total / count


def k_means(points: Tensor, first: list[int]) -> list[Tensor]:
    """Lloyd's algorithm point by point, from the points `first`; the largest cluster comes first."""
    centers, nearest = [points[i] for i in first], None
    for _ in range(100):
        before = nearest
        nearest = []
        for point in points:
            distances = [float(((point - center) ** 2).sum()) for center in centers]
            nearest.append(distances.index(min(distances)))
        if nearest == before:
            break
        for k in range(len(centers)):
            members = [points[i] for i in range(len(points)) if nearest[i] == k]
            centers[k] = torch.stack(members).mean(0) if members else centers[k]
    sizes = [nearest.count(k) for k in range(len(centers))]
    return [centers[k] for k in sorted(range(len(centers)), key=lambda k: (-sizes[k], k))]


def tis(
    model: Any,
    image: Tensor,
    c: int,
    clusters: int = 1024,
    keep: float = 0.5,
    seed: int = 0,
    budget: int | None = None,
    hide: str = "remove",
) -> Tensor:
    """Masks from centroids of the channels of all block outputs; mean probability where a patch was kept."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, y: outputs.append(y[0])) for block in model.blocks]
    with torch.no_grad():
        model(image[None])
    for hook in hooks:
        hook.remove()
    points = torch.cat([y[model.num_prefix_tokens :].T for y in outputs])
    generator = torch.Generator().manual_seed(crc32(str(seed).encode() + image.double().numpy().tobytes()))
    first = torch.randperm(len(points), generator=generator)[:clusters].tolist()
    p, answers, sets = points.shape[1], [], []
    for center in k_means(points, first)[:budget]:
        order = sorted(range(p), key=lambda j: (-float(center[j]), j))
        sets.append(order[: max(1, int(keep * p))])
        answers.append(f(model, image, sets[-1], c, hide))
    scores = []
    for j in range(p):  # a patch that no mask kept has the mean of them
        own = [a for a, kept in zip(answers, sets, strict=True) if j in kept] or answers
        scores.append(sum(own) / len(own))
    return torch.tensor(scores, dtype=torch.float64)


def attended(model: Any, tokens: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """The last block's output (1,N,d) with attention logits S · factor + offset in every block."""
    x = model.norm_pre(tokens[None])
    for block in model.blocks:
        at, y = block.attn, block.norm1(x)
        q, k, v = at.qkv(y).reshape(1, len(tokens), 3, at.num_heads, at.head_dim).permute(2, 0, 3, 1, 4)
        S = at.q_norm(q) @ at.k_norm(k).transpose(-2, -1) * at.head_dim**-0.5 * factor + offset
        x = x + block.ls1(at.proj((S.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return x


def closed(model: Any, tokens: Tensor, gate: Tensor) -> Tensor:
    """Logits with each patch weighted by its gate (n,), as a key of the others and in the head's mean."""
    prefix, n = model.num_prefix_tokens, len(tokens)
    columns = torch.cat([torch.zeros(prefix, dtype=torch.float64), gate.log()]).expand(n, n)
    y = model.norm(
        attended(model, tokens, torch.ones(()), columns * (1 - torch.eye(n, dtype=torch.float64)))
    )[0]
    pooled = y[0] if model.global_pool == "token" else (gate[:, None] * y[prefix:]).sum(0) / gate.sum()
    return model.head(model.fc_norm(pooled))


def atman(model: Any, image: Tensor, c: int, suppress: float = 0.9, similar: float = 0.7) -> Tensor:
    """Attention logits S (heads, queries, keys) turned down before softmax."""
    prefix, P = model.num_prefix_tokens, patches(model)
    x0 = tokens_of(model, image)

    def logit(factor: Tensor) -> float:
        return float(
            model.forward_head(model.norm(attended(model, x0, factor, torch.zeros(())))).detach()[0, c]
        )

    scores = []
    for j in range(P):
        factor = torch.ones(len(x0), dtype=torch.float64)
        for k in range(P):
            a, b = x0[prefix + j], x0[prefix + k]
            cosine = float(a @ b / a.norm() / b.norm())
            factor[prefix + k] -= suppress * (1.0 if j == k else cosine if cosine > similar else 0.0)
        scores.append(logit(torch.ones(len(x0), dtype=torch.float64)) - logit(factor))
    return torch.tensor(scores, dtype=torch.float64)


def sufficient(
    model: Any, image: Tensor, c: int, k: int, threshold: float = 0.9, minimal: bool = False
) -> tuple[list[float], list[int], list[list[int]]]:
    """(p_c before each step, the subset, what was left at each step), by token removal."""
    prefix, left, history, confidence = model.num_prefix_tokens, list(range(patches(model))), [], []
    x0 = tokens_of(model, image)
    while left:
        gate = torch.ones(len(left), dtype=torch.float64, requires_grad=True)
        p = closed(model, torch.cat([x0[:prefix], x0[prefix:][left]]), gate).softmax(0)[c]
        (g,) = torch.autograd.grad(p, gate)
        history.append(left)
        confidence.append(float(p.detach()))
        gone = sorted(range(len(left)), key=lambda i, g=g: float(g[i]))[
            :k
        ]  # the gates whose closing helps most
        left = [j for i, j in enumerate(left) if i not in gone]
    enough = [i for i, p in enumerate(confidence) if p >= threshold]
    best = enough[-1] if enough else max(range(len(confidence)), key=lambda i: confidence[i])
    subset, limit = history[best], threshold if enough else confidence[best]
    while minimal and len(subset) > 1:
        order = sorted(subset, key=lambda j: -f(model, image, [i for i in subset if i != j], c))
        tries = [[i for i in subset if i not in order[:n]] for n in (1, 2, 4, 8, 16) if n < len(subset)]
        able = [rest for rest in tries if f(model, image, rest, c) >= limit]
        if not able:
            break
        subset = able[-1]
    return confidence, subset, history


def summed(
    model: Any, image: Tensor, c: int, steps: int, threshold: float
) -> tuple[list[float], list[int], list[list[int]]]:
    """(p_c before each step, subset of pixels, pixels left at each step), by accumulated gradients."""
    pixels = image.shape[1] * image.shape[2]
    left, total, history, confidence = list(range(pixels)), [0.0] * pixels, [], []
    for i in range(steps):
        there = torch.tensor([float(j in left) for j in range(pixels)], dtype=image.dtype, requires_grad=True)
        p = model((image * there.view(image.shape[1:]))[None])[0].softmax(0)[c]
        (d,) = torch.autograd.grad(p.log(), there)  # showing a pixel is the other way round than hiding it
        history.append(left)
        confidence.append(float(p.detach()))
        size = float(d[left].norm())
        for j in left:
            total[j] -= float(d[j]) / size
        n = max(1, round(pixels * 0.01 ** ((i + 1) / steps)))
        left = sorted(sorted(left, key=lambda j: total[j])[:n])
    enough = [i for i, p in enumerate(confidence) if p >= threshold]
    best = enough[-1] if enough else max(range(steps), key=lambda i: confidence[i])
    return confidence, history[best], history


def exact_shapley_of_removal(model: Any, image: Tensor) -> Tensor:
    """(P, C) by definition, over all 2^P sets, absent patches removed; of the probability of every class."""
    P = patches(model)
    sets = range(2**P)
    v = [logits(model, image, [j for j in range(P) if keep >> j & 1]).softmax(0) for keep in sets]
    phi = torch.zeros(P, len(v[0]), dtype=torch.float64)
    for keep in sets:
        for j in range(P):
            if not keep >> j & 1:
                phi[j] += (v[keep | 1 << j] - v[keep]) / (P * comb(P - 1, keep.bit_count()))
    return phi


# -- greedy searches


def gain(model: Any, image: Tensor, chosen: list[int], c: int, by: str) -> float:
    """How good a set of patches is: f(S), -f(V without S), or their sum."""
    rest = [j for j in range(patches(model)) if j not in chosen]
    kept = 0.0 if by == "deletion" else f(model, image, chosen, c)
    return kept - (0.0 if by == "insertion" else f(model, image, rest, c))


def greedy_order(model: Any, image: Tensor, c: int, by: str, at_once: int = 1) -> list[int]:
    """The `at_once` patches with the largest gain are added, again and again."""
    chosen: list[int] = []
    left = list(range(patches(model)))
    while len(left) > 1:
        values = {j: gain(model, image, [*chosen, j], c, by) for j in left}
        left.sort(key=lambda j: -values[j])
        rest = left[at_once:]
        chosen += left if len(rest) < 2 and at_once > 1 else left[:at_once]
        left = [] if len(rest) < 2 and at_once > 1 else rest
    return chosen + left


def ranks(order: list[int]) -> Tensor:
    """P for the first patch, 1 for the last one."""
    return torch.tensor([float(len(order) - order.index(j)) for j in range(len(order))], dtype=torch.float64)


def best_order(model: Any, image: Tensor, c: int, by: str) -> tuple[float, list[int]]:
    """Over all orders, the largest sum of the gains of the first 1, 2, ..., P - 1 patches, by enumeration."""
    P = patches(model)
    best: dict[frozenset[int], tuple[float, list[int]]] = {frozenset(): (0.0, [])}
    for size in range(1, P + 1):
        for members in combinations(range(P), size):
            own = 0.0 if size == P else gain(model, image, list(members), c, by)
            before = [(best[frozenset(members) - {j}], j) for j in members]
            (total, order), last = max(before, key=lambda pair: pair[0][0])
            best[frozenset(members)] = total + own, [*order, last]
    return best[frozenset(range(P))]


def smdl(
    model: Any, image: Tensor, c: int, *, confidence: float = 0.0, effectiveness: float = 0.05
) -> Tensor:
    """One region (a patch) at a time: confidence, distance between regions, f(S), 1 - f(V without S)."""
    P, chosen = patches(model), list[int]()
    z = [logits(model, image, [j]) for j in range(P)]

    def distance(i: int, j: int) -> float:
        return acos(float(z[i] @ z[j] / z[i].norm() / z[j].norm())) / pi

    def value(members: list[int]) -> float:
        p = logits(model, image, members).softmax(0)
        entropy = -float((p * p.log()).sum())
        apart = 0.0
        if len(members) > 1:
            apart = sum(min(distance(i, j) for j in members if j != i) for i in members)
        rest = [j for j in range(P) if j not in members]
        score = f(model, image, members, c) + 1 - f(model, image, rest, c)
        return score + confidence * (1 - entropy / logarithm(len(p))) + effectiveness * apart

    while len(chosen) < P - 1:
        left = [j for j in range(P) if j not in chosen]
        chosen.append(max(left, key=lambda j: value([*chosen, j])))
    return ranks([*chosen, next(j for j in range(P) if j not in chosen)])


def caap(model: Any, image: Tensor, c: int, *, first: int | None = None, last: int | None = None) -> Tensor:
    """Change of the gray image's logit by the states of one patch at the inputs of blocks first..last."""
    depth, prefix = len(model.blocks), model.num_prefix_tokens
    first, last = depth // 4 if first is None else first, 3 * depth // 4 if last is None else last

    def run(picture: Tensor, states: list[Tensor], patch: int | None) -> float:
        x = model.norm_pre(tokens_of(model, picture)[None])
        for layer, block in enumerate(model.blocks):
            if patch is not None and first <= layer <= last:
                x[0, prefix + patch] = states[layer][prefix + patch]
            x = block(x).detach()
        return float(model.forward_head(model.norm(x))[0, c])

    states, x = [], model.norm_pre(tokens_of(model, image)[None]).detach()
    for block in model.blocks:
        states.append(x[0].clone())
        x = block(x).detach()
    gray = torch.zeros_like(image)
    nothing = run(gray, states, None)
    return torch.tensor([run(gray, states, j) - nothing for j in range(patches(model))], dtype=torch.float64)
