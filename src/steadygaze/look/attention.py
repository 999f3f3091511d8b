"""`attention`: what every head of every layer attends to.

| symbol | meaning                                                                  | in code   |
| A^l    | attention of layer l after softmax, (B, heads, N, N)                     | `a[l]`    |
| F^l    | one matrix for all heads: mean, max or min; its lowest entries set to 0  | `_fused`  |
| M^l    | (F^l + I) / 2, rows divided by their sum                                 | `rollout` |
| R      | M^{L-1} ... M^start, read at the query                                   | `rollout` |

Attention is never stored. One forward pass without gradients keeps the input of every layer, (B, N, D); the
attention of a layer is computed when it is asked for, by running that layer alone. With `grad=True` every
request is a forward pass of its own, in the graph. Many images run in pieces, each an `Attention` of its own,
and the states of one piece are kept.

Formulas: docs/equations.md#attention-rollout-discard, docs/equations.md#attention-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.files import make_parent, write_atomic
from steadygaze.loading.inputs import announce, at_once, prepare_inputs
from steadygaze.look.arrangement import Arrangement, arrange
from steadygaze.look.drawing import checked_index, draw_frame, index_range, write_result
from steadygaze.look.measures import TOP, distance, distances, entropy, overfocus
from steadygaze.notebook import Listing, figure, to_png
from steadygaze.results.attribution import resized
from steadygaze.results.drawing import Row, enlarged, paint, robust_scale, tile, to_pil_image
from steadygaze.target import at_least_float32
from steadygaze.trace.record import Want
from steadygaze.trace.seam import Seam
from steadygaze.vit.adapt import adapt
from steadygaze.vit.clean_forward import check_plain
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.image_range import display_pixels
from steadygaze.vit.view import Headless, ViT

Token = str | tuple[int, int]  # the name of a prefix token, or row and column of a patch
Query = str | int | tuple[int, int]
Heads = int | Sequence[int] | Literal["mean", "max", "min"]
Fusion = Literal["mean", "max", "min"]
FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda a: a.mean(1),
    "max": lambda a: a.amax(1),
    "min": lambda a: a.amin(1),
}
TOP_NAMES = 3  # most attended tokens in a table
LARGE_CELL, CELL, THUMBNAIL = 448, 160, 72  # pixels
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")
DISTILLATION_TOKENS = ("dist_token", "distillation_token")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "heads", "n_head")


@dataclass(frozen=True)
class HeadMeasures:
    """One head in the table of `Attention.table`, mean over images.

    Attributes:
        entropy: Mean entropy of the rows in nats; 0: one token, ln N: all tokens alike.
        distance: Mean distance from a patch to the patches that it attends to, in patches.
        overfocus: Share of all attention that the five most attended tokens get.
        top_tokens: The most attended tokens, most attended first.
    """

    layer: int
    head: int
    entropy: float
    distance: float
    overfocus: float
    top_tokens: tuple[Token, ...]


def attention(
    model: Any,
    images: Any,
    *,
    transform: Callable[[Image.Image], Tensor] | None = None,
    grad: bool = False,
) -> Attention:
    """What every head of every layer attends to, under fused attention too; the model stays as it is.

    Args:
        model: A vision transformer, its name, or the result of `load_model`, `ask` or `zero_shot`. Of a
            model that generates text (`ask(model, prompt=...)`), the layers are those of its language model.
        images: A path, a PIL image, a numpy array (H, W, 3) of uint8, a list or folder of these, or a
            preprocessed tensor (B, 3, H, W).
        transform: From a PIL image to a tensor (3, H, W), if the model does not state its own.
        grad: Whether attention is part of the graph, so that a loss on it has gradients with respect to
            the model's parameters (and to a tensor of images). Dropout is off, as without it.

    Returns:
        An `Attention`; layers are computed when they are read.

    Raises:
        InputError: If the model cannot take the images.
        UnsupportedModelError: If no adapter knows the model.

    Examples:
        >>> import steadygaze as sg
        >>> a = sg.attention(sg.load_model("embedded"), torch.randn(1, 3, 32, 32))
        >>> a
        Attention(6 layers x 4 heads, 65 tokens on 8 x 8 patches, 1 image)
        >>> a[-1, 3].shape, a.map(layer=-1, head=3, query="class").shape
        (torch.Size([1, 65, 65]), torch.Size([1, 8, 8]))
        >>> a.tokens[:3]
        ('class', (0, 0), (0, 1))
    """
    inputs = prepare_inputs(model, images, transform)
    vit = adapt(inputs.model)
    check_plain(inputs.images)
    parameter = next(vit.model.parameters())
    ready = vit.check(inputs.images)
    if ready.device != parameter.device:
        raise InputError(
            f"the images are on {ready.device}, the model on {parameter.device}. "
            f"Use images.to({str(parameter.device)!r})."
        )
    ready = ready.to(parameter.dtype)
    shown = inputs.shown
    if shown is None:
        pixels = display_pixels(inputs.model, ready.detach())
        shown = None if pixels is None else tuple(to_pil_image(p.cpu().numpy()) for p in pixels)
    return Attention(vit, ready if grad else ready.detach(), shown, inputs.names, grad)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of some images, one layer at a time; made by `attention`.

    `a[layer]` is (B, heads, N, N), `a[layer, head]` (B, N, N): row i says how much token i takes from each
    token, and sums to 1. Layers and heads may be slices, and are counted from 0, or from the end with
    negative numbers. Of a layer with windows (Swin), entries outside of the window are 0 and the tokens are
    those of the image, shifts undone; rows of windows with padding sum to less than 1. A layer with reduced
    keys (PVT) gives (B, heads, N, keys). `a["pool"]`, (B, heads, 1, N), is the attention of an attention
    pooling, such as SigLIP's. In a notebook it shows all heads of all layers.

    Attributes:
        images: (B, 3, H, W) as the model takes them.
        shown: The same images for display.
        names: A name for each image.
        grad: Whether what is read is part of the graph.
    """

    vit: ViT
    images: Float[Tensor, "b c h w"]
    shown: tuple[Image.Image, ...] | None
    names: tuple[str, ...]
    grad: bool = False
    _arrangements: dict[int, Arrangement] = field(default_factory=dict, repr=False)
    _head_counts: dict[int, int] = field(default_factory=dict, repr=False)
    _last_piece: dict[int, Attention] = field(default_factory=dict, repr=False)

    # -- what there is ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.vit.blocks)

    def __repr__(self) -> str:
        return f"Attention({self._summary()})"

    def _summary(self) -> str:
        rows, columns = self.grid
        heads = self._head_count()
        count = len(self.images)
        every = self.vit.plan.global_attention
        tokens = len(self.tokens) if every else self._piece_of(0)[0]._hidden[-1].shape[1]
        return (
            f"{len(self)} layers{f' x {heads} heads' if heads else ''}, {tokens} tokens on "
            f"{rows} x {columns} patches, {count} image{'s' if count > 1 else ''}"
        )

    def _head_count(self) -> int | None:
        """Heads of every layer as its modules state them; None if layers differ or none states them."""
        counts = set()
        for block in self.vit.blocks:
            stated = (getattr(m, name, None) for m in block.module.modules() for name in HEAD_COUNTS)
            counts.add(next((n for n in stated if isinstance(n, int)), None))
        return counts.pop() if len(counts) == 1 else None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches behind the last layer."""
        return self.vit.layout(self._piece_of(0)[0]._embedded).grid

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Names of the last layer's tokens: "class", "distillation", "register 0", ..., (row, column)."""
        return self.tokens_of(-1)

    def tokens_of(self, layer: int) -> tuple[Token, ...]:
        """Names of a layer's tokens; layers differ in hierarchical models only."""
        found = self._arrangement(self._layer(layer))
        rows, columns = found.grid
        names: tuple[Token, ...] = prefix_names(self.vit, found.prefix)
        return names + tuple((row, column) for row in range(rows) for column in range(columns))

    @property
    def query(self) -> str:
        """The query of a map unless another is given.

        "class" if there is a class token; "answer" if the model answers a question: the tokens that the
        answer is read from; else "mean", of all patches.
        """
        return self.query_of(-1)

    def query_of(self, layer: int) -> str:
        """The query of a layer's map unless another is given; layers differ in hierarchical models only."""
        if _text(self.vit) is not None:
            return "answer"
        return "class" if "class" in self.tokens_of(layer) else "mean"

    # -- running the model -----------------------------------------------------------------------

    def _pieces(self) -> Iterator[Attention]:
        """The images in pieces that run together, one after the other."""
        return (self._piece_of(start)[0] for start in range(0, len(self.images), at_once(self.images)))

    def _piece_of(self, image: int) -> tuple[Attention, int]:
        """The piece with an image, and the number of the image in it; the last piece is kept."""
        size = at_once(self.images)
        if len(self.images) <= size:
            return self, image
        start = image - image % size
        if start not in self._last_piece:
            some = slice(start, start + size)
            shown = None if self.shown is None else self.shown[some]
            piece = replace(
                self, images=self.images[some], shown=shown, names=self.names[some], _last_piece={}
            )
            self._last_piece.clear()
            self._last_piece[start] = piece
        return self._last_piece[start], image - start

    def _joined_pieces(self, read: Callable[[Attention], Tensor]) -> Tensor:
        """What `read` gives for each piece, along the axis of images."""
        result: Tensor | None = None
        done = 0
        for piece in self._pieces():
            found = read(piece)
            if piece is self:
                return found
            result = found.new_empty(len(self.images), *found.shape[1:]) if result is None else result
            result[done : done + len(found)] = found
            done += len(found)
        assert result is not None
        return result

    @contextmanager
    def _running(self) -> Iterator[None]:
        model = self.vit.model
        with without_autocast(model):
            if self.grad:
                with _without_dropout(model):
                    yield
            else:
                with torch.no_grad(), evaluation_mode(model):
                    yield

    @cached_property
    def _hidden(self) -> tuple[Tensor, ...]:
        """x^0 .. x^L without gradients."""
        model = self.vit.model
        with torch.no_grad(), without_autocast(model), evaluation_mode(model):
            x = [self._embedded]
            for block in self.vit.blocks:
                x.append(block(x[-1]))
        return tuple(x)

    @cached_property
    def _embedded(self) -> Tensor:
        """x^0 without gradients."""
        model = self.vit.model
        with torch.no_grad(), without_autocast(model), evaluation_mode(model):
            return self.vit.embed(self.images.detach())

    def _arrangement(self, layer: int) -> Arrangement:
        if self.vit.plan.global_attention:
            return Arrangement(self.grid, self.grid, self.vit.prefix)
        if layer not in self._arrangements:
            x = self._piece_of(0)[0]._hidden[layer]
            model, name = self.vit.model, f"layer {layer} of this {self.vit.plan.kind}"
            with without_autocast(model), evaluation_mode(model):
                found = arrange(self.vit.blocks[layer], x, self.vit.layout(x), name)
            self._arrangements[layer] = found
        return self._arrangements[layer]

    def _matrices(
        self,
        layers: Sequence[int],
        *,
        together: bool = False,
        images: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Float[Tensor, "b heads n k"]]]:
        """(layer, A^layer) for ascending layers.

        Args:
            together: Whether the caller keeps all layers.
            images: Of how many images the caller keeps them; by default those here.
            rows: The queries whose rows are needed; None: all.
        """
        times = 1.0 if images is None else images / len(self.images)
        seam = _Announced(len(layers) if together else 1, times, rows)
        if not self.grad:
            for layer in layers:
                with self._running():
                    yield layer, self._run(layer, self._hidden[layer], seam)[0]
            return
        wanted = set(layers)
        with self._running():
            x = self.vit.embed(self.images)
        for layer in range(max(wanted) + 1):
            with self._running():
                if layer not in wanted:
                    x = self.vit.blocks[layer](x)
                    continue
                a, x = self._run(layer, x, seam)
            yield layer, a

    def _run(self, layer: int, x: Tensor, seam: _Announced) -> tuple[Tensor, Tensor]:
        """Attention and output of one layer."""
        arrangement = self._arrangement(layer)
        with seam:
            record = seam.next_record()
            y = self.vit.blocks[layer](x)
        kind = self.vit.plan.kind
        if not record.attention:
            raise MethodUnavailableError(
                f"layer {layer} of this {kind} shows no attention: it has none, or it runs in a kernel that "
                "cannot be inspected. In transformers, model.set_attn_implementation('sdpa')."
            )
        if not self.vit.plan.global_attention:
            found = record.attention[0].a
            if arrangement.rows is not None:
                heads = found.shape[1 if found.dim() == 4 else arrangement.heads]
                seam.announce((len(x), heads, x.shape[1], x.shape[1]), found.element_size())
            a = arrangement.dense(found, len(x))
        else:
            a = torch.cat([seam.only_rows(attention.a) for attention in record.attention], 1)
        self._head_counts[layer] = a.shape[1]
        return a, y

    def _pool(self) -> Float[Tensor, "b heads 1 n"]:
        """Attention of the pooling over the last layer's tokens."""
        if self.vit.plan.readout != "pool" or isinstance(self.vit.plan.head, Headless):
            raise InputError(f"query: there is no attention pooling; there are {self._queries(-1)}")
        seam = _Announced()
        if self.grad:
            with self._running():
                x = self.vit.embed(self.images)
                for block in self.vit.blocks:
                    x = block(x)
        else:
            x = self._hidden[-1]
        with self._running(), seam:
            record = seam.next_record()
            self.vit.head(x)
        if not record.attention:
            raise MethodUnavailableError(f"the pooling of this {self.vit.plan.kind} shows no attention")
        patches = self.grid[0] * self.grid[1]
        return record.attention[-1].a[:, :, :1, -patches:]  # class attention: without the class token itself

    # -- reading ---------------------------------------------------------------------------------

    def _layer(self, layer: Any) -> int:
        return checked_index("layer", layer, len(self))

    def __iter__(self) -> Iterator[Float[Tensor, "b heads n k"]]:
        """The attention of each layer in turn."""
        if len(self.images) <= at_once(self.images):
            return (a for _, a in self._matrices(range(len(self))))
        return (self[layer] for layer in range(len(self)))

    def __getitem__(self, key: Any) -> Tensor:
        """Attention of a layer, (B, heads, N, N), or of a layer and head, (B, N, N).

        A slice of layers adds an axis before the heads, a slice or list of heads keeps theirs.
        """
        return self._joined_pieces(lambda piece: piece._read(key, len(self.images)))

    def _read(self, key: Any, images: int) -> Tensor:
        """`__getitem__` for one piece of `images` images."""
        layers, heads = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        if isinstance(layers, str):
            if layers != "pool":
                raise InputError(f"layer: expected {index_range(len(self))} or 'pool', got {layers!r}")
            return self._heads(self._pool(), heads)
        if not isinstance(layers, slice):
            ((_, a),) = self._matrices([self._layer(layers)], images=images)
            return self._heads(a, heads)
        chosen = range(len(self))[layers]
        if not chosen:
            raise InputError(f"layer: expected layers of {index_range(len(self))}, got none by {layers}")
        each = self._matrices(sorted(chosen), together=True, images=images)
        found = {layer: self._heads(a, heads) for layer, a in each}
        if len({a.shape for a in found.values()}) > 1:
            raise InputError(
                f"layer: layers {list(chosen)} have attention of different shapes; read one at a time"
            )
        return torch.stack([found[layer] for layer in chosen], 1)

    def _heads(self, a: Float[Tensor, "b heads n k"], heads: Any) -> Tensor:
        if isinstance(heads, slice):
            return a[:, heads]
        if isinstance(heads, list | tuple):
            return a[:, [checked_index("head", head, a.shape[1]) for head in heads]]
        return a[:, checked_index("head", heads, a.shape[1])]

    def map(self, layer: int = -1, head: Heads = "mean", query: Query | None = None) -> Tensor:
        """How much a query takes from each patch, on the layer's grid; sums to 1 with the prefix tokens.

        Args:
            layer: The layer.
            head: A head, "mean", "max" or "min" over heads, or a list of heads.
            query: "class", "mean" (of all patches), (row, column) of a patch, "register 0" or another name in
                `tokens`, the index of a token, "answer" for models that answer a question, or "pool" for the
                attention of the pooling. None: see `query`.

        Returns:
            (B, rows, columns); (B, k, rows, columns) for a list of k heads.

        Raises:
            InputError: If there is no such layer, head or query; the error names what there is.
        """
        return self._joined_pieces(lambda piece: piece._map(self._layer(layer), head, query))

    def _map(self, layer: int, head: Heads, query: Query | None) -> Tensor:
        """`map` of one piece."""
        if query == "pool":
            if layer != len(self) - 1:
                raise InputError(f"layer: the pooling reads the last layer, {len(self) - 1}, got {layer}")
            return self._joined(self._pool()[:, :, 0], head).unflatten(-1, self.grid)
        ((_, row),) = self._query_rows([layer], query)
        return self._on_grid(layer, self._joined(row, head))

    def _query_rows(
        self, layers: Sequence[int], query: Query | None
    ) -> Iterator[tuple[int, Float[Tensor, "b heads k"]]]:
        """(layer, attention of the query) for ascending layers."""
        if self.vit.plan.global_attention:
            for layer, a in self._matrices(layers, rows=self._rows(layers[0], query)):
                yield layer, a.mean(2)
            return
        wanted = {layer: self._rows(layer, query) for layer in layers}  # before anything is computed
        for layer, a in self._matrices(layers):
            yield layer, a[:, :, wanted[layer]].mean(2)

    def _joined(self, row: Float[Tensor, "b heads k"], head: Any) -> Tensor:
        if isinstance(head, str):
            if head not in FUSIONS:
                raise InputError(
                    f"head: expected {index_range(row.shape[1])}, a list of heads, 'mean', 'max' or 'min', "
                    f"got {head!r}"
                )
            return FUSIONS[head](row)
        return self._heads(row, head)

    def _on_grid(self, layer: int, row: Float[Tensor, "*b k"]) -> Float[Tensor, "*b h w"]:
        """Attention to keys as a map; reduced keys are spread over the patches that they cover."""
        found = self._arrangement(layer)
        patches = row[..., -found.keys[0] * found.keys[1] :].unflatten(-1, found.keys)
        return patches if found.keys == found.grid else resized(patches, found.grid, "nearest")

    def _rows(self, layer: int, query: Query | None) -> list[int]:
        """The tokens whose attention is averaged for a query."""
        tokens = self.tokens_of(layer)
        found = self._arrangement(layer)
        query = self.query_of(layer) if query is None else query
        if query == "mean":
            return list(range(found.prefix, len(tokens)))
        if query == "answer" and _text(self.vit) is not None:
            return list(self.vit.plan.readout_rows)
        if isinstance(query, tuple | list):
            rows, columns = found.grid
            if len(query) != 2:
                raise InputError(f"query: expected (row, column) of a patch, got {query!r}")
            row, column = (
                checked_index(f"query: {name}", at, size)
                for name, at, size in zip(("row", "column"), query, (rows, columns), strict=True)
            )
            return [found.prefix + row * columns + column]
        if isinstance(query, str):
            same = [number for number, token in enumerate(tokens) if token == query]
            if len(same) == 1:
                return same
            if same:
                raise InputError(f"query: token {query!r} stands at {same}; give one of these numbers")
            raise InputError(f"query: there is no token {query!r}; there are {self._queries(layer)}")
        return [checked_index("query: token", query, len(tokens))]

    def _queries(self, layer: int) -> str:
        """What can be a query, in words."""
        found = self._arrangement(self._layer(layer))
        names = [repr(token) for token in self.tokens_of(layer)[: found.prefix]]
        if len(names) > 12:
            names = [*names[:12], "..."]
        names += [repr("answer")] if _text(self.vit) is not None else []
        names += [repr("pool")] if self.vit.plan.readout == "pool" else []
        rows, columns = found.grid
        return f"{', '.join([*names, repr('mean')])}, and (row, column) of {rows} x {columns} patches"

    def rollout(
        self,
        heads: Fusion = "mean",
        discard: float = 0.9,
        start: int = 0,
        *,
        query: Query | None = None,
        normalize: Literal["rows", "columns"] = "rows",
    ) -> Float[Tensor, "b h w"]:
        """Attention rolled out over the layers (Abnar & Zuidema 2020), as vit-explain does it.

        Args:
            heads: How heads are joined.
            discard: Share of the entries of a layer's matrix, the lowest ones, that are set to 0. The class
                token's attention to itself is kept. 0 is the rollout of the paper.
            start: The first layer.
            query: As in `map`.
            normalize: "rows" divides rows by their sum; "columns" divides column j by the sum of row j, as
                the code of vit-explain does.

        Returns:
            (B, rows, columns), not divided by its maximum.

        Raises:
            MethodUnavailableError: If layers attend within windows or to reduced keys.
        """
        if not self.vit.plan.global_attention:
            raise MethodUnavailableError(
                f"rollout multiplies attention over all tokens, and a {self.vit.plan.kind} has windows or "
                "reduced keys. Use map(layer, head) of one layer, or a gradient method of sg.explain."
            )
        if heads not in FUSIONS:
            raise InputError(f"heads: expected 'mean', 'max' or 'min', got {heads!r}")
        if not 0 <= discard < 1:
            raise InputError(f"discard: expected a share of at least 0 and below 1, got {discard!r}")
        if normalize not in ("rows", "columns"):
            raise InputError(f"normalize: expected 'rows' or 'columns', got {normalize!r}")
        first = self._layer(start)
        return self._joined_pieces(
            lambda piece: piece._rollout(heads, discard, range(first, len(self)), query, normalize)
        )

    def _rollout(
        self, heads: str, discard: float, layers: range, query: Query | None, normalize: str
    ) -> Float[Tensor, "b h w"]:
        """`rollout` of one piece."""
        last = layers[-1]
        rows = None if query == "pool" else self._rows(last, query)
        spared = "class" in self.tokens[:1]
        result: Tensor | None = None
        for _, a in self._matrices(layers):
            fused = _fused(at_least_float32(a), heads, discard, spared)
            m = (fused + torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)) / 2
            sums = m.sum(-1)
            m = m / (sums[:, :, None] if normalize == "rows" else sums[:, None, :])
            result = m if result is None else m @ result
        assert result is not None
        if rows is None:
            pooled = nn.functional.pad(FUSIONS[heads](self._pool()), (self.vit.prefix, 0))
            return self._on_grid(last, (pooled.to(result.dtype) @ result)[:, 0])
        return self._on_grid(last, result[:, rows].mean(1))

    def _readable(self) -> list[int]:
        """Every layer whose attention can be read; an error if there is none."""
        refused: MethodUnavailableError | None = None
        readable = []
        for layer in range(len(self)):
            try:
                self._arrangement(layer)
                readable.append(layer)
            except MethodUnavailableError as error:
                refused = error
        if not readable:
            assert refused is not None
            raise refused
        return readable

    def table(self) -> Listing[HeadMeasures]:
        """Entropy, distance, overfocus and the most attended tokens of every layer and head, mean of images.

        Layers whose attention has no map on the tokens are left out. `pandas.DataFrame(a.table())` is the
        same as a frame.

        Examples:
            >>> import steadygaze as sg
            >>> a = sg.attention(sg.load_model("embedded"), torch.zeros(1, 3, 32, 32))
            >>> len(a.table()), a.table()[0].head
            (24, 0)
        """
        measures: dict[int, Tensor] = {}  # layer -> (heads, 3)
        received: dict[int, Tensor] = {}  # layer -> (heads, keys)
        for piece in self._pieces():
            share = len(piece.images) / len(self.images)
            for layer, a in piece._matrices(self._readable()):
                a, found = a.detach(), self._arrangement(layer)
                far = distances(found.grid, found.keys).to(a.device)
                columns = [entropy(a), distance(a, far), overfocus(a, min(TOP, a.shape[-1]))]
                values = torch.stack([column.mean(0).double() for column in columns], 1)
                measures[layer] = measures.get(layer, 0) + share * values
                received[layer] = received.get(layer, 0) + share * at_least_float32(a).mean((0, 2))
        lines: list[HeadMeasures] = []
        for layer, values in measures.items():
            found, names = self._arrangement(layer), self.tokens_of(layer)
            keys = received[layer].shape[-1]
            top = received[layer].topk(min(TOP_NAMES, keys), dim=-1).indices.tolist()
            if found.keys != found.grid:
                names = _reduced_names(names, found, keys)
            lines += [
                HeadMeasures(layer, head, spread, far_away, focus, tuple(names[token] for token in best))
                for head, ((spread, far_away, focus), best) in enumerate(
                    zip(values.tolist(), top, strict=True)
                )
            ]
        return Listing(lines, "heads", ["layer", "head", "entropy", "distance", "overfocus", "top_tokens"])

    # -- figures ---------------------------------------------------------------------------------

    def overlay(
        self,
        layer: int = -1,
        head: Heads = "mean",
        query: Query | None = None,
        *,
        image: int = 0,
        mode: str = "bicubic",
    ) -> Image.Image:
        """One map over its image, as large as the image; a query patch is framed."""
        image = checked_index("image", image, len(self.images))
        if isinstance(head, list | tuple):
            raise InputError(f"head: expected one head, or 'mean', 'max' or 'min', got {head!r}")
        piece, number = self._piece_of(image)
        values = piece.map(layer, head, query)[number]
        drawn = self._painted(values, self._image(image), mode)
        return piece._marked(drawn, self._layer(layer), query)

    def _image(self, image: int) -> Image.Image | None:
        return None if self.shown is None else enlarged(self.shown[image], 224)

    def _painted(self, values: Tensor, below: Image.Image | None, mode: str = "bicubic") -> Image.Image:
        values = values.detach().to("cpu", torch.float64)
        values = values - values.min()  # attention has no zero that matters: what stands out is shown
        values = (values / (robust_scale(values.numpy()) or 1.0)).clamp(0, 1)
        if below is None:
            scale = 224 / max(values.shape)
            size = (max(1, round(values.shape[0] * scale)), max(1, round(values.shape[1] * scale)))
        else:
            size = (below.height, below.width)
        return paint(resized(values, size, mode).clamp(0, 1).numpy(), below)

    def _marked(self, drawn: Image.Image, layer: int, query: Query | None) -> Image.Image:
        """The image with a frame around the patch that is the query."""
        if query is None or query in ("mean", "pool", "answer"):
            return drawn
        found = self._arrangement(layer)
        (token,) = self._rows(layer, query)
        if token < found.prefix:
            return drawn
        draw_frame(drawn, found.grid, divmod(token - found.prefix, found.grid[1]))
        return drawn

    def figure(
        self,
        layer: int | None = None,
        head: Heads | Literal["all"] | None = None,
        query: Query | None = None,
        *,
        image: int = 0,
    ) -> Image.Image:
        """A figure of one image: all layers x heads, the heads of a layer, or one head large.

        Args:
            layer: None: a thumbnail of every head of every layer.
            head: None or "all" with a layer: its heads side by side, with their mean; a list: those heads.
            query: As in `map`; a query patch is framed.
            image: Which image.

        Examples:
            >>> import steadygaze as sg
            >>> a = sg.attention(sg.load_model("embedded"), torch.zeros(1, 3, 32, 32))
            >>> a.figure(layer=-1, head=2, query=(3, 4)).mode
            'RGB'
        """
        image = checked_index("image", image, len(self.images))
        if layer is None and query == "pool":
            layer = -1
        if layer is None:
            if head not in (None, "all"):
                raise InputError(f"layer: expected {index_range(len(self))} beside head={head!r}, got none")
            return self._overview(query, image)
        number = self._layer(layer)
        title = f"layer {number}, query {self.query_of(number) if query is None else query}"
        if head is None or head == "all" or isinstance(head, list | tuple):
            return self._side_by_side(number, None if isinstance(head, str) else head, query, image, title)
        drawn = self.overlay(number, head, query, image=image)
        name = head if isinstance(head, str) else checked_index("head", head, self.heads(number))
        return tile(
            [Row([drawn], title)],
            [f"head {name}" if isinstance(name, int) else f"{name} of heads"],
            cell=LARGE_CELL,
            legend="attention",
        )

    def heads(self, layer: int = -1) -> int:
        """Number of heads of a layer."""
        number = self._layer(layer)
        if number not in self._head_counts:
            next(self._piece_of(0)[0]._matrices([number]))
        return self._head_counts[number]

    def _side_by_side(
        self, layer: int, heads: Sequence[int] | None, query: Query | None, image: int, title: str
    ) -> Image.Image:
        """The image, the mean of the heads and each head, in one row."""
        below = self._image(image)
        piece, number = self._piece_of(image)
        every = range(piece.heads(layer)) if heads is None else heads
        maps = piece.map(layer, list(every), query)[number]
        shown = [("mean of heads", maps.mean(0)), *zip((f"head {h}" for h in every), maps, strict=True)]
        cells = [(name, piece._marked(self._painted(m, below), layer, query)) for name, m in shown]
        if below is not None:
            cells.insert(0, ("image", below))
        drawn = [Row([picture for _, picture in cells], title)]
        return tile(drawn, [name for name, _ in cells], cell=CELL, legend="attention")

    def _overview(self, query: Query | None, image: int) -> Image.Image:
        """A thumbnail of every head; layers from top to bottom."""
        rows: list[tuple[int, list[Image.Image]]] = []
        below = None if self.shown is None else self.shown[image].copy()
        if below is not None:
            below.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
        piece, number = self._piece_of(image)
        for layer, row in piece._query_rows(piece._readable(), query):
            maps = piece._on_grid(layer, row[number].detach())
            rows.append((layer, [piece._marked(self._painted(m, below), layer, query) for m in maps]))
        most = max(len(pictures) for _, pictures in rows)
        blank = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "#ffffff")
        lines = [
            Row([*pictures, *[blank] * (most - len(pictures))], f"layer {layer}") for layer, pictures in rows
        ]
        return tile(lines, [f"head {head}" for head in range(most)], cell=THUMBNAIL, legend="attention")

    def animate(
        self,
        path: str | Path,
        head: int | Fusion = "mean",
        query: Query | None = None,
        *,
        image: int = 0,
        milliseconds: int = 500,
    ) -> Path:
        """Write an animated GIF with one frame for each layer; returns the path."""
        path = Path(path)
        if path.suffix.lower() != ".gif":
            raise InputError(f"expected a file name that ends in .gif, got {path.name!r}")
        image = checked_index("image", image, len(self.images))
        below = self._image(image)
        frames = []
        piece, number = self._piece_of(image)
        for layer, row in piece._query_rows(piece._readable(), query):
            values = piece._on_grid(layer, self._joined(row.detach(), head))[number]
            drawn = piece._marked(self._painted(values, below), layer, query)
            which = f"head {head}" if isinstance(head, int) else f"{head} of heads"
            frame = tile([Row([drawn], which)], [f"layer {layer}"], cell=LARGE_CELL // 2, legend="attention")
            frames.append(frame.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE))
        make_parent(path)
        return write_atomic(
            path,
            lambda file: frames[0].save(
                file, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0
            ),
        )

    def save(
        self,
        path: str | Path,
        layer: int | None = None,
        head: Any = None,
        query: Query | None = None,
        *,
        image: int = 0,
    ) -> Path:
        """Write a file, by the suffix of its name; returns the path.

        .png and other images are `figure`, .gif is `animate`. .npz holds `maps` of all images and heads, (B,
        layers, heads, rows, columns), of one layer or of all, resized to the largest grid where layers
        differ; `layers` and `names`.
        """
        if Path(path).suffix.lower() == ".gif":
            return self.animate(path, "mean" if head is None else head, query, image=image)
        return write_result(
            path,
            lambda: self.figure(layer, head, query, image=image),
            lambda: self._numbers(layer, query),
        )

    def _numbers(self, layer: int | None, query: Query | None) -> dict[str, np.ndarray]:
        layers = self._readable() if layer is None else [self._layer(layer)]
        parts: dict[int, list[Tensor]] = {number: [] for number in layers}
        for piece in self._pieces():
            for number, row in piece._query_rows(layers, query):
                parts[number].append(piece._on_grid(number, row.detach()).float().cpu())
        maps = [torch.cat(found) for found in parts.values()]
        most = max(m.shape[1] for m in maps)
        grid = max((m.shape[-2:] for m in maps), key=math.prod)
        same = [
            nn.functional.pad(resized(m, (grid[0], grid[1]), "nearest"), (0, 0) * 2 + (0, most - m.shape[1]))
            for m in maps
        ]
        arrays = {"maps": torch.stack(same, 1).numpy(), "layers": np.array(layers)}
        return {**arrays, "names": np.array(self.names)}

    def _repr_png_(self) -> bytes:
        return to_png(self.figure())

    def _repr_html_(self) -> str:
        drawn = self.figure()
        query = f"query {escape(str(self.query))}"
        head = f"<div><b>attention</b> of {escape(self.names[0])}, {query}: {escape(self._summary())}</div>"
        return head + figure([drawn], "", alt="attention of every layer and head", width=drawn.width)


class _Announced(Seam):
    """Records attention, and states the memory of a large request before it is allocated.

    Args:
        layers: Number of layers that the caller keeps.
        times: Number of such pieces of images that the caller keeps.
        rows: Queries whose rows are recorded; None: all.
    """

    def __init__(self, layers: int = 1, times: float = 1.0, rows: Sequence[int] | None = None) -> None:
        super().__init__(want=Want(attention=True))
        self.layers, self.times, self.rows, self.announced = layers, times, rows, False

    def announce(self, shape: tuple[int, ...], size: int) -> None:
        if self.announced:
            return
        needed = round(math.prod(shape) * size * self.layers * self.times)
        first = round(shape[0] * self.times)
        layers = f"{self.layers} layers of " if self.layers > 1 else "a layer of "
        what = f"attention of {layers}{' x '.join(map(str, (first, *shape[1:])))}"
        do = "Read fewer layers or images at a time, or use smaller images."
        self.announced = announce(needed, f"{what} (images, heads, queries, keys)", do)

    def sdpa(
        self,
        func: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Fused attention; of some rows, these are written out beside the kernel."""
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if self.rows is None:
            self.announce((*q.shape[:-1], k.shape[-2]), q.element_size())
            return super().sdpa(func, q, k, v, attn_mask, is_causal=is_causal, **options)
        mask = attn_mask
        if is_causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., self.rows, :]
        self.announce((*q.shape[:-2], len(self.rows), k.shape[-2]), q.element_size())
        super().sdpa(func, q[..., self.rows, :], k, v, mask, **options)
        return func(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    def matmul(self, func: Any, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if a.dim() >= 4 and getattr(a, "attention_", None) is None:
            self.announce((*a.shape[:-1], v.shape[-1]), a.element_size())
        return super().matmul(func, a, v, **kwargs)

    def only_rows(self, a: Float[Tensor, "b heads n k"]) -> Tensor:
        """The rows of a recorded attention that are needed."""
        return a if self.rows is None or a.shape[-2] == len(self.rows) else a[:, :, self.rows]


def _fused(
    a: Float[Tensor, "b heads n n"], heads: str, discard: float, spared: bool
) -> Float[Tensor, "b n n"]:
    """One matrix for all heads, its lowest entries set to 0; spared: entry (0, 0) is kept."""
    fused = FUSIONS[heads](a)
    flat = fused.flatten(1)
    count = int(flat.shape[1] * discard)
    if count == 0:
        return fused
    lowest = flat.topk(count, dim=-1, largest=False).indices
    dropped = torch.zeros_like(flat, dtype=torch.bool).scatter(1, lowest, True)
    if spared:
        dropped[:, 0] = False
    return flat.masked_fill(dropped, 0.0).view_as(fused)


def _reduced_names(names: tuple[Token, ...], found: Arrangement, keys: int) -> tuple[Token, ...]:
    """Names of reduced keys: the patch at the upper left of what each covers."""
    rows, columns = found.keys
    down, across = found.grid[0] / rows, found.grid[1] / columns
    prefix = names[: keys - rows * columns]
    patches = tuple((int(r * down), int(c * across)) for r in range(rows) for c in range(columns))
    return (*prefix, *patches)


def prefix_names(vit: ViT, count: int) -> tuple[str, ...]:
    """Names of the tokens before the patches: text, or "class", "distillation", "register 0", ..."""
    text = _text(vit)
    if text is not None:
        return (*text, *(["class"] if len(text) < count else []))[:count]
    names = {name.rpartition(".")[2] for name, _ in vit.model.named_parameters()}
    first = [
        kind
        for kind, known in (("class", CLASS_TOKENS), ("distillation", DISTILLATION_TOKENS))
        if names.intersection(known)
    ]
    rows = vit.plan.readout_rows if vit.plan.readout == "class" else ()
    if 0 in rows and "class" not in first:  # a token of another name that the head reads
        first.insert(0, "class")
    if rows == (0, 1) and "distillation" not in first:  # both in one parameter
        first.append("distillation")
    first = first[: count - vit.plan.added]  # CaiT's class token comes after the blocks
    return tuple((*first, *(f"register {number}" for number in range(count)))[:count])


def _text(vit: ViT) -> tuple[str, ...] | None:
    """The text tokens of a model that answers a question or prompt, in the order of the view."""
    for name in ("text_tokens", "pieces"):
        tokens = getattr(vit.model, name, None)
        if isinstance(tokens, tuple):
            return tokens
    return None


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with the gradients of the parameters as they are."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
