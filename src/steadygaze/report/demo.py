"""The page of `steadygaze demo`: look, explain, check and corrupt with the embedded model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from steadygaze import __version__
from steadygaze.report.pages import environment, write_all

if TYPE_CHECKING:
    from steadygaze.loading.loaded import LoadedModel

CHECKED = ("gaze_outline", "gae", "attcat", "rollout")
CORRUPTION, SEVERITIES = "shot_noise", (1, 3, 5)
PHOTOGRAPH = "demo_photograph.jpg"  # of the example image of the cat, whole and large
SIDE = 256  # of the images that the page shows enlarged


@dataclass(frozen=True)
class Shown:
    """An image file beside the page."""

    file: str
    caption: str


@dataclass(frozen=True)
class Part:
    """A section of the page: one wide figure or several images, and the code that makes them."""

    title: str
    text: str
    code: str
    figure: str = ""
    images: Sequence[Shown] = ()


def write_demo(loaded: LoadedModel, images: Sequence[Path], methods: Sequence[str], out: Path) -> Path:
    """Write index.html, its figures, and the images themselves in folders of their classes, into `out`;
    returns the page.

    Args:
        methods: Those that are shown side by side.
    """
    from steadygaze.look.attention import attention
    from steadygaze.methods.explain import explain

    for file in images:  # folders of classes, as `verify` and `stress` take them
        (out / "photos" / file.stem).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / "photos" / file.stem / file.name)
    cat = next((file for file in images if file.stem == "cat"), images[0])
    given = f'"{loaded.name}", "photos/{cat.stem}/{cat.name}"'
    attention(loaded, cat).figure(layer=-1).save(out / "attention.png")
    explained = explain(loaded, cat, method=list(methods))
    explained.figure(cell=168).save(out / "methods.png")
    explain(loaded, cat, method=list(CHECKED), check=True).figure().save(out / "check.png")
    clean, *corrupted = _corrupted(loaded, cat, out)
    parts = [
        Part(
            "Look: what do the heads attend to?",
            "Attention of the class token to the patches in the last block, one map for each head. "
            "Attention says where the model reads, not what it does with it.",
            f"sg.attention({given}).figure(layer=-1)",
            figure="attention.png",
        ),
        Part(
            "Explain: which patches led to this prediction?",
            "Methods side by side. They do not agree: which one is true?",
            f"sg.explain({given}, method={_listed(methods)}).figure()",
            figure="methods.png",
        ),
        Part(
            "Check: is the map true?",
            "Below each map: the probability of the class while the brightest patches are removed "
            "first, the dimmest first, and random ones. A true map has a red curve far below the gray one, "
            "and a blue one above it.",
            f"sg.explain({given}, method={_listed(CHECKED)}, check=True).figure()",
            figure="check.png",
        ),
        Part(
            "Stress: and in poor light?",
            f"The same image with the {CORRUPTION.replace('_', ' ')} of ImageNet-C, as in a photograph with "
            f"too little light, at severities {', '.join(map(str, SEVERITIES))} of 5. "
            "Below: the patches that led to what is then predicted.",
            f"steadygaze stress --model {loaded.name} --data photos --suites corruptions --out run",
            images=[clean, *corrupted],
        ),
    ]
    page = environment().get_template("demo.html")
    photograph = files("steadygaze") / "assets" / PHOTOGRAPH
    (out / "photograph.jpg").write_bytes(photograph.read_bytes())
    photo = Shown("photograph.jpg", "the photograph")
    text = page.render(photo=photo, parts=parts, version=__version__, colors=8)
    return write_all({out / "index.html": text})[0]


def _listed(methods: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{method}"' for method in methods) + "]"


def _corrupted(loaded: LoadedModel, file: Path, out: Path) -> list[Shown]:
    """The input of the model, clean and at each severity, above its map; written to `out`."""
    from PIL import Image

    from steadygaze.data.images import read_image
    from steadygaze.methods.explain import explain
    from steadygaze.results.check import stack
    from steadygaze.results.drawing import enlarged
    from steadygaze.robustness.corruptions.corrupt import corrupt

    clean = loaded.preprocess.pixels(read_image(file))
    views = {"clean": clean, **{f"severity {s}": corrupt(clean, CORRUPTION, s, seed=0) for s in SEVERITIES}}
    att = explain(loaded, [Image.fromarray(view) for view in views.values()])
    shown = []
    for i, (name, view) in enumerate(views.items()):
        above = enlarged(Image.fromarray(view), SIDE)
        written = f"{CORRUPTION}_{i}.png"
        stack([above, att.overlay(above, i)]).save(out / written)
        shown.append(Shown(written, f"{name}: {att.title(i)}"))
    return shown
