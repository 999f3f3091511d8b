"""Visual question answering as a suite of a stress run: VQAv2's files, and accuracy by ten answers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import steadygaze as sg
from benchmarks.vision_language import vilt
from steadygaze.data.datasets.vqa import read_vqa
from steadygaze.data.images import read_image
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.report.pages import write_stress
from steadygaze.robustness.vqa import CONTRACTIONS, normalize_answer, vqa_accuracy
from steadygaze.runs.compare import compare
from steadygaze.runs.suites.vqa import VisualQuestions

QUESTIONS = ("what is on the table ?", "is the table red ?", "what is a cup", "the red table ?")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vilt")
    model, tokenizer = vilt()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.ViltImageProcessor(size={"shortest_edge": 64}, size_divisor=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four questions about two images, and one about an image that is missing."""
    folder = tmp_path_factory.mktemp("vqav2")
    rng = np.random.default_rng(0)
    (folder / "val2014").mkdir()
    for number in (1, 2):
        pixels = rng.integers(0, 255, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "val2014" / f"COCO_val2014_{number:012d}.png")
    questions = [
        {"question_id": 10 * i, "image_id": 1 + i % 2, "question": text} for i, text in enumerate(QUESTIONS)
    ]
    questions.append({"question_id": 99, "image_id": 3, "question": "what ?"})
    names = [*(f"answer {i}" for i in range(6)), "cup"]
    annotations = [
        {"question_id": q["question_id"], "answers": [{"answer": a} for a in rng.choice(names[:3], 10)]}
        for q in questions
    ]
    (folder / "v2_OpenEnded_questions.json").write_text(json.dumps({"questions": questions}))
    (folder / "v2_annotations.json").write_text(json.dumps({"annotations": annotations}))
    return folder


def test_accuracy_is_the_mean_over_sets_of_nine_people() -> None:
    people = ["red", "red", "a red", "blue", *["green"] * 6]
    assert vqa_accuracy("Red", people) == pytest.approx((3 * 2 / 3 + 7 * 1) / 10)
    assert vqa_accuracy("green", people) == 1.0
    assert vqa_accuracy("yellow", people) == 0.0
    assert vqa_accuracy("Red", ["red"] * 10) == 0.0  # all agree: compared as they are
    assert [normalize_answer(text) for text in ("The two.", "dont know!", "1,000", "red/white", "3.5")] == [
        "2",
        "don't know",
        "1000",
        "red white",
        "3.5",
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("im", "im"),  # the evaluation code has "Im", which lower-case text never contains
        ("ive shes somethings", "ive shes somethings"),
        ("notve twas", "not've 'twas"),
        ("couldnt've she'dve", "couldn't've she'd've"),
        ("somebody'd", "somebodyd"),
        ("a" + "." * 40, "a........"),  # the first 32 periods only
        ("one, the 1,000 dogs", "1 1000 dogs"),
        ("5. x.y .5", "5 xy .5"),
        ("u.s.a./none", "usa 0"),
    ],
)
def test_normalization_is_that_of_the_evaluation_code(answer: str, expected: str) -> None:
    assert normalize_answer(answer) == expected
    assert len(CONTRACTIONS) == 120


def test_answers_that_all_agree_are_compared_as_they_are() -> None:
    assert vqa_accuracy(" red\tdog\n", ["red dog"] * 10) == 1.0
    assert vqa_accuracy("red  dog", ["red dog"] * 10) == 0.0  # two spaces


def test_rows_are_the_accuracy_of_the_model_s_own_answers(model_folder: Path, data: Path) -> None:
    options = {"corruptions": "fog,contrast", "severities": "1,5"}
    loaded = sg.load_model(str(model_folder))
    rows = sg.stress(loaded, None, suites=[f"vqa:{data}"], batch_size=3, **options)
    frame = rows.to_pandas()
    assert len(frame) == 4 * 5
    items, missing = read_vqa(data)
    assert missing == [99]
    model, tokenizer = vilt()
    for item in items:
        pixels = loaded.preprocess(read_image(item.image))[None]
        inputs = tokenizer([item.question], return_tensors="pt")
        with torch.no_grad():
            logits = model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                pixel_values=pixels,
                pixel_mask=torch.ones(1, *pixels.shape[-2:], dtype=torch.long),
            ).logits
        expected = vqa_accuracy(model.config.id2label[int(logits.argmax())], item.answers)
        chosen = frame[(frame["image"] == f"vqa:{item.question_id}") & (frame["setting"] == "vqa/clean")]
        assert chosen["value"].tolist() == [pytest.approx(expected)]


def test_a_run_resumes_reports_and_compares(model_folder: Path, data: Path, tmp_path: Path) -> None:
    request = {"suites": [f"vqa:{data}"], "corruptions": "fog", "severities": "3"}
    first = sg.stress(str(model_folder), None, out=tmp_path / "run", **request)
    again = sg.stress(str(model_folder), None, out=tmp_path / "run", **request)
    assert len(again) == len(first) == 8
    page = tmp_path / "page.html"
    write_stress(first, page)
    assert "Visual question answering" in page.read_text(encoding="utf-8")
    (card,) = first.cards()
    assert ("vqa", "mean_vqa_accuracy") in card.scores
    sg.stress(str(model_folder), None, out=tmp_path / "other", **request)
    comparison = compare([tmp_path / "run"], [tmp_path / "other"])
    assert {change.quantity.name for change in comparison.changes} >= {"vqa_accuracy"}


@pytest.mark.full
def test_runs_of_other_suites_have_no_table_of_questions() -> None:
    batches = [(torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))]
    rows = sg.stress(sg.load_model("embedded"), batches, suites=["occlusion"])
    (card,) = rows.cards()
    assert list(VisualQuestions([""]).tables(card)) == []


def test_refusals_say_what_to_do(data: Path, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="expected a ViltForQuestionAnswering"):
        sg.stress("embedded", None, suites=[f"vqa:{data}"])
    with pytest.raises(InputError, match="expected vqa:FOLDER"):
        sg.stress(str(model_folder), None, suites=["vqa"])
    with pytest.raises(InputError, match=r"expected one file \*questions\*.json, got none"):
        sg.stress(str(model_folder), None, suites=[f"vqa:{tmp_path}"])
    (tmp_path / "questions.json").write_text("{")
    with pytest.raises(InputError, match="expected JSON"):
        read_vqa(tmp_path)
    (tmp_path / "questions.json").write_text('{"questions": [{"question_id": 1}]}')
    with pytest.raises(InputError, match="expected question_id, image_id, question"):
        read_vqa(tmp_path)
