"""One view of every vision transformer: embed -> blocks -> head.

A `ViT` runs the model's own modules; nothing is copied, patched or hooked. Tokens are ordinary tensors that
remember their `Layout` (grid, which patches are left, rotary rows), so that

    x = vit.select(vit.embed(images), keep)
    for block in vit.blocks:
        x = block(x)
    logits = vit.head(x)

is the model with only the patches `keep`, each at its own position.

Relative position biases are made inside a block, as a table over all tokens. For kept patches, its rows (and
columns) are gathered: `KeptPositions` is active only while kept tokens run through a block, and only for
layouts with removed patches; it answers the two places where such a table is used: the mask of
`scaled_dot_product_attention`, and an addition of shapes that do not fit (eager attention, pooling with
positions).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.target import Outputs
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.intercept import ADD, Interception, TorchFunction, eager
from steadygaze.vit.outputs import model_output


class _Gather(Interception):
    def __init__(self, kept: Tensor, patches: int, prefix: int) -> None:
        super().__init__()
        self.kept, self.patches, self.prefix = kept, patches, prefix
        head = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        self.index = torch.cat([head, kept + prefix], dim=1)  # (B, prefix + k): token indices that are left
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("add", *ADD)

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        mask = None if attn_mask is None else self.pairs(attn_mask, q.shape[-2])
        return func(q, k, v, mask, *args, **kwargs)

    def add(self, func: TorchFunction, x: Any, y: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            x, y = self.fit(x, y), self.fit(y, x)
        return func(x, y, **kwargs)

    def pairs(self, table: Tensor, left: int) -> Tensor:
        """(..., N, N) -> (B, ..., K, K) for the `left` remaining tokens; smaller tables are unchanged."""
        for extra, index in ((self.prefix, self.index), (0, self.kept)):
            if (
                table.shape[-1] == table.shape[-2] == extra + self.patches
                and left == index.shape[1] < table.shape[-1]
            ):
                table = table.expand(
                    index.shape[0], *table.shape[-3:] if table.dim() > 2 else (1, *table.shape)
                )
                rows = index[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[-1])
                columns = index[:, None, None, :].expand(-1, table.shape[1], index.shape[1], -1)
                return table.gather(2, rows).gather(3, columns)
        return table

    def fit(self, table: Tensor, other: Tensor) -> Tensor:
        if table.dim() == 4 and other.dim() == 4 and other.shape[-1] == other.shape[-2]:
            return self.pairs(table, other.shape[-1])
        if table.dim() == 3 and other.dim() == 3 and table.shape[0] == 1 and table.shape[1] > other.shape[1]:
            for extra, index in ((self.prefix, self.index), (0, self.kept)):
                if table.shape[1] == extra + self.patches and other.shape[1] == index.shape[1]:
                    return table[0][index]
        return table


def KeptPositions(layout: Layout, prefix: int) -> AbstractContextManager[Any]:
    """Gather position tables for the kept patches of `layout`; does nothing when all patches are there."""
    if layout.kept is None:
        return nullcontext()
    return _Gather(layout.kept, layout.grid[0] * layout.grid[1], prefix)


def rotary(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Rows (..., P, d) of a rotary embedding for the kept patches: (B, heads or 1, k, d)."""
    if kept is None:
        return rows
    if rows.dim() == 2:
        return rows[kept].unsqueeze(1)
    return rows[:, kept].transpose(0, 1)  # one table for each head: (H, P, d) -> (B, H, k, d)


Readout = Literal["class", "mean", "pool"]


@dataclass(frozen=True)
class Layout:
    """Where tokens lie on the image.

    Attributes:
        grid: Rows and columns of patches.
        kept: The remaining patches, None for all.
        state: What the blocks of this model need besides tokens, such as rotary rows.
        taps: What the head reads of earlier blocks, in their order (plans with `reads_layers`).
    """

    grid: tuple[int, int]
    kept: Int[Tensor, "b k"] | None = None
    state: Any = None
    taps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The linear parts of one pre-norm attention branch (docs/equations.md#pre-norm-mixing).

    x'_i = x_i + s_i · O · concat_h(Σ_j A_hij v_hj) + output_bias; v_hj − value_offset is free of biases.
    """

    value_offset: Float[Tensor, " hd"]  # W_v β₁ + b_v: what the value has of biases
    output: Float[Tensor, "d hd"]  # LayerScale · W_o (· gain and centering of an inner norm)
    inner_norm: (
        tuple[float, bool] | None
    )  # (eps, centered) of a norm between A·V and W_o: gives the row scale s_i
    second_gain: Float[Tensor, " d"]  # LayerScale₂ · γ₂
    second_norm: tuple[float, bool]  # (eps, centered) of the norm before the MLP
    output_bias: Float[Tensor, " d"] | None = None  # LayerScale · (b_o + W_o β of an inner norm)
    before: Callable[[Tensor], Tensor] | None = None  # a norm that runs before the first block (`norm_pre`)


@dataclass(frozen=True)
class Block:
    """One layer of a view: the model's own block, and how its input lies on the image."""

    module: nn.Module
    call: Callable[[Tensor, Layout], Tensor]
    plan: "Plan"
    parts: Callable[[], Parts] | None = None
    spatial: Callable[[Tensor, Layout], Float[Tensor, "b h w c"]] | None = (
        None  # None: prefix, then patches in raster order
    )
    channels_last: bool = False  # the module takes (B, h, w, C), not (B, N, C)

    def __call__(self, x: Tensor) -> Tensor:
        layout = layout_of(x, self.plan)
        with KeptPositions(layout, self.plan.prefix):
            y = self.call(x, layout)
        return y if self.plan.reads_layers else remember(y, layout)

    def patches(self, x: Tensor, layout: Layout) -> Float[Tensor, "b h w c"]:
        """The input of this block (or a tensor of its shape) on the grid: prefix dropped, channels last."""
        return _feature_map(self.spatial, x, layout, self.plan.prefix)


@dataclass(frozen=True)
class Plan:
    """What an adapter declares about a model; `ViT` is made of it."""

    embed: Callable[[Tensor], tuple[Tensor, Any, tuple[int, int]]]  # images -> tokens, state, grid
    blocks: list[dict[str, Any]]  # keyword arguments of `Block`, without plan
    head: Callable[[Tensor, Layout], Tensor]
    input_size: tuple[int, int, int]
    fixed_size: bool
    grid: tuple[int, int]
    prefix: int
    readout: Readout
    readout_rows: tuple[int, ...] = (0,)
    readout_patches: float = 0.0  # share of the patches' mean where a "class" head reads both
    readout_weights: Float[Tensor, " p"] | None = None  # of the patches in a weighted mean; None: all equal
    reads_layers: bool = False  # the head reads earlier blocks too: `call` adds them to the layout's taps
    kind: str = ""
    removable: bool = True  # patches can really be removed after embed
    global_attention: bool = True  # every block attends over all tokens in one matrix
    rotary: bool = False
    mixed: bool = False  # patches are mixed outside attention too: convolutions, TAP, CB
    spatial: Callable[[Tensor, Layout], Float[Tensor, "b h w c"]] | None = (
        None  # the last block's output; None as in `Block`
    )
    outputs: Outputs = "classes"  # what the head gives; see `steadygaze.target`
    added: int = 0  # tokens at the end of the prefix that a module added and that the head does not get
    main_value: int | None = None  # of several values, the one that is explained if no other is named
    checked: bool = False  # made of a view that was checked already


@dataclass(frozen=True)
class Headless:
    """The head of a model that has none: only a model around it, with a head of its own, can be viewed."""

    message: str

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        raise UnsupportedModelError(self.message)


@dataclass(frozen=True, eq=False)
class ViT:
    """A vision transformer seen as embed -> blocks -> head. Made by `steadygaze.adapt`."""

    model: nn.Module
    plan: Plan = field(repr=False)
    blocks: tuple[Block, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(Block(plan=self.plan, **b) for b in self.plan.blocks))

    @property
    def prefix(self) -> int:
        """Number of class, distillation and register tokens before the patches."""
        return self.plan.prefix

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches that carry the map, at the model's own image size."""
        return self.plan.grid

    @property
    def readout(self) -> Readout:
        """Which tokens feed the head: "class" row, "mean" of patches, or attention "pool"."""
        return self.plan.readout

    def embed(self, images: Tensor) -> Float[Tensor, "b n d"]:
        """Tokens before the first block, positions added (a `norm_pre` belongs to block 0)."""
        try:
            tokens, state, grid = self.plan.embed(self.check(images))
        except AssertionError as error:  # timm asserts what sizes its patches divide
            raise InputError(f"the model takes no images of shape {tuple(images.shape)}: {error}") from error
        return remember(tokens, Layout(grid, state=state))

    def select(self, tokens: Tensor, keep: Tensor) -> Float[Tensor, "b m d"]:
        """Only the patches `keep`, in the order given; prefix tokens stay. Positions are those of the image.

        Indices count the patches of `tokens` in raster order, each at most once. With all of them nothing
        changes.
        """
        if not self.plan.removable:
            raise InputError(
                f"patches of a {self.plan.kind} cannot be removed: its blocks need the whole grid. "
                f"Mask them instead."
            )
        layout = self.layout(tokens)
        patches = layout.grid[0] * layout.grid[1] if layout.kept is None else layout.kept.shape[1]
        if (
            keep.dim() != 2
            or keep.shape[0] != tokens.shape[0]
            or keep.dtype not in (torch.int32, torch.int64)
        ):
            raise InputError(
                f"keep: expected integer patch indices of shape ({tokens.shape[0]}, k), "
                f"got {keep.dtype} {tuple(keep.shape)}"
            )
        if keep.numel() and (int(keep.min()) < 0 or int(keep.max()) >= patches):
            raise InputError(
                f"keep: indices must lie in 0..{patches - 1}, got {int(keep.min())}..{int(keep.max())}"
            )
        keep = keep.to(device=tokens.device, dtype=torch.long)
        ordered = keep.sort(dim=1).values
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise InputError("keep: a patch stands twice in one row; each patch can be kept once")
        if (
            keep.shape[1] == patches
        ):  # nothing is removed: raster order, so that position tables fit as they are
            keep = ordered
        patch = tokens[:, self.prefix :].gather(1, keep.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        kept = keep if layout.kept is None else layout.kept.gather(1, keep)
        return remember(torch.cat([tokens[:, : self.prefix], patch], dim=1), replace(layout, kept=kept))

    def head(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b classes"]:
        """Logits from the output of the last block: final norm, pooling, classifier."""
        layout = self.layout(x)
        with KeptPositions(layout, self.prefix):
            return self.plan.head(x, layout)

    def logits(self, tokens: Tensor, start: int = 0) -> Float[Tensor, "b classes"]:
        """Run the blocks from `start` on, and the head."""
        for block in self.blocks[start:]:
            tokens = block(tokens)
        return self.head(tokens)

    def __call__(self, images: Tensor) -> Float[Tensor, "b classes"]:
        return self.logits(self.embed(images))

    def layout(self, x: Tensor) -> Layout:
        """Where the tokens `x` lie."""
        return layout_of(x, self.plan)

    def patches(self, layer: int, x: Tensor, layout: Layout) -> Float[Tensor, "b h w c"]:
        """Tokens of the shape of x^layer on their grid; layer L is the output of the last block."""
        spatial = self.blocks[layer].spatial if layer < len(self.blocks) else self.plan.spatial
        return _feature_map(spatial, x, layout, self.prefix)

    def check(self, images: Any) -> Tensor:
        """The images, if the model can take them; else an error that says why not."""
        channels, height, width = self.plan.input_size
        expected = f"expected floating-point images of shape (B, {channels}, {height}, {width})"
        if not isinstance(images, Tensor):
            raise InputError(
                f"{expected}, got {type(images).__name__}. Make a tensor with the model's own transform."
            )
        if images.dim() == 3:
            raise InputError(
                f"{expected}, got {tuple(images.shape)}: the batch axis is missing. Use image.unsqueeze(0)."
            )
        if images.dim() != 4 or images.shape[1] != channels:
            swap = images.dim() == 4 and images.shape[-1] == channels
            hint = " The channels are last: use images.permute(0, 3, 1, 2)." if swap else ""
            byte = " Then convert uint8: images / 255, and normalize." if images.dtype == torch.uint8 else ""
            raise InputError(f"{expected}, got {tuple(images.shape)}.{hint}{byte if swap else ''}")
        if not images.is_floating_point():
            raise InputError(
                f"{expected}, got {images.dtype}. Scale to 0..1 and normalize with the model's mean and std: "
                "(images / 255 - mean) / std, mean and std of shape (3, 1, 1)."
            )
        if images.is_meta:
            raise InputError(f"{expected}, got images on the meta device, which have no values.")
        if self.plan.fixed_size and tuple(images.shape[-2:]) != (height, width):
            raise InputError(
                f"{expected}, got {tuple(images.shape)}. Resize the images: this model has a fixed size."
            )
        if images.shape[0] == 0:
            raise InputError(f"{expected}, got an empty batch.")
        wide = torch.promote_types(images.dtype, torch.float32)  # a float16 sum of sound pixels passes 65504
        if not torch.isfinite(images.sum(dtype=wide)):  # one pass: NaN and infinity survive a sum
            raise InputError(
                "the images have NaN or infinite values. Look at the file or the transform they come from."
            )
        return images


def _feature_map(
    spatial: Callable[[Tensor, Layout], Tensor] | None, x: Tensor, layout: Layout, prefix: int
) -> Float[Tensor, "b h w c"]:
    if spatial is not None:
        return spatial(x, layout)
    if layout.kept is not None:
        raise InputError("tokens with removed patches do not fill a grid; give the tokens of the whole image")
    return x[:, prefix:].unflatten(1, layout.grid)


def layout_of(x: Tensor, plan: Plan) -> Layout:
    """The layout that `x` remembers; a plain tensor with every token lies on the model's own grid."""
    layout = getattr(x, "layout_", None)
    if layout is not None:
        return layout
    (height, width), (channels, *size) = plan.grid, plan.input_size
    if plan.global_attention and x.shape[1] != plan.prefix + height * width:
        raise InputError(
            f"these tokens have lost their layout: expected {plan.prefix} prefix tokens and {height}x{width} "
            f"patches, got {x.shape[1]} tokens. Use tokens from vit.embed or vit.select."
        )
    state = None
    if plan.rotary or not plan.global_attention:
        with torch.no_grad():
            _, state, _ = plan.embed(torch.zeros(1, channels, *size, device=x.device, dtype=x.dtype))
    return Layout(plan.grid, state=state)


def remember(x: Tensor, layout: Layout) -> Tensor:
    """Attach a layout to `x`."""
    x.layout_ = layout  # type: ignore[attr-defined]
    return x


def check_weights(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a model without weights, or with weights that allow no gradients."""
    if next(model.parameters(), None) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameters")
    if any(p.is_inference() for p in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} was created in torch.inference_mode, and such weights allow no "
            f"gradients. Create it, or copy it with copy.deepcopy, outside of that mode."
        )


def verify(vit: ViT) -> None:
    """Raise UnsupportedModelError unless the view gives the model's own logits."""
    if isinstance(vit.plan.head, Headless):
        raise UnsupportedModelError(vit.plan.head.message)
    parameter = next(vit.model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, *vit.plan.input_size, generator=generator).to(parameter.device, parameter.dtype)
    with torch.no_grad(), evaluation_mode(vit.model), eager():
        expected = model_output(vit.model, images)
        got = vit(images)
    if got.shape != expected.shape or got.dim() != 2:
        raise UnsupportedModelError(
            f"{type(vit.model).__name__}: expected logits of shape (B, classes), the model returns "
            f"{tuple(expected.shape)} and the view {tuple(got.shape)}. Give the model a pooled "
            f"classification head."
        )
    scale = expected.abs().max().clamp_min(1e-6)
    error = float((got - expected).abs().max() / scale)
    # the same modules in the same order: mostly 0
    if not error <= min(200 * torch.finfo(expected.dtype).eps ** 0.75, 0.1):
        raise UnsupportedModelError(
            f"{type(vit.model).__name__}: its own logits and those of the view embed -> {len(vit.blocks)} "
            f"blocks -> head differ by {error:.1e} (relative). The model may do something between its blocks "
            f"that the {vit.plan.kind} adapter does not know."
        )


def blank_image(vit: ViT) -> Float[Tensor, "1 c h w"]:
    """An all-zero image of the model's input size, on its device and in its precision."""
    parameter = next(vit.model.parameters())
    return torch.zeros(1, *vit.plan.input_size, device=parameter.device, dtype=parameter.dtype)
