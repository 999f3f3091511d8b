"""Attention of clean and corrupted images: entropy, concentration, distance, similarity, stability.

A^l is (B, heads, N, N) after softmax, rows sum to 1; c_j = mean_i A_ij is what token j receives, Σ c_j = 1.

| measure   | formula                                                     | range      | high means         |
| entropy   | mean_i −Σ_j A_ij ln A_ij, 0 ln 0 = 0                        | 0..ln N    | spread out         |
| overfocus | Σ of the k largest c_j                                      | k/N..1     | few tokens dominate|
| gini      | Gini coefficient of c                                       | 0..1 − 1/N | few tokens dominate|
| peak      | N · max_j c_j                                               | 1..N       | one token dominates|
| distance  | mean_i Σ_j A'_ij |p_i − p_j|, patches only, A' renormalized | patches    | long range         |
| head_...  | mean over heads h < h' of cos(vec A_h, vec A_h')            | 0..1       | heads are alike    |
| token_... | mean over tokens i < i' of cos(A_i, A_i')                   | 0..1       | tokens are alike   |
| stability | cos(vec A_h(clean), vec A_h(corrupted))                     | 0..1       | unchanged          |

head_similarity, token_similarity: lower is more diverse.

Entropy as in Context Broadcasting (docs/equations.md#attention-entropy), stability and head similarity as in
TAP (docs/equations.md#attention-stability), distance as in ViT (Dosovitskiy et al., app. D.7) with patches as
the unit. Fused attention is seen through the seam, and only one layer at a time is held.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.look.measures import TOP, distance, distances, entropy, overfocus
from steadygaze.target import at_least_float32
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT

Map = Float[Tensor, "b heads n n"]


@dataclass(frozen=True)
class AttentionMeasures:
    """One number for each image, layer and head, (B, L, heads); head_similarity (B, L); see the table above.

    NaN where a layer has fewer heads than another, and for the head similarity of a single head.
    """

    entropy: Float[Tensor, "b l heads"]
    overfocus: Float[Tensor, "b l heads"]
    gini: Float[Tensor, "b l heads"]
    peak: Float[Tensor, "b l heads"]
    distance: Float[Tensor, "b l heads"]
    head_similarity: Float[Tensor, "b l"]
    token_similarity: Float[Tensor, "b l heads"]
    logits: Float[Tensor, "b classes"]
    top: int


def walk(
    vit: ViT, batches: Sequence[Float[Tensor, "b c h w"]], see: Callable[..., None]
) -> list[Float[Tensor, "b classes"]]:
    """Run batches of images side by side; `see(layer, A, A', ...)` gets each layer's attention, once."""
    if not vit.plan.global_attention:
        raise MethodUnavailableError(
            f"a {vit.plan.kind} has no attention matrix over all tokens (windows, reduced keys): "
            "its attention cannot be measured. Use a model with attention over all tokens."
        )
    with torch.no_grad(), evaluation_mode(vit.model):
        streams = [vit.embed(images) for images in batches]
        seam = Seam(want=Want(attention=True))
        for layer, block in enumerate(vit.blocks):
            maps = []
            for s, x in enumerate(streams):
                with seam:
                    record = seam.next_record()
                    streams[s] = block(x)
                    seam.next_record()
                if not record.attention:
                    raise MethodUnavailableError(f"block {layer} of this {vit.plan.kind} shows no attention")
                maps.append(
                    record.attention[0].a
                    if len(record.attention) == 1
                    else torch.cat([a.a for a in record.attention], 1)
                )
                del record
            see(layer, *maps)
            del maps
        return [vit.head(x) for x in streams]


def attention_measures(
    model: nn.Module | ViT, images: Float[Tensor, "b c h w"], *, top: int = TOP
) -> AttentionMeasures:
    """Entropy, overfocus, concentration, distance and similarity of every layer, in one forward pass.

    Examples:
        >>> import steadygaze as sg
        >>> model = sg.load_model("embedded").model
        >>> attention_measures(model, torch.randn(2, 3, 32, 32)).entropy.shape
        torch.Size([2, 6, 4])
    """
    vit = adapt(model)
    far = patch_distances(vit, images)
    names = "entropy", "overfocus", "gini", "peak", "distance", "head_similarity", "token_similarity"
    values_of: dict[str, list[Tensor]] = {name: [] for name in names}

    def see(layer: int, a: Map) -> None:
        values_of["entropy"].append(entropy(a))
        values_of["overfocus"].append(overfocus(a, top))
        values_of["gini"].append(gini(a))
        values_of["peak"].append(peak(a))
        values_of["distance"].append(distance(a, far))
        values_of["head_similarity"].append(head_similarity(a))
        values_of["token_similarity"].append(token_similarity(a))

    (logits,) = walk(vit, [images], see)
    return AttentionMeasures(
        **{name: _layers(values) for name, values in values_of.items()}, logits=logits, top=top
    )


def attention_stability(
    model: nn.Module | ViT, clean: Float[Tensor, "b c h w"], corrupted: Float[Tensor, "b c h w"]
) -> Float[Tensor, "b l heads"]:
    """Cosine between the attention of the clean and the corrupted image, by layer and head; 1: unchanged.

    Examples:
        >>> import steadygaze as sg
        >>> model, images = sg.load_model("embedded").model, torch.randn(2, 3, 32, 32)
        >>> attention_stability(model, images, images + 0.1 * torch.randn_like(images)).shape
        torch.Size([2, 6, 4])
    """
    if clean.shape != corrupted.shape:
        shapes = f"{tuple(clean.shape)} and {tuple(corrupted.shape)}"
        raise InputError(f"expected clean and corrupted images of one shape, got {shapes}")
    layers: list[Tensor] = []
    walk(adapt(model), [clean, corrupted], lambda layer, a, b: layers.append(stability(a, b)))
    return _layers(layers)


# -- of one layer ----------------------------------------------------------------------------------


def gini(a: Map) -> Float[Tensor, "b heads"]:
    """Gini coefficient of the attention that tokens receive: 0 even, 1 − 1/N all on one."""
    received = at_least_float32(a).mean(-2).sort(-1).values
    n = received.shape[-1]
    rank = torch.arange(1, n + 1, dtype=received.dtype, device=received.device)
    return (received * (2 * rank - n - 1)).sum(-1) / (n * received.sum(-1))


def peak(a: Map) -> Float[Tensor, "b heads"]:
    """The most attended token's share, in even shares: 1 even, N all on one."""
    return a.shape[-1] * at_least_float32(a).mean(-2).amax(-1)


def head_similarity(a: Map) -> Float[Tensor, " b"]:
    """Mean cosine between the maps of two heads; lower is more diverse. NaN for a single head."""
    flat = nn.functional.normalize(at_least_float32(a).flatten(2), dim=-1)
    cosines = flat @ flat.transpose(1, 2)
    heads = a.shape[1]
    if heads < 2:
        return cosines.new_full((len(a),), float("nan"))
    rows, columns = zip(*itertools.combinations(range(heads), 2), strict=True)
    return cosines[:, list(rows), list(columns)].mean(-1)


def token_similarity(a: Map) -> Float[Tensor, "b heads"]:
    """Mean cosine between the attention of two tokens (rows); lower is more diverse, 1: all attend alike.

    Examples:
        >>> token_similarity(torch.full((1, 1, 4, 4), 0.25)).item()
        1.0
    """
    rows = nn.functional.normalize(at_least_float32(a), dim=-1)
    n = a.shape[-1]
    if n < 2:
        return rows.new_full(a.shape[:2], float("nan"))
    # Σ over all i, i' of cos(A_i, A_i') = |Σ_i of the unit rows|², of which n are 1 (i = i')
    return (rows.sum(-2).square().sum(-1) - n) / (n * (n - 1))


def stability(a: Map, b: Map) -> Float[Tensor, "b heads"]:
    """Cosine between two maps of the same head."""
    return nn.functional.cosine_similarity(
        at_least_float32(a).flatten(2), at_least_float32(b).flatten(2), dim=-1
    )


def patch_distances(vit: ViT, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "p p"]:
    """Distance between every two patches, in patches."""
    with torch.no_grad(), evaluation_mode(vit.model):
        return distances(vit.layout(vit.embed(images[:1])).grid).to(images.device)


def _layers(values: list[Tensor]) -> Tensor:
    """Stacked along axis 1; layers with fewer heads are filled with NaN."""
    if values[0].dim() == 1:
        return torch.stack(values, 1)
    most = max(v.shape[1] for v in values)
    return torch.stack([nn.functional.pad(v, (0, most - v.shape[1]), value=float("nan")) for v in values], 1)


# -- images --------------------------------------------------------------------------------------


def attention_figure(
    model: nn.Module | ViT,
    clean: Float[Tensor, "1 c h w"],
    corrupted: Float[Tensor, "1 c h w"] | None = None,
    *,
    layer: int = -1,
    heads: bool = True,
    cell: int = 224,
    images: Sequence[Any] = (),
) -> Any:
    """Draw one layer's N x N attention, mean over heads and each head; below, that of the corrupted image.

    Row i, column j is how much token i takes from token j: an overfocused head shows bright vertical lines.
    Clean and corrupted share each column's color scale. images: shown next to the maps, one for each row.

    Examples:
        >>> import steadygaze as sg
        >>> attention_figure(sg.load_model("embedded").model, torch.randn(1, 3, 32, 32), cell=64).mode
        'RGB'
    """
    from steadygaze.results.drawing import Row, paint, robust_scale, tile, to_pil_image

    vit = adapt(model)
    depth = len(vit.blocks)
    if not -depth <= layer < depth:
        raise InputError(f"layer: expected 0..{depth - 1}, or from the end -1..-{depth}, got {layer}")
    batches = [clean] if corrupted is None else [clean, corrupted]
    if any(len(batch) != 1 for batch in batches) or len(images) not in (0, len(batches)):
        shapes = [tuple(batch.shape) for batch in batches]
        raise InputError(f"expected one image (1, 3, H, W), and `images` for each or none, got {shapes}")
    kept: list[Tensor] = []

    def see(now: int, *maps: Map) -> None:
        if now == layer % depth:
            kept.extend(at_least_float32(a[0]) for a in maps)

    walk(vit, batches, see)
    columns = [
        torch.cat([a.mean(0, keepdim=True), a if heads else a[:0]]).cpu().double().numpy() for a in kept
    ]
    scales = [max(robust_scale(rows[c]) for rows in columns) or 1.0 for c in range(len(columns[0]))]
    headings = ["mean of heads", *(f"head {h + 1}" for h in range(len(columns[0]) - 1))]
    drawn = [[paint(a / s, None) for a, s in zip(rows, scales, strict=True)] for rows in columns]
    if images:
        headings = ["image", *headings]
        drawn = [[to_pil_image(p), *row] for p, row in zip(images, drawn, strict=True)]
    note = f"attention of layer {layer % depth + 1} of {depth}; rows look at columns"
    titles = ("clean", "corrupted")
    return tile(
        [Row(row, title, note) for row, title in zip(drawn, titles, strict=False)], headings, cell=cell
    )
