"""From prompts to the inputs of a text tower: which tokenizer, how long, how padded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze.errors import BadInput

CLIP_VOCABULARY = 49408  # of OpenAI's byte-pair encoding, which open_clip brings along
TEXT_INPUTS = ("input_ids", "attention_mask")


def find_tokenizer(model: Any, given: Any = None, name: str = "") -> Any:
    """The tokenizer of a model that compares images with text.

    given: a tokenizer, a processor that has one, or the folder or hub name of one
    name: folder or hub name of the model, where it is known
    """
    if isinstance(given, (str, Path)):
        return _load(str(given))
    if given is not None:
        return getattr(given, "tokenizer", given) if hasattr(given, "image_processor") else given
    config: Any = getattr(model, "config", None)
    origin = name or str(getattr(config, "_name_or_path", "") or "")
    if hasattr(model, "encode_text"):
        return _open_clip_tokenizer(model)
    if not origin:
        raise _no_tokenizer(model, "its config names no folder or repository")
    return _load(origin)


@lru_cache(maxsize=8)
def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        reason = "it has no vocabulary" if is_empty(tokenizer) else ""
    except Exception as error:  # whatever transformers and the hub raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason:
        raise BadInput(
            f"no tokenizer was found in {name} ({reason[:120]}). Give tokenizer=, or save the tokenizer of "
            "the model into its folder",
            option="tokenizer",
        )
    return tokenizer


def find_processor(model: Any, given: Any = None, name: str = "") -> Any:
    """The processor of a model that generates text: it prepares the image and the prompt together.

    given: a processor, or the folder or hub name of one; name: of the model, where it is known
    """
    if given is not None and not isinstance(given, (str, Path)):
        return given
    origin = str(given or name or getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    reason = "its config names no folder or repository"
    if origin:
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(origin, trust_remote_code=False)
            if hasattr(processor, "tokenizer") and hasattr(processor, "image_processor"):
                return processor
            reason = f"{origin} has no processor of both images and text"
        except Exception as error:  # whatever transformers and the hub raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    raise BadInput(
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


def _no_tokenizer(model: Any, why: str) -> BadInput:
    return BadInput(
        f"target: a text needs the tokenizer of {type(model).__name__}, and {why}. Give tokenizer=, a "
        "tokenizer or the folder of one, or load the model with steadygaze.load_model, which keeps its own",
        option="tokenizer",
    )


def tokenise(model: Any, tokenizer: Any, prompts: Sequence[str], device: torch.device) -> Any:
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
    known = (
        getattr(text_config, "max_position_embeddings", None),
        getattr(model, "context_length", None),
        getattr(tokenizer, "model_max_length", None),
    )
    limits = [int(limit) for limit in known if limit is not None and limit < 10**6]
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
