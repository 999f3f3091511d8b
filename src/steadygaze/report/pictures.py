"""The pictures on which a method did best and worst, with their maps: made again from the model and the data, if both
are there."""

from __future__ import annotations

import base64
import io
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from steadygaze.errors import BadInput, DegenerateMap, SteadygazeError
from steadygaze.runs.verify.summary import Line, Section, quantity

EACH = 4  # best ones, and as many worst ones
SIDE = 200  # pixels


@dataclass(frozen=True)
class Shown:
    """A picture, its maps, what was measured on it, and what the model says of it."""

    name: str
    title: str
    values: list[float]
    pictures: list[str]  # data addresses: the picture, then one map for each method


@dataclass(frozen=True)
class Gallery:
    """Best and worst pictures of the first method, beside the second; or why there are none."""

    methods: list[Line]
    metric: str
    best: list[Shown]
    worst: list[Shown]
    why_not: str = ""


def gallery(section: Section, run: dict[str, Any]) -> Gallery:
    """The gallery of a section whose rows come from `run`."""
    metric = section.shown[0]
    methods = compared(section)
    try:
        best, worst = _extremes(section, metric, methods[0])
        made = _shown(section, run, metric, methods, [*best, *worst])
    except (SteadygazeError, OSError) as error:
        return Gallery(methods, metric, [], [], f"Pictures are left out: {error}")
    return Gallery(methods, metric, made[: len(best)], made[len(best) :])


def compared(section: Section) -> list[Line]:
    """The best method and the next one that is not the same method with other options or another score."""
    first = section.lines[0]
    others = [line for line in section.lines[1:] if line[0].partition(":")[0] != first[0].partition(":")[0]]
    return [first, *(others or section.lines[1:])[:1]]


def _extremes(section: Section, metric: str, line: Line) -> tuple[list[str], list[str]]:
    values = section.array(metric, line)
    order = [int(i) for i in np.argsort(values, kind="stable") if not np.isnan(values[i])]
    if quantity(metric).better == "higher":
        order.reverse()
    each = min(EACH, len(order) // 2)
    return [section.names[i] for i in order[:each]], [section.names[i] for i in order[::-1][:each]]


def _shown(
    section: Section, run: dict[str, Any], metric: str, methods: list[Line], names: list[str]
) -> list[Shown]:
    import torch

    from steadygaze.data.folders import Classes
    from steadygaze.data.images import read_image
    from steadygaze.data.masks import find
    from steadygaze.explainer import explain
    from steadygaze.heatmap import percent
    from steadygaze.loading.load import load_model
    from steadygaze.methods.diffmask import with_gates
    from steadygaze.vit import adapt

    if "given" not in run.get("about", {}):
        raise BadInput("the data was given in memory.")
    given, target = run["about"]["given"], run["settings"]["target"]
    loaded = load_model(given["model"], given["checkpoint"], num_classes=given["num_classes"])
    if loaded.weights_hash != section.weights:
        raise BadInput(
            f"{given['model']} has other weights now: {loaded.weights_hash}, not {section.weights}."
        )
    vit = adapt(loaded.model)
    with torch.no_grad():
        outputs = vit(torch.zeros(1, *vit.plan.input_size)).shape[1]
    found = find(given["data"], given["masks"], Classes(loaded.classes, outputs))
    items = {item.name: item for item in found.items}
    missing = [name for name in names if name not in items]
    if missing:
        raise BadInput(f"{missing[0]} is not in {given['data']} any more.")
    places = {name: i for i, name in enumerate(section.names)}
    made = []
    for name in names:
        image = loaded.preprocess(read_image(items[name].path))[None]
        with torch.no_grad():
            chances = vit(image)[0].softmax(-1)
        predicted = int(chances.argmax())
        asked = {"label": items[name].label, "predicted": predicted}.get(target, target)
        wanted = predicted if asked is None else int(asked)
        picture = enlarged(loaded.picture(image[0]))
        drawn = [address(picture)]
        for method, score in methods:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DegenerateMap)
                (named,) = (
                    with_gates([method], given.get("diffmask")) if method.startswith("diffmask") else [method]
                )
                attribution = explain(vit, image, target=wanted, method=named, score=score)
            drawn.append(address(attribution.overlay(picture)))
        title = f"{word(loaded.classes, wanted)} {percent(float(chances[wanted]))}"
        if predicted != wanted:
            title += (
                f"; the model says {word(loaded.classes, predicted)} {percent(float(chances[predicted]))}"
            )
        values = [float(section.array(metric, line)[places[name]]) for line in methods]
        made.append(Shown(name, title, values, drawn))
    return made


def word(classes: tuple[str, ...] | None, index: int) -> str:
    return classes[index].split(",")[0] if classes else f"class {index}"


def enlarged(picture: Image.Image) -> Image.Image:
    scale = SIDE / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.LANCZOS)


def address(picture: Image.Image) -> str:
    """The picture itself as an address, so that the page needs no other file."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=86)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
