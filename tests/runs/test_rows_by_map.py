"""`verify` writes the rows of a map as soon as it is measured: an interrupted batch keeps the maps that are
done, and only the others are computed when it is resumed.
"""

from pathlib import Path

import pytest

import steadygaze as sg
from helpers.runs import image_folder, rows_of
from helpers.tiers import tiered
from steadygaze.progress import Progress
from steadygaze.runs import verify as measure

METHODS = ["gae", "rollout", "ixg", "gaze", "occlusion:budget=4"]
METRICS = ["insertion_aopc", "deletion_accuracy", "agreement"]
HOW = {
    "methods": METHODS,
    "metrics": METRICS,
    "ratios": [0.3, 0.7],
    "batch_size": 2,
    "limit": 4,
    "random": False,
}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[sg.LoadedModel, Path, Path]:
    folder = tmp_path_factory.mktemp("by-map")
    model, data = sg.load_model("embedded"), image_folder(folder / "data")
    sg.verify(model, data, out=folder / "undisturbed", **HOW)
    return model, data, folder / "undisturbed"


class Interrupt:
    """Ctrl-C after this many maps, each of one batch."""

    def __init__(self, maps: int) -> None:
        self.maps, self.seen = maps, []

    def __call__(self, progress: Progress) -> None:
        if progress.task == "verify":
            self.seen.append((progress.done, progress.total, progress.unit))
            if progress.done == 2 * self.maps:
                raise KeyboardInterrupt


@pytest.mark.parametrize("maps", tiered([1, 3, 5, 7], [3]))
def test_an_interrupted_batch_keeps_its_maps(given, tmp_path, monkeypatch, maps):
    model, data, undisturbed = given
    interrupt = Interrupt(maps)
    with pytest.raises(KeyboardInterrupt):
        sg.verify(model, data, out=tmp_path, on_progress=interrupt, **HOW)
    assert interrupt.seen == [(done, 20, "maps") for done in range(0, 2 * maps + 1, 2)], "once for each map"
    kept = rows_of(tmp_path)
    assert len(kept) == 2 * 2 * maps + 2 * 5 * (maps > 5), (
        "two images, two metrics; agreement when all are done"
    )
    assert set(kept) < set(rows_of(undisturbed))

    measured, real = [], measure.evaluate

    def evaluate(vit, batch, maps, metrics, **options):
        if "insertion_aopc" in metrics:
            measured.append(len(maps))
        return real(vit, batch, maps, metrics, **options)

    monkeypatch.setattr(measure, "evaluate", evaluate)
    sg.verify(model, data, out=tmp_path, **HOW)
    assert sum(measured) == 10 - maps, "a map that had its rows was measured again"
    assert rows_of(tmp_path) == rows_of(undisturbed)


def test_methods_of_one_pass_are_explained_together(given, monkeypatch):
    model, data, _ = given
    parts, real = [], measure.maps_of

    def maps_of(clean, target, methods, score):
        parts.append([method.name for method in methods])
        return real(clean, target, methods, score)

    monkeypatch.setattr(measure, "maps_of", maps_of)
    sg.verify(model, data, **HOW | {"limit": 1})
    assert sorted(name for part in parts for name in part) == sorted(METHODS)
    assert ["gae", "rollout", "ixg"] in parts and ["occlusion:budget=4"] in parts


@pytest.mark.full
def test_a_run_without_the_chance_level_is_resumed_without_it(tmp_path):
    """Folders written by earlier versions have no `random`."""
    data = image_folder(tmp_path / "data")
    given = {"methods": ["ixg"], "metrics": ["deletion_aopc"], "out": tmp_path / "run"}
    before = sg.verify("embedded", data, limit=2, random=False, **given)
    assert list(sg.verify("embedded", data, limit=2, **given)) == list(before)
    new = sg.verify("embedded", data, limit=2, **{**given, "out": tmp_path / "new"})
    assert {row["method"] for row in new} == {"ixg", "random"}
