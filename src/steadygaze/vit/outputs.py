"""The logits in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygaze.errors import UnsupportedModel

FORWARD = "sg.adapt(model, forward=lambda m, x: ...)"
NAMED = (
    "logits",
    "image_embeds",
    "out",
)  # image_embeds: of CLIP's image tower; out: of torchvision's segmenters
NO_LOGITS = ("pooler_output", "loss")


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output.

    A tensor is taken as it is. Of a dict, tuple or output object: `logits`, or else the only tensor of shape
    (B, C). Anything else is refused: a guess might explain something that is not a class.
    """
    if isinstance(output, Tensor):
        return output
    for name in NAMED:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    entries = _entries(output)
    rows = [access for access, value in entries.items() if _is_table(value)]
    if len(rows) == 1:
        return entries[rows[0]]
    kind = type(output).__name__
    if rows:
        raise UnsupportedModel(
            f"the model returns a {kind} with {len(rows)} tensors of shape (B, C): {', '.join(rows)}. Choose "
            f"the logits: sg.adapt(model, forward=lambda m, x: m(x){rows[0]})."
        )
    raise UnsupportedModel(
        f"expected a model that gives logits (B, classes), got a {kind} without them. If they can be "
        f"computed from it: {FORWARD}."
    )


def check_logits(logits: Tensor, name: str) -> Tensor:
    """The outputs of the model `name`, if they may be logits (B, classes); else an error with what to do."""
    shape = f"{name}: expected logits of shape (B, classes), got {tuple(logits.shape)}"
    if logits.dim() == 4:
        raise UnsupportedModel(
            f"{shape}: this is a segmenter. Explain one of its regions: sg.explain(model, images, "
            f"target=sg.Region(label, point=(x, y))), or with a box or a mask. `steadygaze stress` measures "
            f"it with the suite segmentation."
        )
    if logits.dim() != 2:
        advice = "m(x)[:, None]" if logits.dim() == 1 else "..."
        raise UnsupportedModel(f"{shape}. Give them: sg.adapt(model, forward=lambda m, x: {advice}).")
    if logits.is_inference():
        raise UnsupportedModel(
            f"{name} runs in torch.inference_mode, which allows no gradients. Use torch.no_grad in its "
            f"forward pass instead, or give another one: {FORWARD}."
        )
    sums = logits.sum(1)
    if logits.shape[1] > 1 and bool((logits >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        raise UnsupportedModel(
            f"{name} returns probabilities (rows that sum to 1), where logits are expected. Their logarithm "
            f"will do: sg.adapt(model, forward=lambda m, x: m(x).log())."
        )
    return logits


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()


def _entries(output: Any) -> dict[str, Any]:
    """What an output holds, by the Python expression that reads it."""
    if isinstance(output, Mapping):
        return {f"[{name!r}]": value for name, value in output.items() if name not in NO_LOGITS}
    if isinstance(output, (tuple, list)):
        return {f"[{index}]": value for index, value in enumerate(output)}
    return {
        f".{name}": value for name, value in getattr(output, "__dict__", {}).items() if name not in NO_LOGITS
    }
