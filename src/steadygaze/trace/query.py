"""What a method that runs the model itself is given: one question about a batch of images."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.target import CallableTarget, target_value
from steadygaze.trace.capture import Forward, forward
from steadygaze.trace.completeness import resize_map
from steadygaze.trace.rules import PLAIN, Rules
from steadygaze.vit.view import ViT, remember


@dataclass(frozen=True, eq=False)
class Query:
    """A batch of images, the quantity to explain, and how to run the model.

    Attributes:
        tokens: `vit.embed(images)`.
        rules: Rules of the backward pass.
        score: The quantity of the class to explain, such as "logit".
        target: The class of each image, (B,), or a callable that returns the quantity itself; None if no
            class is explained.
        hidden: x^0 .. x^{L-1} and the output of the last block, for methods registered with
            reads_hidden=True.
        logits: Logits of the whole images, from the same forward pass.
        run: The recorded forward pass of the whole images, for methods registered with `recorded`.
        on_progress: Called during long searches.
        allow_partial: Whether an interrupted search may return a map of the runs that were done.
    """

    vit: ViT
    images: Float[Tensor, "b c h w"]
    tokens: Float[Tensor, "b n d"]
    target: Int[Tensor, " b"] | CallableTarget | None
    score: str = "logit"
    rules: Rules = PLAIN
    hidden: tuple[Tensor, ...] = ()
    logits: Float[Tensor, "b classes"] | None = None
    run: Forward | None = None
    on_progress: OnProgress = ignore_progress
    allow_partial: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the map."""
        return self.vit.layout(self.tokens).grid

    @property
    def patches(self) -> int:
        """Number of patches of the map."""
        return self.grid[0] * self.grid[1]

    def value(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
        """The explained quantity, one number per image."""
        assert self.target is not None  # methods that depend on the class are refused before
        return target_value(self.target, self.score, logits, self.vit.plan.outputs)

    def gradient(self, x: Tensor, space: str) -> Tensor:
        """∂T/∂x at other tokens (space="tokens") or at other images (space="pixels")."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            tokens = remember(x, self.vit.layout(self.tokens)) if space == "tokens" else self.vit.embed(x)
            run = forward(self.vit, tokens, rules=self.rules, cut=False)
            return torch.autograd.grad(self.value(run.logits).sum(), x)[0]

    def at(self, x: Tensor, space: str) -> Float[Tensor, " b"]:
        """T at other tokens (space="tokens") or at other images (space="pixels")."""
        with torch.enable_grad():  # a callable target must be differentiable
            tokens = remember(x, self.vit.layout(self.tokens)) if space == "tokens" else self.vit.embed(x)
            return self.value(self.vit.logits(tokens).detach().requires_grad_()).detach()

    def per_patch(self, x: Tensor, space: str) -> Float[Tensor, "b h w"]:
        """Sum what belongs to each patch: the channels of its token, or its pixels."""
        if space == "tokens":
            patches = self.vit.blocks[0].patches(x, self.vit.layout(self.tokens))
            return resize_map(patches.sum(-1), self.grid)
        pixels, (height, width) = x.sum(1), self.grid
        if pixels.shape[1] % height or pixels.shape[2] % width:
            return resize_map(pixels, self.grid)
        return pixels.unflatten(2, (width, -1)).unflatten(1, (height, -1)).sum((2, 4))
