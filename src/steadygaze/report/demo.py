"""The page of `steadygaze demo`: look, explain, check and corrupt with the embedded model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygaze import __version__
from steadygaze.report.pages import environment, write_all

if TYPE_CHECKING:
    from steadygaze.loading.loaded import LoadedModel

SEVERITIES = (1, 3, 5)
SHOWN = ("gaze_outline", "rollout")


def write_demo(loaded: LoadedModel, images: Sequence[Path], grid: str, out: Path) -> Path:
    """Write attention.png, check.png, fog.png, index.html and the images themselves, in folders of their
    classes, into `out`; returns the page.

    Args:
        grid: Name of the file with the methods side by side, in `out`.
    """
    from steadygaze.look.attention import attention
    from steadygaze.methods.explain import explain

    cat = next((file for file in images if file.stem == "cat"), images[0])
    attention(loaded, cat).figure(layer=-1).save(out / "attention.png")
    checked = explain(loaded, [str(file) for file in images], method=list(SHOWN), check=True)
    checked.figure().save(out / "check.png")
    foggy, predictions = _in_fog(loaded, cat)
    foggy.save(out / "fog.png")
    parts: list[dict[str, Any]] = [
        {
            "title": "Look: what do the heads attend to?",
            "text": "Attention of the class token to the patches in the last block, one map for each head. "
            "Attention says where the model reads, not what it does with it.",
            "file": "attention.png",
            "code": 'sg.attention(model, "cat.png").figure(layer=-1)',
        },
        {
            "title": "Explain: which patches led to this prediction?",
            "text": "Six methods side by side. They do not agree: which one is true?",
            "file": grid,
            "code": 'sg.explain(model, "cat.png", method=["gaze_outline", "gae", "attnlrp"])',
        },
        {
            "title": "Check: is the map true?",
            "text": "Below each map: the probability of the class while the brightest patches are removed "
            "first, the dimmest first, and random ones. A true map has a red curve far below the gray one, "
            "and a blue one above it.",
            "file": "check.png",
            "code": 'sg.explain(model, "cat.png", check=True).check_text()',
        },
        {
            "title": "Stress: and in fog?",
            "text": "The same image under the fog of ImageNet-C, severities 1, 3 and 5, each with the map of "
            "what is predicted.",
            "file": "fog.png",
            "lines": predictions,
            "code": "steadygaze stress --model embedded --data photos --suites corruptions --out run",
        },
    ]
    text = (
        environment()
        .get_template("demo.html")
        .render(model=loaded.name, count=len(images), parts=parts, version=__version__, colors=8)
    )
    for file in images:  # folders of classes, as `verify` and `stress` take them
        (out / "photos" / file.stem).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / "photos" / file.stem / file.name)
    return write_all({out / "index.html": text})[0]


def _in_fog(loaded: LoadedModel, file: Path) -> tuple[Any, list[str]]:
    """The image and its map at each severity, and what is predicted."""
    import numpy as np
    from PIL import Image

    from steadygaze.data.images import read_image
    from steadygaze.methods.explain import explain
    from steadygaze.robustness.corruptions.corrupt import corrupt

    clean = np.asarray(read_image(file))
    views = {"clean": clean, **{f"fog {s}": corrupt(clean, "fog", s, seed=0) for s in SEVERITIES}}
    att = explain(loaded, [Image.fromarray(view) for view in views.values()])
    words = [f"{name}: {att.title(i)}" for i, name in enumerate(views)]
    return att.figure(), words
