"""The model's run on unmodified images, computed once for everything that needs it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.view import ViT


@dataclass(frozen=True, eq=False)
class CleanForward:
    """A batch of images, their tokens and logits, without gradients; each is computed when it is first read.

    The attribution methods and the metrics of a batch share one of these.
    """

    vit: ViT
    images: Float[Tensor, "b c h w"]

    @classmethod
    def of(cls, vit: ViT, images: Any) -> Self:
        """Copy the images in the model's precision; InputError if the model cannot run on them."""
        with without_autocast(vit.model):
            return cls(vit, _checked(vit, images))

    @cached_property
    def tokens(self) -> Float[Tensor, "b n d"]:
        """Embedded images."""
        with torch.no_grad(), without_autocast(self.vit.model), evaluation_mode(self.vit.model):
            return self.vit.embed(self.images)

    @cached_property
    def logits(self) -> Float[Tensor, "b classes"]:
        """Logits of the unmodified images."""
        with torch.no_grad(), without_autocast(self.vit.model), evaluation_mode(self.vit.model):
            return self.vit.logits(self.tokens)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of a map."""
        return self.vit.layout(self.tokens).grid


def check_plain(images: Any) -> None:
    """Raise InputError for sparse and nested tensors, and for those of `torch.vmap`."""
    if isinstance(images, Tensor) and (images.layout != torch.strided or images.is_nested):
        kind = "a nested tensor" if images.is_nested else f"a tensor of layout {images.layout}"
        raise InputError(
            f"expected images as a dense tensor (B, 3, H, W), got {kind}. Use to_dense() or stack."
        )
    if isinstance(images, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(images):
        raise InputError(
            "expected images as a plain tensor, got one of vmap or another transform of torch.func"
        )


def _checked(vit: ViT, images: Any) -> Tensor:
    """A copy of the images in the model's precision; raises InputError if the model cannot run on them."""
    check_plain(images)
    images = vit.check(images)
    parameter = next(vit.model.parameters())
    if images.device != parameter.device:
        raise InputError(
            f"the images are on {images.device}, the model on {parameter.device}. "
            f"Use images.to({str(parameter.device)!r})."
        )
    if parameter.dtype == torch.bfloat16 and parameter.device.type == "cpu" and not _cpu_has_bfloat16():
        raise InputError(
            "the model is in bfloat16 on a CPU without bfloat16 arithmetic, which takes minutes per image. "
            "Use model.float()."
        )
    return images.detach().clone().to(parameter.dtype)


def _cpu_has_bfloat16() -> bool:
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())
