"""Patch-Fool against an obvious loop; its places, its figure, and the suite."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers.runs import image_folder
from oracles import patch_fool as oracle
from oracles.models import tiny
from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.robustness import patch_fool
from steadygaze.runs.estimate import estimate_run
from steadygaze.runs.request import StressRequest
from steadygaze.runs.settings import LineChart
from steadygaze.runs.stress import run_stress

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORM: dict[str, Any] = {"mean": MEAN, "std": STD}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def batch(model: Any, count: int = 3) -> tuple[Tensor, Tensor]:
    """Normalized images, and the classes that the model predicts."""
    m, s = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (MEAN, STD))
    pixels = torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images = (pixels - m) / s
    with torch.no_grad():
        return images, model(images).argmax(1)


@pytest.mark.parametrize("kind", ["registers", "average"])
def test_it_is_the_loop_of_the_paper(kind: str) -> None:
    model = tiny(kind, depth=6)
    images, labels = batch(model, 2)
    got = patch_fool(model, images, labels, steps=11, seeds=[4, 5], **NORM)
    m, s = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    for i, seed in enumerate((4, 5)):
        patch = oracle.attended(model, images[i : i + 1], 4)
        assert got.places[i].tolist() == [patch // 4, patch % 4]
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(1, 3, 12, 12, generator=generator, dtype=torch.float64)
        expected = oracle.patch_fool(model, images[i : i + 1], int(labels[i]), patch, noise, m, s, 11)
        assert torch.allclose(got.images[i : i + 1], expected, atol=1e-8)
    changed = (got.images != images).any(1)
    assert changed.sum((1, 2)).tolist() == [9, 9]
    assert torch.equal(got.predicted, model(got.images).argmax(1))
    a = sg.attention(model, got.images)[2].mean((1, 2))[:, -16:] * (16 + model.num_prefix_tokens)
    assert torch.allclose(got.after[:, 2].flatten(1), a)
    assert got.at_place(got.before)[1, 4] == got.before[1, 4].max()


def test_places_and_early_stops_belong_to_an_image() -> None:
    model = tiny(depth=4)
    images, labels = batch(model, 4)
    labels[3] = (labels[3] + 1) % 5
    options: dict[str, Any] = {"steps": 15, "stop_early": True, **NORM}
    maps = sg.explain(model, images, target=labels, method="gae").scores
    by_name = patch_fool(model, images, labels, place="gae", **options)
    by_map = patch_fool(model, images, labels, place=maps, **options)
    assert torch.equal(by_name.places, by_map.places) and torch.equal(by_name.images, by_map.images)
    highest = maps.flatten(1).argmax(1)
    assert by_name.places.tolist() == [[int(p) // 4, int(p) % 4] for p in highest]
    assert torch.equal(by_name.images[3], images[3]) and by_name.steps[3] == 0  # wrong from the start
    together = patch_fool(model, images, labels, place="random", seeds=[0, 1, 2, 3], **options)
    alone = patch_fool(model, images[2:3], labels[2:3], place="random", seeds=2, **options)
    assert torch.allclose(together.images[2:3], alone.images, atol=1e-9)
    assert together.steps[2] == alone.steps[0] and together.places[2].tolist() == alone.places[0].tolist()
    assert torch.equal(
        together.robust(), (together.steps == 15) & (model(together.images).argmax(1) == labels)
    )
    whole = patch_fool(
        model, images, labels, place="random", seeds=[0, 1, 2, 3], **options | {"stop_early": False}
    )
    assert torch.equal(whole.steps, together.steps) and len(set(whole.steps.tolist())) > 1


def test_the_figure_shows_image_and_layers_before_and_after() -> None:
    model = tiny(depth=4).float()
    images, labels = batch(tiny(depth=4), 1)
    result = patch_fool(model, images.float(), labels, place=(1, 2), steps=2, **NORM)
    narrow, wide = result.figure(layers=[0]), result.figure()
    assert narrow.mode == "RGB" and wide.width > 2 * narrow.width
    with pytest.raises(InputError, match="layer"):
        result.figure(layers=[4])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"place": (4, 0)}, r"0\.\.3"),
        ({"place": "gaee"}, "gae"),
        ({"place": None}, r"place: expected attention, .*, got None"),
        ({"place": [1, 2]}, r"\(row, column\) or maps, got \[1, 2\]"),
        ({"place": torch.zeros(3, 2, 2)}, r"maps \(3, 4, 4\)"),
        ({"steps": 0}, "steps"),
        ({"weight": -1}, "weight"),
        ({"seeds": [1]}, "one for each of 3"),
        ({"labels": torch.full((3,), 5)}, r"classes 0\.\.4"),
    ],
)
def test_bad_input(changes: dict[str, Any], says: str) -> None:
    model = tiny()
    images, labels = batch(model)
    with pytest.raises(ValueError, match=says):
        patch_fool(**{"model": model, "images": images, "labels": labels, **NORM} | changes)


# -- the suite -------------------------------------------------------------------------------------


def request(data: Path, **changes: Any) -> StressRequest:
    given: dict[str, Any] = {
        "model": "embedded",
        "data": data,
        "limit": 4,
        "options": {"patch_steps": 3},
        "suites": "patchfool:gae,patchfool:0x7",
        "batch_size": 4,
        "num_workers": 0,
    }
    return StressRequest(**given | changes)


def values(rows: Any) -> dict[tuple[str, ...], float]:
    return {(row["setting"], row["metric"], row["image"]): row["value"] for row in rows}


def test_the_suite_resumes_and_its_cost_is_estimated(tmp_path: Path) -> None:
    data = image_folder(tmp_path / "data")
    rows = run_stress(request(data, out=tmp_path / "run"))
    found = values(rows)
    for (setting, metric, image), value in found.items():
        if metric == "patch_attention":
            assert (value is not None) == (found["clean", "top1", image] == 1)
            assert value is None or 0 <= found[setting, "patch_steps", image] <= 3
    card = rows.cards(repeats=10)[0]
    assert ("patchfool/gae", "top1") in card.numbers and ("patchfool/0x7", "top1") in card.numbers
    assert any("not the published Patch-Fool" in note for note in card.run["settings"]["notes"])
    file = tmp_path / "run" / "rows-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]))  # as if killed in the middle
    assert values(run_stress(request(data, out=tmp_path / "run"))) == found
    estimate = estimate_run(request(data, suites="patchfool:random", options={}))
    assert estimate.rows == 4 * (3 + 4) and any("survive all 250 steps" in note for note in estimate.notes)


def test_the_chart_is_the_attention_of_images_that_were_attacked(tmp_path: Path) -> None:
    image = next(image_folder(tmp_path / "images").glob("cat/*.png"))
    for name in CIFAR10:  # in one of the ten folders it is classified correctly, and attacked
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / image.name).write_bytes(image.read_bytes())
    rows = run_stress(request(tmp_path / "data", limit=None, suites="patchfool:0x7"))
    card = rows.cards(repeats=10)[0]
    (suite,) = [suite for suite in card.suites if suite.name == "patchfool"]
    _, chart = suite.figures(card)
    assert isinstance(chart, LineChart) and [line.name for line in chart.lines] == ["after", "before"]
    for line, metric in zip(chart.lines, ("patch_attention", "patch_attention_clean"), strict=True):
        (layers,) = [row["detail"] for row in rows if row["metric"] == metric and row["value"] is not None]
        assert line.y == pytest.approx(layers) and list(line.x) == list(range(len(layers)))
    assert chart.lines[0].y != chart.lines[1].y


@pytest.mark.parametrize(
    ("suite", "error"),
    [
        ("patchfool:gaee", ValueError),
        ("patchfool:8x0", InputError),
        ("patchfool:random,patchfool:random", InputError),
    ],
)
def test_a_wrong_place_is_named(suite: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match=r"gae|grid of 8 x 8|twice"):
        sg.stress("embedded", image_folder(tmp_path / "data"), suites=suite)


def test_a_model_without_global_attention_is_named() -> None:
    import timm

    model = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(1, 1))
    with pytest.raises(MethodUnavailableError, match="no attention matrix over all tokens"):
        patch_fool(model, torch.zeros(1, 3, 224, 224), torch.tensor([0]), **NORM)
