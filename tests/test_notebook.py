"""What a notebook shows: images with overlays and class names, tables, summaries; escaped, no scripts."""

import base64
import io
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import steadygaze as sg
from helpers import tiny_models

METHODS = ["gaze_removal", "gae"]
HOSTILE = "<script>alert(1)</script>"


def decoded(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def html_images(html: str) -> list[Image.Image]:
    return [
        decoded(base64.b64decode(data)) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    ]


@pytest.fixture(scope="module")
def loaded() -> sg.LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def red() -> Image.Image:
    return Image.new("RGB", (32, 32), (200, 40, 30))


def test_an_attribution_shows_the_image_its_overlay_and_the_class_name(loaded, red):
    att = sg.explain(loaded, loaded.preprocess(red)[None], target="cat")
    html = att._repr_html_()
    original, overlay = html_images(html)
    assert np.abs(np.asarray(original, int) - [200, 40, 30]).max() <= 1, "the normalization is undone"
    assert overlay.size == original.size and original.width >= 224
    assert re.search(r"<figcaption>cat [\d.]+ %</figcaption>", html) and "8 x 8 patches" in html
    assert decoded(att._repr_png_()).width > 2 * 224
    assert "gaze_outline" in repr(att) and "explains cat" in repr(att) and len(repr(att)) < 120


def test_images_stay_with_their_maps_when_an_attribution_is_indexed(loaded):
    colors = [Image.new("RGB", (32, 32), (10 * k, 0, 0)) for k in range(20)]
    images = torch.stack([loaded.preprocess(image) for image in colors])
    att = sg.explain(loaded, images, target=3)
    assert att[5:9].display_image(1).getpixel((0, 0)) == (60, 0, 0)
    assert att[-9].display_image().getpixel((0, 0)) == (110, 0, 0)
    assert att[-1].display_image().getpixel((0, 0)) == (190, 0, 0), "every image is kept"
    assert "and 8 more" in att._repr_html_()


def test_given_images_and_names_come_first(loaded, red):
    att = sg.explain(loaded, loaded.preprocess(red)[None], target=3)
    blue = Image.new("RGB", (64, 64), (0, 0, 255))
    shown = att.with_images([blue])
    assert shown.title() == att.title() and shown.title().startswith("cat")
    assert html_images(shown._repr_html_())[0].getpixel((0, 0)) == (0, 0, 255)
    hostile = att.with_images([blue], [HOSTILE] * 10)
    for html in (hostile._repr_html_(), sg.Attributions(gae=hostile)._repr_html_()):
        assert "<script" not in html and "&lt;script&gt;" in html


def test_several_methods_are_a_dict_that_shows_a_grid(loaded, red):
    both = sg.explain(loaded, loaded.preprocess(red)[None].repeat(2, 1, 1, 1), target="cat", method=METHODS)
    assert isinstance(both, dict) and list(both) == METHODS
    html = both._repr_html_()
    assert len(html_images(html)) == 2 * (1 + len(METHODS))
    assert html.count("<b>cat ") == 2 and all(f"<figcaption>{name}</figcaption>" in html for name in METHODS)
    grid, one = decoded(both._repr_png_()), decoded(both["gae"]._repr_png_())
    assert grid.width > one.width and grid.height == one.height
    lines = repr(both).splitlines()
    assert len(lines) == 4 and all(name in line for name, line in zip(METHODS, lines[1:], strict=False))
    assert sg.Attributions()._repr_html_() == "Attributions({})"


def test_a_module_without_normalization_or_names_is_shown_too():
    model = tiny_models.PLAIN["transformers ViT"]()
    images = tiny_models.images_of(model, batch=1)
    att = sg.explain(model, images, target=1, method="gae")
    original, _ = html_images(att._repr_html_())
    assert {value for band in original.getextrema() for value in band} >= {0, 255}, "stretched"
    assert att.title().startswith("class 1"), "transformers' placeholders are no names"


def test_a_loaded_model_is_a_short_summary_without_paths(loaded):
    assert "0.81 million parameters" in repr(loaded) and "10 classes" in repr(loaded)
    assert len(repr(loaded)) < 200 and "Linear(" not in repr(loaded)
    html = loaded._repr_html_()
    assert "32 x 32" in html and "airplane, automobile, bird, ..." in html and "mean 0.49" in html
    hostile = replace(loaded, name=HOSTILE, class_names=(HOSTILE,) * 10, checkpoint="/home/me/w.pth")
    assert "<script" not in hostile._repr_html_() and "/home" not in hostile._repr_html_()


@pytest.mark.parametrize("listing", ["list_methods", "list_metrics", "list_suites", "list_losses"])
def test_lists_show_themselves_as_tables(listing):
    entries = getattr(sg, listing)()
    html, text = entries._repr_html_(), repr(entries)
    assert isinstance(entries, list) and html.count("<tr>") == 1 + len(entries)
    assert len(text.splitlines()) == 2 + len(entries) and max(map(len, text.splitlines())) <= 110
    assert all(entry.name in html and entry.name in text for entry in entries)
    assert pickle.loads(pickle.dumps(entries)) == entries


def test_rows_show_the_ranking_or_the_card(loaded):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [(images, torch.tensor([0, 1, 2]))]
    metrics = ["insertion_aopc", "deletion_aopc"]
    ranking = sg.verify(loaded, data, methods=[*METHODS, "random"], metrics=metrics)
    assert "of verify: embedded; 3 images, 3 methods, 2 metrics" in repr(ranking)
    html = ranking._repr_html_()
    assert html.count("<tr>") == 1 + 3 and "95 % intervals" in html and "3 images are few" in html
    card = sg.stress(loaded, data, suites=["corruptions"], corruptions="fog", severities=[1])
    assert "of stress: embedded; 3 images, 2 settings" in repr(card)
    assert "fog/1" in card._repr_html_() and "<table>" in card._repr_html_()
