"""Text as the question: how similar is an image to each of K prompts? (docs/equations.md#text-similarity)

    y_k = s · ⟨f / ‖f‖, t_k⟩ + b

| symbol | meaning                                                     | in the code       |
| f      | the image embedding: pooled, projected, not yet unit length | `features`        |
| t_k    | the embedding of prompt k, unit length                      | `text_embeddings` |
| s, b   | the model's own scale, and bias (SigLIP; 0 for CLIP)        | `scale`, `bias`   |

y_k is the model's own logit of image and text. With several templates, t_k is the mean of the unit-length
embeddings of prompt k in each template, scaled to unit length again (Radford et al. 2021, section 3.1.4).
Prompts are tokenized with the model's own tokenizer, padded and truncated as the model was trained.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.data.decoding import first_line
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.target import Outputs, check_class_names
from steadygaze.vit.adapt import adapt, unwrapped
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.outputs import compares_text, model_output, text_features
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan

CLIP_VOCABULARY = 49408  # of OpenAI's byte-pair encoding, which open_clip brings along
TEXT_INPUTS = ("input_ids", "attention_mask")


def find_tokenizer(model: Any, tokenizer: Any = None, name: str = "") -> Any:
    """The tokenizer of a model that compares images with text.

    Args:
        tokenizer: A tokenizer, a processor that has one, or the folder or hub name of one; by default the
            model's own.
        name: Folder or hub name of the model, where it is known.
    """
    if isinstance(tokenizer, (str, Path)):
        return _load(str(tokenizer))
    if tokenizer is not None:
        return (
            getattr(tokenizer, "tokenizer", tokenizer) if hasattr(tokenizer, "image_processor") else tokenizer
        )
    config: Any = getattr(model, "config", None)
    origin = name or str(getattr(config, "_name_or_path", "") or "")
    if hasattr(model, "encode_text"):
        return _open_clip_tokenizer(model)
    if not origin:
        raise _no_tokenizer(model, "its config names no folder or repository")
    return _load(origin)


@contextmanager
def without_prompts() -> Iterator[None]:
    """Keep transformers from asking on standard input whether to execute code: it raises ValueError instead.

    It hands `trust_remote_code` on to some parts of a model only, and asks about the others for as many
    seconds as its own constant says.
    """
    try:
        from transformers import dynamic_module_utils
    except ImportError:  # it is not installed: open_clip needs it for some models only
        yield
        return
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


@lru_cache(maxsize=8)
def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        with without_prompts():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        reason = "it has no vocabulary" if is_empty(tokenizer) else ""
    except Exception as error:  # whatever transformers and the hub raise
        reason = first_line(error)
    if reason:
        raise InputError(
            f"no tokenizer was found in {name} ({reason[:120]}). Give tokenizer=, or save the tokenizer of "
            "the model into its folder",
            option="tokenizer",
        )
    return tokenizer


def find_processor(model: Any, processor: Any = None, name: str = "") -> Any:
    """The processor of a model that generates text: it prepares the image and the prompt together.

    Args:
        processor: A processor, or the folder or hub name of one; by default the model's own.
        name: Name of the model, where it is known.
    """
    if processor is not None and not isinstance(processor, (str, Path)):
        return processor
    origin = str(processor or name or getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    reason = "its config names no folder or repository"
    if origin:
        from transformers import AutoProcessor

        try:
            with without_prompts():
                processor = AutoProcessor.from_pretrained(origin, trust_remote_code=False)
            if hasattr(processor, "tokenizer") and hasattr(processor, "image_processor"):
                return processor
            reason = f"{origin} has no processor of both images and text"
        except Exception as error:  # whatever transformers and the hub raise
            reason = first_line(error)[:120]
    raise InputError(
        f"prompt: it needs the processor of {type(model).__name__}, and none was found ({reason}). Give "
        "processor=, or save the processor into the model's folder",
        option="processor",
    )


def is_empty(tokenizer: Any) -> bool:
    """Whether a tokenizer knows no word: transformers makes such a one where the files are missing."""
    return len(tokenizer) <= len(tokenizer.all_special_tokens)


def _open_clip_tokenizer(model: Any) -> Any:
    vocabulary = getattr(model, "vocab_size", None)
    if vocabulary != CLIP_VOCABULARY:
        raise _no_tokenizer(model, f"a vocabulary of {vocabulary} is not that of CLIP's own tokenizer")
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer(context_length=model.context_length)


def _no_tokenizer(model: Any, why: str) -> InputError:
    return InputError(
        f"a text needs the tokenizer of {type(model).__name__}, and {why}. Give tokenizer=, a tokenizer or "
        "the folder of one, to steadygaze.ask, or load the model with steadygaze.load_model, which keeps it",
        option="tokenizer",
    )


def tokenize(model: Any, tokenizer: Any, prompts: Sequence[str], device: torch.device) -> Any:
    """What `text_features` takes. Long prompts are truncated, with a warning."""
    limit = context_length(model, tokenizer)
    for prompt in prompts:
        length = _length(tokenizer, prompt)
        if limit is not None and length > limit:
            warnings.warn(
                f"the prompt {prompt[:60]!r} has {length} tokens and {type(model).__name__} takes {limit}: "
                "the rest is cut off",
                stacklevel=2,
            )
    if hasattr(model, "encode_text"):
        ids: Tensor = tokenizer(list(prompts))
        return ids.to(device)
    padded = "max_length" if type(model).__name__.startswith("Siglip") else True  # as SigLIP was trained
    encoded = tokenizer(list(prompts), padding=padded, truncation=True, max_length=limit, return_tensors="pt")
    return {name: encoded[name].to(device) for name in TEXT_INPUTS if name in encoded}


def context_length(model: Any, tokenizer: Any) -> int | None:
    """How many tokens the text tower takes; None if neither model nor tokenizer tells."""
    text_config = getattr(getattr(model, "config", None), "text_config", None)
    stated = (
        getattr(text_config, "max_position_embeddings", None),
        getattr(model, "context_length", None),
        getattr(tokenizer, "model_max_length", None),
    )
    limits = [int(limit) for limit in stated if limit is not None and limit < 10**6]
    return min(limits) if limits else None


def _length(tokenizer: Any, prompt: str) -> int:
    """Tokens of a prompt, with the marks of its begin and end."""
    encode = getattr(tokenizer, "encode", None)
    if encode is None:  # open_clip's wrapper of a tokenizer of transformers
        inner = getattr(tokenizer, "tokenizer", None)
        return 0 if inner is None else len(inner.encode(prompt))
    own_marks = hasattr(tokenizer, "sot_token_id")  # open_clip's: `encode` leaves them out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(encode(prompt)) + (2 if own_marks else 0)


TEMPLATES = {  # names of sets of templates
    "photo": ("a photo of a {}.",),
    "seven": (  # the subset that the authors of CLIP selected for ImageNet
        "itap of a {}.",
        "a bad photo of the {}.",
        "a origami {}.",
        "a photo of the large {}.",
        "a {} in a video game.",
        "art of the {}.",
        "a photo of the small {}.",
    ),
    "none": ("{}",),
}
CHUNK = 256  # prompts embedded at a time


class TextClassifier(nn.Module):
    """A classifier of images whose classes are texts: forward(images) gives similarities (B, K).

    Attributes:
        model: The model whose image embedding is compared: CLIP, SigLIP, open_clip, or an image tower.
        text_embeddings: (K, D), scaled to unit length here.
        class_names: What class k is called.
        outputs: "classes" (softmax over the K texts), "labels" (a sigmoid each, as SigLIP is trained) or
            "values".
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        model: nn.Module,
        text_embeddings: Float[Tensor, "k d"],
        *,
        class_names: Sequence[str],
        scale: float | Tensor = 1.0,
        bias: float | Tensor = 0.0,
        outputs: Outputs = "classes",
    ) -> None:
        super().__init__()
        self.model, self.class_names, self.outputs = model, tuple(class_names), outputs
        unit = F.normalize(text_embeddings.detach(), dim=-1)
        self.register_buffer("weight", scale * unit)
        self.register_buffer("bias", unit.new_zeros(len(unit)) + bias)

    def forward(self, images: Tensor) -> Tensor:
        """Similarities (B, K) of images (B, 3, H, W)."""
        return self.similarity(model_output(self.model, images))

    def similarity(self, features: Tensor) -> Tensor:
        """Similarities (B, K) of image embeddings (B, D)."""
        return F.linear(F.normalize(features, dim=-1), self.weight, self.bias)

    def class_index(self, name: str) -> int:
        """The class of that name."""
        if name not in self.class_names:
            raise UnknownNameError("class", name, self.class_names)
        return self.class_names.index(name)


@register_adapter("text", matches=TextClassifier)
def plan(classifier: TextClassifier) -> Plan:
    """The view of the image tower, with the similarity as its head."""
    tower = adapt(classifier.model).plan

    def head(x: Tensor, layout: Layout) -> Tensor:
        return classifier.similarity(tower.head(x, layout))

    return replace(tower, head=head, outputs=classifier.outputs, checked=True)


def text_classifier(
    model: Any,
    prompts: Sequence[str],
    *,
    templates: Sequence[str] = ("{}",),
    tokenizer: Any = None,
    outputs: Outputs | None = None,
    class_names: Sequence[str] | None = None,
) -> TextClassifier:
    """The classifier of these prompts. outputs: by default what a prompt alone means to the model."""
    module = unwrapped(model)
    if not compares_text(module):
        raise InputError(
            f"a text needs a model with a text tower (CLIPModel, SiglipModel, open_clip), got "
            f"{type(module).__name__}. For an image tower give text_embeddings=, (K, D)"
        )
    tokenizer = find_tokenizer(module, tokenizer or getattr(model, "tokenizer", None))
    embeddings = embed_prompts(module, prompts, templates, tokenizer)
    scale, bias = _scale_and_bias(module)
    if outputs is None:
        outputs = "values" if getattr(module, "logit_bias", None) is None else "labels"
    return TextClassifier(
        module, embeddings, class_names=class_names or prompts, scale=scale, bias=bias, outputs=outputs
    )


def embedding_classifier(
    model: Any, text_embeddings: Any, *, logit_scale: float | None = None, outputs: Outputs | None = None
) -> TextClassifier:
    """The classifier of texts that the user has embedded: (K, D), in the space of the image embedding."""
    module = unwrapped(model)
    vectors = text_embeddings
    is_tensor = isinstance(vectors, Tensor)
    if not is_tensor or vectors.dim() != 2 or not vectors.is_floating_point() or not len(vectors):
        got = f"shape {tuple(vectors.shape)}, {vectors.dtype}" if is_tensor else type(vectors).__name__
        raise InputError(
            f"text_embeddings: expected floating-point embeddings (K, D), got {got}", option="text_embeddings"
        )
    vit = adapt(module)
    parameter = next(module.parameters())
    with torch.no_grad(), without_autocast(module), evaluation_mode(module):
        probe = torch.zeros(1, *vit.plan.input_size, device=parameter.device, dtype=parameter.dtype)
        width = model_output(module, probe).shape[-1]
    if vectors.shape[1] != width:
        raise InputError(
            f"text_embeddings: expected shape (K, {width}), the width of the image embedding of this "
            f"{vit.plan.kind}, got {tuple(vectors.shape)}",
            option="text_embeddings",
        )
    scale, bias = _scale_and_bias(module)
    names = [f"text {k}" for k in range(len(vectors))]
    return TextClassifier(
        module,
        vectors.to(device=parameter.device, dtype=parameter.dtype),
        class_names=names,
        scale=scale if logit_scale is None else logit_scale,
        bias=bias,
        outputs=outputs or ("classes" if len(vectors) > 1 else "values"),
    )


def competing_texts(
    model: Any, class_names: Sequence[str], templates: str | Sequence[str], *, tokenizer: Any = None
) -> Any:
    """The classifier that `zero_shot` returns."""
    names = list(class_names) if not isinstance(class_names, str) else [class_names]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(
            f"class_names: expected at least one name, each a non-empty text, got {class_names!r:.200}"
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"class_names: expected different names, got {repeated[0]!r} twice")
    chosen = parse_templates(templates)
    classifier = text_classifier(model, names, templates=chosen, tokenizer=tokenizer, outputs="classes")
    return with_module(model, classifier, [template.format(name) for name in names for template in chosen])


@dataclass(frozen=True)
class TextClasses:
    """Words that make a classifier of a model that compares images with text, for runs and the command line.

    Attributes:
        texts: Prompts as they are: the similarity with one, or several that compete.
        class_names: A name for each class, as for `zero_shot`.
        templates: Templates with {} where the class name goes, as for `zero_shot`.
    """

    texts: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = TEMPLATES["photo"]

    def applied(self, loaded: Any) -> Any:
        """The classifier of a result of `load_model`."""
        module = unwrapped(loaded)
        if self.class_names and not compares_text(module):  # a classifier: the names of its classes
            check_class_names(self.class_names, module)
            return replace(loaded, class_names=self.class_names)
        if self.class_names:
            return competing_texts(loaded, self.class_names, self.templates)
        if len(self.texts) > 1:
            return competing_texts(loaded, self.texts, "none")
        return with_module(loaded, text_classifier(loaded, self.texts), self.texts)


def parse_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """The templates of a set of ours, or those given; each has {} once, where the class name goes."""
    if isinstance(templates, str) and templates in TEMPLATES:
        return TEMPLATES[templates]
    if isinstance(templates, str) and "{" not in templates:
        raise UnknownNameError(
            "set of templates",
            templates,
            TEMPLATES,
            "A custom template must contain {}.",
            option="template",
        )
    several = (templates,) if isinstance(templates, str) else tuple(templates)
    for template in several:
        if not isinstance(template, str) or template.count("{}") != 1 or "{" in template.replace("{}", ""):
            raise InputError(
                f"templates: expected texts with {{}} once, where the class name goes, such as 'a photo of a "
                f"{{}}.', got {template!r}",
                option="template",
            )
    if not several:
        raise InputError("templates: expected at least one template, got none", option="template")
    return several


def with_module(holder: Any, module: nn.Module, texts: Sequence[str]) -> Any:
    """The module; for a result of `load_model`, a copy of that with the module, its names and a new hash."""
    if (
        not is_dataclass(holder)
        or isinstance(holder, (nn.Module, type))
        or not hasattr(holder, "weights_hash")
    ):
        return module
    digest = hashlib.sha256("\n".join([holder.weights_hash, *texts]).encode()).hexdigest()
    names = getattr(module, "class_names", None)
    changes = {"model": module, "class_names": names, "weights_hash": digest[:16], "task": None}
    return replace(holder, **changes)


@torch.no_grad()
def embed_prompts(
    model: nn.Module, prompts: Sequence[str], templates: Sequence[str], tokenizer: Any
) -> Float[Tensor, "k d"]:
    """Unit-length embeddings of prompts: the mean over templates of unit-length embeddings, scaled again."""
    device = next(model.parameters()).device
    texts = [
        template.format(prompt) if template != "{}" else prompt
        for prompt in prompts
        for template in templates
    ]
    pieces = []
    with without_autocast(model), evaluation_mode(model):
        for start in range(0, len(texts), CHUNK):
            inputs = tokenize(model, tokenizer, texts[start : start + CHUNK], device)
            pieces.append(F.normalize(text_features(model, inputs), dim=-1))
    each = torch.cat(pieces).unflatten(0, (len(prompts), len(templates)))
    return F.normalize(each.mean(1), dim=-1)


def _scale_and_bias(model: Any) -> tuple[float | Tensor, float | Tensor]:
    """The model's own logit scale (stored as a logarithm) and bias; 1 and 0 for an image tower."""
    scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
    return 1.0 if scale is None else scale.detach().exp(), 0.0 if bias is None else bias.detach()
