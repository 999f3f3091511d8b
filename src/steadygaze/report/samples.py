"""Pictures of a stress run, made again from the model and the data if both are there."""

from __future__ import annotations

import warnings
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from steadygaze.errors import BadInput, DegenerateMap, SteadygazeError
from steadygaze.report.pictures import address, enlarged, word
from steadygaze.robustness.corruptions.corrupt import CORRUPTIONS, corrupt
from steadygaze.runs.stress_card import Card
from steadygaze.runs.stress_compare import Comparison

Named = list[tuple[str, str]]


@dataclass(frozen=True)
class Shot:
    """A picture with what was made of it: (words, data address)."""

    name: str
    title: str
    pictures: Named


def reopened(card: Card) -> tuple[Any, dict[str, Any]]:
    """The model of a run, and its pictures by name; raises if either is not what it was."""
    from steadygaze.data.folders import Classes
    from steadygaze.data.label_maps import find_maps
    from steadygaze.data.masks import find
    from steadygaze.loading.load import load_model
    from steadygaze.runs.asked import outputs

    given = card.run.get("about", {}).get("given")
    if given is None:
        raise BadInput("the data was given in memory.")
    loaded = load_model(given["model"], given["checkpoint"], num_classes=given["num_classes"])
    if loaded.weights_hash != card.weights:
        raise BadInput(f"{given['model']} has other weights now: {loaded.weights_hash}, not {card.weights}.")
    if "segmentation" in card.run["settings"]["suite"]:
        return loaded, {item.name: item for item in find_maps(given["data"], given["masks"]).items}
    found = find(given["data"], given["masks"], Classes(loaded.classes, outputs(loaded.model, loaded.size)))
    return loaded, {item.name: item for item in found.items}


def sample_pictures(card: Card) -> tuple[Named, Named, str]:
    """One picture of the run clean and under each of its corruptions; of a ViT its attention too; or why there is none."""
    try:
        return _samples(card)
    except (SteadygazeError, OSError) as error:
        return [], [], f"Pictures are left out: {error}"


def _samples(card: Card) -> tuple[Named, Named, str]:
    from steadygaze.data.images import read_image
    from steadygaze.runs.stress_data import Lens, seed_of

    loaded, items = reopened(card)
    name = card.names_of("")[0]
    if name not in items:
        raise BadInput(f"{name} is not in {card.run['about']['given']['data']} any more.")
    settings = card.run["settings"]
    severities = settings["severities"]
    severity = severities[len(severities) // 2]
    clean = Lens(loaded).pixels(read_image(items[name].path))
    seed = seed_of(settings["seed"], name)
    made = {c: corrupt(clean, c, severity, seed=seed) for c in settings["corruptions"] if c in CORRUPTIONS}
    segments = "segmentation" in settings["suite"]
    seen = {"clean": clean} | {f"{c.replace('_', ' ')} {severity}": p for c, p in made.items()}
    shown = [
        (words, address(enlarged(Image.fromarray(_tinted(loaded, p) if segments else p))))
        for words, p in seen.items()
    ]
    sheets: Named = []
    if "attention" in settings["suite"] and made:
        sheets.append(_attention(loaded, clean, *next(iter(made.items())), severity))
    tint = " Coloured by the class that the model says of each pixel." if segments else ""
    return (
        shown,
        sheets,
        f"{name} as the model sees it, and under each corruption at severity {severity}.{tint}",
    )


def _tinted(loaded: Any, pixels: Any) -> Any:
    """The picture, half of it the colour of what the model says: each class a hue of its own."""
    import torch

    from steadygaze.robustness.segmentation import label_map
    from steadygaze.runs.stress_measure import Judge
    from steadygaze.runs.stress_suite import Plan

    judge = Judge(loaded.model, None, Plan(()), loaded.mean, loaded.std)
    said = (
        label_map(loaded.model, judge.normalised(torch.from_numpy(pixels.copy()).permute(2, 0, 1))[None])[0]
        .cpu()
        .numpy()
    )
    hues = np.array([hsv_to_rgb((0.62 + 0.618034 * c) % 1, 0.8, 0.9) for c in range(256)])
    return (0.5 * pixels + 127.5 * hues[said]).astype(np.uint8)


def _attention(loaded: Any, clean: Any, name: str, corrupted: Any, severity: int) -> tuple[str, str]:
    import torch

    from steadygaze.robustness.attention import attention_picture
    from steadygaze.runs.stress_measure import Judge
    from steadygaze.runs.stress_suite import Plan

    judge = Judge(loaded.model, None, Plan(()), loaded.mean, loaded.std)
    one, two = (
        judge.normalised(torch.from_numpy(p.copy()).permute(2, 0, 1))[None] for p in (clean, corrupted)
    )
    sheet = attention_picture(
        loaded.model, one, two, cell=160, pictures=[Image.fromarray(clean), Image.fromarray(corrupted)]
    )
    words = f"Attention of the last layer: clean, and under {name.replace('_', ' ')} {severity}."
    return f"{words} Bright columns: tokens that all others look at.", address(sheet)


def turned_pictures(found: Comparison, method: str, show: int) -> tuple[dict[str, list[Shot]], str]:
    """The first pictures that turned wrong and right, with the maps of both models; or why there are none."""
    try:
        return _turned(found, method, show), ""
    except (SteadygazeError, OSError) as error:
        return {}, f"Pictures are left out: {error}"


def _turned(found: Comparison, method: str, show: int) -> dict[str, list[Shot]]:
    import torch

    from steadygaze.data.images import read_image
    from steadygaze.explainer import explain
    from steadygaze.heatmap import percent
    from steadygaze.runs.stress_data import Lens, seed_of
    from steadygaze.runs.stress_measure import Judge
    from steadygaze.runs.stress_suite import Plan

    if found.setting != "clean" and found.setting.split("/")[0] not in CORRUPTIONS:
        raise BadInput(f"the pictures of {found.setting} are not made again here.")
    opened = [reopened(card) for card in (found.before[0], found.after[0])]
    out: dict[str, list[Shot]] = {}
    for way, names in found.turned.items():
        shots = []
        for name in names[:show]:
            pictures: Named = []
            for side, (loaded, items), card in zip(
                ("before", "after"), opened, (found.before[0], found.after[0]), strict=True
            ):
                if name not in items:
                    raise BadInput(f"{name} is not in the data any more.")
                pixels = Lens(loaded).pixels(read_image(items[name].path))
                if found.setting != "clean":
                    kind, severity = found.setting.split("/")
                    pixels = corrupt(
                        pixels, kind, int(severity), seed=seed_of(card.run["settings"]["seed"], name)
                    )
                judge = Judge(loaded.model, None, Plan(()), loaded.mean, loaded.std)
                image = judge.normalised(torch.from_numpy(pixels.copy()).permute(2, 0, 1))[None]
                chances = judge.logits(image)[0].softmax(-1)
                predicted = int(chances.argmax())
                picture = enlarged(Image.fromarray(pixels))
                if not pictures:
                    pictures.append(("picture", address(picture)))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DegenerateMap)
                    drawn = explain(loaded.model, image, target=predicted, method=method).overlay(picture)
                words = f"{word(loaded.classes, predicted)} {percent(float(chances[predicted]))}"
                pictures.append((f"{side}: {words}", address(drawn)))
            label = items[name].label
            shots.append(Shot(name, word(loaded.classes, label) if label is not None else name, pictures))
        out[way] = shots
    return out
