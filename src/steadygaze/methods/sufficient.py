"""Sufficient input subsets by batched gradient SIS (Carter et al. 2021; docs/equations.md#sis).

    repeat: g_j = ∂ log p_c / ∂m_j at the remaining patches (or pixels), where m_j = 1 hides j; record p_c;
            hide the k with the largest g: those with the least evidence for c
    then    walk back from the end: the first remaining set with p_c ≥ threshold is the sufficient subset

| space   | hidden means                           | g_j, with T = log p_c                                  |
| patches | token removed: later steps are cheaper | −Σ_l Σ_h Σ_{i≠j} ∂T/∂S^l_hij − ⟨y_j − mean y, ∂T/∂y_j⟩ |
| pixels  | all channels zero                      | −⟨x_j, ∂T/∂x_j⟩ over the pixel's channels              |

S are the attention logits, y what an averaging head takes the mean of. Removing a token is closing its gate
in every layer's attention, and in the mean: g is the first-order effect of that. It finds far smaller
subsets than −⟨x_j, ∂T/∂x_j⟩ of the embedding (docs/evidence/search.md).

`summed=True` (not in the paper): each step adds g/|g| to the sum of the earlier steps, and hides the
largest sums; the number of remaining places decreases by a constant factor, from all to one in a hundred. A
single g holds for small changes only; summed over many sets it finds far smaller subsets of pixels
(docs/evidence/search.md).

∂ log p and ∂ p rank places equally; the logarithm does not underflow for an improbable class. Ties are
broken in raster order. For models whose patches cannot be removed (Swin), the pixels of patches are set to
zero and g is summed over them, with a warning.

Such a subset is sufficient, not minimal. `minimal=True` prunes it: each patch is left out alone, and those
whose absence costs least are removed, as many (1, 2, 4, ...) as keep p_c ≥ threshold; repeated until no
patch can be spared. These runs have few patches and come on top of the walk's; a given `budget` holds for
them too.

As a map: how late a patch was hidden, positive for the subset, negative for the rest. Where no set reaches
the threshold, the one with the highest p_c is taken, and `reached` is False.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.methods.perturbation import BLACK_BOX
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, run_search
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.target import Target, class_score, resolve_target
from steadygaze.trace.capture import Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import subset_logits, to_pixels
from steadygaze.vit.view import ViT

SPACES = ("patches", "pixels")
STEPS = {"patches": 49, "pixels": 502}  # 4 of 196 patches, 100 of 224 x 224 pixels per step
SUMMED_STEPS, SUMMED_SHARE = 100, 0.01  # steps with summed=True, and the share of places left at the end
PRUNING_RUNS = 300  # for the listed cost; 200 to 700 on DeiT-Tiny
Removal = Literal["remove", "fill", "pixels"]


@dataclass(frozen=True, eq=False)
class SufficientSubsets:
    """Sufficient subsets of a batch; places are patches (rows, columns), or pixels.

    Attributes:
        subset: The places that suffice.
        subset_confidence: p_c of the subset alone.
        reached: Whether that is at least the threshold.
        step: When a place was hidden, counted from 0; the number of steps if it never was.
        confidence: p_c before each step, the first of the whole image.
        left: Number of remaining places before each step.
    """

    target: Int[Tensor, " b"]
    subset: Bool[Tensor, "b rows columns"]
    subset_confidence: Float[Tensor, " b"]
    reached: Bool[Tensor, " b"]
    step: Int[Tensor, "b rows columns"]
    confidence: Float[Tensor, "b steps"]
    left: Int[Tensor, " steps"]

    @property
    def size(self) -> Int[Tensor, " b"]:
        """Number of places in the subset."""
        return self.subset.flatten(1).sum(1)


@dataclass(frozen=True)
class Settings:
    """Options of the search, checked."""

    threshold: float
    space: str
    budget: int | None
    minimal: bool
    summed: bool

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise UnknownNameError("space", str(self.space), SPACES)
        if not 0 < self.threshold <= 1:
            raise InputError(f"sufficient: threshold is a confidence in 0..1, got {self.threshold!r}")

    def sizes(self, places: int) -> list[int]:
        """Number of remaining places before each step."""
        usual = SUMMED_STEPS if self.summed else STEPS[self.space]
        runs = check_budget("sufficient", 2 * usual if self.budget is None else self.budget, 2)
        return step_sizes(places, runs // 2, self.summed)


def subsets(
    model: nn.Module | ViT,
    images: Float[Tensor, "b c h w"],
    target: Target = None,
    *,
    threshold: float = 0.9,
    space: str = "patches",
    budget: int | None = None,
    minimal: bool = True,
    summed: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> SufficientSubsets:
    """Sufficient subsets of every image for its predicted class or another."""
    vit = adapt(model)
    reason = has_confidence(vit)
    if reason:
        raise MethodUnavailableError(f"sufficient: {reason}")
    images = vit.check(images).to(next(vit.model.parameters()).dtype)
    with torch.inference_mode(False), evaluation_mode(vit.model):
        with torch.no_grad():
            tokens = vit.embed(images)
            classes = resolve_target(target, vit.logits(tokens), vit.plan.outputs)
        if classes is None or classes.dim() != 1:
            raise InputError(
                "sufficient: expected a class, or one per image, got a callable or several per image, "
                "which have no single confidence"
            )
        query = Query(vit, images, tokens, classes, on_progress=on_progress)
        return _search(query, Settings(threshold, space, budget, minimal, summed))


def has_confidence(vit: ViT) -> str:
    """Why the model's outputs have no confidence to compare with a threshold; empty if they have one."""
    if vit.plan.outputs != "values":
        return ""
    return "the model gives values (regression), which have no confidence to compare with a threshold"


@register_method(
    "sufficient",
    "model",
    cost=2.0 * STEPS["patches"] + PRUNING_RUNS,
    unsupported=has_confidence,
    **BLACK_BOX,
)
def sufficient(
    query: Query,
    *,
    threshold: float = 0.9,
    space: str = "patches",
    budget: int | None = None,
    minimal: bool = True,
    summed: bool = False,
) -> Float[Tensor, "b h w"]:
    """The fewest patches that keep the model confident (batched gradient SIS): positive in the subset."""
    if callable(query.target):
        raise InputError(
            "sufficient: a callable target has no confidence to compare with a threshold. Give a class."
        )
    result = _search(query, Settings(threshold, space, budget, minimal, summed))
    late = (result.step + 1) / (result.confidence.shape[1] + 1)
    scores = torch.where(result.subset, late, late - 1).to(query.images)
    if space == "patches":
        return scores
    pixels_per_patch = scores[0].numel() / query.patches
    return query.per_patch(scores[:, None], "pixels") / pixels_per_patch


def _search(query: Query, settings: Settings) -> SufficientSubsets:
    images = query.images
    grid = query.grid if settings.space == "patches" else (images.shape[-2], images.shape[-1])
    sizes = settings.sizes(grid[0] * grid[1])
    walk = _Walk(query, grid, sizes, _removal(query.vit, settings.space), settings.summed)
    confidence = run_search(query, "sufficient", len(sizes), 1, walk)
    done = confidence.shape[1]
    enough = confidence >= settings.threshold
    reached = enough.any(1)
    last = torch.where(enough, torch.arange(done, device=images.device), -1).amax(1)
    last = torch.where(reached, last, confidence.argmax(1))
    step = torch.where(walk.step < done, walk.step, done)
    subset = step >= last[:, None]
    of_subset = confidence.gather(1, last[:, None])[:, 0]
    if settings.minimal and settings.space == "patches":
        threshold = torch.where(reached, settings.threshold, of_subset)
        limit = float("inf") if settings.budget is None else settings.budget
        of_subset = _prune(walk, subset, of_subset, threshold, limit)
    return SufficientSubsets(
        target=walk.target,
        subset=subset.unflatten(1, grid),
        subset_confidence=of_subset,
        reached=reached,
        step=step.unflatten(1, grid),
        confidence=confidence,
        left=torch.tensor(sizes[:done], device=images.device),
    )


def step_sizes(places: int, steps: int, summed: bool) -> list[int]:
    """Number of remaining places before each step: decreasing by a constant, or (summed) by a factor."""
    if summed:
        shares = (SUMMED_SHARE ** (i / steps) for i in range(steps))
        return sorted({max(1, round(places * share)) for share in shares}, reverse=True)
    k = -(-places // min(steps, places))
    return list(range(places, 0, -k))


def _removal(vit: ViT, space: str) -> Removal:
    if space == "pixels":
        return "pixels"
    if vit.plan.removable and vit.plan.global_attention:
        return "remove"
    warnings.warn(
        f"sufficient: patches of a {vit.plan.kind} cannot be removed, "
        f"so they are filled with the mean color.",
        stacklevel=5,
    )
    return "fill"


class _Walk:
    """Step by step: p_c of the remaining places, then those with the largest g (or sum) are hidden."""

    def __init__(
        self, query: Query, grid: tuple[int, int], sizes: list[int], removal: Removal, summed: bool
    ) -> None:
        assert isinstance(query.target, Tensor)
        self.query, self.target, self.grid, self.removal = query, query.target, grid, removal
        self.sizes, self.summed = [*sizes, 0], summed
        shape, device = (len(query.images), sizes[0]), query.images.device
        self.step = torch.full(shape, torch.iinfo(torch.int64).max, device=device)
        dtype = torch.promote_types(query.images.dtype, torch.float32)
        self.sum = torch.zeros(shape, dtype=dtype, device=device)

    def __call__(self, part: slice) -> Float[Tensor, "b 1"]:
        visible = self.step >= part.start
        remaining = visible.nonzero()[:, 1].view(len(visible), -1)  # the same number for every image
        with torch.enable_grad():
            log_p, g = self.gradient(remaining, visible)
        if self.summed:
            g = F.normalize(g.to(self.sum), dim=1, eps=torch.finfo(self.sum.dtype).tiny)
            self.sum = self.sum.scatter_add(1, remaining, g)
            g = self.sum.gather(1, remaining)
        count = self.sizes[part.start] - self.sizes[part.stop]
        least_evidence = g.argsort(dim=1, descending=True, stable=True)[:, :count]
        self.step = self.step.scatter(1, remaining.gather(1, least_evidence), part.start)
        return log_p.exp()[:, None]

    def gradient(
        self, remaining: Int[Tensor, "b n"], visible: Bool[Tensor, "b p"]
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b n"]]:
        """log p_c, and g of the remaining places."""
        vit, images = self.query.vit, self.query.images
        if self.removal == "remove":
            want = Want(attention=True, norm=True)
            run = forward(vit, vit.select(self.query.tokens, remaining), want=want)
            log_p = class_score("log_prob", run.logits, self.target, vit.plan.outputs)
            return log_p.detach(), gate_gradient(run.trace(log_p))
        x = (images * to_pixels(visible.unflatten(1, self.grid), images)).requires_grad_()
        log_p = class_score("log_prob", vit(x), self.target, vit.plan.outputs)
        (gradient,) = torch.autograd.grad(log_p.sum(), x)
        g = -(images * gradient).sum(1)
        if self.removal == "fill":  # the mean over a patch's pixels ranks like their sum
            g = F.adaptive_avg_pool2d(g[:, None], self.grid)
        return log_p.detach(), g.flatten(1).gather(1, remaining)


def gate_gradient(trace: Trace) -> Float[Tensor, "b n"]:
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
        candidates = (trace.run.hidden[-1], *trace.run.records[-1].norms)
        y = [t for t in candidates if t.dim() == 3 and t.shape[1] == tokens][-1]
        patches = y.detach()[:, prefix:]
        mean = patches.mean(1, keepdim=True)
        if trace.vit.plan.readout_weights is not None:
            mean = (trace.readout_row()[:, prefix:, None] * patches).sum(1, keepdim=True)
        total = total - ((patches - mean) * trace.grad(y)[:, prefix:]).sum(-1)
    return total


def _prune(
    walk: _Walk,
    subset: Bool[Tensor, "b p"],
    confidence: Float[Tensor, " b"],
    threshold: Float[Tensor, " b"],
    limit: float,
) -> Float[Tensor, " b"]:
    """Prune `subset` in place until no patch can be spared or `limit` runs are spent; returns its p_c."""
    query, confidence, spent = walk.query, confidence.clone(), 0

    def confidence_with(b: int, keep: Bool[Tensor, "r p"]) -> Float[Tensor, " r"]:
        nonlocal spent
        spent += len(keep)
        image = torch.full((len(keep),), b, device=keep.device)
        assert walk.removal != "pixels"
        logits = subset_logits(query.vit, query.images, query.tokens, keep, image, walk.removal)
        return class_score("prob", logits, walk.target[image], query.vit.plan.outputs)

    def prune_once(part: slice) -> Tensor | None:
        before = subset.sum()
        for b in range(len(subset)):
            members = subset[b].nonzero()[:, 0]
            if len(members) < 2 or spent >= limit * len(subset):
                continue
            without_one = subset[b].repeat(len(members), 1).scatter(1, members[:, None], False)
            members = members[confidence_with(b, without_one).argsort(descending=True, stable=True)]
            counts = [2**i for i in range((len(members) - 1).bit_length())]
            fewer = torch.stack([subset[b].scatter(0, members[:n], False) for n in counts])
            p = confidence_with(b, fewer)
            enough = (p >= threshold[b]).nonzero()[:, 0].tolist()
            if enough:
                subset[b], confidence[b] = fewer[enough[-1]], p[enough[-1]]
        return None if subset.sum() == before else confidence[:, None]

    run_search(query, "sufficient, pruning", subset.shape[1], 1, prune_once, least=0)
    return confidence
