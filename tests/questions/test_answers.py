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
    asked = sg.ask(model, question=QUESTION, tokenizer=tokenizer)
    att = sg.explain(asked, images(), target="cup", method="gae")
    assert att.scores.shape == (2, 4, 4) and att.target.tolist() == [6, 6] and att.outputs == "labels"
    assert att.words == tuple(QUESTION.split()) and att.word_scores.shape == (2, 6)
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
    asked = sg.ask(model, prompt=PROMPT, answer=ANSWER, processor=processor, image=photograph())
    att = sg.explain(asked, asked.prepared, method="gaze")
    assert att.scores.shape == (1, 4, 4) and att.outputs == "values" and att.logits.shape == (1, 4)
    assert asked.class_names == (ANSWER, *ANSWER.split())
    token = sg.explain(asked, asked.prepared, target="cup", method="gaze")
    assert token.target.tolist() == [3] and not torch.equal(token.scores, att.scores)
    own = sg.ask(model, prompt=PROMPT, processor=processor, image=photograph())
    own = sg.explain(own, own.prepared, method="rollout")
    assert own.scores.shape == (1, 4, 4)


def test_prepared_images_give_what_the_image_gives() -> None:
    model, processor = llava()
    pixels = processor.image_processor(photograph(), return_tensors="pt")["pixel_values"]
    options = {"prompt": PROMPT, "answer": ANSWER, "processor": processor}
    from_file = sg.ask(model, image=photograph(), **options)
    from_tensor = sg.ask(model, image=pixels, **options)
    torch.testing.assert_close(from_tensor.prepared, from_file.prepared)
    maps = [sg.explain(asked, asked.prepared, method="gae").scores for asked in (from_tensor, from_file)]
    torch.testing.assert_close(*maps)
    with pytest.raises(InputError, match="56 x 56 pixels, got 42 x 56"):
        sg.ask(model, image=pixels[:, :, :42], **options)
    with pytest.raises(InputError, match="may answer differently"):
        sg.ask(model, image=torch.cat([pixels, pixels]), prompt=PROMPT, processor=processor)


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
    asked = sg.ask(loaded, question=QUESTION)
    att = sg.explain(asked, images(), target="cup", method="gae")
    own = sg.ask(model, question=QUESTION, tokenizer=tokenizer)
    torch.testing.assert_close(att.scores, sg.explain(own, images(), target="cup", method="gae").scores)

    model, processor = llava()
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    loaded = sg.load_model(str(tmp_path / "llava"))
    options = {"prompt": PROMPT, "answer": ANSWER, "image": photograph()}
    asked, own = sg.ask(loaded, **options), sg.ask(model, processor=processor, **options)
    att = sg.explain(asked, asked.model.prepared, target="cup", method="gae")
    torch.testing.assert_close(att.scores, sg.explain(own, own.prepared, target="cup", method="gae").scores)


def test_refusals_say_what_to_do() -> None:
    model, tokenizer = vilt()
    with pytest.raises(UnknownNameError, match="answer"):
        sg.explain(sg.ask(model, question=QUESTION, tokenizer=tokenizer), images(), target="cups")
    with pytest.raises(InputError, match="tokenizer="):
        sg.ask(model, question=QUESTION)
    with pytest.raises(InputError, match="give one question"):
        sg.ask(model, question=QUESTION, prompt=PROMPT)
    with pytest.raises(UnsupportedModelError, match="ViltForQuestionAnswering"):
        sg.ask(sg.load_model("embedded"), question=QUESTION)
    writer, processor = llava()
    with pytest.raises(InputError, match="processor="):
        sg.ask(writer, image=photograph(), prompt=PROMPT)
    with pytest.raises(UnsupportedModelError, match="prompt="):
        sg.adapt(writer)
    with pytest.raises(InputError, match="image: expected"):
        sg.ask(writer, prompt=PROMPT, processor=processor)
    with pytest.raises(UnsupportedModelError, match="AutoModelForImageTextToText"):
        sg.ask(sg.load_model("embedded"), image=photograph(), prompt=PROMPT)
