"""The class names that a model carries.

From a `Region` or a `Detection` to a classifier of images and its class: what `ask` and `explain` do.

From words to a classifier of images: `ask` makes the module, `pose` is what `explain` does with words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.questions.detections import Detection, QueryClassifier, detection_query, detects
from steadygaze.questions.generation import Answer, answer_model, generates
from steadygaze.questions.regions import (
    Region,
    RegionClassifier,
    Size,
    is_own,
    label_index,
    own_class_names,
    scores_of,
)
from steadygaze.questions.text import (
    embedding_classifier,
    find_processor,
    find_tokenizer,
    text_classifier,
    with_module,
)
from steadygaze.questions.vqa import VisualQuestion, answers_questions, visual_question
from steadygaze.results.attribution import SHOWN_IN_NOTEBOOK, Attribution
from steadygaze.results.comparison import Attributions
from steadygaze.vit.adapt import adapt, unwrapped
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.outputs import compares_text
from steadygaze.vit.view import ViT

PLACEHOLDER = "LABEL_0"  # what transformers calls a class without a name


def display_names(model: Any, count: int) -> tuple[str, ...] | None:
    """The names of `count` classes, if the model says them; None otherwise."""
    if isinstance(model, ViT):
        model = model.model
    names = getattr(model, "class_names", None)
    if names is None and isinstance(model, nn.Module):
        labels = getattr(getattr(model, "config", None), "id2label", None) or {}
        names = [labels[index] for index in sorted(labels)]
    if not names or len(names) != count or names[0] == PLACEHOLDER:
        return None
    return tuple(map(str, names))


def is_region(target: Any) -> bool:
    """Whether a target is a region or a detection, or several of them."""
    several = target if isinstance(target, (list, tuple)) else [target]
    return any(isinstance(one, (Region, Detection)) for one in several)


def region_question(
    model: Any, images: Any, target: Any
) -> tuple[RegionClassifier | QueryClassifier, int | None]:
    """The classifier of the region, and the class of its label; None: the predicted one."""
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    names = getattr(model, "class_names", None)
    if isinstance(target, Detection):
        if not isinstance(images, Tensor) or images.dim() != 4 or len(images) != 1:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise InputError(f"Detection: expected the image it is in, a tensor (1, 3, H, W), got {got}")
        return detection_query(module, images, target, names)
    if not isinstance(target, Region):
        raise InputError(f"region: expected a steadygaze.Region or Detection, got {target!r:.80}")
    if detects(module):
        raise UnsupportedModelError(
            f"Region: {type(module).__name__} is a detector. Use steadygaze.Detection(label, box)"
        )
    mask = target.pixels(_size(model, module, images, target))
    classifier = RegionClassifier(module, mask, names or own_class_names(module))
    classes = _check_segmenter(classifier)
    if target.label is None:
        return classifier, None
    by_name = isinstance(target.label, str) and names is not None and hasattr(model, "class_index")
    index = (
        model.class_index(target.label)  # of `load_model`, which knows parts of names
        if by_name
        else label_index(target.label, classifier.class_names, type(module).__name__)
    )
    if not 0 <= index < classes:
        raise InputError(f"Region: class {index} is out of range; the model has classes 0..{classes - 1}")
    return classifier, index


def segments(model: Any) -> bool:
    """Whether a loaded model is a segmenter: known by its class, or by its output for a blank image."""
    module = unwrapped(model)
    if is_own(module) or type(module).__name__.endswith("ForSemanticSegmentation"):
        return True
    if isinstance(module, (RegionClassifier, QueryClassifier)) or detects(module) or compares_text(module):
        return False
    parameter = next(module.parameters())
    blank = torch.zeros(1, 3, *model.size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), without_autocast(module), evaluation_mode(module):
            return scores_of(module(blank)).dim() == 4
    except Exception:  # whatever a model raises that takes more than images
        return False


def identity(classifier: RegionClassifier | QueryClassifier) -> list[str]:
    """Texts that tell one question from another, for hashes."""
    if isinstance(classifier, RegionClassifier):
        pixels = classifier.mask.cpu().numpy()
        return [f"region {pixels.shape}", hashlib.sha256(pixels.tobytes()).hexdigest()]
    return [f"query {classifier.query}"]


def _check_segmenter(classifier: RegionClassifier) -> int:
    """The number of classes; an error if the model is not a segmenter."""
    model = classifier.model
    parameter = next(model.parameters())
    channels = getattr(getattr(model, "config", None), "num_channels", 3)
    blank = torch.zeros(1, channels, *classifier.size, device=parameter.device, dtype=parameter.dtype)
    with torch.no_grad(), without_autocast(model), evaluation_mode(model):
        try:
            return scores_of(model(blank)).shape[1]
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"Region: {type(model).__name__}: {error}") from None


def _size(model: Any, module: nn.Module, images: Any, region: Region) -> Size:
    """(H, W) of the image that a region is in: of the given images, or what the model takes."""
    if isinstance(images, Tensor):
        return images.shape[-2], images.shape[-1]
    if region.mask is not None and getattr(region.mask, "ndim", 0) == 2:
        return region.mask.shape
    size: Any = getattr(model, "size", None)  # of `load_model`
    if size is None and is_own(module):
        size = adapt(module.backbone).plan.input_size[1:]
    if size is None:
        size = getattr(getattr(module, "config", None), "image_size", None)
    if isinstance(size, int):
        size = (size, size)
    if size is None:
        raise InputError(
            f"region: the image size of this {type(module).__name__} is not known. Give image=, a tensor "
            "(1, 3, H, W) as the model takes it",
            option="image",
        )
    return int(size[0]), int(size[1])


def needs_each(target: Any, images: Any) -> bool:
    """Whether every image has a question of its own: a list of regions, or a detection in several images."""
    several = isinstance(images, Tensor) and images.dim() == 4 and len(images) > 1
    return is_region(target) and (
        isinstance(target, (list, tuple)) or (isinstance(target, Detection) and several)
    )


def explain_each(explain: Callable[[Tensor, Any], Any], images: Any, target: Any) -> Any:
    """What `explain` gives for each image with its own region, put together."""
    if not isinstance(images, Tensor) or images.dim() != 4:
        raise InputError(f"images: expected a tensor (B, 3, H, W), got {type(images).__name__}")
    targets = list(target) if isinstance(target, (list, tuple)) else [target] * len(images)
    if len(targets) != len(images):
        raise InputError(
            f"target: expected one Region or Detection for all images, or {len(images)}, one for each, got "
            f"{len(targets)}"
        )
    results = [explain(images[i : i + 1], one) for i, one in enumerate(targets)]
    if isinstance(results[0], dict):
        return Attributions({name: _together([result[name] for result in results]) for name in results[0]})
    return _together(results)


def _together(parts: list[Attribution]) -> Attribution:
    """One attribution of several images."""
    first = parts[0]
    targets = [part.target for part in parts if part.target is not None]
    rests = [part.unattributed for part in parts if part.unattributed is not None]
    shares = [part.parts for part in parts if part.parts is not None]
    pixels = [part.pixels for part in parts if part.pixels is not None][:SHOWN_IN_NOTEBOOK]
    return replace(
        first,
        scores=torch.cat([part.scores for part in parts]),
        target=torch.cat(targets),
        logits=torch.cat([part.logits for part in parts]),
        unattributed=torch.cat(rests) if rests else None,
        pixels=torch.cat(pixels) if pixels else None,
        parts={name: torch.cat([one[name] for one in shares]) for name in shares[0]} if shares else None,
    )


class QuestionOptions(TypedDict, total=False):
    """What `explain` takes beside target to put a question into words; its docstring says what each means."""

    prompts: Sequence[str] | None
    text_embeddings: Tensor | None
    tokenizer: Any
    logit_scale: float | None
    question: str | None
    prompt: str | None
    answer: str | None
    processor: Any


def ask(
    model: Any,
    *,
    text: str | Sequence[str] | None = None,
    text_embeddings: Tensor | None = None,
    tokenizer: Any = None,
    logit_scale: float | None = None,
    question: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    region: Region | Detection | None = None,
    image: Any = None,
    processor: Any = None,
) -> Any:
    """The question as a module: forward(images) -> (B, C), for explain, verify, stress and the page.

    text: a prompt, or several: the outputs are their similarities with the image, each on its own (for
        classes that compete, `zero_shot`). Needs a model with a text tower
    text_embeddings: (K, D), texts that are embedded already; for an image tower
    tokenizer: by default the model's own
    logit_scale: factor of the cosine, for text_embeddings; by default the model's own, or 1
    question: for ViLT; the outputs are the logits of its answers
    prompt, answer, image: for a model that generates text. The outputs are the log-probabilities of the
        answer and of each of its tokens; without answer, of what the model says of the image. The image
        decides the size: a PIL image, or a tensor (B, 3, H, W) as the model's processor prepares it
    processor: of a model that generates text; by default the model's own
    region: for a segmenter a `Region`: the outputs are the mean scores of the region, one for each class.
        image tells its size, if not that of the model. For a detector a `Detection` in the image, a tensor
        (1, 3, H, W): the outputs are the class logits of the query that detects it

    For a result of `load_model`, a copy of that with the module in it.
    """
    given = {
        "text": text,
        "text_embeddings": text_embeddings,
        "question": question,
        "prompt": prompt,
        "region": region,
    }
    if sum(value is not None for value in given.values()) != 1:
        raise InputError(f"ask: give one question: {', '.join(f'{name}=' for name in given)}")
    if region is not None:
        classifier, _ = region_question(model, image, region)
        return with_module(model, classifier, identity(classifier))
    if question is not None:
        return with_module(model, _visual_question(model, question, tokenizer), [question])
    if prompt is not None:
        if image is None:
            raise InputError("image: expected the image that the prompt is about", option="image")
        asked, _ = _answer(model, image, prompt, answer, processor)
        return with_module(model, asked, [prompt, *asked.class_names])
    if text_embeddings is not None:
        module = embedding_classifier(model, text_embeddings, logit_scale=logit_scale)
        return with_module(model, module, [str(text_embeddings.double().sum().item())])
    prompts = _texts(text)
    if prompts is None:
        raise InputError(f"text: expected a prompt or several, got {text!r:.200}")
    return with_module(model, text_classifier(model, prompts, tokenizer=tokenizer), prompts)


def _visual_question(model: Any, question: str, tokenizer: Any) -> VisualQuestion:
    module = unwrapped(model)
    given = tokenizer or getattr(model, "tokenizer", None)
    if not answers_questions(module):  # before a tokenizer is looked for
        return visual_question(module, question, given)
    return visual_question(module, question, find_tokenizer(module, given, getattr(model, "name", "")))


def _answer(
    model: Any, image: Any, prompt: str, answer: str | None, processor: Any
) -> tuple[Answer, Float[Tensor, "b 3 h w"]]:
    module = unwrapped(model)
    given = processor or getattr(model, "tokenizer", None)
    if generates(module):
        given = find_processor(module, given, getattr(model, "name", ""))
    return answer_model(module, given, image, prompt, answer)


def pose(model: Any, images: Any, target: Any, **given: Unpack[QuestionOptions]) -> tuple[Any, Any, Any]:
    """Model, images and target that `explain` works with: words become a classifier and classes of it."""
    unknown = sorted(set(given) - set(QuestionOptions.__annotations__))
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}")
    question: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    if is_region(target):
        classifier, label = region_question(model, images, target)
        return classifier, images, label
    texts = _texts(target)
    if "question" in question or "prompt" in question:
        return _answers(model, images, target, texts, question)
    if "text_embeddings" in question:
        options = {name: question[name] for name in ("logit_scale",) if name in question}
        if texts is not None:
            raise InputError("target: with text_embeddings, the index of one of them, got a text")
        return embedding_classifier(model, question["text_embeddings"], **options), images, target
    if compares_text(module):
        model, target = _text_target(model, images, target, texts, question)
        return model, images, target
    if question:
        raise InputError(
            f"{', '.join(question)}: {type(module).__name__} has no text tower to compare images with. Use a "
            "CLIP or SigLIP model with both towers, or text_embeddings= for an image tower"
        )
    if texts is None:
        return model, images, target
    return model, images, _for_batch(_named_classes(model, module, texts), target, images)


def _answers(
    model: Any, images: Any, target: Any, texts: list[str] | None, question: dict[str, Any]
) -> tuple[nn.Module, Any, Any]:
    """A question of ViLT, or the prompt of a model that generates text."""
    asked: VisualQuestion | Answer
    if "prompt" in question:
        asked, images = _answer(
            model, images, question["prompt"], question.get("answer"), question.get("processor")
        )
    else:
        asked = _visual_question(model, question["question"], question.get("tokenizer"))
    if texts is not None:
        target = _for_batch([asked.class_index(text) for text in texts], target, images)
    return asked, images, target


def _text_target(
    model: Any, images: Any, target: Any, texts: list[str] | None, question: dict[str, Any]
) -> tuple[Any, Any]:
    """Prompts of a model that compares images with text, alone or against other prompts."""
    others = question.get("prompts")
    prompts = [] if others is None else _texts(others)
    if prompts is None:
        raise InputError(f"prompts: expected texts to compare with, got {others!r:.200}", option="prompts")
    if texts is None and not prompts:
        if callable(target):
            return model, target
        raise InputError(
            f"target: this {type(unwrapped(model)).__name__} compares images with text and has no classes of "
            f"its own, got {target!r:.80}. Give a prompt, such as target='a photo of a dog', or prompts to "
            "choose from, or make a classifier with steadygaze.zero_shot(model, class_names)",
            option="target",
        )
    candidates = list(dict.fromkeys([*prompts, *(texts or [])]))
    classifier = text_classifier(
        model,
        candidates,
        tokenizer=question.get("tokenizer"),
        outputs="classes" if prompts and len(candidates) > 1 else None,
    )
    if texts is None:
        return classifier, target
    return classifier, _for_batch([candidates.index(text) for text in texts], target, images)


def _texts(target: Any) -> list[str] | None:
    """The texts of a target; None if it is not a text."""
    if isinstance(target, str):
        target = [target]
    if not isinstance(target, (list, tuple)) or not any(isinstance(text, str) for text in target):
        return None
    if not all(isinstance(text, str) and text.strip() for text in target):
        raise InputError(f"target: expected texts that are not empty, got {target!r:.200}", option="target")
    return list(target)


def _for_batch(classes: list[int], target: Any, images: Any) -> Any:
    """One class for all images; or, for a list of K texts, K classes of each image: (B, K)."""
    if isinstance(target, str):
        return classes[0]
    batch = images.shape[0] if isinstance(images, Tensor) else 1
    return torch.tensor([classes] * batch)


def _named_classes(model: Any, module: nn.Module, texts: list[str]) -> list[int]:
    """The classes of these names, of a classifier whose classes have names."""
    named: Any = model if hasattr(model, "class_index") else module
    if hasattr(named, "class_index"):
        return [named.class_index(text) for text in texts]
    raise InputError(
        f"target: expected a class index, got the text {texts[0]!r}: {type(module).__name__} has no text "
        "tower, and the names of its classes are not known. Give the class index, or names by "
        "steadygaze.load_model(model, class_names=...), or use a CLIP or SigLIP model with both towers",
        option="target",
    )
