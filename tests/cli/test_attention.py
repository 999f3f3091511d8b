"""`steadygaze attention`, `features`, `outliers` and `lens`: files, and errors that name what exists."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for file in (folder / "cat.png", folder / "more" / "cat.png"):
        Image.effect_noise((40, 40), 90).convert("RGB").save(file)
    return folder


def attention(*words: Any) -> Any:
    return CliRunner().invoke(app, ["attention", *map(str, words), "-m", "embedded", "--device", "cpu"])


def test_files_of_each_image(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = attention(photos, "--layer", -1, "--heads", "all", "--query", "class", "--gif", "-o", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".png") == [
        "cat-1.attention.png",
        "cat.attention.png",
    ]
    with np.load(out / "cat.attention.npz") as arrays:
        assert arrays["maps"].shape == (1, 1, 4, 8, 8) and arrays["layers"].tolist() == [5]
    with Image.open(out / "cat.attention.gif") as gif:
        assert gif.n_frames == 6


@pytest.mark.parametrize(
    "words",
    [("--layer", "all"), ("--layer", "2", "--heads", "0,3"), ("--heads", "max", "--query", "3,4")],
)
def test_layers_heads_and_queries(words: tuple[str, ...], photos: Path, tmp_path: Path) -> None:
    result = attention(photos / "cat.png", *words, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "cat.attention.png").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--layer", "6"), "0..5"),
        (("--layer", "last"), "--layer"),
        (("--heads", "4", "--layer", "0"), "0..3"),
        (("--heads", "some"), "--heads"),
        (("--query", "register 0"), "'class'"),
        (("--query", "8,0"), "0..7"),
        (("--layer", "all", "--heads", "2"), "layer"),
    ],
)
def test_what_does_not_exist(words: tuple[str, ...], named: str, photos: Path, tmp_path: Path) -> None:
    result = attention(photos / "cat.png", *words, "-o", tmp_path / "out")
    assert result.exit_code == 2 and named in result.output


def test_unreadable_files_are_listed(photos: Path, tmp_path: Path) -> None:
    (photos / "broken.png").write_bytes(b"no image")
    result = attention(photos, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "broken.png" in result.output
    assert (tmp_path / "out" / "cat.attention.png").exists()


def features(*words: Any) -> Any:
    return CliRunner().invoke(app, ["features", *map(str, words), "-m", "embedded", "--device", "cpu"])


@pytest.mark.parametrize("words", [[], ["--point", "3,4"], ["--layer", 2, "--part", "keys"]])
def test_features_of_all_images_are_one_figure(photos, tmp_path, words):
    result = features(photos / "cat.png", *words, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "features.png").width > 400
    with np.load(tmp_path / "features.npz") as arrays:
        assert arrays["values"].shape[:3] == (1, 8, 8) and arrays["names"].tolist() == ["cat"]


@pytest.mark.parametrize("words", [["--point", "3"], ["--point", "9,9"], ["--layer", 6], ["--part", "heads"]])
def test_what_has_no_features_is_named(photos, tmp_path, words):
    result = features(photos / "cat.png", *words, "-o", tmp_path / "out")
    assert result.exit_code == 2 and words[0].strip("-") in result.output
    assert not (tmp_path / "out").exists()


def look(command: str, *words: Any) -> Any:
    return CliRunner().invoke(app, [command, *map(str, words), "-m", "embedded", "--device", "cpu"])


def test_outliers_of_all_images_and_a_sentence(photos: Path, tmp_path: Path) -> None:
    result = look("outliers", photos, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    expected = sg.outliers("embedded", photos)
    assert expected.advice in " ".join(result.output.split())
    with np.load(tmp_path / "out" / "outliers.npz") as arrays:
        assert np.allclose(arrays["norms"], expected.norms) and arrays["mask"].shape == (2, 8, 8)
        assert arrays["attention"].shape == (2, 6, 8, 8) and arrays["names"].tolist() == ["cat", "more-cat"]
    assert Image.open(tmp_path / "out" / "outliers.png").size == expected.figure().size


def test_lens_of_each_image_adds_up_to_its_logit(photos: Path, tmp_path: Path) -> None:
    (photos / "broken.png").write_bytes(b"no image")
    result = look("lens", photos, "--target", "dog", "-o", tmp_path / "out")
    assert result.exit_code == 1 and "broken.png" in result.output and "dog, logit" in result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"{n}.{kind}.png" for n in ("cat", "cat-1") for kind in ("lens", "patches")} | {
        "lens.csv"
    }
    table = pd.read_csv(tmp_path / "out" / "lens.csv")
    parts = table[~table.part.str.startswith("head")].groupby("image").logit.sum()
    expected = sg.lens("embedded", photos / "cat.png", "dog").logit
    assert parts["cat"] == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        ("lens", ["--target", "giraffe"], "giraffe"),
        ("lens", ["--target", "10"], "10"),
        ("lens", ["--text", "a cat"], "text tower"),
        ("outliers", ["--limit", "0"], "--limit"),
    ],
)
def test_errors_of_lens_and_outliers(
    command: str, words: list[str], named: str, photos: Path, tmp_path: Path
) -> None:
    result = look(command, photos / "cat.png", *words, "-o", tmp_path / "out")
    assert result.exit_code == 2 and named in result.output and not (tmp_path / "out").exists()
