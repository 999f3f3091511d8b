"""Test-time registers as their authors write them: one image, tokens at the end, hooks that write in place.

Jiang et al. 2025 (docs/equations.md#registers). `maximum="layer"` is what their code computes, "neuron" what
their paper describes.
"""

from typing import Any

import torch
from torch import Tensor


def sign_max(values: Tensor) -> Tensor:
    high, low = values.max(), values.min()
    return high if abs(high) > abs(low) else low


def moved(output: Tensor, neurons: list[int], count: int, prefix: int, maximum: str) -> Tensor:
    """Activations (tokens, channels), registers last, with `neurons` moved."""
    output = output.clone()
    if maximum == "layer":
        output[-count:, neurons] = sign_max(output[:, neurons])
    else:
        for neuron in neurons:
            output[-count:, neuron] = sign_max(output[:, neuron])
    for neuron in neurons:
        output[prefix:-count, neuron] = 0
    return output


@torch.no_grad()
def logits(model: Any, images: Tensor, neurons: dict[int, list[int]], count: int, maximum: str) -> Tensor:
    """Logits of a timm VisionTransformer, image by image."""
    rows = []
    for image in images:
        x = model._pos_embed(model.patch_embed(image[None]))
        x = model.norm_pre(torch.cat([x, torch.zeros_like(x[:, :count])], dim=1))
        for number, block in enumerate(model.blocks):
            x = x + block.ls1(block.attn(block.norm1(x)))
            hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))[0]
            if number in neurons:
                hidden = moved(hidden, neurons[number], count, model.num_prefix_tokens, maximum)
            x = x + block.ls2(block.mlp.fc2(hidden[None]))
        rows.append(model.forward_head(model.norm(x[:, :-count])))
    return torch.cat(rows)
