"""The card of a stress run: its scores are those of the field; the closing tables; the report."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import Page, image_folder, made_up, thousand
from steadygaze.cli import app
from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS
from steadygaze.report.pages import write_report
from steadygaze.robustness import corruption_scores, reliability_of
from steadygaze.runs.before_after import CardRequest, measure_sides
from steadygaze.runs.request import SUITE_OPTIONS, StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import World
from steadygaze.runs.stress import run_stress

MODELS = {"embedded": lambda: sg.load_model("embedded"), "thousand": thousand}
FEW = {"corruptions": "fog,jpeg_compression", "severities": "1,3", "epsilons": "2/255,8/255", "pgd_steps": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("card") / "data")


@pytest.fixture(scope="module")
def run(data):
    suite = ["corruptions,attacks,occlusion,attention"]
    return run_stress(
        StressRequest(
            model="embedded",
            data=data,
            out=data.parent / "run",
            suites=suite,
            limit=4,
            batch_size=3,
            num_workers=0,
            options=FEW,
        )
    )


def test_scores_are_those_of_the_field():
    rows = made_up(CORRUPTIONS)
    card = rows.cards(repeats=50)[0]
    frame = rows.to_pandas()
    means = frame[frame["metric"] == "top1"].groupby("setting")["value"].mean()
    wanted = corruption_scores(
        {n: [1 - means[f"{n}/{s}"] for s in range(1, 6)] for n in CORRUPTIONS}, 1 - means["clean"]
    )
    found = {
        metric: card.scores["corruptions", metric]
        for metric in ("mce", "relative_mce", "mean_error", "mean_error_all")
    }
    assert found["mce"].value == pytest.approx(wanted.mce) and found["relative_mce"].value == pytest.approx(
        wanted.relative_mce
    )
    assert found["mean_error"].value == pytest.approx(wanted.mean_error)
    assert found["mean_error_all"].value == pytest.approx(wanted.mean_error_all)
    assert (
        "15" in found["mce"].note and "9 images" in found["mce"].note and "19" in found["mean_error_all"].note
    )
    assert all(n.low <= n.value <= n.high for n in found.values()) and found["mce"].low < found["mce"].high
    clean = frame[frame["setting"] == "clean"].set_index(["image", "metric"])["value"].unstack()
    ece = reliability_of(torch.tensor(clean["confidence"].to_numpy()), torch.tensor(clean["top1"].to_numpy()))
    assert card.numbers["clean", "ece"].value == pytest.approx(ece.ece)
    assert card.scores["fog", "error"].value == pytest.approx(wanted.by_corruption["fog"])


ALL = (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("names", "classes", "severities"), [(COMMON[:3], 1000, ALL), (COMMON, 10, ALL), (COMMON, 1000, (3,))]
)
def test_no_mce_where_it_would_mean_nothing(names, classes, severities):
    card = made_up(names, classes=classes, severities=severities).cards(repeats=10)[0]
    assert ("corruptions", "mce") not in card.scores and ("corruptions", "mean_error") in card.scores


def test_bootstrap_does_not_depend_on_the_order_of_rows():
    rows = made_up(COMMON[:2])
    turned = Rows(rows.runs, list(rows)[::-1])
    one, two = (r.cards(repeats=30)[0] for r in (rows, turned))
    assert all(one.numbers[key].low == n.low for key, n in two.numbers.items())
    with pytest.raises(sg.InputError, match="cards"):
        rows.table()


def test_the_command_and_its_report(run, tmp_path):
    folder = run.folders[0]
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert not page.open and not any(a.startswith("http") for a in page.addresses)
    for words in (
        "Robustness",
        "Error by corruption",
        "Accuracy by severity",
        "Attacks in pixel space",
        "While tokens are dropped",
        "Entropy",
        "Stability",
        "Sample images",
        "How it was run",
        "JPEG compression, severity 3",
    ):
        assert words in page.words, words
    for tile in (
        "FGSM, 8/255: top-1 ↑",
        "PGD, 8/255: top-1 ↑",
        "center square covered: top-1 ↑",
        "random tokens dropped: accuracy ↑",
    ):
        assert tile in page.words, "a tile of every suite that was run"
    assert "4 images are few" in page.words, "the caution of the terminal"
    assert text.count("data:image/jpeg") == 3 + 1, "clean, two corruptions, a sheet of attention"
    table = (tmp_path / "table.csv").read_text()
    assert "corruptions,mean_error," in table and "fog/3,top1," in table
    facts = json.loads((folder / "run.json").read_text())["settings"]
    assert facts["weights"] in page.words and facts["images_hash"] in page.words


def test_a_report_without_the_data(tmp_path):
    rows = made_up(COMMON[:3])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(rows.runs[0]))
    (folder / "rows-00000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = write_report([folder], repeats=20)[0].read_text()
    assert "Images are left out" in text and "data:image" not in text


def test_the_closing_tables(data, tmp_path):
    words = [
        "--model",
        "embedded",
        "--data",
        str(data),
        "--suites",
        "corruptions,attacks,occlusion,attention",
        "--corruptions",
        "fog",
    ]
    words += [
        "--severities",
        "1,5",
        "--epsilons",
        "8/255",
        "--pgd-steps",
        "1",
        "--limit",
        "3",
        "--num-workers",
        "1",
    ]
    done = CliRunner().invoke(app, ["stress", *words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    for words in (
        "clean",
        "fgsm/8",
        "pgd/8",
        "center_square/0.5",
        "top1 at 5",
        "random drop",
        "salient drop by gaze",
        "entropy",
        "stability",
        "ece",
        "1 of the 15 common corruptions, severities 1, 5",
        "3 images",
    ):
        assert words in done.output, words


def test_a_run_that_is_not_finished_says_so(run, data, tmp_path):
    """As a kill leaves it; an image that cannot be read is no lack."""
    whole = run.folders[0]
    lines = (whole / "rows-00000.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(lines[0])["image"]
    for name, take, also in (
        ("killed", lambda r: r["setting"] != "fog/3" or r["image"] == first, []),
        (
            "unreadable",
            lambda r: r["image"] != first,
            [{"image": first, "unreadable": f"{first}: no such file"}],
        ),
        ("whole", lambda r: True, []),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text((whole / "run.json").read_text())
        kept = [line for line in lines if take(json.loads(line))]
        (tmp_path / name / "rows-00000.jsonl").write_text(
            "".join([*kept, *(json.dumps(row) + "\n" for row in also)])
        )
        write_report([tmp_path / name], images=False, repeats=20)
        for file in ("report.html", "table.md"):
            text = (tmp_path / name / file).read_text()
            assert ("Not finished: 1 of" in text and "(fog/3)" in text) == (name == "killed"), (name, file)


@pytest.mark.parametrize(
    ("classes", "names", "says"),
    [
        (1000, {}, "before with 10 classes and "),
        (10, {"0": "ship", "1": "frog", "2": "bird"}, "other names of 2 of 3 (0: airplane, ship; 1: "),
        (10, {"0": "Airplane, aeroplane", "1": "automobile", "2": "a bird"}, ""),
    ],
)
def test_a_card_compares_classes_before_anything_is_measured(classes, names, says, tmp_path):
    own = {"0": "airplane", "1": "automobile", "2": "bird"}
    for side, count, words in (("before", 10, own), ("after", classes, names)):
        for kind in ("stress", "verify"):
            folder = tmp_path / side / kind
            folder.mkdir(parents=True)
            facts = {"model": "m", "weights": side, "classes": count}
            run = {"kind": kind, "settings": facts, "about": {"classes": words}}
            (folder / "run.json").write_text(json.dumps(run))
    sides = [str(tmp_path / side) for side in ("before", "after")]
    request = CardRequest(data=None, out=tmp_path / "out")
    if says:
        with pytest.raises(sg.InputError, match=re.escape(says)):
            measure_sides(*sides, request, World())
    else:
        assert measure_sides(*sides, request, World()) == [Path(side) for side in sides]


def test_a_card_compares_classes_before_it_reads_data(tmp_path, monkeypatch):
    """Folders with names of classes cannot be read with ImageNet's: the models are named, not a class."""
    monkeypatch.setattr(
        "steadygaze.runs.request.Request.load", lambda request, world: MODELS[request.model]()
    )
    folder = image_folder(tmp_path / "data")
    request = CardRequest(data=folder, out=tmp_path / "out", suites=["occlusion"])
    with pytest.raises(sg.InputError, match="got embedded with 10 classes and thousand with 1000"):
        measure_sides("embedded", "thousand", request, World())
    wrong = CardRequest(data=folder, out=tmp_path / "out", suites=["occlusoin"])
    with pytest.raises(sg.UnknownNameError, match="occlusion"):
        measure_sides("embedded", "thousand", wrong, World())


def test_a_card_takes_the_options_of_all_suites(tmp_path):
    given = [
        "--attack-steps",
        "2",
        "--suites",
        "corruptions",
        "-d",
        str(tmp_path),
        "-o",
        str(tmp_path / "out"),
    ]
    told = CliRunner().invoke(app, ["card", "embedded", "embedded", *given])
    assert told.exit_code == 2 and "an option of the suite autoattack" in " ".join(told.output.split())
    taken = {parameter.name for parameter in get_command(app).commands["card"].params}
    assert taken >= set(SUITE_OPTIONS)
