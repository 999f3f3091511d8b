"""Rows of the ranking: the chance level, aliases, metrics of another process, and how methods are added."""

import pytest
import torch

import steadygaze as sg
from steadygaze import quantity
from steadygaze.cli.output import stdout
from steadygaze.cli.verify import _print_ranking
from steadygaze.errors import InputError
from steadygaze.faithfulness.metric import METRICS, Values
from steadygaze.report.pages import write_report
from steadygaze.runs.statistics import small_sample_note


@pytest.fixture(scope="module")
def loaded():
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def data():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [(images, torch.tensor([3, 5]))]


def test_the_chance_level_is_printed_whatever_is_cut(loaded, data, capsys, monkeypatch):
    rows = sg.verify(loaded, data, methods=["gae", "gaze", "rollout", "random"], metrics="saco")
    (section,) = rows.table().sections
    for most in (1, 2, 3, 4):
        lines = section.first_lines(most)
        assert len(lines) == most and any(method == "random" for method, _ in lines)
    monkeypatch.setattr("steadygaze.cli.verify.SHOWN", 2)
    _print_ranking(section, stdout(120))
    assert "random  " in capsys.readouterr().out


def test_aliases_are_one_row(loaded, data):
    rows = sg.verify(loaded, data, methods=["gae", "genatt", "rollout"], metrics="saco")
    assert {row["method"] for row in rows} == {"gae", "rollout"}
    rows = sg.verify(loaded, data, methods="rollout", metrics="saco", score=["logit", "prob"])
    assert {row["score"] for row in rows} == {"logit", "prob"}


def test_a_metric_of_another_process_keeps_its_description(loaded, data, tmp_path):
    @sg.register_metric("spread", better="lower", low=0, unit="cells")
    def spread(given):
        "Standard deviation of a map."
        return given.maps.flatten(2).std(2)

    try:
        sg.verify(loaded, data, methods="gae", metrics="spread", out=tmp_path)
    finally:
        METRICS.remove("spread")
    table = sg.Rows.read(tmp_path).table()
    described = table.sections[0].quantity("spread")
    assert (described.better, described.unit, described.low) == ("lower", "cells", 0)
    assert described.summary == "Standard deviation of a map." and described.text(0.1234) == "0.123"
    assert "spread ↓" in table.markdown()


@pytest.mark.parametrize("combine, value", [(quantity.pooled, 50), (lambda values, details: 7.0, 1.5)])
def test_a_metric_of_another_process_is_combined_as_before_or_says_that_it_is_not(
    loaded, data, tmp_path, combine, value
):
    @sg.register_metric("halves", better="lower", summary="Halves.", combine=combine)
    def halves(given):
        values = torch.tensor([[1.0, 2.0]])
        return Values(values, torch.tensor([[[1.0, 2.0], [2.0, 4.0]]]))

    try:
        sg.verify(loaded, data, methods="gae", metrics="halves", random=False, out=tmp_path)
    finally:
        METRICS.remove("halves")
    table = sg.Rows.read(tmp_path).table()
    assert next(table.records())["value"] == value
    write_report([tmp_path])
    texts = [(tmp_path / file).read_text() for file in ("report.html", "table.md", "table.csv")]
    assert all(("mean over images: how" in text) == (value == 1.5) for text in texts)


def test_how_a_method_is_added_to_a_finished_run(loaded, data, tmp_path):
    both = tmp_path / "first", tmp_path / "other"
    sg.verify(loaded, data, methods="gae", metrics="saco", out=both[0])
    with pytest.raises(InputError, match=r"To add rollout .*steadygaze report .* OTHER"):
        sg.verify(loaded, data, methods=["gae", "rollout"], metrics="saco", out=both[0])
    sg.verify(loaded, data, methods="rollout", metrics="saco", out=both[1])
    (section,) = sg.Rows.read(*both).table().sections
    assert {method for method, _ in section.lines} == {"gae", "rollout", "random"}
    with pytest.raises(InputError) as caught:
        sg.verify(loaded, data, methods="gae", metrics="saco", seed=1, out=both[0])
    assert "To add" not in str(caught.value)


def test_the_note_about_few_images_names_what_every_table_prints():
    assert "±" not in small_sample_note(5) and "95 % intervals" in small_sample_note(5)


def test_variants_of_metrics_are_used_by_name_only(loaded, data):
    assert not [info.name for info in sg.list_metrics() if info.name.endswith("_code")]
    assert METRICS["positive_kl_code"].variant
