"""Generative vision-language models: what in the image made the model say this?

    answer, images = answer_model(model, processor, image, "What is on the table?")    # in `prompting`
    answer(images)    # (B, 1 + T): log-probability of the whole answer, then of each of its T tokens

The model is run once on [prompt with image, answer]. Its view starts where the language model does: the
tokens at the input of its first block are the text and the image's tokens (output of the vision tower and
projector).
Text tokens are the prefix of the view and image tokens its patches, although they stand between the text in
the sequence: attention is equivariant under a permutation of its tokens once positions and mask are explicit.
So image tokens are removed for real, and every token keeps its position.

Recognised by structure: a language model with `layers` and `norm`, an `lm_head`, and image tokens in
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
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName, UnsupportedModel
from steadygaze.vit.adapter_registry import register_built_in
from steadygaze.vit.parts import first
from steadygaze.vit.view import Layout, Plan

LANGUAGE_MODELS = ("model.language_model", "model.text_model", "language_model.model", "language_model")


@dataclass(frozen=True)
class ImageTokens:
    """How a model takes images, and where their tokens lie.

    size: (H, W) of the images; grid: rows and columns of their tokens
    inputs: images (B, 3, H, W) -> keyword arguments of the model's forward
    """

    size: tuple[int, int]
    grid: tuple[int, int]
    inputs: Callable[[Tensor], Mapping[str, Tensor]]


class Answer(nn.Module):
    """A model that generates text, with a fixed prompt and answer: images (B, 3, H, W) -> (B, 1 + T) values.

    The values are log-probabilities: of the answer, and of each of its tokens given those before it.
    `class_names` are the answer and its tokens. Made by `answer_model`.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        names: Sequence[str],
        images: ImageTokens,
        image_token: int,
    ) -> None:
        super().__init__()
        self.model, self.images = model, images
        self.class_names = tuple(names)
        device = next(model.parameters()).device
        ids = torch.tensor([[*prompt_ids, *answer_ids]], device=device)
        self.register_buffer("input_ids", ids, persistent=False)
        self.answer_length, self.image_token = len(answer_ids), image_token
        is_image: Bool[Tensor, " n"] = ids[0] == image_token
        if int(is_image.sum()) != images.grid[0] * images.grid[1]:
            raise UnsupportedModel(
                f"expected {images.grid[0]} x {images.grid[1]} image tokens in the prompt, got "
                f"{int(is_image.sum())}. Give one image in one resolution (no tiles)."
            )
        if bool(is_image[-self.answer_length - 1 :].any()):
            raise BadInput("prompt: expected text after the image")
        order = torch.cat([(~is_image).nonzero()[:, 0], is_image.nonzero()[:, 0]])
        self.register_buffer("order", order, persistent=False)  # the view's tokens, by their position

    def class_index(self, name: str) -> int:
        """The value of that name: the answer, or one of its tokens."""
        if name not in self.class_names:
            raise UnknownName("token of the answer", name, self.class_names)
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
    raise UnsupportedModel(f"{type(answer.model).__name__} does not run its language model's first block")


def plan(answer: Answer) -> Plan:
    """The view: text tokens, then image tokens, through the blocks of the language model."""
    model: Any = answer.model
    body = first(model, *LANGUAGE_MODELS)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "norm"):
        raise UnsupportedModel(
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


register_built_in("answer", matches=Answer, plan=plan)
