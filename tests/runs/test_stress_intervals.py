"""Intervals of accuracies from few images: on the console, in tables, in reports and in comparisons."""

import io

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import binomtest

import steadygaze as sg
from helpers.runs import made_up
from steadygaze.cli.stress import print_card
from steadygaze.report.pages import write_stress
from steadygaze.runs.card import Card
from steadygaze.runs.rows import Rows

IMAGES = 20


def rows_with(correct: int, model: str = "a", images: int = IMAGES) -> Rows:
    """A run on clean images and fog, whose first `correct` images are right under both."""
    made = made_up(names=("fog",), images=images, severities=(1,), model=model)
    rows = []
    for row in made:
        right = int(int(row["image"].rpartition("/")[2]) < correct)
        if row["metric"] == "top1":
            label = row["detail"][0]
            rows.append({**row, "value": right, "detail": [label, label if right else 9]})
            rows.append({**row, "metric": "top5", "value": 1, "detail": None})
        else:
            rows.append(row)
    return Rows(made.runs, rows)


def card_with(correct: int, **more) -> Card:
    return rows_with(correct, **more).cards(repeats=200)[0]


@pytest.mark.parametrize("correct", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("metric", ["top1", "top5"])
def test_intervals_of_accuracies_are_those_of_scipy(correct, metric):
    card = card_with(correct)
    count = correct if metric == "top1" else IMAGES
    expected = binomtest(count, IMAGES).proportion_ci(0.95, method="wilson")
    number = card.numbers["clean", metric]
    np.testing.assert_allclose((number.low, number.high), expected, atol=1e-12)
    assert number.high - number.low > 0.1, "twenty images never give an interval without width"


def printed(card: Card) -> str:
    text = io.StringIO()
    print_card(card, Console(file=text, width=200))
    return text.getvalue()


def test_the_console_prints_both_limits():
    text = printed(card_with(IMAGES))
    assert "100.0 (83.9–100.0)" in text and "±0.0" not in text and "Wilson" in text


def test_tables_and_the_report_have_the_same_limits(tmp_path):
    page, csv, markdown = write_stress(rows_with(IMAGES), tmp_path / "report.html", repeats=200)
    table = markdown.read_text()
    assert "| clean | top1 % | 100.0 | [83.89, 100] | 20 |" in table
    assert "| fog | error % | 0.0 |  | 20 |" in table
    assert "(83.9–100.0)" in page.read_text() and "± 0.0" not in page.read_text()
    line = next(line for line in csv.read_text().splitlines() if ",clean,top1," in line)
    assert "0.8388" in line


def test_a_bootstrap_without_width_is_not_printed():
    """The mean error over corruptions is derived: all images are right, so every draw gives the same."""
    number = card_with(IMAGES).numbers["corruptions", "mean_error"]
    assert number.low == number.high and number.text() == "0.0"
    assert "±" in card_with(7).numbers["corruptions", "mean_error"].text()


def test_console_and_report_count_the_same_settings(tmp_path):
    card = card_with(7)
    assert card.setting_count == 2
    page = write_stress(rows_with(7), tmp_path / "report.html", repeats=200)[0]
    assert "a under 2 settings" in page.read_text()


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_verify_and_stress_accept_the_same_labels(form):
    loaded = sg.load_model("embedded")
    images = np.random.default_rng(0).random((3, 3, *loaded.size), dtype=np.float32)
    batches = [(images, form([1, 2, 3]))]
    assert len(sg.verify(loaded, batches, "rollout", "deletion_accuracy")) == 3
    rows = sg.stress(loaded, batches, "corruptions", corruptions="fog", severities="1")
    assert {row["image"] for row in rows} == {"0", "1", "2"}
