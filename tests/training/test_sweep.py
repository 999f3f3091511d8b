"""`steadygaze sweep`: grids, runs that are killed and resumed, shards, the table and the figure."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.training import MODEL
from steadygaze.cli import app
from steadygaze.training.recipe_files import shipped_recipes
from steadygaze.training.sweep import parse_grid, read_sweep

RECIPE = f"""
epochs = 1
batch = 4
log_every = 1
save_every = 1
tensorboard = false

[model]
name = "vit_tiny_patch16_224"
arguments = {{ {", ".join(f"{key} = {value}" for key, value in MODEL.items())} }}

[augment]
crop = "none"

[losses.cross_entropy]
[losses.adl]

[measure]
suites = ["corruptions"]
options = {{ corruptions = "contrast", severities = [5] }}
limit = 8
"""
TAU = "losses.adl.tau=1,2"


@pytest.fixture(scope="module")
def recipe(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    file.write_text(f'{RECIPE}\n[data]\ntrain = "{data}"\ntest = "{data}"\n')
    return file


def sweep(*words: object):
    return CliRunner().invoke(app, ["sweep", *map(str, words)])


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("sweep") / "tau"
    got = sweep(recipe, "--set", TAU, "--seeds", 2, "--out", out)
    assert got.exit_code == 0, got.output
    return out, got.output


def rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "table.csv").open()))


@pytest.mark.full
def test_a_grid_is_trained_measured_and_tabulated(whole):
    out, printed = whole
    folders = sorted(str(folder.relative_to(out)) for folder in out.glob("*/*") if folder.is_dir())
    assert folders == [f"losses.adl.tau={tau}/seed{seed}" for tau in (1, 2) for seed in (0, 1)]
    for folder in folders:
        run = json.loads((out / folder / "train.json").read_text())
        assert f"tau={run['settings']['losses']['adl']['tau']:g}" in folder
        assert f"seed{run['settings']['seed']}" in folder
    table = rows(out)
    assert {row["cell"] for row in table} == {"tau=1", "tau=2"}
    keys = {(row["setting"], row["metric"]) for row in table}
    assert {("clean", "top1"), ("corruptions", "mean_error")} <= keys
    for row in table:
        value, low, high = (float(row[key]) for key in ("value", "low", "high"))
        assert low <= value <= high and row["seeds"] == "2" and row["images"] == "8"
        assert (row["difference"] == "nan") == (row["cell"] == "tau=1")
        measured = [
            card.numbers[row["setting"], row["metric"]].value
            for seed in (0, 1)
            for card in sg.Rows.read(out / f"losses.adl.{row['cell']}" / f"seed{seed}" / "stress").cards()
        ]
        assert value == pytest.approx(sum(measured) / 2, rel=1e-4), "the mean over seeds"
    assert all(len(line) <= 80 for line in printed.splitlines() if re.search(r"\[.*,.*\]", line))
    markdown = (out / "table.md").read_text()
    assert "| tau=1 | 2 |" in markdown and "[" in markdown
    figure = ElementTree.fromstring((out / "sweep.svg").read_text())
    whiskers = [node for node in figure.iter() if node.get("class") == "whisker"]
    assert len(whiskers) == len(table)


def test_a_model_of_a_sweep_is_loaded_and_compared(whole):
    out, _ = whole
    assert sg.load_model(str(out / "losses.adl.tau=1" / "seed0")).model is not None
    sides = [
        ",".join(str(out / f"losses.adl.tau={tau}" / f"seed{seed}") for seed in (0, 1)) for tau in (1, 2)
    ]
    page = out / "compare.html"
    words = ["compare-models", *sides, "--seen", "bright", "--by-class", "--out", str(page), "--no-images"]
    got = CliRunner().invoke(app, words)
    assert got.exit_code == 0, got.output
    table = list(csv.DictReader((out / "compare-classes.csv").open()))
    assert [(row["setting"], row["group"]) for row in table] == [
        (setting, group) for setting in ("clean", "contrast/5") for group in ("seen", "unseen")
    ]
    for row in table:
        low, gap, high = (float(row[key]) for key in ("low", "difference", "high"))
        assert low <= gap <= high and row["images"] == "4" and row["classes"] == "1"
        name = "bright" if row["group"] == "seen" else "dark"
        for column, side in zip(("before", "after"), sides, strict=True):
            frame = pd.concat(sg.Rows.read(f"{run}/stress").to_pandas() for run in side.split(","))
            own = frame[(frame.metric == "top1") & (frame.setting == row["setting"])]
            of_group = own[own.image.str.startswith(name)].value
            assert len(of_group) == 8 and float(row[column]) == pytest.approx(of_group.mean())
    assert "unseen" in got.output and "1 dark" in got.output
    bad = CliRunner().invoke(app, [*words[:3], "--seen", "bright,dark"])
    assert bad.exit_code == 2 and "every image is of a seen class" in bad.output


@pytest.mark.full
def test_a_killed_sweep_resumes_also_in_shards_and_loses_nothing(recipe, whole, tmp_path):
    words = ["sweep", str(recipe), "--set", TAU, "--seeds", "2", "--out", str(tmp_path)]
    first = tmp_path / "losses.adl.tau=1" / "seed0"
    process = subprocess.Popen([sys.executable, "-m", "steadygaze", *words], stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 600
        while not (first / "measured.json").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (first / "measured.json").exists()
    finished = (first / "model.safetensors").stat().st_mtime_ns
    one = sweep(*words[1:], "--shard", "0/2")
    assert one.exit_code == 0 and "not finished" in one.output and "other shards" in one.output
    two = sweep(*words[1:], "--shard", "1/2")
    assert two.exit_code == 0 and "not finished" not in two.output
    assert (first / "model.safetensors").stat().st_mtime_ns == finished, "not trained again"
    assert rows(tmp_path) == rows(whole[0])


def test_dry_run_lists_the_runs_and_writes_nothing(recipe, tmp_path):
    out = tmp_path / "out"
    got = sweep(recipe, "--set", TAU, "--seeds", 2, "--out", out, "--dry-run")
    assert got.exit_code == 0 and got.output.count("losses.adl.tau=") >= 4 and not out.exists()
    assert "4 runs left" in got.output


@pytest.mark.full
def test_a_probe_beside_fine_tuning(recipe, tmp_path):
    """`train` is a key like any other: probe and fine-tuning in one table."""
    words = ("--set", "train=all,head", "--set", "losses.adl=none", "--out", tmp_path)
    got = sweep(recipe, *words)
    assert got.exit_code == 0, got.output
    assert {row["cell"] for row in rows(tmp_path)} == {"train=all", "train=head"}
    assert "an interval over seeds needs three or more" in got.output


def test_another_recipe_or_measure_in_the_folder_is_refused(recipe, whole):
    out, _ = whole
    for change, message in (
        ("epochs=2", "holds a run of another recipe"),
        ("measure.limit=4", "other settings"),
    ):
        got = sweep(recipe, "--set", TAU, "--set", change, "--seeds", 2, "--out", out)
        assert got.exit_code == 2 and message in got.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "losses.adl.tau"], "expected KEY=VALUE"),
        (["--set", "losses.adl.tau=1,,2"], "on each side of a comma"),
        (["--set", "losses.adl.tau=1,1"], "expected different values"),
        (["--set", "losses.adl.tau=1,-2"], "losses.adl.tau: expected a number above 0"),
        (["--set", "losses.adl.tua=1,2"], "losses.adl.tau"),
        (["--set", "modules.tap.branch=2,3"], "branches"),
        (["--set", "seed=1,2"], "--seeds"),
        (["--set", "measure.suites=['corruption']"], "corruptions"),
        (["--shard", "2/2"], "expected I/N"),
    ],
)
def test_errors_name_what_is_wrong(words, message, recipe, tmp_path):
    got = sweep(recipe, "--out", tmp_path / "out", *words)
    assert got.exit_code == 2 and message in got.output, got.output


def test_an_unknown_sweep_suggests_known_ones():
    got = sweep("tap-branch")
    assert got.exit_code == 2 and "tap-branches" in got.output
    listed = sweep("--list")
    assert listed.exit_code == 0 and all(name in listed.output for name in shipped_recipes("sweep"))
    assert 'recipe = "cifar10-adl"' in sweep("adl-weight", "--show").output


def test_lists_are_single_values():
    grid = parse_grid(["data.images=[0,3],[0,6]", "data.only=['a','b']", "optimizer.betas=[0.9, 0.95]"])
    assert grid["data.images"] == [[0, 3], [0, 6]]
    assert grid["data.only"] == [["a", "b"]] and grid["optimizer.betas"] == [[0.9, 0.95]]
    one = read_sweep("cifar10-adl", grid | {"data.train": ["x"]}, seeds=1)
    recipes = [one.recipe_of(cell) for cell in one.cells()]
    assert [recipe.data.images for recipe in recipes] == [[0, 3], [0, 6]]
    assert all(recipe.optimizer.betas == [0.9, 0.95] for recipe in recipes)
    assert len({cell.folder for cell in one.cells()}) == 2


STUDIES = {  # key of the grid -> values that the papers' tables have
    "tap-branches": ("modules.tap", 5),
    "adl-weight": ("losses.adl.weight", 6),
    "adl-threshold": ("losses.adl", 5),
    "tap-allocation": ("modules.tap", 4),
    "cb-variant": ("modules.cb", 5),
    "cb-position": ("modules.cb.position", 3),
    "cb-place": ("modules.cb.where", 3),
    "relevance-weight": ("losses.relevance.relevance", 5),
    "relevance-terms": ("losses.relevance.background", 3),
    "relevance-samples": ("data.images", 3),
}


@pytest.mark.parametrize("name", sorted(shipped_recipes("sweep")))
def test_a_shipped_sweep_expands_to_valid_recipes(name):
    shipped = read_sweep(name, {"data.train": ["train"], "data.masks": ["masks"], "data.test": ["test"]})
    key, count = STUDIES[name]
    assert len(shipped.grid[key]) == count and shipped.seeds == 3
    assert shipped.about and shipped.cost and f"steadygaze sweep {name}" in shipped.command
    cells = shipped.cells()
    settings = [shipped.recipe_of(cell).settings for cell in cells]
    assert len({json.dumps(one, sort_keys=True) for one in settings}) == len(cells), (
        "every cell is another recipe"
    )
    from steadygaze.runs.stress import parse_suites

    measure = shipped.recipe_of(cells[0]).measure
    assert measure.suites is not None and parse_suites(measure.suites, measure.options)


def test_a_sweep_file_of_ones_own(recipe, tmp_path):
    """Its `[measure]` and `[set]` change the recipe's, `--set` changes both."""
    file = tmp_path / "study.toml"
    file.write_text(
        f'recipe = "{recipe}"\nseeds = 2\n[grid]\n"losses.adl" = ["none", {{}}]\n[set]\nepochs = 3\n'
        "[measure]\nlimit = 5\n"
    )
    own = read_sweep(file, {"epochs": [4], "measure.options.severities": [[1]]})
    without, with_adl = (own.recipe_of(cell, 1) for cell in own.cells())
    assert "adl" not in without.losses and "adl" in with_adl.losses
    assert with_adl.epochs == 4 and with_adl.seed == 1 and with_adl.measure.limit == 5
    assert with_adl.measure.options == {"corruptions": "contrast", "severities": [1]}
