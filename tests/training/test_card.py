"""`steadygaze card`: stress and verify of two models, before and after in one page; and the curves of
training in one image."""

import csv
import html
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import steadygaze as sg
from helpers.training import content, image_folder
from steadygaze.cli import app
from steadygaze.cli.results import draw_curves
from steadygaze.methods.registry import DEFAULT
from steadygaze.training.recipe import make_recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("card")
    data = image_folder(root / "data")
    for name, epochs in (("short", 1), ("long", 4)):
        sg.train(make_recipe(content(data, epochs=epochs)), root / name)
    return data, root / "short", root / "long"


def call(*words) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


@pytest.mark.full
def test_one_page_before_and_after(runs, tmp_path):
    data, before, after = runs
    asked = (
        "--corruptions",
        "fog",
        "--severities",
        "3",
        "--epsilons",
        "8/255",
        "--suites",
        "corruptions,attention",
        "--batch-size",
        "12",
    )
    asked = (*asked, "--model-card")
    out = call("card", before, after, "--data", data, "--out", tmp_path / "card", "--show", "2", *asked)
    head, _, body = (
        (tmp_path / "card" / "model-card.md").read_text().removeprefix("---\n").partition("\n---\n")
    )
    metadata = yaml.safe_load(head)
    (results,) = metadata["model-index"][0]["results"]
    values = {metric["name"]: metric["value"] for metric in results["metrics"]}
    assert values["clean: top-1"] == 100.0 and any("removal" in name for name in values), "after"
    assert len(values) == 3, "accuracy, corruptions, removal; the rest is in the table"
    assert metadata["library_name"] == "timm"
    assert "robustness" in metadata["tags"] and "license" not in metadata and "# license:" in head
    assert re.search(r"\| clean: top-1 ↑ \| [\d.]+ \| 100\.0 \[[\d.]+, 100\.0\] \|", body), "intervals"
    assert "```sh\nsteadygaze" in body and "12 images are few" in body
    page = (tmp_path / "card" / "card.html").read_text()
    for words in (
        "Accuracy and robustness",
        "Attention",
        "Faithfulness",
        "Maps side by side",
        "Classes gained and lost",
    ):
        assert words in page
    assert "attention entropy" in page and "attention stability" in page and "data:image/" in page
    rows = list(csv.DictReader((tmp_path / "card" / "card-faithfulness.csv").open()))
    assert {row["method"].partition("/")[0] for row in rows} == {DEFAULT, "random"}, "with chance"
    assert {row["metric"] for row in rows} >= {"removal_mean"} and all(row["images"] == "12" for row in rows)
    assert "faithfulness" in out and "12 images are few" in out
    sentence = re.search(r'<p class="lead">([^<]*)</p>', page)[1]
    assert sentence.startswith("On only 12 images of ") and "top-1 (clean)" in sentence, "what changed"
    assert "newly correct" in sentence and "significantly" in sentence, "and for whom"
    assert html.unescape(sentence) in out, "the console begins with the same sentence"
    assert "verify: 24/24 maps" in out and "stress: " in out
    changes = {
        (row["setting"], row["metric"]): row
        for row in csv.DictReader((tmp_path / "card" / "card.csv").open())
    }
    assert float(changes["clean", "top1"]["after"]) == 1.0
    again = call(
        "card",
        tmp_path / "card/before",
        tmp_path / "card/after",
        "--out",
        tmp_path / "again",
        "--no-images",
    )
    assert "wrote" in again and (tmp_path / "again" / "card.html").is_file()
    same = list(csv.DictReader((tmp_path / "again" / "card-faithfulness.csv").open()))
    assert same == rows


@pytest.mark.full
def test_the_page_begins_with_what_a_person_asks(runs, tmp_path):
    data, before, after = runs
    asked = (
        "--corruptions",
        "fog",
        "--severities",
        "3",
        "--epsilons",
        "2/255",
        "--suites",
        "corruptions,attacks,occlusion",
    )
    call("card", before, after, "--data", data, "--out", tmp_path, "--show", "2", *asked)
    page = (tmp_path / "card.html").read_text()
    parts = {
        name: text for name, _, text in (piece.partition(">") for piece in page.split('<section id="')[1:])
    }
    rows = [
        re.findall(r'<td[^>]*><span class="[^"]*">([^<]*)', row)[:2]
        for row in parts['robustness"'].split("<tr>")
    ]
    for wanted in (
        ["clean", "top-1 ↑"],
        ["fog", "error ↓"],
        ["FGSM, 2/255", "top-1 ↑"],
        ["PGD, 2/255", "top-1 ↑"],
        ["center square covered", "top-1 ↑"],
    ):
        assert wanted in rows, wanted  # changed for sure or not
    assert not any(row and row[0] == "fog/3" for row in rows)
    shown = re.findall(r'class="soft small code">(\w+)/', parts['maps"'])
    assert set(shown) == {"bright", "dark"}, "of both classes, not the first ones by name"


def test_a_model_alone_needs_data(runs, tmp_path):
    done = CliRunner().invoke(app, ["card", str(runs[1]), str(runs[2]), "--out", str(tmp_path)])
    assert done.exit_code == 2 and "expected a folder of data (--data)" in done.output


def test_curves_of_several_runs_in_one_image(runs, tmp_path):
    call("curves", *runs[1:], "--out", tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.startswith("<svg") and "short" in text and "long" in text and "test_top1" in text
    assert text.count("<polyline") == 2 * 5  # lr, loss, cross_entropy, test_loss, test_top1
    call("curves", *runs[1:], "--columns", "loss", "--out", tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == 2
    done = CliRunner().invoke(app, ["curves", str(runs[0]), "--out", str(tmp_path / "x.svg")])
    assert done.exit_code == 2 and "no log.csv" in done.output


def test_numbers_beside_an_axis_are_not_cut_off():
    text = draw_curves({"run": [{"epoch": "1", "lr": "0.001"}, {"epoch": "2", "lr": "0"}]}, [])
    ticks = re.findall(r'class="tick"[^>]*text-anchor="end">([^<]+)', text)
    assert ticks == ["0", "2.5e-4", "0.0005", "7.5e-4", "0.001"]


def test_recipes_are_listed_and_shown():
    listed = call("train", "--list", "--all")
    assert "cifar10-baseline" in listed and "relevance-deit-b" in listed and "not measured" in listed
    assert "embed_dim = 96" in call("train", "cifar10-cb", "--show")
    done = CliRunner().invoke(app, ["train", "no-such-recipe"])
    assert done.exit_code == 2 and "unknown recipe" in done.output
