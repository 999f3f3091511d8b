"""What a model itself gives for images: logits, or the image embedding of one that compares images with text.

Such models (CLIP, SigLIP, open_clip) have two towers, one for images and one for texts, and their own forward
pass needs both; the view is one of the image tower.
"""

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.vit.outputs import logits_of

SIGLIP_TOWERS = ("SiglipVisionModel", "Siglip2VisionModel")


def compares_text(model: Any) -> bool:
    """Whether a model embeds images and texts in one space: CLIP, SigLIP, of transformers or open_clip."""
    return isinstance(model, nn.Module) and (
        _has(model, "get_image_features", "get_text_features") or _has(model, "encode_image", "encode_text")
    )


def model_output(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (B, classes), or the image embedding (B, D) before it is scaled to unit length."""
    if _has(model, "encode_image", "encode_text"):
        return model.encode_image(images)  # type: ignore[operator]
    if compares_text(model):
        return _pooled(model.get_image_features(**pixel_inputs(model, images)))  # type: ignore[operator]
    output = run_model(model, images)
    return output.pooler_output if is_image_tower(model) else logits_of(output)


def run_model(model: nn.Module, images: Tensor) -> Any:
    """The model's own forward pass on images (B, 3, H, W), whatever it gives."""
    inputs = pixel_inputs(model, images)
    return model(images) if len(inputs) == 1 else model(**inputs)


def is_image_tower(model: Any) -> bool:
    """Whether a model is SigLIP's image tower alone, whose pooled output is the image embedding."""
    return type(model).__name__ in SIGLIP_TOWERS and getattr(model, "use_head", False)


def text_features(model: Any, inputs: Any) -> Tensor:
    """Embeddings (K, D) of tokenised texts, before they are scaled to unit length."""
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
