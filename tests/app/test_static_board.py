"""The page without a server: its numbers are those of the model, and everything is in one file."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steadygaze as sg
from steadygaze.errors import InputError
from steadygaze.loading.loaded import LoadedModel

pytest.importorskip("gradio")
from tools.static_board import ROOT, SEED, static_page

FILE = sorted((Path(sg.__file__).parent / "assets" / "demo").glob("*.png"))[0]
METHODS, ORDERS = ("gaze_outline", "rollout"), 2
ATTACK = "</script><script>window.attacked=1</script>"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def page(loaded: LoadedModel) -> str:
    return static_page(loaded, {"an example": Image.open(FILE)}, METHODS, orders=ORDERS)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@torch.no_grad()
def without(loaded: LoadedModel, patches: list[int]) -> torch.Tensor:
    """The prediction without these patches, one run for itself."""
    vit = sg.adapt(loaded)
    tokens = vit.embed(loaded.preprocess(Image.open(FILE))[None])
    keep = [patch for patch in range(vit.grid[0] * vit.grid[1]) if patch not in patches]
    return vit.logits(vit.select(tokens, torch.tensor([keep], dtype=torch.long))).softmax(-1)[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_are_those_of_the_model_without_these_patches(
    loaded: LoadedModel, page: str, method: str
) -> None:
    data = data_of(page)
    (image,) = data["images"]
    stored, half = image["maps"][METHODS.index(method)], data["unit"] / 2 + 1e-5
    scores = sg.explain(loaded, Image.open(FILE), method=method).scores[0].flatten()
    order = scores.argsort(descending=True, stable=True).tolist()
    explained = int(without(loaded, []).argmax())
    assert stored["order"] == order and len(stored["explained"]) == len(stored["top"]) == len(order) + 1
    assert loaded.class_names and image["classes"][image["explained"]] == loaded.class_names[explained]
    for count in (0, 1, 13, 40, len(order)):
        expected = without(loaded, order[:count])
        assert abs(stored["explained"][count] * data["unit"] - float(expected[explained])) <= half
        classes, shares = stored["top"][count][::2], stored["top"][count][1::2]
        assert image["classes"][classes[0]] == loaded.class_names[int(expected.argmax())]
        top = expected.topk(3).values.tolist()
        assert all(abs(p * data["unit"] - q) <= half for p, q in zip(shares, top, strict=True))


def test_chance_is_the_mean_of_random_orders(loaded: LoadedModel, page: str) -> None:
    data = data_of(page)
    (image,) = data["images"]
    generator = torch.Generator().manual_seed(SEED)
    orders = [torch.randperm(64, generator=generator).tolist() for _ in range(ORDERS)]
    explained = int(without(loaded, []).argmax())
    for count in (0, 20, 64):
        expected = sum(float(without(loaded, order[:count])[explained]) for order in orders) / ORDERS
        assert abs(image["chance"][count] * data["unit"] - expected) <= data["unit"] / 2 + 1e-5


def test_nothing_is_loaded_and_names_are_only_text(loaded: LoadedModel) -> None:
    assert loaded.class_names
    named = replace(loaded, class_names=tuple(f"{n} {ATTACK}" for n in range(len(loaded.class_names))))
    page = static_page(named, {ATTACK: Image.open(FILE)}, ("random",), model=ATTACK, orders=1)
    assert page.count("<script") == page.count("</script>") == 3 and "attacked=1</" not in page
    assert data_of(page)["images"][0]["name"] == ATTACK
    addresses = re.findall(r"\b(?:src|href)=[\"']?([^\"'\s>]+)|url\(([^)]+)\)|@import", page)
    assert all(href.startswith("data:") or url == "#sg-hatch" for href, url in addresses)


def test_a_model_whose_patches_cannot_be_removed_gets_words() -> None:
    import timm

    torch.manual_seed(0)
    tiny = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 4)}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **tiny, num_classes=5).eval()
    with pytest.raises(InputError, match="patches can be removed"):
        static_page(sg.load_model(swin), {}, METHODS)


def test_the_page_of_the_site_is_made_of_the_current_files() -> None:
    """If it fails: `python tools/static_board.py`."""
    page = (ROOT / "docs" / "what_if.html").read_text(encoding="utf-8")
    app = files("steadygaze.app")
    sources = [app / "board.html", app / "board.js", app / "page.css", ROOT / "tools" / "static_board.js"]
    for source in sources:
        assert source.read_text(encoding="utf-8").rstrip() in page, source.name
