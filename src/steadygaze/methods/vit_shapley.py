"""ViT-Shapley (Covert, Kim and Lee, ICLR 2023, arXiv 2206.05282): a network that predicts Shapley values.

Equations: docs/equations.md#vit-shapley.

    v(S)  = the prediction with only the patches S, the others removed: probabilities, or values (regression)
    φ̃     = explainer(x⁰, .., x^L)                             one number per patch and class
    φ_j   = φ̃_j + (v(all) − v(∅) − Σ_i φ̃_i) / P                so that Σ_j φ_j = v(all) − v(∅)
    loss  = E_S ‖v(S) − v(∅) − Σ_{j∈S} φ_j‖²                   least for Shapley values, if S ~ Shapley kernel

| symbol | variable | shape     |   | symbol | variable | shape         |
| φ      | phi      | (B, P, C) |   | v(∅)   | null     | (C,)          |
| v(all) | whole    | (B, C)    |   | S      | keep     | (B, R, P)     |

The explainer reads four hidden states of a trunk: LayerNorm each, one linear map of all, one transformer
block over all tokens, LayerNorm, three linear layers with GELU, as the authors' head. The trunk is the model
itself (trunk="model": the map costs one forward pass, which other methods share) or a fine-tuned copy
(trunk="train", as in the paper). Likewise v is the prediction of the model itself (surrogate="model") or of
a copy that was fine-tuned on images with removed patches (surrogate="train", as in the paper).
`steadygaze.training.vit_shapley` trains them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from warnings import warn
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from steadygaze.errors import CheckpointError, MethodUnavailableError
from steadygaze.methods.learned import FileKind, changed_at, hidden_states, take_prefix, with_prefix
from steadygaze.methods.registry import register_method
from steadygaze.target import predictions
from steadygaze.trace.query import Query
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import HidingMode, subset_logits
from steadygaze.vit.view import ViT, blank_image

FILE = FileKind("steadygaze.shapley", "weights of ViT-Shapley", "steadygaze shapley train")
HEAD_WIDTH = 64  # channels of an attention head
RATIO = 4  # width of the linear layers, in widths of a token
EXPLAINED = ("prob", "value")  # the scores that v is


# -- the explainer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of an explainer's weights. widths: of the states that it reads."""

    widths: tuple[int, ...]
    classes: int

    @property
    def width(self) -> int:
        """Channels of its own tokens."""
        return self.widths[-1]

    @property
    def heads(self) -> int:
        most = max(1, self.width // HEAD_WIDTH)
        return next(count for count in range(most, 0, -1) if self.width % count == 0)


class TransformerBlock(nn.Module):
    """A pre-norm block: attention over all tokens, then two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, RATIO * width), nn.GELU(), nn.Linear(RATIO * width, width))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (b, heads, t, d / heads)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Explainer(nn.Module):
    """φ̃ from the hidden states of a trunk. Before training, φ̃ = 0: every patch has an equal share."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        with torch.random.fork_rng(devices=[]):  # layers initialize from the global generator
            torch.manual_seed(seed)
            self.norms = nn.ModuleList(nn.LayerNorm(w) for w in shape.widths)
            self.join = nn.Linear(sum(shape.widths), width)
            self.block = TransformerBlock(width, shape.heads)
            self.head = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, RATIO * width),
                nn.GELU(),
                nn.Linear(RATIO * width, RATIO * width),
                nn.GELU(),
                nn.Linear(RATIO * width, shape.classes),
            )
        last = self.head[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, states: Sequence[Tensor], prefix: int) -> Float[Tensor, "b p c"]:
        """φ̃ of the patches, from the states that `states_read` chooses."""
        normed = [norm(x) for norm, x in zip(self.norms, states, strict=True)]
        x = self.block(self.join(torch.cat(normed, -1)))
        return self.head(x[:, prefix:])


def states_read(vit: ViT, hidden: Sequence[Tensor], dtype: torch.dtype) -> list[Float[Tensor, "b t d"]]:
    """x⁰, x^{L/3}, x^{2L/3} and x^L, all with the same tokens."""
    states = hidden_states(vit, hidden)
    last = len(states) - 1
    return [states[i].to(dtype) for i in sorted({0, round(last / 3), round(2 * last / 3), last})]


def prefix_of(vit: ViT) -> int:
    """Tokens before the patches in the states."""
    return vit.prefix if vit.plan.global_attention else 0


def trunk_hidden(vit: ViT, images: Tensor) -> list[Tensor]:
    """x⁰ .. x^L, with gradients for the weights of the trunk if they are enabled."""
    hidden = [vit.embed(images)]
    for block in vit.blocks:
        hidden.append(block(hidden[-1]))
    return hidden


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of explainer and values: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# -- the game: what a set of patches is worth --------------------------------------------------------


def values(
    vit: ViT, images: Tensor, tokens: Tensor, keep: Bool[Tensor, "b r p"], mode: HidingMode
) -> Float[Tensor, "b r c"]:
    """v(S) of every subset. A head that reads patches alone gives logits of zero for the empty set."""
    image = torch.arange(len(images), device=keep.device).repeat_interleave(keep.shape[1])
    logits = subset_logits(vit, images, tokens, keep.flatten(0, 1), image, mode)
    return predictions(vit.plan.outputs, logits.to(wide(logits.dtype))).unflatten(0, keep.shape[:2])


def value_of_nothing(vit: ViT, images: Tensor, tokens: Tensor, mode: HidingMode) -> Float[Tensor, " c"]:
    """v(∅), which no image changes: it is computed of the first one."""
    rows, columns = vit.layout(tokens).grid
    keep = torch.zeros(1, 1, rows * columns, dtype=torch.bool, device=tokens.device)
    return values(vit, images[:1], tokens[:1], keep, mode)[0, 0]


def efficient(
    phi: Float[Tensor, "b p c"], whole: Float[Tensor, "b c"], null: Float[Tensor, " c"]
) -> Float[Tensor, "b p c"]:
    """Additive normalization: Σ_j φ_j = v(all) − v(∅).

    Examples:
        >>> efficient(torch.tensor([[[1.0], [0.0]]]), torch.tensor([[0.8]]), torch.tensor([0.2])).flatten()
        tensor([ 0.8000, -0.2000])
    """
    return phi + ((whole - null - phi.sum(1)) / phi.shape[1])[:, None]


def kernel_shap_loss(
    phi: Float[Tensor, "b p c"],
    keep: Bool[Tensor, "b r p"],
    value: Float[Tensor, "b r c"],
    null: Float[Tensor, " c"],
) -> Float[Tensor, ""]:
    """Mean over images and subsets of ‖v(S) − v(∅) − Σ_{j∈S} φ_j‖²; the Shapley kernel draws them."""
    predicted = torch.einsum("brp,bpc->brc", keep.to(phi.dtype), phi)
    return (value - null - predicted).square().sum(-1).mean()


# -- files ------------------------------------------------------------------------------------------


def write(
    path: str | Path, explainer: Explainer, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write explainer, facts and tensors to one safetensors file, atomically.

    Args:
        tensors: "null" is v(∅); "trunk.*" and "surrogate.*" are weights of fine-tuned copies; the rest is the
            trainer's.
    """
    about = {"shape": asdict(explainer.shape), **facts}
    FILE.write(path, about, with_prefix("explainer.", explainer) | dict(tensors))


def read_file(path: str | Path) -> tuple[Explainer, dict[str, Any], dict[str, Tensor]]:
    """(explainer, facts, tensors) of a file that `write` wrote. No code in it is executed."""
    facts, tensors = FILE.read(path)
    try:
        shape = facts.pop("shape")
        weights = take_prefix("explainer.", tensors)
        explainer = Explainer(Shape(tuple(shape["widths"]), shape["classes"]))
        explainer.to(weights["join.weight"].dtype).load_state_dict(weights)
        if tensors["null"].shape != (explainer.shape.classes,):
            raise ValueError("v(∅) does not have one number per class")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: its weights do not match its metadata ({error}). Train it again."
        ) from error
    return explainer.eval().requires_grad_(False), facts, tensors


@lru_cache(maxsize=8)
def _read(
    path: str, changed: int, device: torch.device, dtype: torch.dtype
) -> tuple[Explainer, dict[str, Any], dict[str, Tensor]]:
    explainer, facts, tensors = read_file(path)
    used = {name: t for name, t in tensors.items() if name.startswith(("null", "trunk.", "surrogate."))}
    return explainer.to(device, dtype), facts, used


def load(path: str | Path, vit: ViT) -> tuple[Explainer, dict[str, Any], dict[str, Tensor]]:
    """(explainer, facts, v(∅) and weights of copies), on the device of the model; cached."""
    parameter = next(vit.model.parameters())
    return _read(str(path), changed_at(path), parameter.device, wide(parameter.dtype))


# the last copy of each kind, with the file that it was read from and when that was written
_COPIES: "WeakKeyDictionary[ViT, dict[str, tuple[str, int, ViT]]]" = WeakKeyDictionary()


def fine_tuned(vit: ViT, path: str | Path, which: str, tensors: Mapping[str, Tensor]) -> ViT:
    """A copy of the model with the weights of a file's "trunk" or "surrogate", cached; `vit` without."""
    weights = take_prefix(f"{which}.", dict(tensors))
    if not weights:
        return vit
    copies, written = _COPIES.setdefault(vit, {}), changed_at(path)
    if which not in copies or copies[which][:2] != (str(path), written):
        tuned = copy.deepcopy(vit)
        try:
            tuned.model.load_state_dict(weights)
        except RuntimeError as error:
            raise MethodUnavailableError(
                f"vit_shapley: the weights in {path} are of another model. Train them for this model."
            ) from error
        tuned.model.eval().requires_grad_(False)
        copies[which] = (str(path), written, tuned)
    return copies[which][2]


# -- the method -------------------------------------------------------------------------------------

_SHAPES: "WeakKeyDictionary[ViT, Shape]" = WeakKeyDictionary()


def shape_of(vit: ViT) -> Shape:
    """The shape of an explainer for this model, from one forward pass; cached."""
    if vit not in _SHAPES:
        image = blank_image(vit)
        with torch.no_grad(), evaluation_mode(vit.model):
            hidden = trunk_hidden(vit, image)
            classes = vit.head(hidden[-1]).shape[-1]
            widths = tuple(x.shape[-1] for x in states_read(vit, hidden, image.dtype))
        _SHAPES[vit] = Shape(widths, classes)
    return _SHAPES[vit]


def trained(vit: ViT, file: Any = None) -> str:
    """Why there is no explainer for this model; empty if there is."""
    if file is None:
        return (
            "it needs an explainer that is trained for the model. Train it with `steadygaze shapley train`, "
            "then use sg.method('vit_shapley', file=FILE)."
        )
    shape, expected = load(file, vit)[0].shape, shape_of(vit)
    if shape == expected:
        return ""
    widths, expected_widths = (", ".join(map(str, s.widths)) for s in (shape, expected))
    return (
        f"{file} was trained for states of widths {widths} and {shape.classes} classes; this "
        f"model has {expected_widths} and {expected.classes}. Train an explainer for this model."
    )


@register_method(
    "vit_shapley",
    "model",
    family="learned",
    gradient=False,
    class_specific=True,
    cost=1.0,
    score="prob",
    unsupported=trained,
    reads_hidden=True,
)
def vit_shapley(query: Query, *, file: Any = None) -> Float[Tensor, "b h w"]:
    """Shapley values of the patches, predicted by a learned network (ViT-Shapley; file: its weights)."""
    if not isinstance(query.target, Tensor) or query.score not in EXPLAINED:
        asked = query.score if isinstance(query.target, Tensor) else "a callable"
        raise MethodUnavailableError(
            f"vit_shapley: it is trained to explain the prediction itself, expected score 'prob' (or 'value' "
            f"for regression) of a class, got {asked}. Leave score out, or use kernel_shap.",
            option="score",
        )
    explainer, facts, tensors = load(file, query.vit)
    problem = facts.get("diverged") or ("" if facts["explainer_steps"] else "only the surrogate has steps")
    if problem:
        warn(f"vit_shapley: {file} is not trained: {problem}. It explains nothing.", stacklevel=2)
    with torch.no_grad():
        phi = shapley_values(query, file, explainer, tensors)
    index = query.target[:, None, None].expand(-1, phi.shape[1], 1)
    return phi.gather(2, index)[:, :, 0].unflatten(1, query.grid)


def shapley_values(
    query: Query, file: Any, explainer: Explainer, tensors: Mapping[str, Tensor]
) -> Float[Tensor, "b p c"]:
    """φ of every patch and class."""
    vit, dtype = query.vit, wide(query.images.dtype)
    trunk = fine_tuned(vit, file, "trunk", tensors)
    hidden = query.hidden if trunk is vit else trunk_hidden(trunk, query.images)
    phi = explainer(states_read(trunk, hidden, dtype), prefix_of(vit))
    surrogate = fine_tuned(vit, file, "surrogate", tensors)
    logits = query.logits if surrogate is vit and query.logits is not None else surrogate(query.images)
    whole = predictions(vit.plan.outputs, logits.to(dtype))
    return efficient(phi, whole, tensors["null"].to(phi))
