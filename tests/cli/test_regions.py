"""`steadygaze explain --region`: a folder of a segmenter, a point and a box."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from benchmarks import region_zoo
from steadygaze.cli import app

NAMES = {0: "road", 1: "sky", 2: "car", 3: "tree", 4: "person"}


@pytest.fixture(scope="module")
def segformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segformer")
    model = region_zoo.segformer().float()
    model.config.id2label = NAMES
    model.save_pretrained(folder)
    transformers.SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "street.png")
    return folder


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("region", ["point=12,8", "box=0,16,64,64"])
def test_explain_writes_the_map_of_a_region(segformer: Path, tmp_path: Path, region: str) -> None:
    image, out = segformer / "street.png", tmp_path / "out"
    run(
        "explain",
        image,
        "--model",
        segformer,
        "--region",
        region,
        "--target",
        "car",
        "--out",
        out,
        "--method",
        "ixg",
    )
    loaded = sg.load_model(str(segformer))
    kind, _, numbers = region.partition("=")
    target = sg.Region("car", **{kind: [int(number) for number in numbers.split(",")]})
    tensor = loaded.preprocess(Image.open(image))[None]
    expected = sg.explain(loaded, tensor, target, "ixg")
    with np.load(out / "scores.npz") as written:
        (scores,) = (written[name] for name in written.files if name.startswith("ixg"))
    torch.testing.assert_close(torch.tensor(scores).reshape(expected.scores.shape), expected.scores)
    assert "car" in json.dumps(json.loads((out / "manifest.json").read_text()))


def test_wrong_regions_get_words(segformer: Path, tmp_path: Path) -> None:
    image, out = segformer / "street.png", ("--out", tmp_path)
    words = ("explain", image, "--model", segformer, *out)
    assert "expected point=X,Y or box=" in run(*words, "--region", "circle=1,2", code=2)
    assert "64 pixels wide" in run(*words, "--region", "point=64,2", code=2)
    assert "--region point=X,Y" in run(*words, code=2)
    embedded = run("explain", image, "--model", "embedded", "--region", "point=1,2", *out, code=2)
    assert "expected a segmenter" in embedded
