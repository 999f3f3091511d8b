"""What a model gives for images: logits, or the features of one that has no classifier.

Models that compare images with text (CLIP, SigLIP, open_clip) have two towers, one for images and one for
texts, and their own forward pass needs both; the view is one of the image tower. Bare backbones give features
(B, D): what their own forward pass pools, else the class token, else the mean of the patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError

FORWARD = "sg.adapt(model, forward=lambda m, x: ...)"
NAMED = ("logits", "image_embeds", "out")  # image_embeds: CLIP's image tower; out: torchvision's segmenters
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
        raise UnsupportedModelError(
            f"the model returns a {kind} with {len(rows)} tensors of shape (B, C): {', '.join(rows)}. Choose "
            f"the logits: sg.adapt(model, forward=lambda m, x: m(x){rows[0]})."
        )
    raise UnsupportedModelError(
        f"expected a model that gives logits (B, classes), got a {kind} without them. If they can be "
        f"computed from it: {FORWARD}."
    )


def check_logits(logits: Tensor, name: str) -> Tensor:
    """The outputs of the model `name`, if they may be logits (B, classes); else an error with what to do."""
    shape = f"{name}: expected logits of shape (B, classes), got {tuple(logits.shape)}"
    if logits.dim() == 4:
        raise UnsupportedModelError(
            f"{shape}: this is a segmenter. Explain one of its regions: sg.explain(model, images, "
            f"target=sg.Region(label, point=(x, y))), or with a box or a mask. `steadygaze stress` measures "
            f"it with the suite segmentation."
        )
    if logits.dim() != 2:
        advice = "m(x)[:, None]" if logits.dim() == 1 else "..."
        raise UnsupportedModelError(f"{shape}. Give them: sg.adapt(model, forward=lambda m, x: {advice}).")
    if logits.is_inference():
        raise UnsupportedModelError(
            f"{name} runs in torch.inference_mode, which allows no gradients. Use torch.no_grad in its "
            f"forward pass instead, or give another one: {FORWARD}."
        )
    sums = logits.sum(1)
    if logits.shape[1] > 1 and bool((logits >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        raise UnsupportedModelError(
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


def compares_text(model: Any) -> bool:
    """Whether a model embeds images and texts in one space: CLIP, SigLIP, of transformers or open_clip."""
    return isinstance(model, nn.Module) and (
        _has(model, "get_image_features", "get_text_features") or _has(model, "encode_image", "encode_text")
    )


def model_output(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (B, classes), or features (B, D); an image embedding is not yet scaled to unit length."""
    if _has(model, "encode_image", "encode_text"):
        return model.encode_image(images)  # type: ignore[operator]
    if compares_text(model):
        return _pooled(model.get_image_features(**pixel_inputs(model, images)))  # type: ignore[operator]
    output = run_model(model, images)
    features = backbone_features(model, output)
    return logits_of(output) if features is None else features


def run_model(model: nn.Module, images: Tensor) -> Any:
    """The model's own forward pass on images (B, 3, H, W), whatever it gives."""
    if type(model).__name__ == MASKED_AUTOENCODER:
        return _run_unmasked(model, images)
    inputs = pixel_inputs(model, images)
    return model(images) if len(inputs) == 1 else model(**inputs)


MASKED_AUTOENCODER = "ViTMAEModel"
NO_CLASS_TOKEN = ("SiglipVisionModel", "Siglip2VisionModel", "IJepaModel", "SwinModel", "Swinv2Model")


def _run_unmasked(model: Any, images: Tensor) -> Any:
    """The encoder of a masked autoencoder on all patches, in their order; its own forward hides most."""
    config, ratio = model.config, model.config.mask_ratio
    side = config.patch_size
    patches = (images.shape[-2] // side) * (images.shape[-1] // side)
    order = torch.arange(patches, device=images.device, dtype=torch.float32).expand(images.shape[0], -1)
    config.mask_ratio = 0.0
    try:
        return model(images, noise=order)
    finally:
        config.mask_ratio = ratio


def backbone_features(model: nn.Module, output: Any) -> Tensor | None:
    """Features (B, D) in the output of a bare backbone; None for any other model."""
    library, _, _ = type(model).__module__.partition(".")
    if library == "transformers":
        return _hidden_features(model, output)
    if (library, type(model).__name__) == ("monai", "ViT"):  # (tokens or logits, hidden states)
        return output[0].mean(1) if output[0].dim() == 3 else None
    if (library, type(model).__name__) == ("vit_pytorch", "ViT") and output.dim() == 3:
        return output.mean(1) if model.pool == "mean" else output[:, 0]
    return None


def _hidden_features(model: nn.Module, output: Any) -> Tensor | None:
    """Of an output of transformers: what the backbone pools, else the class token, else the mean."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None or any(getattr(output, name, None) is not None for name in NAMED):
        return None
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled
    if hidden.dim() == 4:  # (B, C, h, w)
        return hidden.mean((2, 3))
    return hidden.mean(1) if type(model).__name__ in NO_CLASS_TOKEN else hidden[:, 0]


def text_features(model: Any, inputs: Any) -> Tensor:
    """Embeddings (K, D) of tokenized texts, before they are scaled to unit length."""
    if hasattr(model, "encode_text"):
        return model.encode_text(inputs)
    return _pooled(model.get_text_features(**inputs))


def pixel_inputs(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Images (B, 3, H, W) as the model's own forward pass takes them: SigLIP 2 (NaFlex) takes patches."""
    if not type(model).__name__.startswith("Siglip2"):
        return {"pixel_values": images}
    side = getattr(model.config, "vision_config", model.config).patch_size
    patches, (height, width) = patchify(images, side)
    batch = images.shape[0]
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(batch, height * width, dtype=torch.long, device=images.device),
        "spatial_shapes": torch.tensor([[height, width]] * batch),
    }


def patchify(images: Tensor, side: int) -> tuple[Tensor, tuple[int, int]]:
    """Patches (B, N, side · side · channels) in raster order, channels last, and the grid."""
    batch, channels = images.shape[:2]
    grid = (images.shape[-2] // side, images.shape[-1] // side)
    images = images[..., : grid[0] * side, : grid[1] * side]
    patches = images.reshape(batch, channels, grid[0], side, grid[1], side).permute(0, 2, 4, 3, 5, 1)
    return patches.reshape(batch, grid[0] * grid[1], -1), grid


def _pooled(output: Any) -> Tensor:
    """Transformers before version 5 gives the tensor itself."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _has(model: Any, *methods: str) -> bool:
    return all(callable(getattr(model, name, None)) for name in methods)
