"""Names of the tensors in a map file, and how maps are rounded to float16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.target import SCORES_OF

GIVEN = "given"  # the score of a map that states none
SCALE = "#scale"  # ends the name of the factors of a tensor
NAMED_SCORES = {"callable", *(score for scores in SCORES_OF.values() for score in scores)}
SUFFIX = ".safetensors"


@dataclass(frozen=True, order=True)
class MapName:
    """The maps of one method: `NAME` or `NAME@SCORE` as the name of a tensor.

    >>> MapName.parse("saliency"), MapName.parse("gae@logit").score
    (MapName(method='saliency', score='given'), 'logit')
    """

    method: str
    score: str = GIVEN

    @classmethod
    def parse(cls, text: str) -> MapName:
        """From the name of a tensor."""
        method, at, score = text.rpartition("@")
        return cls(method, score) if at and method and score in NAMED_SCORES else cls(text)

    def __str__(self) -> str:
        return self.method if self.score == GIVEN else f"{self.method}@{self.score}"

    @property
    def in_rows(self) -> str:
        """The method in rows: the prefix tells it from a built-in method of the same name."""
        return f"maps:{self.method}"


def rounded(maps: Float[Tensor, "n h w"]) -> tuple[Float[Tensor, "n h w"], Float[Tensor, " n"]]:
    """Each map divided by its largest magnitude, in float16, and these magnitudes.

    Nothing overflows. Two scores become equal if they differ by less than about 1/2048 of their size; scores
    below 3e-8 of the largest one become zero.
    """
    wide = maps.detach().to("cpu", torch.promote_types(maps.dtype, torch.float32))
    largest = wide.abs().amax(dim=(1, 2))
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (wide / divisor[:, None, None]).half(), largest


def restored(values: Float[Tensor, "n h w"], scale: Float[Tensor, " n"] | None) -> Float[Tensor, "n h w"]:
    """Maps in float32 or wider, as they were before `rounded`."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32 if scale is None else scale.dtype))
    return wide if scale is None else wide * scale[:, None, None].to(wide.dtype)
