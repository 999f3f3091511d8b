"""Mosaics: cells where they belong, metrics as the papers define them, and a run over a folder."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.faithfulness.localization import positive_share
from steadygaze.runs.mosaics import OWN, cell_mask, compose, draw


def plain(value, size=8):
    return torch.full((3, size, size), float(value))


def test_cells_are_in_raster_order_at_half_size():
    mosaic = compose(torch.stack([plain(k) for k in range(4)]))
    assert mosaic.shape == (3, 8, 8)
    assert mosaic[0].unique().tolist() == [0, 1, 2, 3]
    assert [float(mosaic[0, r, c]) for r, c in ((0, 0), (0, 7), (7, 0), (7, 7), (3, 3))] == [0, 1, 2, 3, 0]
    odd = compose(torch.stack([plain(k, 7) for k in range(9)]), side=3).round()
    assert [int((odd[0] == k).sum()) for k in range(9)] == [9, 6, 6, 6, 4, 4, 6, 4, 4]
    mask = cell_mask([k == 4 for k in range(9)], (7, 7), side=3)
    assert ((odd[0] == 4) == (mask == 255)).all()


@pytest.mark.parametrize("kind", OWN)
def test_each_mosaic_has_the_cells_of_its_metric(kind):
    known = {label: [plain(label + 0.1 * k) for k in range(3)] for label in range(6)}
    drawn = draw(kind, known, 12, seed=0)
    assert sorted(drawn.labels.tolist()) == sorted([*range(6)] * 2), "each class equally often"
    shown = set()
    for image, label, mask in zip(drawn.images, drawn.labels.tolist(), drawn.masks, strict=True):
        own = image[0].floor() == label
        assert ((mask == 255) == own).all() and float(own.float().mean()) == OWN[kind] / 4
        cells = image[0, ::4, ::4].flatten()
        assert len(cells.unique()) == 4, "no image twice"
        assert len(cells.floor().unique()) == 5 - OWN[kind], "others of different classes"
        shown.add(tuple(own[::4, ::4].flatten().tolist()))
    assert len(shown) > 2, "cells are shuffled"
    again = draw(kind, known, 12, seed=0)
    assert torch.equal(again.images, drawn.images)


def test_the_share_is_that_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, 4, 4, generator=generator)
    own = [[True, False, False, True], [False, True, False, False]]
    masks = torch.stack([cell_mask(one, (16, 16)) for one in own])
    shares = positive_share(maps, masks)
    for m in range(3):
        for b in range(2):
            heat = maps[m, b].double().numpy()
            quadrants = [heat[:2, :2], heat[:2, 2:], heat[2:, :2], heat[2:, 2:]]
            target = sum(np.sum(q[q > 0]) for q, mine in zip(quadrants, own[b], strict=True) if mine)
            assert float(shares[m, b]) == pytest.approx(100 * target / heat[heat > 0].sum(), abs=1e-9)
    assert positive_share(-maps.abs(), masks).isnan().all()


@pytest.fixture
def folder(tmp_path):
    """Images of patterns, in the folder of the class that the embedded model predicts."""
    loaded = sg.load_model("embedded")
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(60, 3, 4, 4, generator=generator)
    pixels = (255 * torch.nn.functional.interpolate(coarse, 32, mode="bilinear")).byte()
    images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in pixels]
    with torch.no_grad():
        predicted = loaded.model(torch.stack([loaded.preprocess(image) for image in images])).argmax(1)
    for number, (image, label) in enumerate(zip(images, predicted.tolist(), strict=True)):
        place = tmp_path / "images" / loaded.class_names[label]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number}.png")
    assert len(predicted.unique()) >= 4
    return tmp_path / "images"


def test_a_suite_over_a_folder(folder, tmp_path):
    rows = sg.verify("embedded", folder, suite="mosaics", methods=["gaze"], limit=3, out=tmp_path / "run")
    assert {(row["metric"], row["method"]) for row in rows} == {
        (metric, method) for metric in OWN for method in ("gaze", "random")
    }
    assert len(rows) == 2 * 2 * 3 and all(0 <= row["value"] <= 100 for row in rows)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(OWN)
    command = [
        "verify",
        "--suite",
        "mosaics",
        "-m",
        "embedded",
        "-d",
        str(folder),
        "-n",
        "1",
        "--methods",
        "gae",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "focus" in result.output and "gae" in result.output


def test_what_does_not_fit_is_told(folder, tmp_path):
    with pytest.raises(sg.InputError, match="folder of labeled images"):
        sg.verify("embedded", [(torch.zeros(1, 3, 32, 32), torch.zeros(1).long())], suite="mosaics")
    one = tmp_path / "one" / "cat"
    one.mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(one / "a.png")
    with pytest.raises(sg.InputError, match="classes or more"):
        sg.verify("embedded", one.parent, suite="mosaics")
