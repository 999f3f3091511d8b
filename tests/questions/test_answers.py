"""Questions and prompts through the public interface: explain, ask, verify and load_model."""

from pathlib import Path

import pytest
import torch

import steadygaze as sg
from benchmarks.vision_language import ANSWER, PROMPT, QUESTION, llava, photograph, vilt
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError


def images() -> torch.Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_a_question_gives_a_map_and_scores_of_its_words() -> None:
    model, tokenizer = vilt()
    att = sg.explain(model, images(), question=QUESTION, target="cup", tokenizer=tokenizer, method="gae")
    assert att.scores.shape == (2, 4, 4) and att.target.tolist() == [6, 6] and att.outputs == "labels"
    assert att.words == tuple(QUESTION.split()) and att.word_scores.shape == (2, 6)
    asked = sg.ask(model, question=QUESTION, tokenizer=tokenizer)
    again = sg.explain(asked, images(), target=6, method="gae")
    assert torch.equal(again.scores, att.scores) and torch.equal(again.word_scores, att.word_scores)
    assert torch.equal(att[1].word_scores, att.word_scores[1:])
    many = sg.explain(asked, images(), target=["cup", "answer 2"], method=["gae", "ixg"])
    assert many["ixg"].word_scores.shape == (2, 2, 6)


def test_a_question_is_verified_by_true_removal() -> None:
    model, tokenizer = vilt()
    asked = sg.ask(model, question=QUESTION, tokenizer=tokenizer)
    rows = sg.verify(asked, [(images(), torch.tensor([6, 6]))], methods=["gae", "random"]).to_pandas()
    assert set(rows["method"]) == {"gae", "random"} and rows["value"].notna().all()


def test_a_prompt_explains_the_model_s_own_answer_or_a_given_one() -> None:
    model, processor = llava()
    att = sg.explain(model, photograph(), prompt=PROMPT, answer=ANSWER, processor=processor, method="gaze")
    assert att.scores.shape == (1, 4, 4) and att.outputs == "values" and att.logits.shape == (1, 4)
    asked = sg.ask(model, prompt=PROMPT, answer=ANSWER, processor=processor, image=photograph())
    assert asked.class_names == (ANSWER, *ANSWER.split())
    token = sg.explain(
        model, photograph(), prompt=PROMPT, answer=ANSWER, processor=processor, method="gaze", target="cup"
    )
    assert token.target.tolist() == [3] and not torch.equal(token.scores, att.scores)
    own = sg.explain(model, photograph(), prompt=PROMPT, processor=processor, method="rollout")
    assert own.scores.shape == (1, 4, 4)


def test_prepared_images_give_what_the_image_gives() -> None:
    model, processor = llava()
    pixels = processor.image_processor(photograph(), return_tensors="pt")["pixel_values"]
    options = {"prompt": PROMPT, "answer": ANSWER, "processor": processor, "method": "gae"}
    from_file = sg.explain(model, photograph(), **options)
    from_tensor = sg.explain(model, pixels, **options)
    torch.testing.assert_close(from_tensor.scores, from_file.scores)
    with pytest.raises(InputError, match="56 x 56 pixels, got 42 x 56"):
        sg.explain(model, pixels[:, :, :42], **options)
    with pytest.raises(InputError, match="may answer differently"):
        sg.explain(model, torch.cat([pixels, pixels]), prompt=PROMPT, processor=processor)


def test_an_answer_is_verified_by_true_removal() -> None:
    model, processor = llava()
    pixels = processor.image_processor(photograph(), return_tensors="pt")["pixel_values"]
    asked = sg.ask(model, prompt=PROMPT, answer=ANSWER, processor=processor, image=pixels)
    rows = sg.verify(asked, [(pixels, torch.zeros(1))], methods=["gae", "random"], ratios=[0.5]).to_pandas()
    assert set(rows["method"]) == {"gae", "random"} and rows["value"].notna().all()
    token = sg.verify(asked, [(pixels, torch.zeros(1))], methods=["gae"], ratios=[0.5], target=3).to_pandas()
    assert token["value"].tolist() != rows[rows["method"] == "gae"]["value"].tolist()


def test_folders_load_with_what_they_need(tmp_path: Path) -> None:
    model, tokenizer = vilt()
    model.save_pretrained(tmp_path / "vilt")
    tokenizer.save_pretrained(tmp_path / "vilt")
    import transformers

    transformers.ViltImageProcessor(size={"shortest_edge": 64}, size_divisor=16).save_pretrained(
        tmp_path / "vilt"
    )
    loaded = sg.load_model(str(tmp_path / "vilt"))
    assert loaded.size == (64, 64) and loaded.class_names[6] == "cup"
    att = sg.explain(loaded, images(), question=QUESTION, target="cup", method="gae")
    own = sg.explain(model, images(), question=QUESTION, target="cup", method="gae", tokenizer=tokenizer)
    torch.testing.assert_close(att.scores, own.scores)

    model, processor = llava()
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    loaded = sg.load_model(str(tmp_path / "llava"))
    options = {"prompt": PROMPT, "answer": ANSWER, "method": "gae"}
    att = sg.explain(loaded, photograph(), **options)
    own = sg.explain(model, photograph(), processor=processor, **options)
    torch.testing.assert_close(att.scores, own.scores)


def test_refusals_say_what_to_do() -> None:
    model, tokenizer = vilt()
    with pytest.raises(UnknownNameError, match="answer"):
        sg.explain(model, images(), question=QUESTION, target="cups", tokenizer=tokenizer)
    with pytest.raises(InputError, match="tokenizer="):
        sg.explain(model, images(), question=QUESTION)
    with pytest.raises(InputError, match="give one question"):
        sg.ask(model, question=QUESTION, prompt=PROMPT)
    with pytest.raises(UnsupportedModelError, match="ViltForQuestionAnswering"):
        sg.explain(sg.load_model("embedded"), torch.randn(1, 3, 32, 32), question=QUESTION)
    writer, processor = llava()
    with pytest.raises(InputError, match="processor="):
        sg.explain(writer, photograph(), prompt=PROMPT)
    with pytest.raises(UnsupportedModelError, match="prompt="):
        sg.adapt(writer)
    with pytest.raises(InputError, match="image: expected"):
        sg.ask(writer, prompt=PROMPT, processor=processor)
    with pytest.raises(UnsupportedModelError, match="AutoModelForImageTextToText"):
        sg.explain(sg.load_model("embedded"), photograph(), prompt=PROMPT)
