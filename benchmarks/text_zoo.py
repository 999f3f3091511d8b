"""Tiny models that compare images with text, each with a tokenizer of its own: random weights, float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks.zoo import Entry, randomize
from steadygaze.questions import TextClassifier

WORDS = (
    *("a", "the", "photo", "of", "dog", "cat", "bird", "tree", "red", "two", "in", "."),
    *("itap", "art", "origami", "bad", "large", "small", "video", "game"),
)
LENGTH = 16  # tokens that the text towers take
VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,  # CLIP takes 2 for a mark of old configurations
}
NAMES = ("dog", "cat", "bird", "tree", "red dog", "two cat", "art")


def entries() -> Iterator[Entry]:
    """Every kind as a zero-shot classifier of seven class names."""
    installed = OPEN_CLIP if find_spec("open_clip") else {}
    for kind in (*KINDS, *installed):
        yield Entry("text and image", kind, partial(classifier, kind))


def tokenizer() -> Any:
    """One token for each word: <s> words </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LENGTH, **special)


def clip(stem: str = "CLIP", **vision: Any) -> nn.Module:
    """CLIPModel or MetaClip2Model."""
    import transformers

    config = getattr(transformers, f"{stem}Config")(
        text_config=TEXT, vision_config=VISION | vision, projection_dim=12
    )
    return randomize(getattr(transformers, f"{stem}Model")(config))


def siglip(stem: str = "Siglip") -> nn.Module:
    """SiglipModel or Siglip2Model."""
    import transformers

    text = TEXT | {"projection_size": VISION["hidden_size"]}
    vision = VISION | ({"num_patches": 16} if stem == "Siglip2" else {})
    config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=vision)
    return randomize(getattr(transformers, f"{stem}Model")(config))


def open_clip_model(tower: str = "own", **vision: Any) -> nn.Module:
    """CLIP of open_clip, with its own image tower or one of timm."""
    import open_clip.model as library

    small = {"image_size": 32, "patch_size": 8, "width": 24, "layers": 3, "head_width": 12, "mlp_ratio": 2.0}
    text = {"context_length": LENGTH, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2}
    if tower == "own":
        return randomize(library.CLIP(12, small | vision, text))
    timm_tower = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token"}
    model = library.CLIP(12, timm_tower, text)
    reduced: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}
    model.visual.trunk = timm.create_model("vit_base_patch16_siglip_224", num_classes=0, **reduced)
    model.visual.head = nn.Sequential(nn.Linear(24, 12, bias=False))
    return randomize(model)


def open_clip_tokenizer(texts: Sequence[str]) -> Tensor:
    """As open_clip's tokenizers: texts -> ids of fixed length; the mark of the end has the highest number."""
    encoded = tokenizer()(list(texts), padding="max_length", max_length=LENGTH, truncation=True)["input_ids"]
    ids = torch.tensor(encoded)
    return torch.where(ids == 3, 39, ids)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "CLIPModel": clip,
    "MetaClip2Model": partial(clip, "MetaClip2"),
    "SiglipModel": siglip,
    "Siglip2Model": partial(siglip, "Siglip2"),
}
OPEN_CLIP: dict[str, Callable[[], nn.Module]] = {
    "open_clip CLIP": open_clip_model,
    "open_clip CLIP, LayerScale, mean": partial(open_clip_model, ls_init_value=0.1, pool_type="avg"),
    "open_clip CLIP, norm behind the pool": partial(open_clip_model, final_ln_after_pool=True),
    "open_clip CLIP, timm tower": partial(open_clip_model, "timm"),
}


def build(kind: str) -> nn.Module:
    """The model alone."""
    return (KINDS | OPEN_CLIP)[kind]()


def classifier(kind: str) -> tuple[TextClassifier, str]:
    """The zero-shot classifier of a kind, and how it was reduced."""
    with torch.random.fork_rng():
        model = build(kind)
    words = open_clip_tokenizer if kind in OPEN_CLIP else tokenizer()
    return sg.zero_shot(model, NAMES, tokenizer=words), "depth 3, width 24"
