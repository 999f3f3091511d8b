"""Token-aware average pooling before attention (docs/equations.md#tap).

Guo, Stutz & Schiele, "Robustifying token attention", ICCV 2023.

    T(x)_n = Σ_k P_kn · branch_k(x)_n,   P = softmax_k [conv3x3 D→K, BN, conv3x3 K→K](x),   block: x + Attn(norm1(T(x)))

| kind        | branch 0 | branch k ≥ 1                                                                     |
| dilated     | x        | mean over 3x3 tokens with dilation k, zero padding, always divided by 9          |
| kernels     | x        | mean over (2k+1)x(2k+1) tokens, zero padding, always divided by (2k+1)²          |
| average3, average5    | the fixed baselines: T(x) is one mean over 3x3 or 5x5 tokens, nothing learnt        |
| depthwise, convolution | T(x) is one learnt 3x3 convolution, for each channel alone or over all             |

Only patches are pooled; class, register and distillation tokens pass. The residual and the MLP keep the tokens that are not pooled.

T is a matrix over tokens with few numbers in a row. Up to DENSE tokens it is filled in and multiplied, which on CPU and GPU costs a
third of the pools one by one; above, the pools are depthwise convolutions. The first convolution of P is one matrix product for its nine
taps, and a shifted sum of K channels. Both are the same function, and tests hold them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.modules.base import Allocation, Cost, Inserted, checked_allocation

Kind = Literal["dilated", "kernels", "average3", "average5", "depthwise", "convolution"]
LEARNT = ("dilated", "kernels")  # kinds with branches
DENSE = 512  # tokens up to which T is one matrix


@dataclass(frozen=True)
class TAP:
    """Token-aware average pooling as `insert` takes it. temperature divides the branch scores before their softmax."""

    branches: int = 4
    allocation: Allocation | list[int] | range = "all"
    kind: Kind = "dilated"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UnknownName("kind of pooling", str(self.kind), get_args(Kind))
        if isinstance(self.branches, bool) or not isinstance(self.branches, int) or self.branches < 2:
            raise BadInput(
                f"branches: expected a whole number of at least 2 (the tokens themselves, and one pool), got {self.branches!r}"
            )
        if not isinstance(self.temperature, (int, float)) or not 0 < self.temperature < float("inf"):
            raise BadInput(f"temperature: expected a number above 0, got {self.temperature!r}")
        object.__setattr__(self, "allocation", checked_allocation(self.allocation))


class TokenPool(Inserted):
    """T on tokens (B, prefix + h·w, D), patches in raster order, or on a map (B, h, w, D)."""

    def __init__(self, width: int, spec: TAP, *, grid: tuple[int, int], prefix: int = 0) -> None:
        super().__init__()
        self.width, self.kind, self.grid, self.prefix = width, spec.kind, (int(grid[0]), int(grid[1])), prefix
        self.branches, self.temperature = spec.branches, float(spec.temperature)
        self.spec = {"module": "TAP", "kind": spec.kind}
        if spec.kind in LEARNT:
            self.spec |= {"branches": spec.branches, "temperature": self.temperature}
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
        """The grid of that many patches: the model's own, or one of the same shape."""
        h, w = self.grid
        if patches == h * w:  # also where a tracer made the number a tensor
            return h, w
        scale = (patches / (h * w)) ** 0.5
        scaled = (round(h * scale), round(w * scale))
        if scaled[0] * scaled[1] != patches or scaled[0] * w != scaled[1] * h:
            raise BadInput(
                f"TAP: expected {h}x{w} patches, or a grid of the same shape, got {patches}. Give pictures of the model's own shape."
            )
        return scaled

    def check_images(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A hook on the embedding of models that take any size: pictures of another shape would be pooled on a wrong grid."""
        if (
            args
            and args[0].dim() == 4
            and args[0].shape[2] * self.shape[1] != args[0].shape[3] * self.shape[0]
        ):
            raise BadInput(
                f"TAP: expected pictures of the shape {self.shape[0]}x{self.shape[1]} or a multiple, got {tuple(args[0].shape[2:])}: "
                "their tokens would be pooled on a wrong grid."
            )

    shape: tuple[int, int] = (1, 1)  # height and width of the pictures the model was made for

    def pooled(self, x: Float[Tensor, "b n d"], grid: tuple[int, int], prefix: int) -> Float[Tensor, "b n d"]:
        if self.kind in LEARNT:
            weights = self.weights(x, grid, prefix)
            if x.shape[1] <= DENSE:
                return self.matrix(weights, grid, prefix) @ x
        patches = x[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
        if self.kind in LEARNT:
            z = weights[:, :1] * patches
            for k in range(1, self.branches):
                z = z + weights[:, k : k + 1] * self.branch(patches, k)
        elif self.kind.startswith("average"):
            z = F.avg_pool2d(patches, int(self.kind[-1]), 1, int(self.kind[-1]) // 2)  # padding is counted
        else:
            z = self.mix(patches)
        z = z.permute(0, 2, 3, 1).flatten(1, 2)
        return z if prefix == 0 else torch.cat([x[:, :prefix], z], dim=1)

    def branch(self, patches: Float[Tensor, "b d h w"], k: int) -> Float[Tensor, "b d h w"]:
        if self.kind == "kernels":
            return F.avg_pool2d(patches, 2 * k + 1, 1, k)
        ninth = patches.new_full((self.width, 1, 3, 3), 1 / 9)
        return F.conv2d(patches, ninth, padding=k, dilation=k, groups=self.width)

    def weights(
        self, x: Float[Tensor, "b n d"], grid: tuple[int, int], prefix: int
    ) -> Float[Tensor, "b k h w"]:
        """P: one weight for each patch and branch, summing to 1 over the branches."""
        first, norm, last = self.predict.children()
        assert isinstance(first, nn.Conv2d)
        taps = (
            first.weight.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)
        )  # (9K, D): fold adds up what convolution would gather
        scores = F.fold(F.linear(x, taps)[:, prefix:].transpose(1, 2), grid, 3, padding=1)
        scores = last(norm(scores)) if self.temperature == 1 else last(norm(scores)) / self.temperature
        return scores.softmax(1)

    def matrix(
        self, weights: Float[Tensor, "b k h w"], grid: tuple[int, int], prefix: int
    ) -> Float[Tensor, "b n n"]:
        """T as a matrix: row n holds what token n takes from each other one."""
        share, column, inside, width = neighbourhood(
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
        filled.weights_ = True  # type: ignore[attr-defined]  # for the seam and for masking: rows that mix tokens, from the tokens themselves
        return filled

    def cost(self, tokens: int) -> Cost:
        parameters, patches, d, k = (
            sum(p.numel() for p in self.parameters()),
            tokens - self.prefix,
            self.width,
            self.branches,
        )
        if self.kind in LEARNT:
            sizes = [9 if self.kind == "dilated" else (2 * i + 1) ** 2 for i in range(1, k)]
            convolutions = 9 * (d * k + k * k) * patches
            return Cost(parameters, convolutions, 2 * convolutions + (sum(sizes) + 2 * k - 1) * d * patches)
        if self.kind.startswith("average"):
            return Cost(parameters, 0, int(self.kind[-1]) ** 2 * d * patches)
        convolutions = 9 * d * (d if self.kind == "convolution" else 1) * patches
        return Cost(parameters, convolutions, 2 * convolutions)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept must serve gradients later
def neighbourhood(kind: str, branches: int, grid: tuple[int, int], prefix: int, dtype: torch.dtype,
                  device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:  # fmt: skip
    """(share (K, O): how much branch k takes from the neighbour at offset o; column (N, O): which token that is; inside (N, O): 1, or 0
    if it lies outside of the grid, and its column is one that the row does not use; how many columns: N, or N + 1 where a row uses all)

    Offset 0 is the token itself; prefix tokens have no other.
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
    row, at, outside = patch // width, patch % width, prefix + height * width
    column = torch.full((outside, len(offsets)), outside, device="cpu")
    column[:prefix, 0] = torch.arange(prefix, device="cpu")
    for o, (i, j) in enumerate(offsets):
        there = (row + i >= 0) & (row + i < height) & (at + j >= 0) & (at + j < width)
        column[prefix:, o] = torch.where(there, prefix + (row + i) * width + at + j, outside)
    inside = column < outside
    used = torch.zeros(outside, outside + 1, dtype=torch.bool, device="cpu").scatter_(1, column, inside)
    free = used.to(torch.uint8).argmin(1, keepdim=True)  # the first column that the row does not use
    column = torch.where(inside, column, free)
    return (
        share.to(device, dtype),
        column.to(device),
        inside.to(device, dtype),
        max(outside, int(column.max()) + 1),
    )
