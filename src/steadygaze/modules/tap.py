"""Token-aware average pooling before attention (docs/equations.md#tap).

Guo, Stutz & Schiele, "Robustifying Token Attention for Vision Transformers", ICCV 2023.

    T(x)_n = Σ_k P_kn · branch_k(x)_n,   P = softmax_k [conv3x3 D→K, BN, conv3x3 K→K](x)
    block: x + Attn(norm1(T(x)))

| kind                   | branch 0 | branch k ≥ 1                                                     |
| dilated                | x        | mean over 3x3 tokens with dilation k, zero padding, divisor 9    |
| kernels                | x        | mean over (2k+1)x(2k+1) tokens, zero padding, divisor (2k+1)²    |
| average3, average5     | fixed baselines: T(x) is the mean over 3x3 or 5x5 tokens                    |
| depthwise, convolution | T(x) is one learned 3x3 convolution, per channel or over all channels       |

Only patches are pooled; class, register and distillation tokens pass unchanged. The residual and the MLP
use the unpooled tokens.

start="identity" is x + g (T(x) − x) with a learned scalar g = 0. With branches that is another P: branch 0
gets 1 − g (1 − P_0), the others g P_k. The gradient of P's weights is 0 until the first step has changed g.

T is a sparse matrix over tokens. Up to DENSE tokens it is built as a dense matrix and multiplied, which
takes a third of the time of separate pooling operations on CPU and GPU; above, the pools are depthwise
convolutions. The first convolution of P is computed as one matrix product for its nine taps and a shifted
sum of K channels. Tests compare these forms with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.modules.base import Allocation, Cost, Inserted, Start, check_start, checked_allocation

Kind = Literal["dilated", "kernels", "average3", "average5", "depthwise", "convolution"]
WITH_BRANCHES = ("dilated", "kernels")
MAX_BRANCHES = 64  # branch k reaches k tokens far: more than any grid has use for
DENSE = 512  # number of tokens up to which T is a dense matrix


@dataclass(frozen=True)
class TAP:
    """Options of token-aware average pooling.

    Attributes:
        branches: Number of branches, 2..64: the tokens and pools of growing reach.
        allocation: The blocks that get it: "all", "shallow", "deep", "middle_deep", or block indices.
        kind: What the branches are; see the module's table.
        temperature: Divides the branch scores before the softmax.
        start: "paper", or "identity" for a module that changes no output before it is trained.

    Examples:
        >>> TAP(branches=2, start="identity").branches
        2
    """

    branches: int = 4
    allocation: Allocation | list[int] | range = "all"
    kind: Kind = "dilated"
    temperature: float = 1.0
    start: Start = "paper"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UnknownNameError("kind of pooling", str(self.kind), get_args(Kind))
        is_integer = isinstance(self.branches, int) and not isinstance(self.branches, bool)
        if not is_integer or not 2 <= self.branches <= MAX_BRANCHES:
            raise InputError(
                f"branches: expected an integer of 2 or more (the tokens and one pool), at most "
                f"{MAX_BRANCHES}, got {self.branches!r}"
            )
        if not isinstance(self.temperature, (int, float)) or not 0 < self.temperature < float("inf"):
            raise InputError(f"temperature: expected a number above 0, got {self.temperature!r}")
        check_start(self.start)
        object.__setattr__(self, "allocation", checked_allocation(self.allocation))


class TokenPool(Inserted):
    """T on tokens (B, prefix + h·w, D), patches in raster order, or on a map (B, h, w, D).

    Examples:
        >>> TokenPool(8, TAP(), grid=(4, 4), prefix=1)(torch.randn(2, 17, 8)).shape
        torch.Size([2, 17, 8])
    """

    def __init__(self, width: int, spec: TAP, *, grid: tuple[int, int], prefix: int = 0) -> None:
        options: dict[str, Any] = {"module": "TAP", "kind": spec.kind}
        if spec.kind in WITH_BRANCHES:
            options |= {"branches": spec.branches, "temperature": float(spec.temperature)}
        super().__init__(options, spec.start, gated=True)
        self.width, self.kind, self.grid, self.prefix = width, spec.kind, (int(grid[0]), int(grid[1])), prefix
        self.branches, self.temperature = spec.branches, float(spec.temperature)
        if spec.kind in WITH_BRANCHES:
            self.predict = nn.Sequential(
                nn.Conv2d(width, spec.branches, 3, padding=1, bias=False),
                nn.BatchNorm2d(spec.branches),
                nn.Conv2d(spec.branches, spec.branches, 3, padding=1, bias=False),
            )
        elif spec.kind in ("depthwise", "convolution"):
            self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width if spec.kind == "depthwise" else 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.pooled(x.flatten(1, 2), (x.shape[1], x.shape[2]), 0).unflatten(1, x.shape[1:3])
        return self.pooled(x, self.grid_of(x.shape[1] - self.prefix), self.prefix)

    def grid_of(self, patches: int) -> tuple[int, int]:
        """The grid of `patches` patches: the model's own grid, or one with the same aspect ratio."""
        h, w = self.grid
        if patches == h * w:  # comparison also works while tracing, where `patches` is a tensor
            return h, w
        scale = (patches / (h * w)) ** 0.5
        scaled = (round(h * scale), round(w * scale))
        if scaled[0] * scaled[1] != patches or scaled[0] * w != scaled[1] * h:
            raise InputError(
                f"TAP: expected {h}x{w} patches, or a grid of the same aspect ratio, got {patches} patches. "
                "Use images with the model's aspect ratio."
            )
        return scaled

    def check_images(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Hook on the embedding of models that accept any size: other aspect ratios give a wrong grid."""
        if (
            args
            and args[0].dim() == 4
            and args[0].shape[2] * self.shape[1] != args[0].shape[3] * self.shape[0]
        ):
            raise InputError(
                f"TAP: expected images with the aspect ratio of {self.shape[0]}x{self.shape[1]}, "
                f"got {tuple(args[0].shape[2:])}. Their tokens would be pooled on a wrong grid."
            )

    shape: tuple[int, int] = (1, 1)  # input height and width of the model

    def pooled(self, x: Float[Tensor, "b n d"], grid: tuple[int, int], prefix: int) -> Float[Tensor, "b n d"]:
        if self.kind in WITH_BRANCHES:
            weights = self.weights(x, grid, prefix)
            if x.shape[1] <= DENSE:
                return self.matrix(weights, grid, prefix) @ x
        patches = x[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
        if self.kind in WITH_BRANCHES:
            z = _share(weights, 0) * patches
            for k in range(1, self.branches):
                z = z + _share(weights, k) * self.branch(patches, k)
        else:
            size = int(self.kind[-1]) if self.kind.startswith("average") else 0
            z = F.avg_pool2d(patches, size, 1, size // 2) if size else self.mix(patches)  # counts the padding
            z = z if self.gate is None else patches + self.gate.to(z.dtype) * (z - patches)
        z = z.permute(0, 2, 3, 1).flatten(1, 2)
        return z if prefix == 0 else torch.cat([x[:, :prefix], z], dim=1)

    def branch(self, patches: Float[Tensor, "b d h w"], k: int) -> Float[Tensor, "b d h w"]:
        if self.kind == "kernels":
            return F.avg_pool2d(patches, 2 * k + 1, 1, k)
        ninth = patches.new_full((self.width, 1, 3, 3), 1 / 9)
        return F.conv2d(patches, ninth, padding=k, dilation=k, groups=self.width)

    def weights(
        self, x: Float[Tensor, "b n d"], grid: tuple[int, int], prefix: int
    ) -> Float[Tensor, "#b k h w"]:
        """P: the weight of each branch at each patch; weights sum to 1 over the branches.

        With a gate: (1 − g) e_0 + g P.
        """
        first, norm, last = self.predict.children()
        assert isinstance(first, nn.Conv2d)
        # (9K, D): `fold` scatters and adds what a convolution would gather
        taps = first.weight.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)
        scores = F.fold(F.linear(x, taps)[:, prefix:].transpose(1, 2), grid, 3, padding=1)
        scores = last(norm(scores))
        weights = (scores if self.temperature == 1 else scores / self.temperature).softmax(1)
        if self.gate is None:
            return weights
        own = F.one_hot(weights.new_zeros(1, dtype=torch.long), self.branches).to(weights.dtype)[
            ..., None, None
        ]
        return own + self.gate.to(weights.dtype) * (weights - own)

    def matrix(
        self, weights: Float[Tensor, "#b k h w"], grid: tuple[int, int], prefix: int
    ) -> Float[Tensor, "b n n"]:
        """T as a matrix: row n holds the weights of the tokens that are pooled into token n."""
        share, column, inside, width = neighborhood(
            self.kind, self.branches, grid, prefix, weights.dtype, weights.device
        )
        rows = weights.flatten(2).transpose(1, 2) @ share
        if prefix:
            own = F.one_hot(rows.new_zeros(1, dtype=torch.long), rows.shape[2]).to(rows.dtype)
            rows = torch.cat([own.expand(rows.shape[0], prefix, -1), rows], dim=1)
        n = rows.shape[1]
        filled = rows.new_zeros(rows.shape[0], n, width).scatter(
            2, column.expand(rows.shape[0], -1, -1), rows * inside
        )
        filled = filled if width == n else filled[:, :, :n]
        # for the seam and for masking: this matrix mixes tokens, and was computed from them
        filled.weights_ = True  # type: ignore[attr-defined]
        return filled

    def cost(self, tokens: int) -> Cost:
        parameters = sum(p.numel() for p in self.parameters())
        patches, d, k = tokens - self.prefix, self.width, self.branches
        gated = 0 if self.gate is None else 3 * patches * (k if self.kind in WITH_BRANCHES else d)
        if self.kind in WITH_BRANCHES:
            sizes = [9 if self.kind == "dilated" else (2 * i + 1) ** 2 for i in range(1, k)]
            convolutions = 9 * (d * k + k * k) * patches
            return Cost(
                parameters, convolutions, 2 * convolutions + (sum(sizes) + 2 * k - 1) * d * patches + gated
            )
        if self.kind.startswith("average"):
            return Cost(parameters, 0, int(self.kind[-1]) ** 2 * d * patches + gated)
        convolutions = 9 * d * (d if self.kind == "convolution" else 1) * patches
        return Cost(parameters, convolutions, 2 * convolutions + gated)


def _share(weights: Float[Tensor, "b k h w"], k: int) -> Float[Tensor, "b 1 h w"]:
    """The weight of branch k at each patch; for the seam, it is the gate of a product."""
    share = weights[:, k : k + 1]
    share.activation_ = True  # type: ignore[attr-defined]
    return share


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # cached tensors may later be used where gradients are needed
def neighborhood(
    kind: str,
    branches: int,
    grid: tuple[int, int],
    prefix: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(share, column, inside, columns) of T, for each of O offsets to a neighbor.

    share: (K, O) weight of the neighbor at offset o in branch k
    column: (N, O) index of that neighbor; for one outside of the grid, a column that the row does not use
    inside: (N, O) 1 if the neighbor lies inside the grid, else 0
    columns: number of columns, N, or N + 1 if a row uses all of them

    Offset 0 is the token itself, the only one of prefix tokens.
    """
    steps = [(k, k * i, k * j) for k in range(1, branches) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    if kind == "kernels":
        steps = [(k, i, j) for k in range(1, branches) for i in range(-k, k + 1) for j in range(-k, k + 1)]
    offsets = list(dict.fromkeys([(0, 0), *((i, j) for _, i, j in steps)]))
    share = torch.zeros(branches, len(offsets), dtype=torch.float64, device="cpu")
    share[0, 0] = 1
    for k, i, j in steps:
        share[k, offsets.index((i, j))] += 1 / (9 if kind == "dilated" else (2 * k + 1) ** 2)
    height, width = grid
    patch = torch.arange(height * width, device="cpu")
    row, col, outside = patch // width, patch % width, prefix + height * width
    column = torch.full((outside, len(offsets)), outside, device="cpu")
    column[:prefix, 0] = torch.arange(prefix, device="cpu")
    for o, (i, j) in enumerate(offsets):
        exists = (row + i >= 0) & (row + i < height) & (col + j >= 0) & (col + j < width)
        column[prefix:, o] = torch.where(exists, prefix + (row + i) * width + col + j, outside)
    inside = column < outside
    used = torch.zeros(outside, outside + 1, dtype=torch.bool, device="cpu").scatter_(1, column, inside)
    free = used.to(torch.uint8).argmin(1, keepdim=True)  # first column that the row does not use
    column = torch.where(inside, column, free)
    return (
        share.to(device, dtype),
        column.to(device),
        inside.to(device, dtype),
        max(outside, int(column.max()) + 1),
    )
