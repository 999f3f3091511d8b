"""Record docs/images/what_if.gif, the tab "What if?" of the page, in headless Chromium.

    python tools/record_board.py [--deit deit_tiny_patch16_224.safetensors] [--frames FOLDER]

The page is that of `steadygaze app` with DeiT-Tiny (from the hub, or the file), on a photograph of
scikit-image. The mouse is drawn into the page, because screenshots do not have it. Needs gradio, playwright
and Chromium (docs/page.md, "Tests in a browser").
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

import steadygaze as sg

ROOT = Path(__file__).parents[1]
VIEWPORT, SCALE = {"width": 1000, "height": 900}, 1.4  # narrow, then enlarged: the words are easy to read
COLORS = 256
TIMEOUT = 120_000  # milliseconds
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# corners of two strokes over the towers beside the rocket, as row and column of a patch
STROKES = (((3, 2), (11, 2), (11, 1), (8, 1)), ((3, 11), (11, 11), (11, 12), (9, 12)))
FIRST, MOVING, READ, LAST = 1600, 220, 2200, 3500  # milliseconds that a frame is shown
CURSOR = """
const cursor = document.createElement("div");
cursor.innerHTML = `<svg width="30" height="30" viewBox="0 0 20 20">
  <path d="M3 1v15l4-4 3 6 2.5-1.2-3-5.8H15z" fill="#111" stroke="#fff" stroke-width="1.4"></path></svg>`;
cursor.style.cssText = "position: fixed; margin: -2px 0 0 -4px; z-index: 99999; pointer-events: none";
document.body.append(cursor);
window.addEventListener("pointermove", (event) => {
  cursor.style.left = `${event.clientX}px`;
  cursor.style.top = `${event.clientY}px`;
}, true);
"""


@dataclass
class Recorder:
    """Frames of the tab, and for how many milliseconds each is shown."""

    page: Any
    clip: dict[str, float]
    frames: list[Image.Image] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)

    def add(self, duration: int) -> None:
        self.frames.append(Image.open(BytesIO(self.page.screenshot(clip=self.clip))).convert("RGB"))
        self.durations.append(duration)


@contextmanager
def served(loaded: sg.LoadedModel) -> Iterator[str]:
    """The address of the page of this model."""
    from steadygaze.app import page

    blocks = page(loaded)
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, inbrowser=False)
    try:
        yield address
    finally:
        blocks.close(verbose=False)


def record(page: Any, photo: Path) -> Recorder:
    """Remove the towers of the rocket's photograph on the page, a stroke each."""
    from playwright.sync_api import expect

    expect.set_options(timeout=TIMEOUT)
    predicted = page.locator("#sg-prediction")
    expect(predicted).to_contain_text("%")  # of the first example
    page.get_by_label("Remove Image").click()
    expect(predicted).not_to_contain_text("%")
    page.locator("#sg-image input[type=file]").first.set_input_files(photo)
    expect(predicted).to_contain_text("crane")
    page.get_by_role("tab", name="What if?").click()
    page.wait_for_selector(".sg-map-pane img[src^=data]")
    page.evaluate(CURSOR)
    pane = page.locator(".sg-image-pane").bounding_box()
    top, board = page.get_by_role("tablist").first.bounding_box(), page.locator(".sg-board").bounding_box()
    edge = 12
    clip = {
        "x": board["x"] - edge,
        "y": top["y"] - edge,
        "width": board["width"] + 2 * edge,
        "height": pane["y"] + pane["height"] - top["y"] + 2 * edge,
    }
    recorder = Recorder(page, clip)

    def center(row: int, column: int) -> tuple[float, float]:
        return pane["x"] + pane["width"] * (column + 0.5) / 14, pane["y"] + pane["height"] * (row + 0.5) / 14

    page.mouse.move(pane["x"] + pane["width"] / 2, pane["y"] + pane["height"] * 0.9)
    recorder.add(FIRST)
    for stroke in STROKES:
        page.mouse.move(*center(*stroke[0]))
        recorder.add(2 * MOVING)
        page.mouse.down()
        for (row, column), (next_row, next_column) in pairwise(stroke):
            if abs(next_row - row) > 4:  # a long way has a frame in the middle
                page.mouse.move(*center((row + next_row) // 2, column))
                recorder.add(MOVING)
            page.mouse.move(*center(next_row, next_column))
            recorder.add(MOVING)
        page.mouse.up()
        removed = page.locator(".sg-board").get_attribute("data-removed")
        expect(page.locator("#sg-summary")).to_contain_text(f"{removed} of 196 patches removed")
        page.wait_for_timeout(1500)  # until the sign of a running call has faded
        recorder.add(READ)
    recorder.durations[-1] = LAST
    return recorder


def save_gif(recorder: Recorder, path: Path) -> None:
    """All frames with one palette, so that only what changes is stored."""
    sheet = Image.new("RGB", (recorder.frames[0].width, sum(frame.height for frame in recorder.frames)))
    for number, frame in enumerate(recorder.frames):
        sheet.paste(frame, (0, number * frame.height))
    palette = sheet.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, kmeans=2)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in recorder.frames]
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=recorder.durations, loop=0, optimize=True
    )


def main() -> None:
    """Record the page of DeiT-Tiny."""
    from playwright.sync_api import sync_playwright
    from skimage import data

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deit", type=Path, metavar="FILE", help="weights of DeiT-Tiny; default: the hub's")
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="write each frame as PNG too")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "what_if.gif")
    options = parser.parse_args()
    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=options.deit)
    with TemporaryDirectory() as folder, served(loaded) as address, sync_playwright() as playwright:
        photo = Path(folder) / "rocket.png"
        Image.fromarray(data.rocket()).save(photo)
        executable = os.environ.get("CHROMIUM") or shutil.which("chromium")  # None: playwright's own
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        page = browser.new_page(viewport=VIEWPORT, device_scale_factor=SCALE, color_scheme="light")
        page.set_default_timeout(TIMEOUT)
        page.goto(address)
        recorder = record(page, photo)
        browser.close()
    save_gif(recorder, options.out)
    if options.frames is not None:
        options.frames.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(recorder.frames):
            frame.save(options.frames / f"{number:02}.png")
    size = options.out.stat().st_size
    print(f"{options.out}: {len(recorder.frames)} frames of {recorder.frames[0].size}, {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
