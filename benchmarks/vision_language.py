"""Tiny vision-language models of transformers with tokenizers and processors, made in memory.


Nothing is downloaded: tokenizers know a dozen words, image processors are configured for small images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers as tr
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

import steadygaze as sg
from benchmarks.checks import decompx_error, relative
from benchmarks.zoo import Entry, image_of
from steadygaze.questions.generation import Answer, answer_model
from steadygaze.questions.vqa import VisualQuestion, visual_question

QUESTION, PROMPT, ANSWER = "what is on the table ?", "what is on the table ?", "a red cup"
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", *QUESTION.split(), *ANSWER.split(), "ta", "##ble")
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def randomized(model: nn.Module) -> Any:
    """Every parameter random and always the same, none zero or one by initialization; evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.15 * draw if is_gain else 0.2 * draw)
    return model.eval()


def photograph(height: int = 50, width: int = 70) -> Image.Image:
    """An image of noise."""
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def word_tokenizer(*special: str) -> Any:
    """A tokenizer that knows `WORDS`."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tr.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *special]})
    return tokenizer


def vilt() -> tuple[Any, Any]:
    """(ViltForQuestionAnswering with seven answers, tokenizer)."""
    config = tr.ViltConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=64,
        patch_size=16,
        vocab_size=40,
        max_position_embeddings=12,
        id2label={i: f"answer {i}" for i in range(6)} | {6: "cup"},
    )
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = tr.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", cls_token="<s>", sep_token="</s>", unk_token="<unk>"
    )
    return randomized(tr.ViltForQuestionAnswering(config)), tokenizer


def llava() -> tuple[Any, Any]:
    """(LlavaForConditionalGeneration, processor): a CLIP tower of 4 x 4 patches and a Llama."""
    config = tr.LlavaConfig(
        vision_config=tr.CLIPVisionConfig(**VISION),
        text_config=tr.LlamaConfig(**TEXT),
        image_token_index=WORDS.index("<image>"),
        image_seq_length=16,
    )
    images = tr.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = tr.LlavaProcessor(
        images,
        word_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return randomized(tr.LlavaForConditionalGeneration(config)), processor


def qwen() -> tuple[Any, Any]:
    """(Qwen2_5_VLForConditionalGeneration, processor): images of several sizes, positions in three axes."""
    marks = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = word_tokenizer(*marks)
    pad, start, end, video = tokenizer.convert_tokens_to_ids(list(marks))
    vision = {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = tr.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=TEXT | {"rope_parameters": rope},
        image_token_id=pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=video,
    )
    images = tr.Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84})
    processor = tr.Qwen2_5_VLProcessor(images, tokenizer, tr.Qwen2VLVideoProcessor())
    return randomized(tr.Qwen2_5_VLForConditionalGeneration(config)), processor


def one_tile(kind: str) -> tuple[Any, Any]:
    """(Idefics 3 or SmolVLM, processor): four patches become one token. Both with the processor of Idefics 3:
    that of SmolVLM needs the package num2words."""
    config = getattr(tr, f"{kind}Config")(
        vision_config=VISION,
        text_config=tr.LlamaConfig(**TEXT),
        image_token_id=WORDS.index("<image>"),
        scale_factor=2,
    )
    tokenizer = word_tokenizer("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    images = tr.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 56})
    processor = tr.Idefics3Processor(images, tokenizer, image_seq_len=4)
    return randomized(getattr(tr, f"{kind}ForConditionalGeneration")(config)), processor


GENERATIVE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "LLaVA": llava,
    "Qwen2.5-VL": qwen,
    "Idefics 3": partial(one_tile, "Idefics3"),
    "SmolVLM": partial(one_tile, "SmolVLM"),
}


# -- checks against transformers' own forward pass -----------------------------------------------------------


def answered(kind: str) -> tuple[Answer, str]:
    """A generative model with a prompt and an answer, and how it was reduced."""
    model, processor = GENERATIVE[kind]()
    return answer_model(model, processor, photograph(), PROMPT, ANSWER), "3 blocks, width 32, float32"


def asked() -> tuple[VisualQuestion, str]:
    """ViLT with a question, in float64, and how it was reduced."""
    model, words = vilt()
    return visual_question(model.double(), QUESTION, words), "3 blocks, width 32"


def log_probabilities(answer: Answer, images: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Of each token of the answer; the image tokens `hidden` are hidden from all others by the mask."""
    model: Any = answer.model
    ids: Any = answer.input_ids
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1])[None]
    extra = dict(answer.images.inputs(images))
    if hasattr(model.model, "get_rope_index"):
        kinds = (ids == model.config.image_token_id).int()
        positions = model.model.get_rope_index(ids, kinds, extra["image_grid_thw"])[0]
    if hidden is not None:
        mask[0, (ids[0] == model.config.image_token_id).nonzero()[:, 0][hidden]] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **extra).logits
    predicted = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return predicted[-answer.answer_length :]


def question_logits(question: VisualQuestion, images: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Logits of ViLT's own encoder, with the patches `hidden` hidden from all others by the mask."""
    vit, body = sg.adapt(question), question.model.vilt
    with torch.no_grad():
        tokens = vit.embed(images)
        mask = tokens.new_zeros(1, 1, 1, tokens.shape[1])
        if hidden is not None:
            mask[..., vit.prefix + hidden] = float("-inf")
        last = body.encoder(tokens, attention_mask=mask).last_hidden_state
        return question.model.classifier(body.pooler(body.layernorm(last)))


def check_question(question: VisualQuestion) -> dict[str, float | str]:
    """The three checks of `checks.check`, with removal against ViLT's own mask."""
    vit, images = sg.adapt(question), image_of(question, (3, 64, 64))
    hidden, keep = torch.arange(4), torch.arange(4, 16)[None]
    removed = vit.logits(vit.select(vit.embed(images), keep))
    return {
        "logits": relative(vit(images), question(images)),
        "removal": relative(removed, question_logits(question, images, hidden)),
        "decompx": decompx_error(vit),
    }


def check_answer(answer: Answer) -> dict[str, float | str]:
    """Log-probabilities and removal against transformers' own forward pass and mask."""
    vit, images = sg.adapt(answer), image_of(answer, (3, *answer.images.size))
    count = vit.grid[0] * vit.grid[1]
    hidden, keep = torch.arange(count // 2), torch.arange(count // 2, count)[None]
    removed = vit.logits(vit.select(vit.embed(images), keep))[0, 1:]
    return {
        "logits": relative(vit(images)[0, 1:], log_probabilities(answer, images)),
        "removal": relative(removed, log_probabilities(answer, images, hidden)),
        "decompx": "not linear",  # a log-probability is not
    }


def entries() -> Iterator[Entry]:
    """ViLT with a question, and each generative model with a prompt and an answer."""
    yield Entry("questions", "ViltForQuestionAnswering", asked, check_question)
    for kind in GENERATIVE:
        # language models compute their norms in float32
        yield Entry("prompts", kind, partial(answered, kind), check_answer, tolerance=1e-5)
