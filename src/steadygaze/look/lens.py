"""Lens: what class each patch says at each layer, and what each layer and head writes to a class's logit.

**Logit lens** (nostalgebraist 2020). The head, norm and classifier, is applied to the state of one patch as
if every token were in that state:

    lens_l(j) = head(x^{l+1}_j)_c          x^{l+1} the output of block l

**What is written** (direct logit attribution, Elhage et al. 2021; docs/equations.md#lens). With σ of the
final norm held constant, the logit is linear in the tokens that the head reads, with gradient g; a pre-norm
block adds to them:

    logit = ⟨g, x⁰⟩ + Σ_l ( Σ_h ⟨g, W_o^h A^h v^h⟩ + ⟨g, b_o⟩ + ⟨g, MLP_l⟩ ) + bias

| symbol           | here         |
| ---------------- | ------------ |
| ⟨g, x⁰⟩          | `embedding`  |
| ⟨g, W_o^h A^h v^h⟩ | `heads`    |
| Σ_h + ⟨g, b_o⟩   | `attention`  |
| ⟨g, MLP_l⟩       | `mlp`        |
| logit − ⟨g, x^L⟩ | `bias`, of the final norm and the classifier |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.loading.ask import display_names, pose
from steadygaze.loading.inputs import prepare_inputs
from steadygaze.look.drawing import cell_image, matrix, overlay, write_result
from steadygaze.methods.decomposition import branch_of
from steadygaze.notebook import to_png
from steadygaze.results.drawing import Row, tile
from steadygaze.target import resolve_target
from steadygaze.trace import Forward, Seam, Trace, Want, forward, frozen
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import constant_weights, evaluation_mode, without_autocast
from steadygaze.vit.view import Layout, ViT, remember

ROWS_AT_ONCE = 1024  # patches whose state is given to the head in one call


def lens(
    model: Any,
    images: Any,
    target: Any = None,
    *,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> Lens:
    """Read a class at every layer: from each patch, and as what layers and heads write to its logit.

    Args:
        model: A classifier: a module, a name, or what `load_model` gives.
        images: A path, a PIL image, an array (H, W, 3) of uint8, a list or folder of them, or a preprocessed
            tensor (B, 3, H, W).
        target: The class: None (the predicted one), an index, a name, or one index per image.
        transform: How an image becomes the tensor (3, H, W) that a bare module takes.

    Returns:
        A `Lens`, whose `embedding`, `attention`, `mlp` and `bias` add up to the logit.

    Raises:
        InputError: If target or images do not fit the model.
        MethodUnavailableError: If the tokens of the model change their grid on the way (hierarchies), or its
            head reads several layers.

    Examples:
        >>> import steadygaze as sg, torch
        >>> seen = sg.lens(sg.load_model("embedded"), torch.zeros(1, 3, 32, 32), target="cat")
        >>> seen.patches.shape, seen.heads.shape  # images, layers, grid; images, layers, heads
        (torch.Size([1, 6, 8, 8]), torch.Size([1, 6, 4]))
        >>> written = seen.embedding + seen.attention.sum(1) + seen.mlp.sum(1) + seen.bias
        >>> torch.allclose(written, seen.logit, atol=1e-4)
        True
    """
    inputs = prepare_inputs(model, images, transform)
    classifier, target = pose(inputs.model, inputs.images, target, transform)
    vit = adapt(classifier)
    if vit.plan.outputs == "features":
        raise InputError(
            f"model: this {vit.plan.kind} has no classifier, so no class to read. Use a model with one, or "
            "look at steadygaze.features(model, images)."
        )
    if not vit.plan.global_attention or vit.plan.reads_layers:
        raise MethodUnavailableError(
            f"the tokens of a {vit.plan.kind} change their grid, or its head reads several layers, so the "
            "states of its layers cannot be given to the head. Use a model with one grid."
        )
    with without_autocast(vit.model), evaluation_mode(vit.model), constant_weights(vit.model):
        with torch.no_grad():
            tokens = vit.embed(inputs.images)
            run = forward(vit, tokens, want=Want(hidden=False, value=True), grad=False)
        classes = resolve_target(target, run.logits, vit.plan.outputs)
        if classes is None or classes.dim() != 1:
            raise InputError(f"target: expected one class for each image, got {target!r:.80}")
        written = _written(run, classes)
        with torch.no_grad():
            patches, top = _patches(run, classes)
    names = display_names(classifier, run.logits.shape[1])
    return replace(written, patches=patches, top=top, classes=names, images=inputs.shown, names=inputs.names)


@dataclass(frozen=True, eq=False)
class Lens:
    """What layers, heads and patches hold about a class.

    Attributes:
        target: The class of each image, (B,).
        logit: Its logit, (B,).
        embedding: What the embedded tokens hold of the logit before the first block, (B,).
        attention: What the attention of each layer writes to the logit, (B, L).
        heads: The same for each head, (B, L, heads); without the bias of the output projection. None for
            models whose blocks are not pre-norm with one attention.
        mlp: What the MLP of each layer writes, (B, L); where `heads` is None, all that the layer writes.
        bias: What the final norm's bias and the classifier's bias add, (B,).
        patches: The logit of the class that each patch's state gives after each layer, (B, L, rows, columns).
        top: The class with the highest logit for each patch after each layer, (B, L, rows, columns).
        classes: Names of the classes, if they are known.
        images: What the model saw; None where it is not known.
        names: A name for each image.
    """

    target: Int[Tensor, " b"]
    logit: Float[Tensor, " b"]
    embedding: Float[Tensor, " b"]
    attention: Float[Tensor, "b l"]
    heads: Float[Tensor, "b l heads"] | None
    mlp: Float[Tensor, "b l"]
    bias: Float[Tensor, " b"]
    patches: Float[Tensor, "b l h w"] = field(default_factory=lambda: torch.empty(0, 0, 0, 0))
    top: Int[Tensor, "b l h w"] = field(default_factory=lambda: torch.empty(0, 0, 0, 0, dtype=torch.long))
    classes: tuple[str, ...] | None = field(default=None, repr=False)
    images: tuple[Image.Image, ...] | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        titles = ", ".join(self.title(image) for image in range(min(3, len(self.logit))))
        return f"Lens({titles}{', ...' if len(self.logit) > 3 else ''}, {self.attention.shape[1]} layers)"

    def title(self, image: int) -> str:
        """The class and its logit, in words."""
        index = int(self.target[image])
        name = self.classes[index].split(",")[0] if self.classes else f"class {index}"
        return f"{name}, logit {float(self.logit[image]):.2f}"

    def table(self) -> Any:
        """What is written to the logit, as a pandas frame with columns image, layer, part and logit.

        The layer of embedding and bias is -1. Without the rows of single heads ("head 0", ...), the rows of
        an image add up to its logit.
        """
        import pandas as pd

        rows = []
        for image, name in enumerate(self.names):
            rows += [(name, -1, "embedding", self.embedding[image]), (name, -1, "bias", self.bias[image])]
            for layer in range(self.attention.shape[1]):
                rows.append((name, layer, "attention", self.attention[image, layer]))
                rows.append((name, layer, "mlp", self.mlp[image, layer]))
                each = () if self.heads is None else self.heads[image, layer]
                rows += [(name, layer, f"head {head}", value) for head, value in enumerate(each)]
        frame = [(name, layer, part, float(value)) for name, layer, part, value in rows]
        return pd.DataFrame(frame, columns=["image", "layer", "part", "logit"])

    def figure(self, image: int = 0, *, cell: int = 28) -> Image.Image:
        """What every head and MLP writes to the logit of one image: a row for each layer.

        Warm colors raise the logit, cool ones lower it.

        Args:
            image: Which image.
            cell: Width of a square in pixels.
        """
        columns = [self.mlp[image][:, None]]
        headings = ["mlp" if self.heads is not None else "layer"]
        if self.heads is not None:
            columns.insert(0, self.heads[image])
            headings = [*(str(head) for head in range(self.heads.shape[2])), "mlp"]
        return matrix(torch.cat(columns, 1), headings, title=self.title(image), cell=cell)

    def patch_figure(self, image: int = 0, *, cell: int = 112) -> Image.Image:
        """The logit of the class that each patch gives after each layer, over one image.

        Args:
            image: Which image.
            cell: Width of a thumbnail in pixels.
        """
        maps = self.patches[image]
        original = cell_image(self.images, image, (maps.shape[1], maps.shape[2]), cell)
        drawn = [overlay(values - values.median(), original, signed=True) for values in maps]
        headings = ["image", *(f"layer {layer}" for layer in range(len(drawn)))]
        return tile([Row([original, *drawn], self.title(image))], headings, cell=cell)

    def save(self, path: str | Path) -> Path:
        """Write the figure of the first image to an image file."""
        return write_result(path, self.figure)

    def _repr_png_(self) -> bytes:
        return to_png(self.figure())


def _written(run: Forward, classes: Int[Tensor, " b"]) -> Lens:
    """What every layer writes to the logit, from the gradient of the head alone."""
    vit, last = run.vit, run.hidden[-1]
    leaf = remember(last.detach().requires_grad_(), run.layout)
    with torch.enable_grad(), Seam(frozen()):
        logits = vit.head(leaf).gather(1, classes[:, None])[:, 0]
        (g,) = torch.autograd.grad(logits.sum(), leaf)
    trace = Trace(run)

    def read(x: Tensor) -> Float[Tensor, " b"]:
        return torch.einsum("bnd,bnd->b", g, x.expand_as(g))

    logit, attention, heads, mlp = logits.detach(), [], [], []
    embedding = read(run.hidden[0])
    has_parts = all(block.parts is not None for block in vit.blocks)
    for layer in range(len(vit.blocks)):
        x, after = run.hidden[layer], run.hidden[layer + 1]
        if not has_parts:
            attention.append(torch.zeros_like(embedding))
            mlp.append(read(after) - read(x))
            continue
        branch, out = branch_of(trace, layer), trace.mixing(layer).out
        assert out is not None
        if layer == 0:
            embedding = read(branch.x)  # after a norm that runs before the first block
        weight = branch.parts.output.detach().unflatten(1, (out.shape[1], out.shape[3]))
        row = g if branch.scale is None else g * branch.scale[..., None]
        heads.append(torch.einsum("bnd,dhk,bhnk->bh", row, weight, out))
        attention.append(read(branch.after) - read(branch.x))
        mlp.append(read(after) - read(branch.after))
    return Lens(
        target=classes,
        logit=logit,
        embedding=embedding,
        attention=torch.stack(attention, 1),
        heads=torch.stack(heads, 1) if heads else None,
        mlp=torch.stack(mlp, 1),
        bias=logit - read(last),
    )


def _patches(run: Forward, classes: Int[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """The class's logit and the top class of every patch after every block, each (B, L, h, w)."""
    vit, grid = run.vit, run.layout.grid
    count = grid[0] * grid[1]
    number = torch.arange(count, device=classes.device).repeat(len(classes))
    wanted = classes.repeat_interleave(count)
    logits, tops = [], []
    for x in run.hidden[1:]:
        states = x[:, vit.prefix :].flatten(0, 1)
        parts = []
        for start in range(0, len(states), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            parts.append(_head_of(vit, states[some], number[some], run.layout))
        said = torch.cat(parts)
        logits.append(said.gather(1, wanted[:, None]).view(-1, *grid))
        tops.append(said.argmax(1).view(-1, *grid))
    return torch.stack(logits, 1), torch.stack(tops, 1)


def _head_of(vit: ViT, states: Float[Tensor, "n d"], number: Tensor, layout: Layout) -> Tensor:
    """Logits of images with one patch, all of whose tokens are in the same state."""
    tokens = states[:, None].expand(-1, vit.prefix + 1, -1).contiguous()
    return vit.head(remember(tokens, replace(layout, kept=number[:, None])))
