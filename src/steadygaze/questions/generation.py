"""Generative vision-language models: what in the image made the model say this?

    answer = answer_model(model, processor, image, "What is on the table?")
    answer(answer.prepared)    # (B, 1 + T): log-probability of the whole answer, then of each of its T tokens

The model is run once on [prompt with image, answer]. Its view starts where the language model does: the
tokens at the input of its first block are the text and the image's tokens (output of the vision tower and
projector).
Text tokens are the prefix of the view and image tokens its patches, although they stand between the text in
the sequence: attention is equivariant under a permutation of its tokens once positions and mask are explicit.
So image tokens are removed for real, and every token keeps its position.

Recognized by structure: a language model with `layers` and `norm`, an `lm_head`, and image tokens in
`input_ids`. Tested with LLaVA, Qwen2.5-VL, Idefics 3 and SmolVLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.parts import first
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan

LANGUAGE_MODELS = ("model.language_model", "model.text_model", "language_model.model", "language_model")


@dataclass(frozen=True)
class ImageTokens:
    """How a model takes images, and where their tokens lie.

    Attributes:
        size: (H, W) of the images.
        grid: Rows and columns of their tokens.
        inputs: Images (B, 3, H, W) -> keyword arguments of the model's forward.
    """

    size: tuple[int, int]
    grid: tuple[int, int]
    inputs: Callable[[Tensor], Mapping[str, Tensor]]


class Answer(nn.Module):
    """A model that generates text, with a fixed prompt and answer: images (B, 3, H, W) -> (B, 1 + T) values.

    The values are log-probabilities: of the answer, and of each of its tokens given those before it.
    `class_names` are the answer and its tokens, `text_tokens` the tokens of prompt and answer without the
    image's, `prepared` the images that it was made with. Made by `answer_model`.
    """

    prepared: Float[Tensor, "b 3 h w"]

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        names: Sequence[str],
        images: ImageTokens,
        image_token: int,
        prepared: Float[Tensor, "b 3 h w"],
        text_tokens: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.text_tokens = tuple(text_tokens)
        self.register_buffer("prepared", prepared, persistent=False)
        self.model, self.images = model, images
        self.class_names = tuple(names)
        device = next(model.parameters()).device
        ids = torch.tensor([[*prompt_ids, *answer_ids]], device=device)
        self.register_buffer("input_ids", ids, persistent=False)
        self.answer_length, self.image_token = len(answer_ids), image_token
        is_image: Bool[Tensor, " n"] = ids[0] == image_token
        if int(is_image.sum()) != images.grid[0] * images.grid[1]:
            raise UnsupportedModelError(
                f"expected {images.grid[0]} x {images.grid[1]} image tokens in the prompt, got "
                f"{int(is_image.sum())}. Give one image in one resolution (no tiles)."
            )
        if bool(is_image[-self.answer_length - 1 :].any()):
            raise InputError("prompt: expected text after the image")
        order = torch.cat([(~is_image).nonzero()[:, 0], is_image.nonzero()[:, 0]])
        self.register_buffer("order", order, persistent=False)  # the view's tokens, by their position

    def class_index(self, name: str) -> int:
        """The value of that name: the answer, or one of its tokens."""
        if name not in self.class_names:
            raise UnknownNameError("token of the answer", name, self.class_names)
        return self.class_names.index(name)

    def inputs(self, images: Tensor) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        ids = self.input_ids.expand(len(images), -1)  # type: ignore[operator]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.images.inputs(images)}
        positions = first(self.model, "model.get_rope_index")
        if positions is not None:  # positions in time, height and width; the model would store them on itself
            kinds = (ids == self.image_token).int()
            inputs["position_ids"] = positions(
                ids, kinds, inputs["image_grid_thw"], attention_mask=inputs["attention_mask"]
            )[0]
        return inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b values"]:
        """Log-probabilities by the model's own forward pass."""
        logits = self.model(**self.inputs(images), use_cache=False).logits
        return self.values(logits[:, -self.answer_length - 1 : -1])

    def values(self, logits: Float[Tensor, "b t vocabulary"]) -> Float[Tensor, "b values"]:
        """The values, from the logits that predict the answer's tokens."""
        ids = self.input_ids[:, -self.answer_length :].expand(len(logits), -1)  # type: ignore[index]
        tokens = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
        return torch.cat([tokens.sum(1, keepdim=True), tokens], 1)


class _Captured(Exception):
    """Ends a forward pass at the first block of the language model."""

    def __init__(self, tokens: Tensor, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.tokens, self.arguments = tokens, arguments


def language_model_inputs(
    answer: Answer, layer: nn.Module, images: Tensor
) -> tuple[Float[Tensor, "b n d"], dict[str, Any]]:
    """What the first block of the language model is called with: its tokens, and its other arguments."""
    caller = threading.get_ident()

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == caller:
            kwargs = dict(kwargs)
            tokens = args[0] if args else kwargs.pop("hidden_states")
            raise _Captured(tokens, kwargs)

    hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        answer.model(**answer.inputs(images), use_cache=False)
    except _Captured as captured:
        return captured.tokens, captured.arguments
    finally:
        hook.remove()
    raise UnsupportedModelError(
        f"{type(answer.model).__name__} does not run its language model's first block"
    )


@register_adapter("answer", matches=Answer)
def plan(answer: Answer) -> Plan:
    """The view: text tokens, then image tokens, through the blocks of the language model."""
    model: Any = answer.model
    body = first(model, *LANGUAGE_MODELS)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "norm"):
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected a language model with `layers` and `norm` at one of "
            f"{', '.join(LANGUAGE_MODELS)}"
        )
    order: Int[Tensor, " n"] = answer.order  # type: ignore[assignment]
    rows, columns = answer.images.grid
    prefix = len(order) - rows * columns
    reads = slice(prefix - answer.answer_length - 1, prefix - 1)  # text tokens that predict the answer

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        tokens, arguments = language_model_inputs(answer, body.layers[0], images)
        mask = arguments.get("attention_mask")
        if mask is None:  # causal: a token sees those at its position and before
            mask = (order[None, :] <= order[:, None])[None, None]
        else:
            mask = mask[..., order[:, None], order[None, :]]
        rotary = tuple(table[..., order, :] for table in arguments["position_embeddings"])
        return tokens[:, order], (mask, rotary), (rows, columns)

    def call(layer: nn.Module, x: Tensor, layout: Layout) -> Tensor:
        mask, rotary = layout.state
        if layout.kept is not None:
            mask, rotary = _kept(mask, rotary, layout.kept, prefix)
        output = layer(x, attention_mask=mask, position_embeddings=rotary, use_cache=False)
        return output if isinstance(output, Tensor) else output[0]

    return Plan(
        embed=embed,
        blocks=[{"module": layer, "call": partial(call, layer)} for layer in body.layers],
        head=lambda x, layout: answer.values(model.lm_head(body.norm(x[:, reads]))),
        input_size=(3, *answer.images.size),
        fixed_size=True,
        grid=(rows, columns),
        prefix=prefix,
        readout="class",
        readout_rows=tuple(range(prefix)[reads]),
        kind=f"transformers {type(model).__name__}",
        rotary=True,
        outputs="values",
        main_value=0,
    )


def _kept(
    mask: Tensor, rotary: tuple[Tensor, ...], kept: Int[Tensor, "b k"], prefix: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Mask and rotary tables of the tokens that are left, for each image."""
    text = torch.arange(prefix, device=kept.device).expand(len(kept), -1)
    index = torch.cat([text, kept + prefix], 1)
    mask = mask.expand(len(kept), -1, -1, -1)
    rows = mask.gather(2, index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[-1]))
    mask = rows.gather(3, index[:, None, None, :].expand(-1, mask.shape[1], index.shape[1], -1))
    tables = []
    for table in rotary:  # (B or 1, n, d), or (3, B or 1, n, d) for positions in time, height and width
        table = table.expand(*table.shape[:-3], len(kept), *table.shape[-2:])
        place = index[..., None].expand(*table.shape[:-2], -1, table.shape[-1])
        tables.append(table.gather(-2, place))
    return mask, tuple(tables)


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
) -> Answer:
    """The model with a prompt and an answer, and the image as its processor prepares it.

    Args:
        image: A PIL image, or images (B, 3, H, W) that are prepared already; they share prompt and answer.
        answer: None for the model's own (greedy, at most 32 tokens), of one image.
    """
    if not generates(model):
        raise UnsupportedModelError(
            f"prompt: expected a model of AutoModelForImageTextToText, got {type(model).__name__}"
        )
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"prompt: expected a text, got {prompt!r}")
    ready = image if isinstance(image, Tensor) else None
    if ready is not None and (ready.dim() != 4 or ready.shape[1] != 3):
        raise InputError(f"images: expected a PIL image, or a tensor (B, 3, H, W), got {tuple(ready.shape)}")
    shown = image if ready is None else Image.new("RGB", (ready.shape[-1], ready.shape[-2]))
    prepared = _prepare(processor, shown, prompt).to(next(model.parameters()).device)
    tokens = _image_tokens(model, processor, prepared)
    if ready is None:
        ready = _pixels(prepared, tokens)
    elif tuple(ready.shape[-2:]) != tokens.size:
        raise InputError(
            f"images: the processor gives images of {tokens.size[0]} x {tokens.size[1]} pixels, got "
            f"{ready.shape[-2]} x {ready.shape[-1]}. Give a PIL image, which it prepares."
        )
    if answer is None and len(ready) > 1:
        raise InputError(
            f"answer: the model may answer differently for each of {len(ready)} images. Give it."
        )
    prompt_ids = prepared["input_ids"][0].tolist()
    tokenizer = processor.tokenizer
    if answer is None:
        answer_ids = _generated(model, {**prepared, **tokens.inputs(ready)}, tokenizer)
    else:
        answer_ids = [int(token) for token in tokenizer(answer, add_special_tokens=False)["input_ids"]]
        if not answer_ids:
            raise InputError(f"answer: expected a text, got {answer!r}")
    names = [tokenizer.decode(answer_ids), *(tokenizer.decode([token]) for token in answer_ids)]
    image_token = _image_token(model, processor)
    text = [tokenizer.decode([token]) for token in (*prompt_ids, *answer_ids) if token != image_token]
    return Answer(model, prompt_ids, answer_ids, names, tokens, image_token, ready, text)


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
        raise InputError("the model's own answer to this prompt is empty. Give answer='...'.")
    return answer


def _image_token(model: Any, processor: Any) -> int:
    config = model.config
    token_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return int(processor.image_token_id if token_id is None else token_id)


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
            raise UnsupportedModelError(f"expected one image, the processor gives {pixels.shape[1]} tiles")
        return ImageTokens(size, grid, lambda images: {"pixel_values": images[:, None]})
    return ImageTokens(size, grid, lambda images: {"pixel_values": images})


def _grid(size: tuple[int, int], count: int) -> tuple[int, int]:
    """Rows and columns of `count` tokens on an image of this size, with square cells."""
    rows = round((count * size[0] / size[1]) ** 0.5)
    if rows < 1 or count % rows or abs(rows / (count // rows) - size[0] / size[1]) > 1e-6:
        raise UnsupportedModelError(
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
