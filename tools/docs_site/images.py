"""Images of the reference, drawn with the embedded model on the demo images when the site is built."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import steadygaze as sg
from steadygaze.results.attribution import Attribution
from steadygaze.runs.samples import read_index
from steadygaze.training.losses import LOSSES, LossBatch, LossSetup
from tools.docs_site.illustrations import illustrations

SIDE, GAP = 256, 12
WIDE = 500  # pixels: a sheet of several images
SHOWN = 1  # images of a loss's page
COMPARED = ("gaze_removal", "gae", "rollout", "gradcam", "random")
STRESS_OPTIONS: Mapping[str, dict[str, Any]] = {"corruptions": {"severities": (3,)}}


@dataclass(frozen=True)
class Demo:
    """The embedded model with the demo images. masks: the central half of each image, for illustration."""

    loaded: sg.LoadedModel
    images: Tensor
    labels: Tensor
    masks: Tensor


def demo() -> Demo:
    loaded = sg.load_model("embedded")
    folder = files("steadygaze") / "assets" / "demo"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".png")), key=lambda p: p.name)
    assert loaded.class_names is not None
    names = list(loaded.class_names)
    opened = [Image.open(BytesIO(path.read_bytes())).convert("RGB") for path in paths]
    images = torch.stack([loaded.preprocess(image) for image in opened])
    labels = torch.tensor([names.index(path.name.removesuffix(".png")) for path in paths])
    height, width = images.shape[-2:]
    masks = torch.zeros(len(images), height, width)
    masks[:, height // 4 : -height // 4, width // 4 : -width // 4] = 1
    return Demo(loaded, images, labels, masks)


def metric_images(shown: Demo) -> Iterator[tuple[str, bytes]]:
    """(file, SVG) of every metric that can be measured on the demo images: bars of five methods."""
    for info in sg.list_metrics():
        masks = 255 * shown.masks
        batch = (shown.images, shown.labels, masks) if info.needs_masks else (shown.images, shown.labels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(sg.SteadygazeError):  # metrics of other tasks
                rows = sg.verify(shown.loaded, [batch], methods=list(COMPARED), metrics=[info.name])
                values = {name: [r["value"] for r in rows if r["method"] == name] for name in COMPARED}
                means = {name: sum(each) / len(each) for name, each in values.items() if each}
                if means:
                    better = f"{info.better} is better" if info.better != "neither" else ""
                    title = f"{info.label} on four demo images{', ' + better if better else ''}"
                    yield f"metrics/{info.name}.svg", bars(title, means, info.unit).encode()


def suite_images(shown: Demo) -> Iterator[tuple[str, bytes]]:
    """(file, PNG) of every suite: the samples that a report shows, or an illustration if it needs data of
    others."""
    drawn = illustrations(shown.loaded, shown.images)
    for name, tiles in drawn.items():
        yield f"suites/{name}.png", png(beside(tiles))
    for info in sg.list_suites():
        if info.name in drawn:
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Path(folder) / "run"
            data = Path(folder) / "photos"
            _write_photos(shown, data)
            with contextlib.suppress(sg.SteadygazeError):
                given = STRESS_OPTIONS.get(info.name, {})
                sg.stress(shown.loaded, data, suites=[info.name], limit=1, out=run, **given)
                record = read_index(run)
                names = [] if record is None else list(dict.fromkeys(_files(record)))
                tiles = [Image.open(run / "samples" / name).convert("RGB") for name in names][:10]
                tiles = [tile for tile in tiles if tile.width > WIDE] or tiles  # a sheet says it all
                if tiles:
                    yield f"suites/{info.name}.png", png(beside(tiles))


def loss_images(shown: Demo) -> Iterator[tuple[str, bytes]]:
    """(file, PNG) of every loss: an image beside the size of the loss's gradient at its patches."""
    model = shown.loaded.model
    explained = sg.explain(model, shown.images[:SHOWN], method="gae")
    for name, kind in LOSSES.items():
        given: dict[str, Any] = {"teacher": "embedded"} if name == "distillation" else {}
        loss = kind(kind.Options(**given), LossSetup(model, 1, 10, shown.loaded.preprocess))
        observer = loss.observer()
        masks = shown.masks[:SHOWN] if kind.needs_masks else None
        observers = {} if observer is None else {name: observer}
        batch = LossBatch(model, shown.images[:SHOWN], shown.labels[:SHOWN], masks=masks, observers=observers)
        tokens: list[Tensor] = []
        embedding: Any = model.patch_embed
        hook = embedding.register_forward_hook(lambda *call, kept=tokens: kept.append(call[-1]))
        model.train()
        try:
            values = loss(batch)
        finally:
            hook.remove()
            model.eval()
        total = values if isinstance(values, Tensor) else torch.stack(list(values.values())).sum()
        gradients = torch.autograd.grad(total, tokens, allow_unused=True)
        sizes = [gradient.abs().sum(-1) for gradient in gradients if gradient is not None]
        scores = torch.stack(sizes).sum(0).reshape_as(explained.scores)
        yield f"losses/{name}.png", png(row(shown, replace(explained, scores=scores.detach())))


def row(shown: Demo, maps: Attribution) -> Image.Image:
    """Each image beside its overlay."""
    tiles = []
    for i in range(len(maps)):
        image = shown.loaded.to_image(shown.images[i]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        tiles += [image, maps[i].overlay(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)]
    return beside(tiles)


def beside(tiles: list[Image.Image], columns: int = 5) -> Image.Image:
    """Tiles in rows, on white."""
    width, height = max(t.width for t in tiles), max(t.height for t in tiles)
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * (width + GAP), i // columns * (height + GAP)))
    return sheet


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """A bar chart as SVG; zero is marked where values are negative."""
    low, high = min(0.0, *values.values()), max(0.0, *values.values())
    span = (high - low) or 1.0
    left, width, step = 130, 330, 26

    def place(value: float) -> float:
        return left + (value - low) / span * width

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 {34 + step * len(values)}" width="560" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="6" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (name, value) in enumerate(values.items()):
        y = 30 + i * step
        start, end = sorted((place(0), place(value)))
        lines += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{start:.1f}" y="{y}" width="{max(1.0, end - start):.1f}" height="18" fill="#31688e"/>',
            f'<text x="{end + 6:.1f}" y="{y + 14}">{value:.3g}{" " + escape(unit) if unit else ""}</text>',
        ]
    return "\n".join([*lines, "</svg>"])


def png(image: Image.Image) -> bytes:
    opened = BytesIO()
    image.save(opened, "PNG", optimize=True)
    return opened.getvalue()


def _write_photos(shown: Demo, folder: Path) -> None:
    assert shown.loaded.class_names is not None
    for image, label in zip(shown.images, shown.labels.tolist(), strict=True):
        name = Path(shown.loaded.class_names[label]) / "image.png"
        (folder / name).parent.mkdir(parents=True)
        shown.loaded.to_image(image).save(folder / name)


def _files(record: Any) -> Iterator[str]:
    """Names of image files anywhere in the record of a run's samples."""
    if isinstance(record, Mapping):
        for value in record.values():
            yield from _files(value)
    elif isinstance(record, list):
        for value in record:
            yield from _files(value)
    elif isinstance(record, str) and record.endswith(".jpg") and "/" not in record:
        yield record


def all_images(cache: Path | None = None) -> dict[str, bytes]:
    """Path below reference/images -> content. cache: a folder that keeps them until the package changes."""
    kept = None if cache is None else cache / _package_hash()
    if kept is not None and (kept / "complete").exists():
        return {
            p.relative_to(kept).as_posix(): p.read_bytes() for p in sorted(kept.rglob("*.*")) if p.is_file()
        }
    shown = demo()
    makers = (loss_images, suite_images, metric_images)
    images = {path: content for maker in makers for path, content in maker(shown)}
    if kept is not None:
        for path, content in images.items():
            (kept / path).parent.mkdir(parents=True, exist_ok=True)
            (kept / path).write_bytes(content)
        (kept / "complete").touch()
    return images


def _package_hash() -> str:
    """Of the package's code and of this folder: what the images depend on."""
    package = Path(sg.__file__).parent
    digest = sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
