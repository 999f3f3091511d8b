"""Sufficient input subsets: how little of a picture makes the model sure? Batched Gradient SIS.

Carter et al. 2021; docs/equations.md#sis.

    repeat: g_j = ∂ log p_c / ∂m_j at the patches (or pixels) that are left, where m_j = 1 hides j; note p_c;
            hide the k with the largest g, those that speak least for c
    then    walk back from the end: the first set that was left with p_c ≥ threshold is the sufficient subset

| space   | hidden means                                         | g_j, with T = log p_c                                              |
| patches | the token is removed: each step runs on fewer tokens | −Σ_l Σ_h Σ_{i≠j} ∂T/∂S^l_hij − ⟨y_j − mean y, ∂T/∂y_j⟩              |
| pixels  | all channels zero in the normalised picture          | −⟨x_j, ∂T/∂x_j⟩ over the pixel's channels, as the authors          |

S are the attention logits, y what an averaging head takes the mean of. A token is removed when every layer's attention, and the mean, have
closed their gate to it: g is the first-order effect of that. It finds far smaller subsets than −⟨x_j, ∂T/∂x_j⟩ of the embedding
(docs/evidence/search.md).

`summed=True`: each step adds g/|g| to what the steps before found for the places that are left, and hides those of the largest sum; n,
the places that are left, goes from all to one in a hundred by a constant factor. One g is true for small changes only; added up over
many sets it leads to far smaller subsets of pixels than the walk's (docs/evidence/search.md). Not the paper's.

∂ log p and ∂ p rank alike; the logarithm does not underflow for a class that the model does not see at all. Ties go in raster order.
Models whose patches cannot be removed (Swin) have the pixels of patches set to zero, g summed over them; a warning says so.

The subset found so is sufficient, not minimal. `minimal=True` then thins it out: each patch is left out alone, and those that are
missed least go, as many (1, 2, 4, ...) as leave p_c ≥ threshold; again, until what is left can spare none of its patches. These runs are
of few patches and come on top of the walk's; a `budget` that is given holds for them too. As a map: how late a patch was
taken out, above zero for the subset, below for the rest. Where nothing reaches the threshold,
the set of the highest p_c is taken, and `reached` is False.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.method_registry import register_method
from steadygaze.methods.perturbation import BLACK_BOX
from steadygaze.methods.search import budget_of, searched
from steadygaze.target import Target, quantity, resolve
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.record import Want
from steadygaze.vit import ViT, adapt
from steadygaze.vit.subsets import subset_logits, to_pixels
from steadygaze.vit.view import evaluation_mode

SPACES = ("patches", "pixels")
STEPS = {"patches": 49, "pixels": 502}  # 4 of 196 patches, 100 of 224 x 224 pixels a step
SUMMED, LAST = 100, 0.01  # steps of a walk that adds up, and the share of the places that is left at its end
THINNING = 300  # runs of thinning out, about, for the cost that is listed (200 to 700 on DeiT-Tiny)


@dataclass(frozen=True, eq=False)
class Sufficient:
    """What was found; places are patches (rows, columns), or pixels.

    subset: the places that are enough          sure: p_c of them alone          reached: whether that is the threshold or more
    step: when a place was hidden, counted from 0; the number of steps where it never was
    confidence: p_c before each step, the first of the whole picture; `left` places were there then
    """

    target: Int[Tensor, " b"]
    subset: Bool[Tensor, "b rows columns"]
    sure: Float[Tensor, " b"]
    reached: Bool[Tensor, " b"]
    step: Int[Tensor, "b rows columns"]
    confidence: Float[Tensor, "b steps"]
    left: Int[Tensor, " steps"]

    @property
    def size(self) -> Int[Tensor, " b"]:
        """Places in the subset."""
        return self.subset.flatten(1).sum(1)


def subsets(model: nn.Module | ViT, images: Float[Tensor, "b c h w"], target: Target = None, *, threshold: float = 0.9,
            space: str = "patches", budget: int | None = None, minimal: bool = True, summed: bool = False) -> Sufficient:  # fmt: skip
    """Sufficient subsets of every image for its predicted class, or for any class; with the confidence at every step."""
    vit = adapt(model)
    images = vit.check(images).to(next(vit.model.parameters()).dtype)
    with torch.inference_mode(False), evaluation_mode(vit.model):
        with torch.no_grad():
            tokens = vit.embed(images)
            classes = resolve(target, vit.logits(tokens))
        if classes is None or classes.dim() != 1:
            raise BadInput(
                "sufficient: expected a class, or one for each image; a callable or several classes have no confidence"
            )
        return _find(vit, images, tokens, classes, threshold, space, budget, minimal, summed)


@register_method("sufficient", "model", cost=2.0 * STEPS["patches"] + THINNING, **BLACK_BOX)
def sufficient(ask: Any, *, threshold: float = 0.9, space: str = "patches", budget: int | None = None,
               minimal: bool = True, summed: bool = False) -> Float[Tensor, "b h w"]:  # fmt: skip
    """The fewest patches that make the model sure, by batched gradient SIS: above zero the subset, the rest by when it was hidden."""
    if callable(ask.target):
        raise BadInput(
            "sufficient: a callable target has no confidence that could reach a threshold. Give a class."
        )
    found = _find(ask.vit, ask.images, ask.tokens, ask.target, threshold, space, budget, minimal, summed)
    late = (found.step + 1) / (found.confidence.shape[1] + 1)
    scores = torch.where(found.subset, late, late - 1).to(ask.images)
    return (
        scores
        if space == "patches"
        else ask.per_patch(scores[:, None], "pixels") / (scores[0].numel() / (ask.grid[0] * ask.grid[1]))
    )


def _find(vit: ViT, images: Tensor, tokens: Tensor, target: Tensor, threshold: float, space: str, budget: int | None,
          minimal: bool, summed: bool) -> Sufficient:  # fmt: skip
    if space not in SPACES:
        raise UnknownName("space", str(space), SPACES)
    if not 0 < threshold <= 1:
        raise BadInput(f"sufficient: threshold is a confidence in 0..1, got {threshold!r}")
    grid = vit.layout(tokens).grid if space == "patches" else (images.shape[-2], images.shape[-1])
    usual = SUMMED if summed else STEPS[space]
    left = sizes(
        grid[0] * grid[1], budget_of("sufficient", 2 * usual if budget is None else budget, 2) // 2, summed
    )
    walk = _Walk(vit, images, tokens, target, grid, left, _way(vit, space), summed)
    confidence = searched("sufficient", len(left), 1, walk)
    done = confidence.shape[1]
    enough = confidence >= threshold
    reached = enough.any(1)
    last = torch.where(enough, torch.arange(done, device=images.device), -1).amax(1)
    last = torch.where(reached, last, confidence.argmax(1))
    step = torch.where(walk.step < done, walk.step, done)
    subset = step >= last[:, None]
    sure = confidence.gather(1, last[:, None])[:, 0]
    if minimal and space == "patches":
        sure = _prune(
            walk,
            subset,
            sure,
            torch.where(reached, threshold, sure),
            float("inf") if budget is None else budget,
        )
    there = torch.tensor(left[:done], device=images.device)
    return Sufficient(
        target, subset.unflatten(1, grid), sure, reached, step.unflatten(1, grid), confidence, there
    )


def sizes(places: int, steps: int, summed: bool) -> list[int]:
    """How many places are left before each step: as many fewer every time, or (summed) by as large a factor."""
    if summed:
        return sorted({max(1, round(places * LAST ** (i / steps))) for i in range(steps)}, reverse=True)
    k = -(-places // min(steps, places))
    return list(range(places, 0, -k))


def _way(vit: ViT, space: str) -> str:
    if space == "pixels":
        return "pixels"
    if vit.plan.removable and vit.plan.global_attention:
        return "remove"
    warnings.warn(
        f"sufficient: patches of a {vit.plan.kind} cannot be removed, so they are painted in the mean colour.",
        stacklevel=5,
    )
    return "fill"


class _Walk:
    """One step after the other: p_c with what is left, then the places with the largest g (or sum of them) are hidden."""

    def __init__(self, vit: ViT, images: Tensor, tokens: Tensor, target: Tensor, grid: tuple[int, int], sizes: list[int], how: str,
                 summed: bool) -> None:  # fmt: skip
        self.vit, self.images, self.tokens, self.target, self.grid, self.how = (
            vit,
            images,
            tokens,
            target,
            grid,
            how,
        )
        self.sizes, self.summed = [*sizes, 0], summed
        self.step = torch.full((len(images), sizes[0]), torch.iinfo(torch.int64).max, device=images.device)
        self.sum = torch.zeros(
            self.step.shape, dtype=torch.promote_types(images.dtype, torch.float32), device=images.device
        )

    def __call__(self, part: slice) -> Float[Tensor, "b 1"]:
        seen = self.step >= part.start
        left = seen.nonzero()[:, 1].view(len(seen), -1)  # every image has as many left
        with torch.enable_grad():
            log_p, g = self.gradient(left, seen)
        if self.summed:
            g = torch.nn.functional.normalize(g.to(self.sum), dim=1, eps=torch.finfo(self.sum.dtype).tiny)
            self.sum = self.sum.scatter_add(1, left, g)
            g = self.sum.gather(1, left)
        worst = g.argsort(dim=1, descending=True, stable=True)[
            :, : self.sizes[part.start] - self.sizes[part.stop]
        ]
        self.step = self.step.scatter(1, left.gather(1, worst), part.start)
        return log_p.exp()[:, None]

    def gradient(
        self, left: Int[Tensor, "b n"], seen: Bool[Tensor, "b p"]
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b n"]]:
        """log p_c and g of the places that are left."""
        if self.how == "remove":
            run = forward(self.vit, self.vit.select(self.tokens, left), want=Want(attention=True, norm=True))
            log_p = quantity("log_prob", run.logits, self.target)
            return log_p.detach(), closing(run.trace(log_p))
        x = (self.images * to_pixels(seen.unflatten(1, self.grid), self.images)).requires_grad_()
        log_p = quantity("log_prob", self.vit(x), self.target)
        (d,) = torch.autograd.grad(log_p.sum(), x)
        g = -(self.images * d).sum(1)
        if self.how == "fill":  # the mean over a patch's pixels ranks as their sum
            g = torch.nn.functional.adaptive_avg_pool2d(g[:, None], self.grid)
        return log_p.detach(), g.flatten(1).gather(1, left)


def closing(trace: Trace) -> Float[Tensor, "b n"]:
    """∂T/∂m_j of closing the gate to patch j in every attention, and in the mean that the head takes."""
    pooled = trace.vit.readout == "pool"
    tokens, prefix = trace.run.hidden[-1].shape[1], trace.vit.prefix
    total = trace.logits.new_zeros(len(trace.logits), tokens - prefix)
    for record in trace.run.records if pooled else trace.run.records[:-1]:
        for attention in record.attention:
            a, g = attention.a.detach(), trace.grad(attention.a)
            ds = a * (g - (a * g).sum(-1, keepdim=True))  # softmax's Jacobian
            taken = ds.sum((1, 2))
            if ds.shape[-1] == ds.shape[-2] == tokens:
                taken = taken - ds.diagonal(dim1=-2, dim2=-1).sum(1)
            total = total - taken[:, -total.shape[1] :]
    if not pooled:
        y = [
            t
            for t in (trace.run.hidden[-1], *trace.run.records[-1].norms)
            if t.dim() == 3 and t.shape[1] == tokens
        ][-1]
        patches = y.detach()[:, prefix:]
        total = total - ((patches - patches.mean(1, keepdim=True)) * trace.grad(y)[:, prefix:]).sum(-1)
    return total


def _prune(walk: _Walk, subset: Bool[Tensor, "b p"], sure: Float[Tensor, " b"], threshold: Float[Tensor, " b"],
           limit: float) -> Float[Tensor, " b"]:  # fmt: skip
    """Thin `subset` out (in place), round by round, until nothing can be spared or `limit` runs are spent; gives p_c of the rest."""
    sure, spent = sure.clone(), [0]

    def confidence(b: int, tried: Bool[Tensor, "r p"]) -> Float[Tensor, " r"]:
        spent[0] += len(tried)
        image = torch.full((len(tried),), b, device=tried.device)
        return quantity(
            "prob",
            subset_logits(walk.vit, walk.images, walk.tokens, tried, image, walk.how),
            walk.target[image],
        )

    def round_(part: slice) -> Tensor | None:
        before = subset.sum()
        for b in range(len(subset)):
            members = subset[b].nonzero()[:, 0]
            if len(members) < 2 or spent[0] >= limit * len(subset):
                continue
            missed = confidence(b, subset[b].repeat(len(members), 1).scatter(1, members[:, None], False))
            members = members[missed.argsort(descending=True, stable=True)]
            counts = [2**i for i in range((len(members) - 1).bit_length())]
            fewer = torch.stack([subset[b].scatter(0, members[:n], False) for n in counts])
            p = confidence(b, fewer)
            able = (p >= threshold[b]).nonzero()[:, 0].tolist()
            if able:
                subset[b], sure[b] = fewer[able[-1]], p[able[-1]]
        return None if subset.sum() == before else sure[:, None]

    searched("sufficient, thinning out", subset.shape[1], 1, round_, least=0)
    return sure
