"""From a processor of transformers, an image and a prompt to an `Answer` (see `generation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.questions.generation import LANGUAGE_MODELS, Answer, ImageTokens
from steadygaze.vit.evaluation_mode import evaluation_mode
from steadygaze.vit.parts import first

LONGEST = 32  # tokens of an answer that the model gives itself


def generates(model: Any) -> bool:
    """Whether a model generates text from an image and a prompt."""
    return (
        hasattr(model, "lm_head")
        and first(model, *LANGUAGE_MODELS) is not None
        and hasattr(model, "generate")
    )


def answer_model(
    model: nn.Module, processor: Any, image: Any, prompt: str, answer: str | None = None
) -> tuple[Answer, Float[Tensor, "b 3 h w"]]:
    """The model with a prompt and an answer, and the image as its processor prepares it.

    image: a PIL image, or images (B, 3, H, W) that are prepared already; they share prompt and answer
    answer: None for the model's own (greedy, at most 32 tokens), of one image
    """
    if not generates(model):
        raise UnsupportedModel(
            f"prompt: expected a model of AutoModelForImageTextToText, got {type(model).__name__}"
        )
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadInput(f"prompt: expected a text, got {prompt!r}")
    ready = image if isinstance(image, Tensor) else None
    if ready is not None and (ready.dim() != 4 or ready.shape[1] != 3):
        raise BadInput(f"images: expected a PIL image, or a tensor (B, 3, H, W), got {tuple(ready.shape)}")
    shown = image if ready is None else Image.new("RGB", (ready.shape[-1], ready.shape[-2]))
    prepared = _prepare(processor, shown, prompt).to(next(model.parameters()).device)
    tokens = _image_tokens(model, processor, prepared)
    if ready is None:
        ready = _pixels(prepared, tokens)
    elif tuple(ready.shape[-2:]) != tokens.size:
        raise BadInput(
            f"images: the processor gives images of {tokens.size[0]} x {tokens.size[1]} pixels, got "
            f"{ready.shape[-2]} x {ready.shape[-1]}. Give a PIL image, which it prepares."
        )
    if answer is None and len(ready) > 1:
        raise BadInput(f"answer: the model may answer differently for each of {len(ready)} images. Give it.")
    prompt_ids = prepared["input_ids"][0].tolist()
    tokenizer = processor.tokenizer
    if answer is None:
        answer_ids = _generated(model, {**prepared, **tokens.inputs(ready)}, tokenizer)
    else:
        answer_ids = [int(token) for token in tokenizer(answer, add_special_tokens=False)["input_ids"]]
        if not answer_ids:
            raise BadInput(f"answer: expected a text, got {answer!r}")
    names = [tokenizer.decode(answer_ids), *(tokenizer.decode([token]) for token in answer_ids)]
    built = Answer(model, prompt_ids, answer_ids, names, tokens, _image_token(model, processor))
    return built, ready


def _prepare(processor: Any, image: Any, prompt: str) -> Any:
    """The processor's output for one image and the prompt, with its chat template where there is one."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
    else:
        mark = str(getattr(processor, "image_token", "<image>"))
        text = prompt if mark in prompt else f"{mark}\n{prompt}"
    options = (
        {"do_image_splitting": False} if hasattr(processor.image_processor, "do_image_splitting") else {}
    )
    return processor(images=[image], text=[text], return_tensors="pt", **options)


def _generated(model: Any, prepared: Mapping[str, Tensor], tokenizer: Any) -> list[int]:
    inner = first(model, "model")
    deltas = getattr(inner, "rope_deltas", None)
    with torch.no_grad(), evaluation_mode(model):
        sequence = model.generate(**prepared, do_sample=False, max_new_tokens=LONGEST)
    if hasattr(inner, "rope_deltas"):
        inner.rope_deltas = deltas
    new = sequence[0, prepared["input_ids"].shape[1] :].tolist()
    special = set(tokenizer.all_special_ids)
    answer = [token for token in new if token not in special]
    if not answer:
        raise BadInput("the model's own answer to this prompt is empty. Give answer='...'.")
    return answer


def _image_token(model: Any, processor: Any) -> int:
    config = model.config
    known = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return int(processor.image_token_id if known is None else known)


def _image_tokens(model: Any, processor: Any, prepared: Any) -> ImageTokens:
    """How this model takes images, read off what its processor gives."""
    pixels = prepared["pixel_values"]
    if "image_grid_thw" in prepared:  # Qwen: a row of numbers for each patch
        return _flattened_patches(model, prepared["image_grid_thw"])
    size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    count = int((prepared["input_ids"] == _image_token(model, processor)).sum())
    grid = _grid(size, count)
    if pixels.dim() == 5:  # Idefics: (B, images, 3, H, W)
        if pixels.shape[1] != 1:
            raise UnsupportedModel(f"expected one image, the processor gives {pixels.shape[1]} tiles")
        return ImageTokens(size, grid, lambda images: {"pixel_values": images[:, None]})
    return ImageTokens(size, grid, lambda images: {"pixel_values": images})


def _grid(size: tuple[int, int], count: int) -> tuple[int, int]:
    """Rows and columns of `count` tokens on an image of this size, with square cells."""
    rows = round((count * size[0] / size[1]) ** 0.5)
    if rows < 1 or count % rows or abs(rows / (count // rows) - size[0] / size[1]) > 1e-6:
        raise UnsupportedModel(
            f"{count} image tokens form no grid on an image of {size[0]} x {size[1]} pixels"
        )
    return rows, count // rows


def _flattened_patches(model: Any, grid: Int[Tensor, "1 3"]) -> ImageTokens:
    """Images of Qwen's vision tower: patches in groups of merged ones, each repeated in time."""
    vision = model.config.vision_config
    side, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    _, rows, columns = (int(n) for n in grid[0])

    def inputs(images: Tensor) -> Mapping[str, Tensor]:
        shape = (len(images), 3, rows // merge, merge, side, columns // merge, merge, side)
        patches = images.reshape(shape).permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = patches.unsqueeze(6).expand(*patches.shape[:6], frames, side, side)
        grids = grid.to(images.device).expand(len(images), 3)
        return {"pixel_values": patches.reshape(len(images) * rows * columns, -1), "image_grid_thw": grids}

    return ImageTokens((rows * side, columns * side), (rows // merge, columns // merge), inputs)


def _pixels(prepared: Any, tokens: ImageTokens) -> Float[Tensor, "1 3 h w"]:
    """The image that the processor prepared, as (1, 3, H, W)."""
    pixels = prepared["pixel_values"]
    if "image_grid_thw" not in prepared:
        return pixels[:, 0] if pixels.dim() == 5 else pixels
    height, width = tokens.size
    number = torch.arange(3 * height * width, dtype=torch.float64).view(1, 3, height, width)
    where = (
        tokens.inputs(number)["pixel_values"].flatten().long().to(pixels.device)
    )  # which pixel each value is
    image = pixels.new_zeros(3 * height * width)
    return image.scatter(0, where, pixels.flatten()).view(1, 3, height, width)
