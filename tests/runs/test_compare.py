"""`steadygaze compare-models`: before and after, over the same images."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import Page, image_folder, made_up
from steadygaze.cli import app
from steadygaze.data.datasets.imagenet import COMMON
from steadygaze.robustness import class_changes, mcnemar
from steadygaze.runs.compare import compare
from steadygaze.runs.request import StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.statistics import told_apart
from steadygaze.runs.stress import run_stress


def kept(rows: Rows, folder, change=lambda row: row):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(rows.runs[0]))
    lines = (json.dumps(change({**row, "content": row["image"]})) for row in rows)
    (folder / "rows-00000.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def tops(rows, setting="clean"):
    found = {r["image"]: r["value"] for r in rows if (r["setting"], r["metric"]) == (setting, "top1")}
    return np.array([found[name] for name in sorted(found)])


@pytest.fixture
def pair(tmp_path):
    one, two = made_up(COMMON, images=12), made_up(COMMON, images=12, seed=5, model="b")
    return one, two, kept(one, tmp_path / "one"), kept(two, tmp_path / "two")


def test_numbers_are_paired_differences(pair):
    one, two, a, b = pair
    found = compare([a], [b], repeats=200)
    changes = {c.key: c for c in found.changes}
    before, after = tops(one), tops(two)
    clean = changes["clean", "top1"]
    assert (
        clean.difference == pytest.approx((after - before).mean())
        and clean.low <= clean.difference <= clean.high
    )
    assert clean.p == pytest.approx(mcnemar(before, after)) and clean.images == 12
    scores = [r.cards(repeats=10)[0].scores["corruptions", "mce"].value for r in (one, two)]
    assert changes["corruptions", "mce"].difference == pytest.approx(scores[1] - scores[0])
    assert ("clean", "ece") in changes and ("fog", "ce") in changes
    assert found.counts == {"wrong": int((before > after).sum()), "right": int((after > before).sum())}
    names = sorted({r["image"] for r in one})
    assert found.turned["wrong"] == [n for n, x, y in zip(names, before, after, strict=True) if x > y]
    labels = np.array([int(name[1]) for name in names])
    assert found.classes == class_changes(labels, before, after)


def test_a_model_and_itself(pair):
    _, _, a, _ = pair
    found = compare([a], [a], repeats=50)
    assert all(c.difference == c.low == c.high == 0 and not c.verdict for c in found.changes)
    assert found.counts == {"wrong": 0, "right": 0} and not found.notes


def test_pairing_makes_small_differences_sure(tmp_path):
    """One image in ten of many gets better: unpaired intervals overlap, the paired one leaves zero out."""
    rows = made_up(COMMON[:1], images=150)
    a = kept(rows, tmp_path / "a")

    def better(row):
        return {**row, "value": 1} if row["metric"] == "top1" and int(row["image"][3:]) % 10 == 0 else row

    b = kept(rows, tmp_path / "b", better)
    clean = next(c for c in compare([a], [b]).changes if c.key == ("clean", "top1"))
    cards = [Rows.read(x).cards()[0].numbers["clean", "top1"] for x in (a, b)]
    assert cards[0].high > cards[1].low and clean.low > 0 and clean.verdict == "better"


def test_only_what_both_have(pair, tmp_path):
    one, _, a, _ = pair
    few = made_up(COMMON[:2], images=7, seed=5, model="b")
    b = kept(few, tmp_path / "few")
    found = compare([a], [b], repeats=20)
    assert {c.images for c in found.changes} == {7}
    assert any("5 of its 12 images" in note for note in found.notes) and any(
        note.startswith("only before") for note in found.notes
    )
    assert next(c for c in found.changes if c.setting.label == "clean").before.mean == pytest.approx(
        tops(one)[_places(one, few)].mean()
    )


def test_means_over_corruptions_are_of_the_same_corruptions(tmp_path):
    """The same model under other corruptions and severities: the common part is equal, nothing differs."""
    rows = made_up(COMMON, images=12)

    def part(folder, names, severities):
        there = {"clean", *(f"{name}/{s}" for name in names for s in severities)}
        return kept(Rows(rows.runs, [r for r in rows if r["setting"] in there]), folder)

    a, b = part(tmp_path / "a", COMMON[:4], (1, 2, 3)), part(tmp_path / "b", COMMON[2:9], (3, 4))
    alone = [Rows.read(x).cards(repeats=10)[0].scores["corruptions", "mean_error"].value for x in (a, b)]
    assert alone[0] != alone[1]
    found = compare([a], [b], repeats=50)
    assert all(c.difference == c.low == c.high == 0 for c in found.changes)
    mean = next(c for c in found.changes if c.key == ("corruptions", "mean_error"))
    assert mean.before.mean == pytest.approx(
        1 - np.mean([tops(rows, f"{name}/3").mean() for name in COMMON[2:4]])
    )
    assert {note.split(":")[0] for note in found.notes} == {"only before", "only after"}


def test_a_run_that_is_not_finished_is_paired_image_by_image(pair, tmp_path):
    one, _, a, _ = pair
    names = sorted({r["image"] for r in one})
    half = [r for r in one if r["setting"] != "fog/3" or r["image"] in names[:5]]
    broken = [
        {**r, "value": None, "flag": "broken logits"}
        if (r["setting"], r["image"]) == ("snow/1", names[2])
        else r
        for r in half
    ]
    found = compare([kept(Rows(one.runs, broken), tmp_path / "half")], [a], repeats=50)
    assert all(c.difference == c.low == c.high == 0 for c in found.changes)
    images = {c.setting.label: c.images for c in found.changes if c.quantity.name == "top1"}
    assert (images["fog/3"], images["snow/1"], images["fog/2"]) == (5, 11, 12)
    assert any("fog/3 7, snow/1 1" in note for note in found.notes)


@pytest.mark.full
def test_other_seeds_are_told(pair, tmp_path):
    one, _, a, _ = pair
    facts = {**one.runs[0], "settings": {**one.runs[0]["settings"], "seed": 9, "suite": ["corruptions"]}}
    other = kept(Rows([facts], list(one)), tmp_path / "other", lambda row: {**row, "seed": 9})
    assert any(
        note.startswith("other seeds before (0) than after (9)")
        for note in compare([a], [other], repeats=20).notes
    )
    assert not compare([a, other], [other, a], repeats=20).notes


def _places(one, few):
    names = sorted({r["image"] for r in one})
    return [names.index(name) for name in sorted({r["image"] for r in few})]


def test_seeds_are_a_mean_and_a_spread(tmp_path, monkeypatch):
    runs = [made_up(COMMON[:2], seed=s) for s in range(4)]
    folders = [kept(rows, tmp_path / str(i)) for i, rows in enumerate(runs)]
    found = compare(folders[:2], folders[2:], repeats=50)
    clean = next(c for c in found.changes if c.key == ("clean", "top1"))
    means = [tops(r).mean() for r in runs]
    assert clean.before.seeds == 2 and clean.before.deviation == pytest.approx(np.std(means[:2], ddof=1))
    assert clean.difference == pytest.approx(np.mean(means[2:]) - np.mean(means[:2])) and clean.p is None
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["compare-models", f"{folders[0]},{folders[1]}", f"{folders[2]},{folders[3]}", "--no-images"]
    )
    assert done.exit_code == 0 and "2 and 2 seeds" in done.output
    assert "wrote compare.html" in done.output and (tmp_path / "compare.html").is_file(), "in no run folder"
    assert not any((folder / "compare.html").exists() for folder in folders)
    with pytest.raises(sg.InputError, match="same seed twice"):
        compare([folders[0], kept(runs[0], tmp_path / "again")], folders[2:3])


def test_what_is_refused(pair, tmp_path):
    one, _, a, b = pair
    with pytest.raises(sg.InputError, match="no image in common"):
        compare([a], [kept(one, tmp_path / "x", lambda r: {**r, "image": "other/" + r["image"]})])
    with pytest.raises(sg.InputError, match="do not map"):
        compare(
            [a],
            [kept(one, tmp_path / "y", lambda r: {**r, "detail": [8, 8]} if r["metric"] == "top1" else r)],
        )
    with pytest.raises(sg.UnknownNameError, match="Did you mean 'fog/3'"):
        compare([a], [b], setting="fog/33")
    with pytest.raises(sg.InputError, match="no rows yet"):
        compare([a], [kept(Rows(one.runs, []), tmp_path / "z")])
    done = CliRunner().invoke(app, ["compare-models", str(a), str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "run.json" in done.output
    facts = json.loads((a / "run.json").read_text())
    del facts["settings"]["kind"]
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify" / "run.json").write_text(json.dumps(facts))
    with pytest.raises(sg.InputError, match="run of verify"):
        compare([a], [tmp_path / "verify"])


@pytest.mark.full
def test_the_command_shows_images_with_their_maps(tmp_path):
    data = image_folder(tmp_path / "data")
    loaded = sg.load_model("embedded")
    save_file(loaded.model.state_dict(), tmp_path / "one.safetensors")
    weights = load_file(tmp_path / "one.safetensors")
    weights["head.bias"] = weights["head.bias"].clone()
    weights["head.bias"][3] += 50  # says cat, always
    save_file(weights, tmp_path / "two.safetensors")
    for name in ("one", "two"):
        options = {"corruptions": "fog", "severities": [1]}
        how = {
            "checkpoint": tmp_path / f"{name}.safetensors",
            "limit": 6,
            "num_workers": 0,
            "options": options,
        }
        run_stress(
            StressRequest(model="embedded", data=data, out=tmp_path / name, suites=["corruptions"], **how)
        )
    done = CliRunner().invoke(
        app,
        [
            "compare-models",
            str(tmp_path / "one"),
            str(tmp_path / "two"),
            "--show",
            "2",
            "-o",
            str(tmp_path / "compare.html"),
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    turned = int(re.search(r"newly correct \(clean\): (\d+)", done.output)[1])
    assert (
        turned >= 1
        and "3 cat" in done.output
        and "clean" in done.output
        and "6 images are few" in done.output
    )
    text = (tmp_path / "compare.html").read_text()
    page = Page(text)
    shown = sum(min(2, int(n)) for n in re.findall(r"newly \w+ \(clean\): (\d+)", done.output))
    assert not page.open and text.count("data:image/jpeg") == 3 * shown
    assert "after: cat" in page.words and "Classes gained and lost" in page.words
    with (tmp_path / "compare.csv").open() as file:
        lines = {(row["setting"], row["metric"]): row for row in csv.DictReader(file)}
    assert {"difference", "low", "high", "verdict"} <= set(lines["clean", "top1"]) and (
        "fog/1",
        "top1",
    ) in lines


def test_models_of_one_name_are_told_apart_by_the_shortest_path():
    def run(weights, checkpoint="", model="deit"):
        given = {"checkpoint": checkpoint, "model": model}
        facts = {"model": "deit", "weights": weights, "checkpoint": Path(checkpoint).name}
        return {"settings": facts, "about": {"given": given}}

    folders = [Path("out/before/stress"), Path("out/after/stress")]
    runs = [run("1", "runs/wa/w.safetensors"), run("2", "runs/wb2/w.safetensors")]
    assert told_apart(runs, folders) == ["deit (wa/w.safetensors)", "deit (wb2/w.safetensors)"]
    runs = [run("1", model="a/run/best"), run("2", model="b/run/best")]
    assert told_apart(runs, folders) == ["deit (a/run/best)", "deit (b/run/best)"]
    assert told_apart([run("1"), run("2")], folders) == ["deit (before/stress)", "deit (after/stress)"]
    assert told_apart([run("1"), run("2", "x/w.pt")], folders) == ["deit", "deit (w.pt)"]
