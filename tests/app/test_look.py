"""The tab "Look": attention, similar patches and principal components, and what the page opens with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadygaze as sg
from benchmarks import region_zoo
from steadygaze.app.viewer import Viewer
from steadygaze.data.preprocess import Preprocess
from steadygaze.loading.loaded import LoadedModel
from steadygaze.look.drawing import draw_frame

pytest.importorskip("gradio")

from benchmarks.page_client import Visitor, as_input
from helpers.page import served
from steadygaze.app.layout import ATTENTION, COMPONENTS, SIMILAR, Events, build_page, with_point

IMAGE_FILE = sorted((Path(sg.__file__).parent / "assets" / "demo").glob("*.png"))[0]
ATTACK = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def viewer() -> Viewer:
    return Viewer(sg.load_model("embedded"))


def swin() -> LoadedModel:
    torch.manual_seed(0)
    tiny = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 4)}
    model = timm.create_model("swin_tiny_patch4_window7_224", **tiny, num_classes=5).eval()
    return LoadedModel(model, "tiny", Preprocess.resize_and_crop((64, 64), mean=(0.0,) * 3, std=(1.0,) * 3))


def backbone() -> LoadedModel:
    return sg.load_model(timm.create_model("test_vit", num_classes=0).eval())


def calls(module: torch.nn.Module, run: Callable[[], Any]) -> int:
    """How often a module runs."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = module.register_forward_hook(counted)
    try:
        run()
    finally:
        hook.remove()
    return count


def test_attention_is_that_of_the_library(viewer: Viewer) -> None:
    read = sg.attention(viewer.loaded, IMAGE_FILE)
    read = replace(read, shown=(viewer.shown(IMAGE_FILE),))
    for head, pixel, query in ((None, None, None), (2, (10, 20), (5, 2))):
        expected = read.overlay(3, "mean" if head is None else head, query)
        look = viewer.attention_overlay(IMAGE_FILE, 3, head, pixel)
        assert np.array_equal(np.asarray(look.image), np.asarray(expected))
        assert look.heads == 4 and look.head == head
    assert "patch (5, 2)" in look.caption and "head 2" in look.caption


def test_attention_is_one_forward_pass(viewer: Viewer) -> None:
    model = viewer.loaded.model
    for look in (lambda: viewer.attention_overlay(IMAGE_FILE, 3, 1), lambda: viewer.pca(IMAGE_FILE)):
        assert calls(model.patch_embed, look) == 1
    assert calls(model.blocks[3], lambda: viewer.attention_overlay(IMAGE_FILE, 3, 1, (3, 4))) == 2


def test_similar_patches_and_components(viewer: Viewer) -> None:
    look = viewer.similar(IMAGE_FILE, 2, (31, 0))
    values = sg.features(viewer.loaded, IMAGE_FILE, 2).similarity(0, (0, 7))[0]
    assert f"patch (0, 7): {float(values.min()):.2f} to 1.00" in look.caption and look.heads is None
    framed = look.image.copy()
    draw_frame(framed, (8, 8), (0, 7))
    assert np.array_equal(np.asarray(framed), np.asarray(look.image))  # the frame was there
    assert "patch (4, 4)" in viewer.similar(IMAGE_FILE).caption  # the center
    colors = np.asarray(viewer.pca(IMAGE_FILE, 5).image)
    assert colors.shape == (672, 672, 3) and colors.std() > 0


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ((ATTENTION, 6, True, 0, ""), "0..5"),
        ((ATTENTION, 0, False, 4, ""), "0..3"),
        ((ATTENTION, 0, False, "x", ""), "0..3"),
        ((ATTENTION, 0, True, 0, "32, 0"), "0..31"),
        ((SIMILAR, 0, True, 0, "here"), "pixel"),
        ((SIMILAR, None, True, 0, ""), "0..5"),
        (("Dreams", 0, True, 0, ""), "Attention"),
    ],
)
def test_what_does_not_exist_is_named_with_what_exists(viewer: Viewer, inputs: Any, word: str) -> None:
    with pytest.raises(sg.SteadygazeError, match=word):
        Events(viewer).look(IMAGE_FILE, *inputs)


def test_events_show_every_view(viewer: Viewer) -> None:
    events = Events(viewer)
    for kind in (ATTENTION, SIMILAR, COMPONENTS):
        image, legend, caption, heads, _ = events.look(IMAGE_FILE, kind, 5, True, 0, "")
        assert isinstance(image, Image.Image) and "layer 5" in caption
        assert heads.visible == (kind == ATTENTION) and bool(legend) == (kind != COMPONENTS)
    *_, slider = events.look(IMAGE_FILE, ATTENTION, 5, False, 3, "0, 0")
    assert slider["maximum"] == 3 and slider["value"] == 3
    assert events.look(None, ATTENTION, 5, True, 0, "")[0] is None


def test_layers_with_other_heads_and_grids() -> None:
    events = Events(Viewer(swin()))
    *_, caption, _, slider = events.look_at_layer(IMAGE_FILE, ATTENTION, 1, False, 3, "63, 63")
    assert slider["maximum"] == 3 and "patch (7, 7)" in caption
    *_, caption, _, slider = events.look_at_layer(IMAGE_FILE, ATTENTION, 0, False, 3, "63, 63")
    assert slider["maximum"] == 1 and slider["value"] == 1 and "patch (15, 15)" in caption
    assert "layer 0" in events.look(IMAGE_FILE, SIMILAR, 0, True, 0, "")[2]


def test_attention_that_cannot_be_read_gets_words(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise sg.MethodUnavailableError(f"no attention {ATTACK}")

    monkeypatch.setattr("steadygaze.app.viewer.attention", refused)
    image, _, caption, heads, _ = Events(viewer).look(IMAGE_FILE, ATTENTION, 0, True, 0, "")
    assert image.size == (672, 672) and not heads.visible
    assert "no attention" in caption and "<img" not in caption


def test_a_segmenter_is_looked_at() -> None:
    names = ("road", "sky", "car", "tree", "person")
    preprocess = Preprocess.resize_and_crop(size=(64, 64))
    loaded = sg.load_model(region_zoo.segformer().float(), preprocess=preprocess, class_names=names)
    viewer = with_point(Viewer(loaded), "")
    for kind in (ATTENTION, SIMILAR, COMPONENTS):
        image, *_ = Events(viewer).look(IMAGE_FILE, kind, 0, True, 0, "")
        assert isinstance(image, Image.Image)
    build_page(Viewer(loaded))


def test_the_page_opens_with_an_image_and_its_result(viewer: Viewer) -> None:
    with served(viewer.loaded) as address:
        visitor = Visitor(address)
        config = visitor.http.get(f"{address}config").json()
        components = config["components"]
        (upload,) = (c for c in components if c["props"].get("elem_id") == "sg-upload")
        tabs = [c["props"]["label"] for c in components if c["type"] == "tabitem"]
        assert tabs == ["Look", "Why?", "Is it true?", "What if?"]
        look = next(d for d in config["dependencies"] if d["api_name"] == "look")
        assert "load" in [event for _, event in look["targets"]]
        load = next(d for d in config["dependencies"] if d["api_name"] == "load")
        assert load["trigger_after"] == look["id"]
        image = as_input(upload["props"]["value"]["path"])
        answer = visitor.call("look", image, ATTENTION, 5, True, 0, "")
        assert answer.error is None and answer.data[0]["path"] and "layer 5" in answer.data[2]
        answer = visitor.call("look", image, ATTENTION, 7, True, 0, "")
        assert answer.error is not None and "0..5" in answer.error


def test_the_page_of_a_backbone_has_the_tab_alone() -> None:
    with served(backbone()) as address:
        visitor = Visitor(address)
        components = visitor.http.get(f"{address}config").json()["components"]
        assert [c["props"]["label"] for c in components if c["type"] == "tabitem"] == ["Look"]
        answer = visitor.call("look", visitor.upload(IMAGE_FILE), COMPONENTS, 0, True, 0, "")
        assert answer.error is None and "layer 0" in answer.data[2]


def test_the_page_arrives_with_its_first_result(viewer: Viewer) -> None:
    """Before any event: the image that is served with the page is the attention of the example."""
    components = build_page(viewer).config["components"]
    shown = next(c["props"] for c in components if c["props"].get("elem_id") == "sg-look")
    caption = next(c["props"] for c in components if c["props"].get("elem_id") == "sg-look-caption")
    last = len(viewer.vit.blocks) - 1
    wanted = viewer.attention_overlay(IMAGE_FILE, last, None, None)
    assert np.array_equal(np.asarray(Image.open(shown["value"]["path"])), np.asarray(wanted.image))
    assert wanted.caption.split(",")[0] in caption["value"]
