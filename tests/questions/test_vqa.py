"""ViLT: the view against transformers' own logits, removed patches and words, context broadcasting."""

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from benchmarks.vision_language import QUESTION, question_logits, vilt
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.questions.vqa import VisualQuestion, visual_question


@pytest.fixture(scope="module")
def question() -> VisualQuestion:
    return visual_question(*_of(QUESTION))


def _of(text: str) -> tuple[torch.nn.Module, str, object]:
    model, tokenizer = vilt()
    return model, text, tokenizer


def images(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def own_logits(question: VisualQuestion, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
    """An oracle: the call that the documentation of transformers shows."""
    ids = question.input_ids.expand(len(pixels), -1)
    with torch.no_grad(), torch.random.fork_rng():
        return question.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask.expand(len(pixels), -1),
            pixel_values=pixels,
            pixel_mask=torch.ones(len(pixels), *pixels.shape[-2:], dtype=torch.long),
        ).logits


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (96, 64)])
def test_the_view_gives_the_logits_of_the_model(question: VisualQuestion, size: tuple[int, int]) -> None:
    pixels = images(*size)
    expected = own_logits(question, pixels)
    torch.testing.assert_close(sg.adapt(question)(pixels), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sg.adapt(question.words(size))(pixels), expected, rtol=1e-4, atol=1e-5)


def test_removed_patches_are_as_if_hidden_from_all_others(question: VisualQuestion) -> None:
    vit, pixels = sg.adapt(question), images()
    removed = vit.logits(vit.select(vit.embed(pixels), torch.arange(3, 16).expand(2, -1)))
    expected = question_logits(question, pixels, torch.arange(3))
    torch.testing.assert_close(removed, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(removed, vit(pixels), atol=1e-3)


def test_the_score_of_a_word_by_occlusion_is_what_masking_it_changes(question: VisualQuestion) -> None:
    """Masked in transformers' own forward pass, with all other words at their positions."""
    pixels = images()
    words = question.words((64, 64))
    scores = sg.explain(words, pixels, target=3, method="occlusion", score="logit").scores[:, 0]
    whole = own_logits(question, pixels)[:, 3]
    positions = [i for i, word in enumerate(question.is_word) if word]
    for column, position in enumerate(positions):
        mask = torch.ones(1, len(question.pieces), dtype=torch.long)
        mask[0, position] = 0
        drop = whole - own_logits(question, pixels, mask)[:, 3]
        torch.testing.assert_close(scores[:, column], drop, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["gaze_removal", "gae", "alti", "decompx+skipplus", "rise:budget=32"])
def test_batch_equals_singles_and_the_random_state_stays(question: VisualQuestion, method: str) -> None:
    pixels = images()
    state = torch.get_rng_state()
    both = sg.explain(question, pixels, target=2, method=method).scores
    assert torch.equal(torch.get_rng_state(), state)
    for index in range(2):
        alone = sg.explain(question, pixels[index : index + 1], target=2, method=method).scores
        torch.testing.assert_close(both[index : index + 1], alone, rtol=1e-3, atol=1e-5)


def test_pieces_of_a_word_are_added_up() -> None:
    model, _ = vilt()
    words = VisualQuestion(
        model,
        "tablet",
        [1, 15, 16, 5, 2],
        ["<s>", "ta", "##ble", "what", "</s>"],
        [False, True, True, True, False],
    )
    names, scores = words.words((64, 64)).merged(torch.tensor([[1.0, 2.0, 4.0]]))
    assert names == ("table", "what") and scores.tolist() == [[3.0, 4.0]]


def test_context_broadcasting_goes_in(question: VisualQuestion) -> None:
    model = question.model
    changed = sg.modules.insert(model, cb=sg.modules.CB("plain"))
    assert len(sg.modules.inserted(changed)) == 3
    with_cb = VisualQuestion(
        changed, question.question, question.input_ids[0].tolist(), question.pieces, question.is_word
    )
    pixels = images()
    assert not torch.allclose(with_cb(pixels), question(pixels), atol=1e-3)
    assert sg.explain(with_cb, pixels, method="gae").scores.shape == (2, 4, 4)
    plain = sg.modules.remove(changed)
    restored = VisualQuestion(
        plain, question.question, question.input_ids[0].tolist(), question.pieces, question.is_word
    )
    torch.testing.assert_close(restored(pixels), question(pixels), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="TAP cannot be inserted"):
        sg.modules.insert(model, tap=sg.modules.TAP())


def test_refusals_say_what_to_do() -> None:
    model, tokenizer = vilt()
    with pytest.raises(InputError, match="question: expected a text"):
        visual_question(model, " ", tokenizer)
    with pytest.raises(InputError, match="at most 12 tokens, got 22"):
        visual_question(model, "what is on the " * 5, tokenizer)
    with pytest.raises(UnsupportedModelError, match="expected a ViltForQuestionAnswering"):
        visual_question(torch.nn.Linear(1, 1), QUESTION, tokenizer)
    with pytest.raises(UnsupportedModelError, match="question="):
        sg.adapt(model)
    model.config.max_image_length = 7
    with pytest.raises(UnsupportedModelError, match="max_image_length = -1"):
        sg.adapt(visual_question(model, QUESTION, tokenizer))
