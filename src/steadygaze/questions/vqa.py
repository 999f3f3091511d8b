"""Visual question answering: a question turns a ViLT model of transformers into a classifier of images.

    question = visual_question(model, "what is on the table?", tokenizer)
    question(images)    # (B, answers): the logits that the model itself gives for this question

ViLT runs one sequence, [text tokens, image class token, patches], through one stack of blocks. In the view,
the text and the image's class token are prefix tokens, so patches are attributed and removed as in any ViT.
`QuestionWords` exchanges the roles: the image's tokens are the prefix, and the words are a grid of one row,
so every method that attributes patches attributes words too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.vit.adapters.transformers import layer_parts
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan


class VisualQuestion(nn.Module):
    """A `ViltForQuestionAnswering` with a fixed question: images (B, 3, H, W) -> logits (B, answers).

    Made by `visual_question`.

    Attributes:
        pieces: The tokens of the question as text.
        is_word: Whether each token is a word; False for special tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        question: str,
        ids: Sequence[int],
        pieces: Sequence[str],
        is_word: Sequence[bool],
    ) -> None:
        super().__init__()
        self.model, self.question = model, question
        self.pieces, self.is_word = tuple(pieces), tuple(is_word)
        device = next(model.parameters()).device
        self.register_buffer("input_ids", torch.tensor([list(ids)], device=device), persistent=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The answers that the model can give."""
        names: dict[int, str] = self.model.config.id2label  # type: ignore[union-attr, assignment]
        return tuple(names[index] for index in sorted(names))

    def class_index(self, name: str) -> int:
        """The answer of that name."""
        if name not in self.class_names:
            raise UnknownNameError("answer", name, self.class_names)
        return self.class_names.index(name)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b answers"]:
        """Logits of the answers. ViLT shuffles the patches of an image, which changes rounding only."""
        ids = self.input_ids.expand(len(images), -1)  # type: ignore[operator]
        mask = torch.ones(len(images), *images.shape[-2:], dtype=torch.long, device=images.device)
        with torch.random.fork_rng(devices=[]):
            return self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=images, pixel_mask=mask
            ).logits

    def words(self, size: tuple[int, int]) -> QuestionWords:
        """The same classifier of images of this size, with words of the question in place of the patches."""
        return QuestionWords(self, size)


class QuestionWords(nn.Module):
    """A `VisualQuestion` whose view has the question's tokens, without special ones, as its patches.

    Attributes:
        size: (H, W) of the images.
    """

    def __init__(self, question: VisualQuestion, size: tuple[int, int]) -> None:
        super().__init__()
        self.question, self.size = question, size

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b answers"]:
        """Logits of the answers."""
        return self.question(images)

    def merged(self, scores: Float[Tensor, "*b tokens"]) -> tuple[tuple[str, ...], Float[Tensor, "*b words"]]:
        """Words and their scores; pieces of one word (##...) are added up."""
        pieces = [p for p, word in zip(self.question.pieces, self.question.is_word, strict=True) if word]
        starts = [index for index, piece in enumerate(pieces) if index == 0 or not piece.startswith("##")]
        bounds = [*starts, len(pieces)]
        spans = [slice(a, b) for a, b in pairwise(bounds)]
        words = tuple("".join(piece.removeprefix("##") for piece in pieces[span]) for span in spans)
        return words, torch.stack([scores[..., span].sum(-1) for span in spans], -1)


def visual_question(model: nn.Module, question: str, tokenizer: Any) -> VisualQuestion:
    """The classifier of answers to a question.

    Args:
        tokenizer: A tokenizer of transformers, or a processor that has one.
    """
    if not answers_questions(model):
        raise UnsupportedModelError(
            f"question: expected a ViltForQuestionAnswering of transformers, got {type(model).__name__}"
        )
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"question: expected a text such as 'what is on the table?', got {question!r}")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    ids = [int(token) for token in tokenizer(question)["input_ids"]]
    config: Any = model.config
    if len(ids) > config.max_position_embeddings:
        raise InputError(
            f"question: expected at most {config.max_position_embeddings} tokens, got {len(ids)}. Shorten it."
        )
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    is_word = [token not in special for token in ids]
    if not any(is_word):
        raise InputError(f"question: {question!r} has no words that the model knows")
    return VisualQuestion(model, question, ids, tokenizer.convert_ids_to_tokens(ids), is_word)


@torch.no_grad()
def answer_logits(
    model: Any, tokenizer: Any, questions: Sequence[str], images: Float[Tensor, "b c h w"]
) -> Float[Tensor, "b answers"]:
    """Logits of the answers to a question for each image; long questions are truncated."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    longest = model.config.max_position_embeddings
    text = tokenizer(list(questions), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    ids, mask = text["input_ids"].to(images.device), text["attention_mask"].to(images.device)
    visible = torch.ones(len(images), *images.shape[-2:], dtype=torch.long, device=images.device)
    with torch.random.fork_rng(devices=[]), evaluation_mode(model):  # ViLT shuffles the patches
        return model(input_ids=ids, attention_mask=mask, pixel_values=images, pixel_mask=visible).logits


def any_question(model: nn.Module) -> VisualQuestion:
    """The model with a question of one token, for what does not depend on the question: its blocks."""
    return VisualQuestion(model, "", [0], [""], [False])


def answers_questions(model: Any) -> bool:
    """Whether a model is a ViLT with a head for questions."""
    return type(model).__name__ == "ViltForQuestionAnswering"


@register_adapter("visual_question", matches=VisualQuestion)
def image_plan(question: VisualQuestion) -> Plan:
    """The view whose patches are the image's."""
    text = len(question.pieces)

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        return _tokens(question, images)[0], None, _grid(question, images.shape[-2:])

    return _plan(question, embed=embed, grid=_grid(question, _size(question)), prefix=text + 1)


@register_adapter("question_words", matches=QuestionWords)
def word_plan(words: QuestionWords) -> Plan:
    """The view whose patches are the question's words; everything else is prefix."""
    question = words.question
    word = torch.tensor(question.is_word)
    count = int(word.sum())

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        tokens, text = _tokens(question, images)
        is_word = word.to(tokens.device)
        special, spoken = tokens[:, :text][:, ~is_word], tokens[:, :text][:, is_word]
        return torch.cat([special, tokens[:, text:], spoken], 1), None, (1, count)

    rows, columns = _grid(question, words.size)
    return _plan(
        question,
        embed=embed,
        grid=(1, count),
        prefix=len(question.pieces) - count + 1 + rows * columns,
        size=words.size,
    )


def _plan(question: VisualQuestion, size: tuple[int, int] | None = None, **own: Any) -> Plan:
    """What both views share. size: the only (H, W) that is accepted; None: any."""
    model: Any = question.model
    body, layers = model.vilt, model.vilt.encoder.layer

    def call(layer: nn.Module, x: Tensor, layout: Layout) -> Tensor:
        return layer(x)[0]

    height, width = size or _size(question)
    limit = getattr(model.config, "max_image_length", -1)
    if isinstance(limit, int) and 0 < limit < (height // _patch(question)) * (width // _patch(question)):
        raise UnsupportedModelError(
            f"this ViltForQuestionAnswering keeps {limit} random patches of an image (max_image_length), so "
            "its answers are random. Set model.config.max_image_length = -1."
        )
    return Plan(
        blocks=[
            {"module": layer, "call": partial(call, layer), "parts": layer_parts(layer, None)}
            for layer in layers
        ],
        head=lambda x, layout: model.classifier(body.pooler(body.layernorm(x))),
        input_size=(model.config.num_channels, height, width),
        readout="class",
        kind="transformers ViltForQuestionAnswering",
        outputs="labels",  # trained by one binary cross-entropy for each answer
        fixed_size=size is not None,
        **own,
    )


def _tokens(question: VisualQuestion, images: Tensor) -> tuple[Float[Tensor, "b n d"], int]:
    """[text, image class token, patches in raster order], and the number of text tokens."""
    embeddings: Any = question.model.vilt.embeddings  # type: ignore[union-attr]
    ids = question.input_ids.expand(len(images), -1)  # type: ignore[operator]
    mask = torch.ones(len(images), *images.shape[-2:], dtype=torch.long, device=images.device)
    with torch.random.fork_rng(devices=[]):  # visual_embed shuffles the patches
        x, _, (index, (_, columns)) = embeddings.visual_embed(images, mask, max_image_length=-1)
    raster = (index[..., 0] * columns + index[..., 1]).argsort(1)
    patches = x[:, 1:].gather(1, raster.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    kinds = embeddings.token_type_embeddings.weight
    text = embeddings.text_embeddings(input_ids=ids) + kinds[0]
    return torch.cat([text, torch.cat([x[:, :1], patches], 1) + kinds[1]], 1), ids.shape[1]


def _patch(question: VisualQuestion) -> int:
    return int(question.model.config.patch_size)  # type: ignore[union-attr, arg-type]


def _size(question: VisualQuestion) -> tuple[int, int]:
    size: Any = question.model.config.image_size  # type: ignore[union-attr]
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _grid(question: VisualQuestion, size: Sequence[int]) -> tuple[int, int]:
    patch = _patch(question)
    return size[0] // patch, size[1] // patch
