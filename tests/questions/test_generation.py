"""Answers of vision-language models: the view against transformers' own forward pass, and true removal."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import steadygaze as sg
from benchmarks.vision_language import ANSWER, GENERATIVE, PROMPT, llava, log_probabilities, photograph
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.questions.generation import Answer, answer_model
from steadygaze.trace.rules import frozen
from steadygaze.trace.seam import Seam


@cache
def posed(kind: str) -> tuple[Answer, Tensor]:
    model, processor = GENERATIVE[kind]()
    answer = answer_model(model, processor, photograph(), PROMPT, ANSWER)
    return answer, answer.prepared


@pytest.mark.parametrize("kind", GENERATIVE)
def test_the_view_gives_the_log_probabilities_of_the_model(kind: str) -> None:
    answer, images = posed(kind)
    expected = log_probabilities(answer, images)
    values = sg.adapt(answer)(images)[0]
    torch.testing.assert_close(values[1:], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[0], expected.sum(), rtol=1e-4, atol=1e-4)
    assert answer.class_names == ("a red cup", "a", "red", "cup")


@pytest.mark.parametrize("kind", GENERATIVE)
def test_removed_image_tokens_are_as_if_hidden_from_all_others(kind: str) -> None:
    answer, images = posed(kind)
    vit = sg.adapt(answer)
    count = vit.grid[0] * vit.grid[1]
    hidden = torch.tensor([0, count - 1])
    keep = torch.tensor([[i for i in range(count) if i not in hidden.tolist()]])
    values = vit.logits(vit.select(vit.embed(images), keep))[0, 1:]
    torch.testing.assert_close(values, log_probabilities(answer, images, hidden), rtol=1e-4, atol=1e-4)
    assert (values - sg.adapt(answer)(images)[0, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", GENERATIVE)
def test_the_model_s_own_answer_is_what_it_generates(kind: str) -> None:
    model, processor = GENERATIVE[kind]()
    answer = answer_model(model, processor, photograph(), PROMPT)
    images = answer.prepared
    prompt = answer.input_ids[:, : -answer.answer_length]
    generated = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **answer.images.inputs(images),
        **({"mm_token_type_ids": (prompt == answer.image_token).int()} if kind == "Qwen2.5-VL" else {}),
        do_sample=False,
        max_new_tokens=32,
    )
    special = set(processor.tokenizer.all_special_ids)
    expected = [token for token in generated[0, prompt.shape[1] :].tolist() if token not in special]
    assert answer.input_ids[0, -answer.answer_length :].tolist() == expected


@pytest.mark.parametrize("kind", GENERATIVE)
def test_pixels_are_those_of_the_processor(kind: str) -> None:
    model, processor = GENERATIVE[kind]()
    answer = answer_model(model, processor, photograph(), PROMPT, ANSWER)
    images = answer.prepared
    mark = getattr(processor, "image_token", "<image>")
    options = (
        {"do_image_splitting": False} if hasattr(processor.image_processor, "do_image_splitting") else {}
    )
    expected = processor(images=[photograph()], text=[f"{mark}\n{PROMPT}"], return_tensors="pt", **options)
    torch.testing.assert_close(answer.images.inputs(images)["pixel_values"], expected["pixel_values"])


METHODS = ("ixg", "gaze", "decompx+skipplus", "gae", "rollout", "attnlrp", "occlusion", "rise:budget=32")


@pytest.mark.parametrize(
    ("kind", "method"),
    [("LLaVA", method) for method in METHODS] + [(kind, "ixg") for kind in GENERATIVE if kind != "LLaVA"],
)
def test_methods_explain_an_answer_and_its_tokens(kind: str, method: str) -> None:
    answer, images = posed(kind)
    whole = sg.explain(answer, images, target=0, method=method)
    assert whole.scores.shape == (1, *sg.adapt(answer).grid)
    assert whole.scores.std() > 0
    tokens = sg.explain(answer, images, target=[[1, 2, 3]], method=method)
    assert tokens.scores.shape == (1, 3, *sg.adapt(answer).grid)
    if method == "ixg":  # the gradient of a sum is the sum of the gradients
        torch.testing.assert_close(tokens.scores.sum(1), whole.scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", GENERATIVE)
def test_a_batch_gives_what_single_images_give(kind: str) -> None:
    answer, images = posed(kind)
    both = torch.cat([images, images.flip(-1)])
    maps = sg.explain(answer, both, target=0, method="gae").scores
    for index in range(2):
        alone = sg.explain(answer, both[index : index + 1], target=0, method="gae").scores
        torch.testing.assert_close(maps[index : index + 1], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", GENERATIVE)
def test_nothing_is_left_on_the_model(kind: str) -> None:
    model, processor = GENERATIVE[kind]()
    answer = answer_model(model, processor, photograph(), PROMPT)
    images = answer.prepared
    answer(images)  # transformers installs hooks of its own in the first forward pass
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {name: (dict(m._forward_pre_hooks), dict(m._forward_hooks)) for name, m in model.named_modules()}
    answer = answer_model(model, processor, photograph(), PROMPT)
    images = answer.prepared
    sg.explain(answer, images, target=0, method=["gae", "occlusion"])
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert (dict(module._forward_pre_hooks), dict(module._forward_hooks)) == hooks[name], name
        changed = [key for key, value in before[name].items() if vars(module)[key] is not value]
        assert not changed, (name, changed)


def test_the_norm_of_language_models_is_held_like_the_norm_of_torch() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(8, generator=torch.Generator().manual_seed(1))
    gradients = []
    for norm in (LlamaRMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)):
        norm.weight.data = weight.clone()
        inputs = x.clone().requires_grad_()
        with Seam(frozen(1.0)):
            norm(inputs).pow(2).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    plain = x.clone().requires_grad_()
    LlamaRMSNorm(8, eps=1e-6)(plain).pow(2).sum().backward()
    assert not torch.allclose(gradients[0], plain.grad, atol=1e-3)


def test_refusals_say_what_to_do() -> None:
    model, processor = llava()
    with pytest.raises(InputError, match="prompt: expected a text"):
        answer_model(model, processor, photograph(), "  ")
    with pytest.raises(InputError, match="answer: expected a text"):
        answer_model(model, processor, photograph(), PROMPT, "")
    with pytest.raises(UnsupportedModelError, match="AutoModelForImageTextToText"):
        answer_model(nn.Linear(1, 1), processor, photograph(), PROMPT)
