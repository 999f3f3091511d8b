"""The suite `funnybirds` equals the naive protocol on drawn birds; incomplete folders are explained."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

import steadygaze as sg
from steadygaze.faithfulness.funnybirds import NAMES
from steadygaze.models.layers import small_vit
from steadygaze.runs.funnybirds import summary
from tests.helpers.funnybirds import CLASSES, SIZE, bird_model, write_funnybirds
from tests.oracles.funnybirds import protocol

SHORT = ("csdc", "pc", "dc", "com", "cor", "con")
METHODS = ["gradcam", "raw_attention"]  # one that depends on the class, one that does not


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_funnybirds(tmp_path_factory.mktemp("birds"))


@pytest.fixture(scope="module")
def loaded():
    names = [str(k) for k in range(len(CLASSES))]
    return sg.load_model(bird_model(), image_size=SIZE, mean=(0, 0, 0), std=(1, 1, 1), class_names=names)


def pixels(path):
    return torch.from_numpy(np.array(Image.open(path))[None, ..., :3]).permute(0, 3, 1, 2) / 255


def test_scores_of_the_paper(loaded, folder):
    rows = sg.verify(loaded, folder, suite="funnybirds", methods=METHODS, random=False, batch_size=4)
    table = summary(rows)
    assert not hasattr(loaded.model, "funnybirds")

    @cache
    def logits(path):
        with torch.no_grad():
            return loaded.model(pixels(path))[0].tolist()

    for method in METHODS:

        def explain(path, target, method=method):
            return sg.explain(loaded.model, pixels(path), target, method).scores[0].double().tolist()

        wanted = protocol(folder, logits, explain)
        found = table.loc[(method, "logit")] / 100
        for ours, theirs in (("distractibility", "d"), *((name, name) for name in SHORT)):
            assert found[ours] == pytest.approx(wanted[theirs], abs=1e-9), (method, ours)
        assert 100 * found["threshold"] == pytest.approx(wanted["threshold"])
        values = {name: [r for r in rows if r["metric"] == name and r["method"] == method] for name in NAMES}
        assert np.mean([r["value"] for r in values[NAMES[3]]]) == pytest.approx(100 * wanted["accuracy"])
        counts = np.sum([r["detail"] for r in values[NAMES[4]]], 0)
        assert counts[0] / counts[1] == pytest.approx(wanted["background"])
        assert 0 < wanted["accuracy"] < 1 and wanted["con"] + wanted["csdc"] > 0


def test_runs_are_resumed(loaded, folder, tmp_path):
    rows = sg.verify(loaded, folder, suite="funnybirds", methods="gradcam", limit=1, out=tmp_path / "run")
    assert {row["method"] for row in rows} == {"gradcam", "random"}
    assert {row["image"] for row in rows} == {"0"} and len(rows) == 2 * len(NAMES)
    again = sg.verify(loaded, folder, suite="funnybirds", methods="gradcam", limit=1, out=tmp_path / "run")
    assert [row["value"] for row in again] == [row["value"] for row in rows]


def test_what_is_missing_is_told(loaded, folder, tmp_path):
    def run(data, **options):
        return sg.verify(loaded, data, suite="funnybirds", methods="gradcam", **options)

    with pytest.raises(sg.InputError, match="layout of FunnyBirds"):
        run([(torch.zeros(1, 3, SIZE, SIZE), torch.zeros(1).long())])
    with pytest.raises(sg.InputError, match="explains the label"):
        run(folder, target="predicted")
    with pytest.raises(sg.InputError, match=r"test_interventions; .* lacks parts.json, classes.json"):
        run(tmp_path)
    for name in ("parts", "classes", "dataset_test"):
        (tmp_path / f"{name}.json").write_bytes((folder / f"{name}.json").read_bytes())
    with pytest.raises(sg.InputError, match=r"36 files of test image 0 .* lacks test/0/000000.png"):
        run(tmp_path)
    for name, content, words in (
        ("dataset_test", [{"class_idx": 6}], "class_idx below 6"),
        ("dataset_test", [{"class_idx": "../.."}], "class_idx"),
        ("dataset_test", [{"class_idx": 0, "bg_objects": "1," * 51}], "at most 50 background"),
        ("classes", [{"class_idx": 1, "parts": {}}], "expected class_idx 0"),
        ("parts", {"hat": []}, "expected parts of eye, beak"),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(sg.InputError, match=words):
            run(tmp_path)
    with pytest.raises(sg.InputError, match="verify with suite='funnybirds'"):
        sg.verify(loaded, [(torch.zeros(1, 3, SIZE, SIZE), torch.zeros(1).long())], metrics=NAMES[0])
    two = sg.load_model(small_vit(SIZE, 8, 2), image_size=SIZE, mean=(0, 0, 0), std=(1, 1, 1))
    with pytest.raises(sg.InputError, match="each of the 6 classes"):
        sg.verify(two, folder, suite="funnybirds")
