"""Vision DiffMask (Nalmpantis et al. 2023, arXiv 2304.06391): gates that learn which patches to mask.

Equations: docs/equations.md#diffmask and docs/equations.md#hard-concrete.

    h̄⁰  = embed(image) − embed(blank)                         the patches' content without their positions
    u_l = α · tanh(w₂ · tanh(W₁ [h̄⁰; h^l] + c₁) + c₂) + β_l   l = 0 .. L+1: h̄⁰, the blocks' inputs, the output
    z_l ~ HardConcrete(u_l):  s = σ((u + logit U) / τ),  z = clip((r − ℓ) s + ℓ, 0, 1),  U uniform
    z   = Π_l z_l                                             a patch is kept if all gates are open
    x̂   = z · h̄⁰ + (1 − z) · b + positions                    b is learned; prefix tokens are never masked
    P(z ≠ 0) = σ(u − τ ln(−ℓ/r)),    E[z] = ∫₀¹ P(z > t) dt = ∫₀¹ σ(u − τ logit((t − ℓ) / (r − ℓ))) dt

| symbol | variable | paper           |   | symbol | variable    | paper   |
| α      | stretch  | 15, ImageNet 20 |   | τ      | temperature | 0.2     |
| β      | shift    | 8, learned       |   | ℓ, r   | left, right | -0.2, 1 |

The map is Π_l E[z_l] over all gates (`read="expected"`, the paper) or Π_l P(z_l ≠ 0) (`read="probability"`,
its code), in 0..1, from one forward pass. `steadygaze.training.diffmask` trains the gates. In hierarchical
models the gates lie on the map's grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.methods.learned import FileKind, changed_at, hidden_states, on_grid, take_prefix, with_prefix
from steadygaze.methods.registry import register_method
from steadygaze.trace.query import Query
from steadygaze.vit.masking import token_indices
from steadygaze.vit.view import ViT, blank_image, remember

NODES = 24  # of the quadrature of E[z]
PREFIX_PARAMETERS = (
    "cls_token",
    "class_token",
    "class_embedding",
    "dist_token",
    "distillation_token",
    "reg_token",
    "register_tokens",
)
FILE = FileKind("steadygaze.diffmask", "gates of Vision DiffMask", "steadygaze diffmask train")


@dataclass(frozen=True)
class HardConcrete:
    """A relaxed Bernoulli variable that is exactly 0 or 1 with positive probability."""

    temperature: float = 0.2
    left: float = -0.2
    right: float = 1.0

    def sample(self, u: Tensor, uniform: Tensor) -> Tensor:
        """z in 0..1, differentiable in u; `uniform` in 0..1."""
        eps = torch.finfo(u.dtype).eps
        s = ((u + torch.logit(uniform.clamp(eps, 1 - eps))) / self.temperature).sigmoid()
        return ((self.right - self.left) * s + self.left).clamp(0, 1)

    def log_probability(self, u: Tensor) -> Tensor:
        """ln P(z ≠ 0)."""
        return F.logsigmoid(u - self.temperature * log(-self.left / self.right))

    def expected(self, u: Tensor) -> Tensor:
        """E[z], by Gauss-Legendre over y with t = 1 − y⁵: smooth also where t → 1."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        y, dy = (nodes + 1) / 2, weights / 2
        total = torch.zeros_like(u)
        for t, dt in zip(1 - y**5, 5 * y**4 * dy, strict=True):
            a = (t - self.left) / (self.right - self.left)
            total = total + dt * torch.sigmoid(u - self.temperature * log(a / (1 - a)))
        return total


class Gate(nn.Module):
    """u_l from [h̄⁰; h^l]: (B, T, d + d_l) -> (B, T)."""

    def __init__(self, width: int, inner: int, stretch: float, shift: float) -> None:
        super().__init__()
        self.first, self.second = weight_norm(nn.Linear(width, inner)), weight_norm(nn.Linear(inner, 1))
        self.stretch, self.shift = stretch, nn.Parameter(torch.tensor(float(shift)))

    @torch.no_grad()
    def open(self) -> None:
        """u = β for every token: the weight-normed w₂ keeps its direction and has length 0, c₂ is 0."""
        self.second.parametrizations.weight.original0.zero_()
        self.second.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.stretch * self.second(self.first(x).tanh()).tanh().squeeze(-1) + self.shift


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of the gates; gates with equal widths can load each other's weights."""

    widths: tuple[int, ...]  # of the states
    stretch: float = 15.0
    shift: float = 8.0
    concrete: HardConcrete = field(default_factory=HardConcrete)


class DiffMask(nn.Module):
    """One gate for each hidden state of a model, and the learned vector b that replaces a masked patch."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape, self.concrete = shape, shape.concrete
        width = shape.widths[0]
        with torch.random.fork_rng(devices=[]):  # layers initialize from the global generator
            torch.manual_seed(seed)
            inner = max(1, width // 4)
            self.gates = nn.ModuleList(
                Gate(width + w, inner, shape.stretch, shape.shift) for w in shape.widths
            )
            self.baseline = nn.Parameter(nn.init.xavier_normal_(torch.empty(1, 1, width)))

    def logits(self, states: Sequence[Tensor], last: int | None = None) -> Float[Tensor, "b t layers"]:
        """u of the gates 0..last (None: all gates)."""
        count = len(self.gates) if last is None else last + 1
        pairs = zip(self.gates[:count], states, strict=False)
        return torch.stack([gate(torch.cat([states[0], h], -1)) for gate, h in pairs], -1)

    def map(self, u: Float[Tensor, "b t layers"], read: str = "expected") -> Float[Tensor, "b t"]:
        """The share of each token that all gates keep, 0..1."""
        if read == "expected":
            return self.concrete.expected(u).prod(-1)
        if read == "probability":
            return self.concrete.log_probability(u).sum(-1).exp()
        raise UnknownNameError("read", read, ("expected", "probability"))


# -- hidden states, and tokens with masked patches --------------------------------------------------


def blank(vit: ViT, images: Tensor) -> Float[Tensor, "1 n d"]:
    """The tokens of an all-zero image: positions, and what all patches have in common."""
    with torch.no_grad():
        return vit.embed(torch.zeros_like(images[:1]))


def prefix_tokens(vit: ViT, empty: Tensor) -> Float[Tensor, "1 p d"]:
    """The model's prefix tokens (class, distillation, registers) without positions.

    Where the model has no such parameters, or others too, they are those of `empty`, with positions.
    """
    width = empty.shape[-1]
    named = [p for name, p in vit.model.named_parameters() if name.rpartition(".")[2] in PREFIX_PARAMETERS]
    tokens = [p.detach().reshape(-1, width) for p in named if p.shape[-1] == width]
    if sum(map(len, tokens)) == vit.prefix:
        return torch.cat([empty.new_zeros(0, width), *tokens])[None]
    return empty[:, : vit.prefix]


def states(vit: ViT, empty: Tensor, hidden: Sequence[Tensor], prefix: Tensor | None = None) -> list[Tensor]:
    """h̄⁰, h¹ .. h^{L+1}: (B, T, d_l). Plain ViTs: all tokens, prefix first. Hierarchical: the map's cells.

    Args:
        prefix: h̄⁰ of the prefix tokens (`prefix_tokens`); None: 0. The gates of patches do not depend on it.
    """
    content = hidden[0] - empty
    if vit.plan.global_attention:
        if prefix is not None:
            content = torch.cat([prefix.expand(len(content), -1, -1), content[:, vit.prefix :]], 1)
    else:
        layout = vit.layout(hidden[0])
        content = on_grid(vit.blocks[0].patches(content, layout), layout.grid)
    return [content, *hidden_states(vit, hidden)]


def masked(vit: ViT, tokens: Tensor, empty: Tensor, z: Float[Tensor, "b t"], baseline: Tensor) -> Tensor:
    """x̂: tokens whose patches are replaced by `baseline`, at their own position, where z is 0."""
    layout = vit.layout(tokens)
    if vit.plan.global_attention:
        gone = F.pad(1 - z[:, vit.prefix :], (vit.prefix, 0))
    else:
        index = token_indices(vit, tokens)
        coarse = (1 - z).unflatten(1, layout.grid)[:, None]
        fine = F.interpolate(coarse, size=tuple(index.shape), mode="nearest")
        gone = z.new_zeros(tokens.shape[:2]).index_copy(1, index.flatten(), fine.flatten(1))
    return remember(tokens + gone.unsqueeze(-1) * (baseline - (tokens - empty)), layout)


# -- files ------------------------------------------------------------------------------------------


def write(
    path: str | Path, mask: DiffMask, facts: Mapping[str, Any], extra: Mapping[str, Tensor] | None = None
) -> None:
    """Write gates, facts about them and the trainer's state to one safetensors file, atomically."""
    tensors = with_prefix("mask.", mask) | dict(extra or {})
    FILE.write(path, {"shape": asdict(mask.shape), **facts}, tensors)


def read_file(path: str | Path) -> tuple[DiffMask, dict[str, Any], dict[str, Tensor]]:
    """(gates, facts, the trainer's state) from a file that `write` wrote. No code in it is executed."""
    facts, tensors = FILE.read(path)
    try:
        shape = dict(facts.pop("shape"))
        shape |= {"widths": tuple(shape["widths"]), "concrete": HardConcrete(**shape["concrete"])}
        mask = DiffMask(Shape(**shape))
        mask.load_state_dict(take_prefix("mask.", tensors))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"{path}: its description of the gates cannot be used ({reason})") from error
    return mask.eval().requires_grad_(False), facts, tensors


@lru_cache(maxsize=8)
def _read(
    path: str, changed: int, device: torch.device, dtype: torch.dtype
) -> tuple[DiffMask, dict[str, Any]]:
    mask, facts, _ = read_file(path)
    return mask.to(device, dtype), facts


def load(path: str | Path, vit: ViT) -> tuple[DiffMask, dict[str, Any]]:
    """The gates in a file, on the device and in the precision of the model; cached."""
    parameter = next(vit.model.parameters())
    return _read(str(path), changed_at(path), parameter.device, parameter.dtype)


# -- the method -------------------------------------------------------------------------------------


def trained(vit: ViT, file: Any = None) -> str:
    """Why there are no gates for this model; empty if there are."""
    if file is None:
        return (
            "it needs gates that are trained for the model. Train them with `steadygaze diffmask train`, "
            "then use sg.method('diffmask', file=FILE)."
        )
    widths = load(file, vit)[0].shape.widths
    empty = blank(vit, blank_image(vit))
    blocks = len(widths) - 2
    if widths[0] == empty.shape[-1] and (blocks == len(vit.blocks) or not vit.plan.global_attention):
        return ""
    return (
        f"{file} was trained for tokens of width {widths[0]} and {blocks} blocks; this model has "
        f"{empty.shape[-1]} and {len(vit.blocks)}. Train gates for this model."
    )


@register_method(
    "diffmask",
    "model",
    family="learned",
    gradient=False,
    class_specific=False,
    cost=1.0,
    unsupported=trained,
    reads_hidden=True,
)
def diffmask(query: Query, *, file: Any = None, read: str = "expected") -> Float[Tensor, "b h w"]:
    """Vision DiffMask: what learned gates keep of each patch (read: "expected", or "probability")."""
    mask, facts = load(file, query.vit)
    if facts.get("diverged"):
        how = "is not trained yet" if facts.get("early") else "diverged in training"
        warn(f"diffmask: {file} {how}: {facts['diverged']}. It explains nothing.", stacklevel=2)
    only = facts.get("settings", {}).get("target")
    if only is not None and not (isinstance(query.target, Tensor) and bool((query.target == only).all())):
        raise MethodUnavailableError(
            f"diffmask: {file} was trained for class {only} alone. Use target={only}.", option="target"
        )
    with torch.no_grad():
        seen = states(query.vit, blank(query.vit, query.images), query.hidden)
        if tuple(h.shape[-1] for h in seen) != mask.shape.widths:
            raise MethodUnavailableError(
                f"diffmask: {file} was trained for hidden states of other widths. Train gates for this model."
            )
        kept = mask.map(mask.logits(seen), read)
    prefix = query.vit.prefix if query.vit.plan.global_attention else 0
    return kept[:, prefix:].unflatten(1, query.grid)
