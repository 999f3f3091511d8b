"""What `steadygaze explain` leaves in its output folder, and what it prints about it."""

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import steadygaze.cli.explain as command
from helpers.tiers import tiered
from steadygaze.cli import app
from steadygaze.cli.explain import GRID_ROWS, MAX_TOP
from steadygaze.results.drawing import Row, tile

DEMO = Path(command.__file__).parents[1] / "assets" / "demo"
SHIP = DEMO / "ship.png"


def explain(*words: object, code: int = 0) -> str:
    given = ["explain", *map(str, words), "--model", "embedded"]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# -- --top -----------------------------------------------------------------------------------------


def test_too_many_classes_are_refused_before_anything_is_written(tmp_path):
    output = explain(SHIP, "--top", 5000, "--out", tmp_path / "out", code=2)
    assert "--top 5000" in output and f"at most {MAX_TOP}" in output
    assert not (tmp_path / "out").exists()


def test_more_classes_than_the_model_has_are_all_of_them_and_this_is_printed(tmp_path):
    output = explain(SHIP, "--top", 50, "--method", "gae", "--out", tmp_path)
    assert "--top 50: the model has 10 classes; all of them were explained" in output
    assert len(list(tmp_path.glob("ship.gae.*.png"))) == 10
    assert json.loads((tmp_path / "manifest.json").read_text())["target"] == "top 10"


@pytest.mark.full
def test_the_grid_is_bounded_and_what_it_leaves_out_is_printed(tmp_path):
    for number in range(8):
        Image.open(SHIP).save(tmp_path / f"{number}.png")
    output = explain(tmp_path, "--top", 10, "--method", "gae", "--out", tmp_path / "out")
    assert "the first 3 of 8 images" in output
    few = explain(tmp_path / "0.png", "--top", 10, "--method", "gae", "--out", tmp_path / "few")
    assert "the first" not in few
    one_image = Image.open(tmp_path / "few" / "grid.png").height
    assert Image.open(tmp_path / "out" / "grid.png").height < one_image * GRID_ROWS / 10


@pytest.mark.full
def test_the_grid_shows_a_bounded_number_of_methods(tmp_path):
    methods = ",".join(f"attixg+plus:freeze={number / 100}" for number in range(30))
    output = explain(SHIP, "--method", methods, "--out", tmp_path)
    assert "the first 24 of 30 methods" in output and len(list(tmp_path.glob("ship.*.png"))) == 30
    assert Image.open(tmp_path / "grid.png").width < 26 * 240


# -- a folder that was used before -----------------------------------------------------------------


def test_overlays_of_an_earlier_run_are_removed_and_other_files_are_kept(tmp_path):
    explain(DEMO / "cat.png", SHIP, "--method", "gae,rollout", "--out", tmp_path)
    (tmp_path / "cat.notes.png").write_bytes(b"mine")
    output = explain(SHIP, "--method", "gae", "--out", tmp_path)
    written = {"ship.gae.png", "grid.png", "scores.npz", "manifest.json"}
    assert names(tmp_path) == written | {"cat.notes.png"}
    assert "removed 3 overlays of an earlier run" in output


@pytest.mark.parametrize(
    "listed",
    tiered(["../kept.png", "/kept.png", "sub/kept.png", "kept.txt", "link.png", "sub.png", 7, None], 2),
)
def test_a_manifest_of_others_removes_nothing(tmp_path, listed):
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub.png").mkdir()
    kept = [tmp_path / "kept.png", out / "sub" / "kept.png", out / "kept.txt"]
    for file in kept:
        file.write_bytes(b"mine")
    (out / "link.png").symlink_to(tmp_path / "kept.png")
    manifest = {"images": [{"overlays": {"gae": [listed]}}]}
    (out / "manifest.json").write_text(json.dumps(manifest))
    explain(SHIP, "--method", "gae", "--out", out)
    assert all(file.read_bytes() == b"mine" for file in kept)
    assert (out / "link.png").is_symlink() and (out / "sub.png").is_dir()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"images": 3}', '{"name": "a web app", "icons": []}'])
def test_a_manifest_that_is_not_ours_is_no_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert "removed" not in explain(SHIP, "--method", "gae", "--out", tmp_path)


# -- the class that was explained ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["Frog", "6"])
def test_the_explained_class_is_named(tmp_path, target):
    output = explain(SHIP, "--target", target, "--method", "gae", "--out", tmp_path)
    assert "explained class: frog (class 6)" in output


def test_the_predicted_class_needs_no_line(tmp_path):
    assert "explained class" not in explain(SHIP, "--method", "gae", "--out", tmp_path)


# -- what is read ----------------------------------------------------------------------------------


def test_avif_is_explained_and_no_progress_bar_of_transformers_is_printed(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    model, images = tmp_path / "model", tmp_path / "images"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(model)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(model)
    images.mkdir()
    Image.open(SHIP).convert("RGB").save(images / "photo.avif")
    words = ["explain", images, "--model", model, "--method", "rollout", "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "photo.rollout.png").is_file()
    assert "Loading" not in result.output and "it/s" not in result.output and "%|" not in result.output


# -- the legend ------------------------------------------------------------------------------------


@pytest.mark.parametrize("legend", ["positive", "signed"])
@pytest.mark.parametrize("cell", [64, 224])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_the_legend_lies_inside_the_sheet(legend, cell, columns):
    row = Row([Image.new("RGB", (cell, cell), "white")] * columns)
    sheet = tile([row], [""] * columns, cell=cell, legend=legend)
    gray = sheet.convert("L").point(lambda value: 255 if value < 250 else 0)
    left, _, right, _ = gray.getbbox()
    assert left >= 4 and right <= sheet.width - 4, "nothing is cut at the sides"
    if cell == 224 and columns > 1:
        wide = tile([Row([row.images[0]] * 8)], [""] * 8, cell=cell, legend=legend)
        ink = wide.convert("L").point(lambda value: 255 if value < 250 else 0).getbbox()
        shorter_bar = (ink[2] - ink[0]) - (right - left)
        assert 0 <= shorter_bar <= cell // 2 + 1, "all words, and a color bar of at least half the length"
