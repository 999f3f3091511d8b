"""Prompts as targets: CLIP, SigLIP and SigLIP 2 of transformers, tiny and random; no published weights."""

import copy
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import text_zoo, zoo
from steadygaze.questions import TEMPLATES, TextClassifier
from steadygaze.trace import Want, forward, frozen
from steadygaze.vit.outputs import pixel_inputs

KINDS = [kind for kind in text_zoo.KINDS if kind.endswith("Model")]
PROMPTS = ["a photo of a dog", "a cat", "two red bird in the tree"]
TOKENIZER = text_zoo.tokenizer()


@cache
def model_of(kind: str) -> Any:
    return text_zoo.build(kind)


def images_of(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def is_siglip(model: nn.Module) -> bool:
    return "Siglip" in type(model).__name__


def own_logits(model: Any, images: Tensor, prompts: list[str], tokenizer: Any = TOKENIZER) -> Tensor:
    """logits_per_image of transformers' own forward pass."""
    full = {"padding": "max_length", "max_length": text_zoo.LENGTH}
    text = tokenizer(prompts, **(full if is_siglip(model) else {"padding": True}), return_tensors="pt")
    ids = {name: text[name] for name in ("input_ids", "attention_mask") if name in text}
    with torch.no_grad():
        return model(**ids, **pixel_inputs(model, images)).logits_per_image


def save(model: Any, folder: Path, *, tokenizer: bool = True) -> Path:
    from transformers import CLIPImageProcessor, Siglip2ImageProcessor

    size = {"height": 32, "width": 32}
    if "Siglip2" in type(model).__name__:
        Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(folder)
    else:
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    copy.deepcopy(model).float().save_pretrained(folder)
    if tokenizer:
        TOKENIZER.save_pretrained(folder)
    return folder


# -- the quantity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_similarity_is_the_models_own_logit(kind: str) -> None:
    model, images = model_of(kind), images_of()
    classifier = sg.ask(model, text=PROMPTS, tokenizer=TOKENIZER)
    with torch.no_grad():
        torch.testing.assert_close(classifier(images), own_logits(model, images, PROMPTS), rtol=0, atol=1e-12)
    assert sg.adapt(classifier).plan.outputs == ("labels" if "Siglip" in kind else "values")
    attribution = sg.explain(classifier, images, target=PROMPTS)
    torch.testing.assert_close(attribution.logits, classifier(images).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_patches_and_what_has_no_patch_add_up_to_the_similarity(kind: str) -> None:
    """Bias-free decompx from block 0: the projection and the unit length keep it complete."""
    model, images = sg.ask(model_of(kind), text=PROMPTS, tokenizer=TOKENIZER), images_of()
    vit = sg.adapt(model)
    with torch.no_grad():
        tokens = vit.embed(images)
    run = forward(vit, tokens, rules=frozen(1.0), want=Want(bias=True))
    for k in range(len(PROMPTS)):
        similarity = run.logits[:, k]
        trace = run.trace(similarity, retain=True)
        x, g = trace.tokens(0)
        prefix = (x * g)[:, : vit.prefix].sum((1, 2))
        biases = torch.stack([trace.bias_terms(layer).sum(1) for layer in range(trace.depth + 1)]).sum(0)
        decompx = sg.explain(model, images, target=k, method="decompx").scores.sum((1, 2))
        torch.testing.assert_close(decompx + prefix + biases, similarity.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("unit", ["normalize", "norm", "vector_norm"])
def test_the_norm_is_held_however_unit_length_is_written(unit: str) -> None:
    """F.normalize(x), x / x.norm() and x / torch.linalg.vector_norm(x), in a head of the user's own."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = nn.Parameter(torch.randn(5, 192, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: Tensor) -> Tensor:
            if unit == "normalize":
                x = F.normalize(x, dim=-1)
            elif unit == "norm":
                x = x / x.norm(dim=-1, keepdim=True)
            else:
                x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x @ self.text.T

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    model.head = Head()
    model = model.double().eval()
    vit, images = sg.adapt(model), images_of()
    with torch.no_grad():
        tokens = vit.embed(images)
    for rules, implicit in ((frozen(1.0), False), (frozen(0.5), True)):
        run = forward(vit, tokens, rules=rules, want=Want(bias=True, implicit=implicit))
        trace = run.trace(run.logits[:, 2])
        x, g = trace.tokens(0)
        terms = [trace.bias_terms(layer, implicit=implicit).sum(1) for layer in range(trace.depth + 1)]
        total = (x * g).sum((1, 2)) + torch.stack(terms).sum(0)
        torch.testing.assert_close(total, run.logits[:, 2].detach(), rtol=0, atol=1e-10)


# -- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_a_text_is_one_target_and_a_list_is_several_of_each_image(kind: str) -> None:
    loaded = sg.load_model(model_of(kind), image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    loaded, images = replace(loaded, tokenizer=TOKENIZER), images_of()
    several = sg.explain(loaded, images, target=PROMPTS)
    assert several.scores.shape == (2, 3, 4, 4)
    for k, prompt in enumerate(PROMPTS):  # each on its own: the others do not matter
        one = sg.explain(loaded, images, target=prompt)
        assert one.scores.shape == (2, 4, 4)
        torch.testing.assert_close(one.scores, several.scores[:, k], rtol=1e-9, atol=1e-12)


def test_against_other_prompts_there_are_log_odds() -> None:
    model, images = model_of("CLIPModel"), images_of()
    options = {"score": "log_odds", "method": "ixg"}
    classifier = sg.zero_shot(model, PROMPTS, templates="none", tokenizer=TOKENIZER)
    against = sg.explain(classifier, images, target=PROMPTS[0], **options)
    same = sg.explain(classifier, images, target=0, **options)
    torch.testing.assert_close(against.scores, same.scores)
    with pytest.raises(sg.InputError, match="log_odds"):  # alone, a similarity has no odds
        sg.explain(sg.ask(model, text=PROMPTS[0], tokenizer=TOKENIZER), images, score="log_odds")
    predicted = sg.explain(classifier, images)
    assert torch.equal(predicted.target, own_logits(model, images, PROMPTS).argmax(1))


def test_text_embeddings_serve_an_image_tower() -> None:
    from transformers import CLIPVisionModelWithProjection

    model, images = model_of("CLIPModel"), images_of()
    tower = CLIPVisionModelWithProjection(model.config.vision_config).double().eval()
    tower.vision_model, tower.visual_projection = model.vision_model, model.visual_projection
    classifier = sg.ask(model, text=PROMPTS, tokenizer=TOKENIZER)
    scale = float(model.logit_scale.detach().exp())
    whole = sg.explain(classifier, images, target=PROMPTS[1], method="decompx")
    embeddings = 3.0 * classifier.weight  # of any length
    asked = sg.ask(tower, text_embeddings=embeddings, logit_scale=scale)
    alone = sg.explain(asked, images, target=1, method="decompx", score="logit")
    torch.testing.assert_close(alone.scores, whole.scores)
    cosine = sg.ask(tower, text_embeddings=embeddings)
    torch.testing.assert_close(cosine(images) * scale, classifier(images))


def test_siglips_image_tower_is_viewed_alone() -> None:
    model, images = model_of("SiglipModel"), images_of()
    with torch.no_grad():
        expected = model.vision_model(images).pooler_output
        torch.testing.assert_close(sg.adapt(model.vision_model)(images), expected)
    scores = sg.explain(model.vision_model, images, target=lambda f: f[:, 0], method="gae").scores
    assert scores.shape == (2, 4, 4) and scores.abs().sum() > 0


def test_a_class_name_is_a_target_of_a_loaded_classifier() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).eval()
    loaded = sg.load_model(model, class_names=["cat", "dog", "tree"])
    images = torch.randn(2, 3, 32, 32)
    named = sg.explain(loaded, images, target="dog", method="ixg")
    assert named.target is not None and named.target.tolist() == [1, 1]
    assert sg.explain(loaded, images, target=["dog", "cat"], method="ixg").scores.shape == (2, 2, 2, 2)
    with pytest.raises(sg.UnknownNameError, match="tree"):
        sg.explain(loaded, images, target="treee")


# -- zero shot -------------------------------------------------------------------------------------


def test_templates_are_averaged_at_unit_length() -> None:
    model = model_of("CLIPModel")
    names, templates = ["dog", "cat"], ["a photo of a {}.", "art of the {}."]
    classifier = sg.zero_shot(model, names, templates, tokenizer=TOKENIZER)
    rows = []
    for name in names:
        embedded = []
        for template in templates:
            encoded = TOKENIZER([template.format(name)], return_tensors="pt")
            with torch.no_grad():
                vector = model.get_text_features(encoded["input_ids"]).pooler_output[0]
            embedded.append(vector / vector.norm())
        mean = (embedded[0] + embedded[1]) / 2
        rows.append(model.logit_scale.exp() * mean / mean.norm())
    torch.testing.assert_close(classifier.weight, torch.stack(rows).detach())
    assert isinstance(classifier, TextClassifier) and classifier.class_names == ("dog", "cat")


def test_a_set_of_templates_has_a_name() -> None:
    model = model_of("CLIPModel")
    by_name = sg.zero_shot(model, ["dog", "cat"], "seven", tokenizer=TOKENIZER)
    given = sg.zero_shot(model, ["dog", "cat"], TEMPLATES["seven"], tokenizer=TOKENIZER)
    assert torch.equal(by_name.weight, given.weight) and len(TEMPLATES["seven"]) == 7
    with pytest.raises(sg.UnknownNameError, match="seven"):
        sg.zero_shot(model, ["dog"], "sevn", tokenizer=TOKENIZER)
    with pytest.raises(sg.InputError, match="once"):
        sg.zero_shot(model, ["dog"], ["a {} and a {}"], tokenizer=TOKENIZER)
    with pytest.raises(sg.InputError, match="twice"):
        sg.zero_shot(model, ["dog", "dog"], tokenizer=TOKENIZER)
    with pytest.raises(sg.InputError, match="at least one name"):
        sg.zero_shot(model, [], tokenizer=TOKENIZER)


def test_a_copy_of_a_classifier_is_independent() -> None:
    classifier = text_zoo.classifier("CLIPModel")[0]
    again = copy.deepcopy(classifier)
    with torch.no_grad():
        classifier.model.visual_projection.weight.zero_()
    images = images_of()
    assert sg.adapt(again)(images).abs().max() > 0
    torch.testing.assert_close(sg.adapt(again)(images), again(images))


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_brings_its_tokenizer_and_its_preprocessing(kind: str, tmp_path: Path) -> None:
    loaded = sg.load_model(str(save(model_of(kind), tmp_path)))
    assert loaded.size == (32, 32) and loaded.class_names is None
    images = images_of().float()
    attribution = sg.explain(loaded, images, target=PROMPTS[0])
    expected = own_logits(loaded.model, images, PROMPTS[:1], loaded.tokenizer)
    torch.testing.assert_close(attribution.logits, expected, rtol=1e-5, atol=1e-5)
    classifier = sg.zero_shot(loaded, ["dog", "cat"])
    assert classifier.class_names == ("dog", "cat") and isinstance(classifier, sg.LoadedModel)
    assert classifier.weights_hash not in ("", loaded.weights_hash)
    assert sg.explain(classifier, images, target="cat").scores.shape == (2, 4, 4)


def test_a_bare_model_finds_the_tokenizer_where_it_came_from(tmp_path: Path) -> None:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(save(model_of("CLIPModel"), tmp_path))
    assert sg.explain(model, images_of().float(), target="a dog", method="ixg").scores.shape == (2, 4, 4)


# -- failures in words -----------------------------------------------------------------------------


def test_without_a_tokenizer_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(sg.InputError, match="Give tokenizer="):
        sg.explain(model_of("CLIPModel"), images_of(), target="a dog")
    loaded = sg.load_model(str(save(model_of("CLIPModel"), tmp_path, tokenizer=False)))
    with pytest.raises(sg.InputError, match=r"no tokenizer was found in .*tokenizer="):
        sg.explain(loaded, images_of().float(), target="a dog")


def test_a_long_prompt_is_truncated_with_a_warning() -> None:
    model, long = model_of("CLIPModel"), " ".join(["dog"] * 30)
    with pytest.warns(UserWarning, match="has 32 tokens and CLIPModel takes 16"):
        cut = sg.ask(model, text=long, tokenizer=TOKENIZER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fits = sg.ask(model, text=" ".join(["dog"] * 14), tokenizer=TOKENIZER)
    torch.testing.assert_close(cut.weight, fits.weight)


@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_a_model_of_images_and_text_needs_a_prompt(kind: str) -> None:
    for target in (None, 3):
        with pytest.raises(sg.InputError, match="target='a photo of a dog'"):
            sg.explain(model_of(kind), images_of(), target=target)
    features = sg.explain(model_of(kind), images_of(), target=lambda f: f[:, 0], method="ixg")
    assert features.scores.shape == (2, 4, 4)


def test_a_classifier_without_names_takes_no_text() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).eval()
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(sg.InputError, match=r"no text tower.*class_names="):
        sg.explain(model, images, target="a dog")
    with pytest.raises(sg.InputError, match="text tower"):
        sg.ask(model, text=["a dog"])
    with pytest.raises(sg.InputError, match="text tower"):
        sg.zero_shot(model, ["dog"])


def test_an_image_tower_needs_text_embeddings() -> None:
    tower, images = model_of("SiglipModel").vision_model, images_of()
    with pytest.raises(sg.InputError, match="no text tower"):
        sg.explain(tower, images, target="a dog")
    with pytest.raises(sg.InputError, match="no classifier"):
        sg.explain(tower, images)
    with pytest.raises(sg.InputError, match=r"expected shape \(K, 24\).*got \(2, 7\)"):
        sg.ask(tower, text_embeddings=torch.zeros(2, 7))
    with pytest.raises(sg.InputError, match=r"embeddings \(K, D\), got list"):
        sg.ask(tower, text_embeddings=[1.0])


@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_runs_need_a_classifier(kind: str) -> None:
    model, data = model_of(kind), [(images_of(), torch.tensor([0, 1]))]
    for measure in (sg.verify, sg.stress):
        with pytest.raises(sg.InputError, match=r"steadygaze.zero_shot\(model, class_names\)"):
            measure(model, data)
    rows = sg.verify(sg.zero_shot(model, ["dog", "cat"], tokenizer=TOKENIZER), data, methods=["ixg"])
    assert len(rows) > 0
    one = sg.verify(sg.ask(model, text="a dog", tokenizer=TOKENIZER), [(images_of(), torch.zeros(2).long())])
    assert len(one) > 0


def test_a_question_is_one_and_not_empty() -> None:
    with pytest.raises(sg.InputError, match="give one question: text=, text_embeddings="):
        sg.ask(model_of("CLIPModel"))
    with pytest.raises(sg.InputError, match="not empty"):
        sg.explain(model_of("CLIPModel"), images_of(), target=["a dog", ""])


def test_the_names_of_a_configuration_are_targets():
    """What the notebook and the command line print is accepted as the target, without `load_model`."""
    model = zoo.transformers_model("ViTForImageClassification", "sdpa")[0]
    names = [f"class {letter}, {letter}" for letter in "abcdefghij"[: model.config.num_labels]]
    images = images_of()
    with pytest.raises(sg.InputError, match="names of its classes are not known"):
        sg.explain(model, images, target="b", method="ixg")  # LABEL_0, LABEL_1, ... are no names
    model.config.id2label = dict(enumerate(names))
    expected = sg.explain(model, images, target=1, method="ixg")
    assert expected.classes == tuple(names)
    for target in ("class b, b", "b", "Class B", "1"):
        for given in (model, sg.adapt(model)):
            assert sg.explain(given, images, target=target, method="ixg").scores.equal(expected.scores)
    several = sg.explain(model, images, target=["a", "b"], method="ixg")
    assert several.target.tolist() == [[0, 1]] * len(images)
    with pytest.raises(sg.errors.UnknownNameError, match="class"):
        sg.explain(model, images, target="no such name", method="ixg")
