"""Write docs/what_if.html, the board of patches with predictions computed beforehand: it needs no server.

    python tools/static_board.py [--deit deit_tiny_patch16_224.safetensors] [--out docs/what_if.html]

One file with everything in it, about 400 kB. The board is drawn and operated by the files of
`steadygaze app` (board.html, board.js, page.css), and static_board.js chooses what is shown. Needs DeiT-Tiny
(from the hub, or the file), gradio and the photographs of scikit-image; takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from markupsafe import Markup
from PIL import Image
from torch import Tensor

import steadygaze as sg
from steadygaze.app.viewer import Viewer
from steadygaze.errors import InputError
from steadygaze.files import write_atomic
from steadygaze.report.pages import environment
from steadygaze.target import NOUNS, output_name
from steadygaze.vit.removal import ranking, reads_nothing, subset_logits

ROOT = Path(__file__).parents[1]
METHODS = ("gaze_outline", "gae", "rollout", "random")
PHOTOS = {  # in scikit-image: what it shows, and who took it
    "rocket": ("rocket", "rocket by SpaceX (public domain)"),
    "camera": ("photographer", "photographer by Lav Varshney (CC0)"),
    "coffee": ("coffee", "coffee by Rachel Michetti (CC0)"),
    "chelsea": ("cat", "cat by Stéfan van der Walt (CC0)"),
}
RANDOM_ORDERS, SEED = 10, 0
TOP = 3  # classes that are shown at each number of patches
UNIT = 1e-4  # probabilities are stored as multiples of this
SIDE, QUALITY = 448, 78  # pixels and quality of images in the page


@torch.no_grad()
def probabilities_along(
    viewer: Viewer, image: Tensor, order: Int[Tensor, " p"]
) -> Float[Tensor, "k classes"]:
    """The prediction without the first k patches of `order`, for k = 0, 1, ... up to all of them.

    Args:
        image: (1, C, H, W), normalized.
    """
    counts = torch.arange(len(order) + 1)
    keep = order.argsort() >= counts[:, None]
    first = torch.zeros(len(counts), dtype=torch.long)
    tokens = viewer.vit.embed(image)
    return subset_logits(viewer.vit, image, tokens, keep, first, "remove").double().softmax(-1)


def curves_of(viewer: Viewer, photo: Image.Image, methods: Sequence[str], orders: int) -> dict[str, Any]:
    """What the page shows of one image (static_board.js describes it)."""
    image = viewer.loaded.preprocess(photo)[None]
    maps = viewer.maps(photo, methods)
    shown = viewer.shown(photo)
    shown = shown.resize((SIDE, round(SIDE * shown.height / shown.width)), Image.Resampling.LANCZOS)
    order = {name: ranking(attribution.scores)[0] for name, attribution in maps.items()}
    along = {name: probabilities_along(viewer, image, ranked) for name, ranked in order.items()}
    best = {
        name: probabilities.topk(min(TOP, probabilities.shape[1])) for name, probabilities in along.items()
    }
    explained = int(best[methods[0]].indices[0, 0])
    generator = torch.Generator().manual_seed(SEED)
    patches = len(order[methods[0]])
    chance = torch.stack(
        [
            probabilities_along(viewer, image, torch.randperm(patches, generator=generator))[:, explained]
            for _ in range(orders)
        ]
    ).mean(0)
    used = sorted({explained}.union(*(found.indices.unique().tolist() for found in best.values())))
    place = {index: number for number, index in enumerate(used)}

    def top(method: str) -> list[list[int]]:
        """The most probable classes at each k: class, probability, class, probability, ..."""
        pairs = zip(best[method].indices.tolist(), best[method].values, strict=True)
        return [
            [number for index, p in zip(indices, stored(values), strict=True) for number in (place[index], p)]
            for indices, values in pairs
        ]

    return {
        "image": small_url(shown),
        "classes": class_names(viewer, used),
        "explained": place[explained],
        "chance": stored(chance),
        "maps": [
            {
                "map": small_url(maps[name].overlay(shown, mode="nearest")),
                "order": order[name].tolist(),
                "explained": stored(along[name][:, explained]),
                "top": top(name),
            }
            for name in methods
        ],
    }


def stored(probabilities: Float[Tensor, " n"]) -> list[int]:
    """Probabilities as whole multiples of `UNIT`."""
    return (probabilities / UNIT).round().long().tolist()


def class_names(viewer: Viewer, classes: Sequence[int]) -> list[str]:
    """Names up to their first comma; in full where two of these classes would have the same name."""
    short = [output_name("classes", index, viewer.loaded.class_names).split(",")[0] for index in classes]
    count = Counter(short)
    return [
        name if count[name] == 1 else viewer.classes[index]
        for name, index in zip(short, classes, strict=True)
    ]


def small_url(image: Image.Image) -> str:
    """The image as WebP in a URL: far fewer bytes than the PNG of the app's `data_url`."""
    buffer = BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY, method=6)
    return f"data:image/webp;base64,{b64encode(buffer.getvalue()).decode()}"


def static_page(
    loaded: sg.LoadedModel,
    photos: Mapping[str, Image.Image],
    methods: Sequence[str] = METHODS,
    *,
    model: str = "",
    credits: str = "",
    orders: int = RANDOM_ORDERS,
) -> str:
    """The page as HTML.

    Args:
        photos: By the name under which each is shown.
        model: The name of the model in the text; by default that of `loaded`.
        orders: Number of random orders, of which chance is the mean.
    """
    from steadygaze.app.layout import legend

    viewer = Viewer.of(loaded)
    if viewer.outputs != "classes" or viewer.removal_mode != "remove":
        raise InputError(f"expected a classifier whose patches can be removed, got {loaded.name}")
    summaries = {info.name: info.summary for info in sg.list_methods()}
    rows, columns = viewer.vit.grid
    data = {
        "rows": rows,
        "columns": columns,
        "unit": UNIT,
        "methods": [{"name": name, "about": summaries[name]} for name in methods],
        "images": [
            {"name": name, **curves_of(viewer, photo, methods, orders)} for name, photo in photos.items()
        ],
    }
    # no name can end the element that the data are in
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")

    def source(folder: Any, name: str) -> Markup:
        return Markup((folder / name).read_text(encoding="utf-8").rstrip())

    app, here = files("steadygaze.app"), Path(__file__).parent
    template = (here / "static_board.html").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(template)
        .render(
            model=model or loaded.name,
            patches=rows * columns,
            orders=orders,
            credits=credits,
            version=sg.__version__,
            colors=8,
            class_token=not reads_nothing(viewer.vit),
            board=source(app, "board.html"),
            board_script=source(app, "board.js"),
            board_style=source(app, "page.css"),
            script=source(here, "static_board.js"),
            colors_of_maps=Markup(legend(False, NOUNS["classes"])),
            data=Markup(text),
        )
    )


def main() -> None:
    """Write the page of DeiT-Tiny."""
    from skimage import data

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deit", type=Path, metavar="FILE", help="weights of DeiT-Tiny; default: the hub's")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "what_if.html")
    options = parser.parse_args()
    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=options.deit)
    photos = {
        shown: Image.fromarray(getattr(data, name)()).convert("RGB") for name, (shown, _) in PHOTOS.items()
    }
    credits = ", ".join(credit for _, credit in PHOTOS.values()) + ", all from scikit-image"
    page = static_page(loaded, photos, model="DeiT-Tiny", credits=credits)
    print(f"{write_atomic(options.out, page)}: {len(page.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
