"""The report: one file that needs no other, with every number of the table; and the charts it is made of."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import Page, image_folder
from steadygaze.cli import app
from steadygaze.report import charts as svg
from steadygaze.report.pages import write_report
from steadygaze.runs.request import VerifyRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import Line, LineChart
from steadygaze.runs.verify import run_verify


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    data = image_folder(folder / "data")
    ask = VerifyRequest(
        random=False,
        model="embedded",
        data=data,
        out=folder / "run",
        methods=["gaze", "rollout", "ixg"],
        limit=9,
        batch_size=3,
        score=["logit", "log_odds"],
        ratios=[0.2, 0.5, 0.8],
        command="steadygaze verify --model embedded <&>",
    )
    run_verify(ask)
    return folder / "run"


def test_the_page_is_whole_and_needs_no_other_file(run, tmp_path):
    files = write_report([run], tmp_path / "deep" / "page.html", repeats=100)
    assert [file.name for file in files] == ["page.html", "table.csv", "table.md"]
    text = files[0].read_text()
    page = Page(text)
    assert not page.open
    for address in page.addresses:
        assert address.startswith("data:") or (address.startswith("#") and address[1:] in page.ids), address[
            :80
        ]
    assert not re.search(r"https?://|@import|url\(", text), "leads outside"
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert page.rows == 1 + 3 * 2 + 1, "the chance level has a row, also if it was not measured"
    assert (
        "embedded" in page.words
        and "gaze" in page.words
        and "steadygaze verify --model embedded <&>" in page.words
    )
    for number in Rows.read(run).table(repeats=100).to_pandas()["value"]:
        assert f"{number:.1f}" in page.words
    run_facts = json.loads((run / "run.json").read_text())["settings"]
    assert run_facts["weights"] in page.words and run_facts["versions"]["torch"] in page.words
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(chart)
    assert text.count('class="chart"') == 5, "four curves and a scatter"


def test_best_and_worst_images_are_shown(run, tmp_path):
    text = write_report([run], tmp_path / "page.html", repeats=50)[0].read_text()
    assert text.count("data:image/jpeg") == 8 * 3
    section = Rows.read(run).table(repeats=50).sections[0]
    values = section.array(section.shown[0], section.lines[0])
    best = section.names[values.argmax()]
    assert (
        re.search(r"[a-z]+/\d\.png", text[text.index("Best images") :])[0] in best
        or values.max() == sorted(values)[-2]
    )
    without = write_report([run], tmp_path / "page.html", repeats=50, images=False)[0].read_text()
    assert "data:image/jpeg" not in without


def test_the_report_needs_neither_model_nor_data(run, tmp_path, monkeypatch):
    monkeypatch.setattr("steadygaze.loading.load.load_model", None)
    copy = copied(run, tmp_path / "run")
    shutil.copytree(run / "samples", copy / "samples")
    assert write_report([copy], repeats=50)[0].read_text().count("data:image/jpeg") == 8 * 3


def test_a_run_without_samples_is_reported_without_images(run, tmp_path):
    copy = copied(run, tmp_path / "run")
    text = write_report([copy], repeats=50)[0].read_text()
    assert "Images are left out" in text and "data:image/jpeg" not in text
    assert "Repeat the command to store them: steadygaze verify" in text
    assert (copy / "report.html").exists()


@pytest.mark.full
def test_samples_are_stored_for_data_in_memory_too(tmp_path):
    loaded = sg.load_model("embedded")
    batch = torch.rand(4, 3, 32, 32), torch.arange(4)
    options = {"methods": ["ixg", "rollout"], "ratios": [0.5]}
    sg.verify(loaded, [batch], **options, out=tmp_path / "list")
    assert write_report([tmp_path / "list"], repeats=50)[0].read_text().count("data:image/jpeg") == 4 * 3
    sg.verify(loaded, iter([batch]), **options, out=tmp_path / "generator")  # cannot be read a second time
    assert "Images are left out" in write_report([tmp_path / "generator"], repeats=50)[0].read_text()


@pytest.mark.full
def test_a_run_of_python_has_the_chance_level(tmp_path):
    batch = torch.rand(4, 3, 32, 32), torch.arange(4)
    options = {"methods": ["rollout"], "ratios": [0.5], "metrics": ["insertion_aopc"]}
    model = sg.load_model("embedded")
    rows = sg.verify(model, [batch], **options, out=tmp_path / "run")
    assert {row["method"] for row in rows} == {"rollout", "random"}
    page = Page(write_report([tmp_path / "run"], repeats=50)[0].read_text())
    assert page.rows == 1 + 2 and "not measured" not in page.words
    alone = sg.verify(model, [batch], **options)
    assert {row["method"] for row in alone} == {"rollout"}, "rows that no report shows are those of the call"
    both = sg.verify(model, [batch], **options, random=True)
    assert [row for row in both if row["method"] == "rollout"] == list(alone)


def test_tables_hold_the_numbers(run, tmp_path):
    _, table, markdown = write_report([run], tmp_path / "page.html", repeats=100, images=False)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 6 * 5
    first = rows[0]
    assert float(first["low"]) <= float(first["value"]) <= float(first["high"]) and first["images"] == "9"
    frame = Rows.read(run).to_pandas()
    for row in rows:
        if row["metric"] != "removal_mean":
            chosen = frame[
                (frame[["method", "score", "metric"]] == [row["method"], row["score"], row["metric"]]).all(
                    axis=1
                )
            ]
            assert abs(chosen["value"].mean() - float(row["value"])) < 1e-3
    assert markdown.read_text().count("\n| ") == 2 + 6


def test_a_chosen_baseline(run, tmp_path):
    text = write_report([run], tmp_path / "a.html", repeats=50, baseline="rollout/logit", images=False)[
        0
    ].read_text()
    assert "against rollout · logit" in text
    with pytest.raises(sg.InputError, match="nobody"):
        write_report([run], tmp_path / "a.html", baseline="nobody", images=False)


def test_runs_of_two_models_stand_side_by_side(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    facts = json.loads((run / "run.json").read_text())
    facts["settings"]["model"] = "another"
    (other / "run.json").write_text(json.dumps(facts))
    lines = (json.loads(line) for line in (run / "rows-00000.jsonl").read_text().splitlines())
    (other / "rows-00000.jsonl").write_text(
        "".join(json.dumps({**r, "model": "another"}) + "\n" for r in lines)
    )
    text = write_report([run, other], tmp_path / "both.html", repeats=50, images=False)[0].read_text()
    assert text.count("<table>") == 2 and "another" in text


def copied(run, folder, rows=lambda row: row, **settings):
    """A run like `run`, with other settings and rows."""
    folder.mkdir()
    facts = json.loads((run / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "settings": {**facts["settings"], **settings}}))
    lines = (rows(json.loads(line)) for line in (run / "rows-00000.jsonl").read_text().splitlines())
    (folder / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines if row))
    return folder


@pytest.mark.parametrize(
    ("settings", "rows", "says"),
    [
        ({"target": "3"}, lambda row: row, "target 3"),
        ({"ratios": [0.5]}, lambda row: row, "ratios 0.5"),
        ({"seed": 4}, lambda row: {**row, "seed": 4}, "seed 4"),
        ({"preprocessing": {"crop_pct": "1.0"}}, lambda row: row, "preprocessing crop_pct 1.0"),
        ({"weights": "0123"}, lambda row: {**row, "weights": "0123"}, "other"),
        (
            {"images_hash": "0123"},
            lambda row: {**row, "image": "other/" + row["image"]},
            "images of other",
        ),
        ({"images_hash": "0123"}, lambda row: {**row, "content": "0123"}, "images of other"),
        ({}, lambda row: {**row, "content": "0123"}, "images of other"),
    ],
)
def test_runs_that_were_not_measured_alike_are_not_mixed(run, tmp_path, settings, rows, says):
    other = copied(run, tmp_path / "other", rows, **settings)
    text = write_report([run, other], tmp_path / "both.html", repeats=50, images=False)[0].read_text()
    assert text.count("<table>") == 2 and f"({says})" in text
    alone, first = (Rows.read(*folders).table(repeats=50).sections[0] for folders in ([run], [run, other]))
    assert alone.cells == first.cells and not alone.variant
    assert says in (tmp_path / "table.csv").read_text() and f"({says})" in (tmp_path / "table.md").read_text()


def test_more_methods_and_a_smaller_sample_of_the_same_images_are_one_table(run, tmp_path):
    names = sorted({row["image"] for row in Rows.read(run)})
    rows = lambda row: {**row, "method": "alti"} if row["image"] in names[:4] else None  # noqa: E731
    some = copied(run, tmp_path / "some", rows, images_hash="0123")
    (section,) = Rows.read(run, some).table(repeats=50).sections
    assert not section.variant and len(section.names) == len(names)
    assert {cell.images for (_, line), cell in section.cells.items() if line[0] == "alti"} == {4}


def test_the_start_layer_is_drawn(run, tmp_path):
    ask = VerifyRequest(
        random=False,
        model="embedded",
        data=run.parent / "data",
        out=tmp_path / "run",
        methods=["ixg", "cat"],
        limit=3,
        ratios=[0.5],
        start_layers="0,2,5",
    )
    run_verify(ask)
    text = write_report([tmp_path / "run"], repeats=50, images=False)[0].read_text()
    assert "Where PLUS starts" in text and text.count("<polyline") == 2
    assert "ixg+plus</span>" in text


def test_the_command(run, tmp_path):
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), "--no-images"])
    assert done.exit_code == 0 and "table.csv" in done.output and (tmp_path / "r.html").exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "run.json" in done.output
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "no rows yet" in done.output


def test_rows_in_memory_have_a_table_too():
    loaded = sg.load_model("embedded")
    rows = sg.verify(loaded, [(torch.randn(4, 3, 32, 32), torch.arange(4))], methods=["ixg"], ratios=[0.5])
    assert "ixg" in str(rows.table(repeats=10))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 97.2), (0.001, 0.0042), (5, 5)])
def test_ticks(low, high):
    found = svg.ticks(low, high)
    assert all(low <= t <= high for t in found) and 1 <= len(found) <= 11


def test_charts_escape_names():
    chart = svg.lines(LineChart('"t"', [Line("<a & b>", [0, 1], [1, 2])], "<x>", "y"))
    assert "<a" not in chart and ET.fromstring(chart) is not None
    chart = svg.scatter(LineChart("t", [Line(f"m{i}", [1.0], [2.0], i) for i in range(12)], "x", "y"))
    heights = re.findall(r'class="name[^>]* y="([\d.]+)"', chart)
    assert len(heights) == svg.LABELED == len(set(heights)), "labels of one place are moved apart"


def test_of_very_many_methods_the_best_are_listed(tmp_path):
    """Each with an image of its own: a table of all values would have as many numbers as names squared."""
    settings = {"kind": "verify", "model": "m", "weights": "w", "seed": 0, "versions": {}, "data": "d"}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    common = {"score": "logit", "model": "m", "weights": "w", "seed": 0, "metric": "deletion_aopc"}
    names = ["random", *(f"m{number}" for number in range(1, 600))]
    rows = [
        common | {"image": f"{name}.png", "value": float(number), "method": name}
        for number, name in enumerate(names)
    ]
    (tmp_path / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _, table = write_report([tmp_path], tmp_path / "page.html", repeats=20)
    for file in (page, table):
        assert "500 of 600 methods are listed, 100 are left out" in file.read_text()
    lines = [line.split(" | ")[0] for line in table.read_text().splitlines() if " | logit | " in line]
    assert len(lines) == 500 and lines[0] == "| m599" and lines[-1] == "| random"
