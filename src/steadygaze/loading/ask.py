"""From a model and a question to a classifier of images: `ask` and `zero_shot`.

`pose` does the same for a text, a `Region`, a `Detection` or a quantity of features that is given to
`explain` as its target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from steadygaze.data.images import any_image
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.loading.inputs import prepare_inputs, resolved
from steadygaze.questions.detections import Detection, QueryClassifier, detection_query, detects
from steadygaze.questions.features import FeatureTarget
from steadygaze.questions.generation import answer_model, generates
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
    TextClasses,
    competing_texts,
    embedding_classifier,
    find_processor,
    find_tokenizer,
    text_classifier,
    with_module,
)
from steadygaze.questions.vqa import answers_questions, visual_question
from steadygaze.target import class_index_of
from steadygaze.vit.adapt import adapt, unwrapped
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.outputs import compares_text
from steadygaze.vit.view import ViT

Transform = Callable[[Image.Image], Tensor]
PLACEHOLDER = "LABEL_0"  # what transformers calls a class without a name


def display_names(model: Any, count: int | None = None) -> tuple[str, ...] | None:
    """The names of `count` classes (None: of any number), if the model says them; None otherwise."""
    if isinstance(model, ViT):
        model = model.model
    names = getattr(model, "class_names", None)
    if names is None and isinstance(model, nn.Module):
        labels = getattr(getattr(model, "config", None), "id2label", None) or {}
        names = [labels[index] for index in sorted(labels)]
    if not names or count not in (None, len(names)) or names[0] == PLACEHOLDER:
        return None
    return tuple(map(str, names))


def region_question(
    model: Any, images: Any, target: Any, transform: Transform | None = None
) -> tuple[RegionClassifier | QueryClassifier, int | None]:
    """The classifier of the region, and the class of its label; None: the predicted one."""
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    names = getattr(model, "class_names", None)
    if isinstance(target, Detection):
        if images is not None and not isinstance(images, Tensor):
            images = prepare_inputs(model, images, transform).images
        if not isinstance(images, Tensor) or images.dim() != 4 or len(images) != 1:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise InputError(
                f"Detection: expected the image it is in, a path, a PIL image, or a tensor "
                f"(1, 3, H, W), got {got}"
            )
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


def each_region(target: Any, images: Any) -> list[Region | Detection] | None:
    """The region or detection of each image, if every image has a question of its own; None otherwise."""
    several = isinstance(target, (list, tuple)) and any(isinstance(t, (Region, Detection)) for t in target)
    many_images = isinstance(images, Tensor) and images.dim() == 4 and len(images) > 1
    if not several and not (isinstance(target, Detection) and many_images):
        return None
    if not isinstance(images, Tensor) or images.dim() != 4:
        raise InputError(f"images: expected a tensor (B, 3, H, W), got {type(images).__name__}")
    targets = list(target) if several else [target] * len(images)
    if len(targets) != len(images):
        raise InputError(
            f"target: expected one Region or Detection for all images, or {len(images)}, one for each, got "
            f"{len(targets)}"
        )
    return targets


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
    feature: FeatureTarget | None = None,
    image: Any = None,
    processor: Any = None,
    transform: Transform | None = None,
) -> Any:
    """Pose a question to a model: a classifier of images, accepted wherever a model is.

    Give one of text, text_embeddings, question, prompt, region and feature.

    Args:
        model: A name or folder for `load_model`, a module, the result of `load_model`, or an object of
            `transformers.pipeline`.
        text: A prompt or several, for a model with a text tower (CLIP, SigLIP, open_clip). The outputs are
            their similarities with the image, each on its own; `zero_shot` makes classes that compete.
        text_embeddings: Texts that are embedded already, (K, D), for an image tower.
        tokenizer: By default the model's own.
        logit_scale: Factor of the cosine, for text_embeddings; by default the model's own, or 1.
        question: Question about the images, for ViLT. The outputs are the logits of its answers.
        prompt: Prompt about an image, for a model that generates text. The outputs are the log-probabilities
            of the answer and of each of its tokens.
        answer: The answer to the prompt; by default what the model says of the image.
        region: For a segmenter a `Region`: the outputs are the mean scores of the region, one for each class.
            For a detector a `Detection`: the outputs are the class logits of the query that detects it.
        feature: For a model without a classifier: `similar_to(image)`, `component(k, images)` or
            `feature_norm()`. The output is this one value.
        image: What prompt or region are about: a path, a PIL image, a numpy array (H, W, 3) of uint8, or a
            preprocessed tensor (B, 3, H, W). With a prompt, a tensor is as the model's processor prepares it,
            and the question keeps the image as `prepared`, (B, 3, H, W). With a detection, a tensor is (1, 3,
            H, W). With a region, a tensor tells the size, if that is not the model's own.
        processor: Processor of a model that generates text; by default the model's own.
        transform: From a PIL image to a tensor (3, H, W), for the image of a detection and the images of a
            feature, if the model does not state its own preprocessing.

    Returns:
        A module, images (B, 3, H, W) -> (B, C), with `class_names`; for a name or a result of `load_model`, a
        copy of what `load_model` returns, with the module in it.

    Raises:
        InputError: If none or several questions are given, or one is not complete.
        UnsupportedModelError: If the model cannot answer this kind of question.

    Examples:
        ```python
        asked = sg.ask("openai/clip-vit-base-patch32", text=["a dog", "a cat"])
        sg.explain(asked, "dog.jpg", target="a dog")
        ```
    """
    questions = {
        "text": text,
        "text_embeddings": text_embeddings,
        "question": question,
        "prompt": prompt,
        "region": region,
        "feature": feature,
    }
    if sum(value is not None for value in questions.values()) != 1:
        raise InputError(f"ask: give one question: {', '.join(f'{name}=' for name in questions)}")
    if feature is not None:
        if not isinstance(feature, FeatureTarget):
            raise InputError(
                f"feature: expected sg.similar_to(image), sg.component(k, images) or sg.feature_norm(), got "
                f"{feature!r:.80}"
            )
        return _feature_question(resolved(model), feature, transform)
    model = resolved(model)
    module, name = unwrapped(model), getattr(model, "name", "")
    own_tokenizer = getattr(model, "tokenizer", None)
    if region is not None:
        classifier, _ = region_question(model, image, region, transform)
        if isinstance(classifier, QueryClassifier):
            return with_module(model, classifier, [f"query {classifier.query}"])
        pixels = classifier.mask.cpu().numpy()
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()
        return with_module(model, classifier, [f"region {pixels.shape}", digest])
    if question is not None:
        tokenizer = tokenizer or own_tokenizer
        if answers_questions(module):  # else the model is the problem, not a missing tokenizer
            tokenizer = find_tokenizer(module, tokenizer, name)
        return with_module(model, visual_question(module, question, tokenizer), [question])
    if prompt is not None:
        if image is None:
            raise InputError("image: expected the image that the prompt is about", option="image")
        processor = processor or own_tokenizer
        if generates(module):
            processor = find_processor(module, processor, name)
        image = image if isinstance(image, Tensor) else any_image(image)
        asked = answer_model(module, processor, image, prompt, answer)
        return with_module(model, asked, [prompt, *asked.class_names])
    if text_embeddings is not None:
        module = embedding_classifier(model, text_embeddings, logit_scale=logit_scale)
        return with_module(model, module, [str(text_embeddings.double().sum().item())])
    prompts = _texts(text)
    if prompts is None:
        raise InputError(f"text: expected a prompt or several, got {text!r:.200}")
    return with_module(model, text_classifier(model, prompts, tokenizer=tokenizer), prompts)


def zero_shot(
    model: Any, class_names: Sequence[str], templates: str | Sequence[str] = "photo", *, tokenizer: Any = None
) -> Any:
    """Make a classifier of images from class names and a model that compares images with text.

    Args:
        model: CLIPModel, SiglipModel, Siglip2Model of transformers, a model of open_clip, the name or folder
            of one, or the result of `load_model` with one.
        class_names: A name or prompt for each class.
        templates: A built-in set ("photo": "a photo of a {}.", "seven", "none": the names alone), a template
            with {} where the class name goes, or several; their embeddings are averaged.
        tokenizer: By default the model's own.

    Returns:
        A module, images (B, 3, H, W) -> logits (B, classes); for a name or a result of `load_model`, a copy
        of what `load_model` returns, with this module and these class names. It is accepted wherever a model
        is.

    Raises:
        InputError: If the model has no text tower, or names or templates are empty.

    Examples:
        ```python
        classifier = sg.zero_shot("openai/clip-vit-base-patch32", ["dog", "cat"])
        sg.explain(classifier, "dog.jpg", target="dog", score="log_odds")
        ```
    """
    return competing_texts(resolved(model), class_names, templates, tokenizer=tokenizer)


def as_classifier(loaded: Any, words: TextClasses | FeatureTarget | None) -> Any:
    """A loaded model as a classifier: one that compares images with text needs words for its classes."""
    if isinstance(words, FeatureTarget):
        return _feature_question(loaded, words)
    if words is not None:
        return words.applied(loaded)
    module = unwrapped(loaded)
    if compares_text(module):
        raise InputError(
            f"{type(module).__name__} compares images with text and has no classes. Give class "
            "names or texts: steadygaze.zero_shot(model, class_names) makes a classifier of it",
            option="class_names",
        )
    return loaded


def _feature_question(model: Any, feature: FeatureTarget, transform: Transform | None = None) -> Any:
    return feature.applied(model, lambda images: prepare_inputs(model, images, transform).images)


def pose(model: Any, images: Any, target: Any, transform: Transform | None = None) -> tuple[Any, Any]:
    """The classifier and the target that `explain` works with: texts and regions become classes.

    Args:
        transform: Preprocessing of the images that a target has, where the model does not state its own.
    """
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    if isinstance(target, (Region, Detection)):
        return region_question(model, images, target)
    if isinstance(target, FeatureTarget):
        return _feature_question(model, target, transform), 0
    texts = _texts(target)
    if compares_text(module) and not callable(target):
        if texts is None:
            raise InputError(
                f"target: this {type(module).__name__} compares images with text and has no classes of its "
                f"own, got {target!r:.80}. Give a prompt, such as target='a photo of a dog', or make a "
                "classifier with steadygaze.ask(model, text=prompts) or steadygaze.zero_shot(model, names)",
                option="target",
            )
        prompts = list(dict.fromkeys(texts))
        model = text_classifier(model, prompts)
        classes = [prompts.index(text) for text in texts]
    elif texts is None:
        return model, target
    else:
        classes = [_class_index(model, module, text) for text in texts]
    if isinstance(target, str):
        return model, classes[0]
    batch = images.shape[0] if isinstance(images, Tensor) else 1
    return model, torch.tensor([classes] * batch)


def _class_index(model: Any, module: nn.Module, text: str) -> int:
    """The class of this name: of a question, of `load_model`, or of a configuration of transformers."""
    named: Any = module if hasattr(module, "class_index") else model
    if hasattr(named, "class_index"):
        return named.class_index(text)
    names = display_names(module)
    if names is not None:
        return class_index_of(text, names, type(module).__name__)
    raise InputError(
        f"target: expected a class index, got the text {text!r}: {type(module).__name__} has no text tower, "
        "and the names of its classes are not known. Give the class index, or names by "
        "steadygaze.load_model(model, class_names=...), or use a CLIP or SigLIP model",
        option="target",
    )


def _texts(target: Any) -> list[str] | None:
    """The texts of a target; None if it is not a text."""
    if isinstance(target, str):
        target = [target]
    if not isinstance(target, (list, tuple)) or not any(isinstance(text, str) for text in target):
        return None
    if not all(isinstance(text, str) and text.strip() for text in target):
        raise InputError(f"target: expected texts that are not empty, got {target!r:.200}", option="target")
    return list(target)
