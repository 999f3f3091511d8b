"""The page in a real browser, used as a visitor uses it: mouse, finger, desktop and phone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import steadygaze as sg
from helpers.browser import DESKTOP, PHONE, TIMEOUT, chromium
from steadygaze.loading.loaded import LoadedModel

pytest.importorskip("gradio")
from helpers.page import served
from tools.static_board import static_page

pytestmark = pytest.mark.browser
IMAGE_FILE = sorted((Path(sg.__file__).parent / "assets" / "demo").glob("*.png"))[0]
SIDE = 8  # patches of the embedded model
ATTACK = '<img src=x onerror="window.attacked=1">${window.attacked=1}{{window.attacked=1}}'
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(browser: Any, loaded: LoadedModel) -> Iterator[str]:
    with served(loaded) as address:
        yield address


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[OpenPage]:
    """Opens the page; a test fails if the page has an error in JavaScript."""
    contexts, errors = [], []

    def opened(device: dict[str, Any] = DESKTOP, url: str = address) -> Any:
        context = browser.new_context(**device)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#sg-main")
        expect(page.locator("#sg-prediction")).to_contain_text("%")  # of the first example
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def upload(page: Any, file: Path) -> None:
    page.locator("#sg-image input[type=file]").first.set_input_files(file)


def explain(page: Any) -> None:
    page.get_by_role("tab", name="Why?").click()
    page.get_by_role("button", name="Explain", exact=True).click()


def what_if(page: Any) -> Any:
    """The board of patches, when its map is there."""
    page.get_by_role("tab", name="What if?").click()
    page.wait_for_selector(".sg-map-pane img[src^=data]")
    return page.locator(".sg-board")


def center(page: Any, patch: int, pane: str = "image") -> tuple[float, float]:
    """The center of a patch on the screen."""
    page.locator(f".sg-{pane}-pane").scroll_into_view_if_needed()
    box = page.locator(f".sg-{pane}-pane").bounding_box()
    row, column = divmod(patch, SIDE)
    return box["x"] + box["width"] * (column + 0.5) / SIDE, box["y"] + box["height"] * (row + 0.5) / SIDE


def expect_removed(page: Any, count: int) -> None:
    """Both the board and the prediction know of this number of removed patches."""
    expect(page.locator(".sg-board")).to_have_attribute("data-removed", str(count))
    expect(page.locator("#sg-summary")).to_contain_text(f"{count} of {SIDE * SIDE} patches removed")


def test_upload_explain_and_verify(open_page: OpenPage, loaded: LoadedModel) -> None:
    page = open_page()
    page.get_by_label("Remove Image").click()
    expect(page.locator("#sg-prediction")).not_to_contain_text("%")
    upload(page, IMAGE_FILE)
    expect(page.locator("#sg-prediction")).to_contain_text("%")
    predicted = page.locator("#sg-prediction").inner_text()
    assert any(name in predicted for name in loaded.class_names or ())
    explain(page)
    maps = page.locator("#sg-maps img")
    expect(maps).to_have_count(4)
    for index in range(4):  # sharp: a lossless file with at least as many pixels as are shown
        image = maps.nth(index)
        assert image.get_attribute("src").endswith(".png")
        assert image.evaluate("image => image.naturalWidth >= image.clientWidth")
    expect(page.get_by_text("most evidence for the class").first).to_be_visible()
    page.get_by_label("Also show evidence against the class").check()
    expect(page.get_by_text("against the class", exact=True).first).to_be_visible()
    page.get_by_role("tab", name="Is it true?").click()
    page.get_by_role("button", name="Verify", exact=True).click()
    rows = page.locator("[role=gridcell], td").filter(has_text="random")
    expect(rows.first).to_be_visible()


def test_the_page_opens_with_attention_and_a_click_is_a_query(open_page: OpenPage) -> None:
    page = open_page()
    seen, caption = page.locator("#sg-look img").first, page.locator("#sg-look-caption")
    expect(caption).to_contain_text("Attention of layer 5, mean of 4 heads")
    expect(seen).to_be_visible()
    box = seen.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / SIDE, box["y"] + box["height"] * 5.5 / SIDE)
    expect(caption).to_contain_text("patch (5, 2)")
    page.get_by_label("Similar patches").check()
    expect(caption).to_contain_text("similarity of features of layer 5 to patch (5, 2)")
    page.get_by_label("Principal components").check()
    expect(caption).to_contain_text("Principal components")
    page.get_by_label("Attention", exact=True).check()
    page.get_by_role("button", name="Without a patch").click()
    expect(caption).to_contain_text("the class token")


def test_ten_quick_clicks_are_ten_patches(open_page: OpenPage) -> None:
    page = open_page()
    what_if(page)
    image, heatmap = (page.locator(f".sg-{name}-pane").bounding_box() for name in ("image", "map"))
    assert heatmap["x"] >= image["x"] + image["width"] and abs(heatmap["y"] - image["y"]) < 30
    for patch in range(20, 30):
        page.mouse.click(*center(page, patch))
    expect_removed(page, 10)
    for patch in (20, 21, 40):  # two are restored, one is removed, on the map
        page.mouse.click(*center(page, patch, "map"))
    expect_removed(page, 9)
    page.get_by_role("button", name="Restore all patches").click()
    expect_removed(page, 0)
    page.get_by_role("button", name="Remove the most relevant patches").click()
    expect_removed(page, 13)


def test_a_drag_removes_every_patch_below_it(open_page: OpenPage) -> None:
    page = open_page()
    what_if(page)
    for steps in (1, 5):  # few events or many: the second drag restores
        page.mouse.move(*center(page, 16))
        page.mouse.down()
        page.mouse.move(*center(page, 23), steps=steps)
        page.mouse.up()
        expect_removed(page, 8 if steps == 1 else 0)


def test_the_keyboard_removes_patches(open_page: OpenPage) -> None:
    page = open_page()
    what_if(page)
    page.locator(".sg-image-pane").focus()
    for key in ("ArrowUp", "ArrowDown", "ArrowRight", "Space", "ArrowRight", "Enter"):  # not above the image
        page.keyboard.press(key)
    expect_removed(page, 2)
    expect(page.locator(".sg-spoken")).to_have_text("row 2, column 3: removed")
    page.keyboard.press("Tab")  # the map has the same patches and the same position
    expect(page.locator(".sg-map-pane")).to_be_focused()
    page.keyboard.press("Space")
    expect_removed(page, 1)
    expect(page.locator(".sg-spoken")).to_have_text("row 2, column 3: kept")


def test_a_phone(open_page: OpenPage) -> None:
    page = open_page(PHONE)
    for name in ("Look", "Why?", "Is it true?", "What if?"):
        box = page.get_by_role("tab", name=name).bounding_box()  # without scrolling
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844
    what_if(page)
    for patch in range(10):
        page.touchscreen.tap(*center(page, patch))
    expect_removed(page, 10)
    # a finger draws on the image
    finger = page.context.new_cdp_session(page)
    for kind, patch in (("touchStart", 24), ("touchMove", 28), ("touchMove", 31), ("touchEnd", None)):
        points = [] if patch is None else [dict(zip("xy", center(page, patch), strict=True))]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    expect_removed(page, 18)
    for name in ("Look", "Why?", "Is it true?", "What if?"):
        page.get_by_role("tab", name=name).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_bad_upload_gets_words(open_page: OpenPage, tmp_path: Path) -> None:
    page, bad = open_page(), tmp_path / "notes.png"
    explain(page)
    expect(page.locator("#sg-maps img")).to_have_count(4)
    bad.write_text("no image")
    page.get_by_label("Remove Image").click()
    upload(page, bad)
    expect(page.get_by_test_id("toast-body")).to_contain_text("notes.png: does not decode as an image")
    expect(page.locator("#sg-prediction")).not_to_contain_text("%")  # nothing of the image before
    expect(page.locator("#sg-maps img")).to_have_count(0)


def test_one_bad_method_does_not_wipe_the_others(open_page: OpenPage) -> None:
    page = open_page()
    methods = page.get_by_label("Methods")
    methods.fill("gradcamm")
    methods.press("Enter")
    methods.press("Escape")
    explain(page)
    expect(page.get_by_test_id("toast-body")).to_contain_text("gradcamm")
    expect(page.locator("#sg-maps img")).to_have_count(4)


def test_names_from_strangers_are_only_text(open_page: OpenPage, loaded: LoadedModel, tmp_path: Path) -> None:
    names = tuple(f"{number} {ATTACK}" for number in range(len(loaded.class_names or ())))
    bad = tmp_path / "<img src=x onerror=window.attacked=1>.png"
    bad.write_text("no image")
    with served(replace(loaded, class_names=names, name=ATTACK)) as address:
        page = open_page(url=address)
        explain(page)
        expect(page.locator("#sg-maps img")).to_have_count(4)
        what_if(page)
        page.mouse.click(*center(page, 3))
        expect(page.locator("#sg-summary")).to_contain_text(ATTACK)
        expect(page.locator(".sg-heading")).to_contain_text(ATTACK)
        page.get_by_label("Remove Image").click()
        upload(page, bad)
        expect(page.get_by_test_id("toast-body")).to_contain_text("onerror")
        assert page.evaluate("window.attacked") is None


def test_the_page_without_a_server(browser: Any, loaded: LoadedModel, tmp_path: Path) -> None:
    methods = ("gaze_outline", "random")
    file, errors = tmp_path / "what_if.html", []
    photos = {path.stem: Image.open(path) for path in IMAGE_FILE.parent.glob("*.png")}
    file.write_text(static_page(loaded, photos, methods, orders=1), encoding="utf-8")
    order = (
        sg.explain(loaded, photos["cat"], method="gaze_outline").scores[0].flatten().argsort(descending=True)
    )
    for device in (DESKTOP, PHONE):
        context = browser.new_context(**device, offline=True)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.locator("label", has=page.get_by_label("cat")).click()
        board, summary = page.locator(".sg-board"), page.locator("#summary")
        slider = page.get_by_label("Brightest patches removed")

        def expect_shown(
            count: int, board: Any = board, summary: Any = summary, slider: Any = slider
        ) -> None:
            expect(board).to_have_attribute("data-removed", str(count))
            expect(summary).to_contain_text(f"{count} of {SIDE * SIDE} patches removed")
            expect(slider).to_have_value(str(count))

        slider.focus()
        page.keyboard.press("Home")
        expect_shown(0)
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect_shown(3)
        touch = page.touchscreen.tap if device is PHONE else page.mouse.click
        touch(*center(page, int(order[20])))  # it and what is brighter
        expect_shown(21)
        touch(*center(page, int(order[9]), "map"))  # is restored, with all that are dimmer
        expect_shown(9)
        before = page.locator(".sg-board path.sg-gone").first.get_attribute("d")
        page.locator("label", has=page.get_by_label("random")).click()
        expect_shown(9)
        assert page.locator(".sg-board path.sg-gone").first.get_attribute("d") != before
        page.get_by_role("button", name="Play").click()
        expect_shown(SIDE * SIDE)
        assert page.evaluate("document.documentElement.scrollWidth") <= device["viewport"]["width"]
        context.close()
    assert errors == []
