"""The page of a segmenter: a click chooses the pixel that is asked about."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import steadygaze as sg
from benchmarks import region_zoo
from steadygaze.app.viewer import Viewer
from steadygaze.data.preprocess import Preprocess

pytest.importorskip("gradio")

from helpers.page import served
from steadygaze.app.layout import clicked, marked, needs_point, with_point

NAMES = ("road", "sky", "car", "tree", "person")


@pytest.fixture(scope="module")
def loaded() -> sg.LoadedModel:
    preprocess = Preprocess.resize_and_crop(size=(64, 64))
    return sg.load_model(region_zoo.segformer().float(), preprocess=preprocess, class_names=NAMES)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 100, 3), dtype=np.uint8)).save(path)
    return path


def test_a_pixel_has_the_probabilities_of_the_segmenter_there(loaded: sg.LoadedModel, file: Path) -> None:
    viewer = Viewer(loaded)
    assert needs_point(viewer) and not needs_point(Viewer(sg.load_model("embedded")))
    with torch.no_grad():
        scores = loaded.model(loaded.preprocess(Image.open(file))[None]).logits
    pixels = F.interpolate(scores, size=(64, 64), mode="bilinear", align_corners=False)[0].softmax(0)
    for text, (x, y) in (("40, 7", (40, 7)), ("", (32, 32))):
        found = with_point(viewer, text).predictions(file)
        assert list(found) == list(NAMES)
        assert list(found.values()) == pytest.approx(pixels[:, y, x].tolist(), abs=1e-5)


def test_a_click_is_a_pixel_of_what_the_model_sees(loaded: sg.LoadedModel, file: Path) -> None:
    viewer = Viewer(loaded)
    assert clicked(viewer, file, (405, 75)) == "40, 7"  # 640 pixels show 64
    assert clicked(viewer, file, (640, 640)) == "63, 63"
    plain, shown = with_point(viewer, "40, 7").shown(file), marked(viewer, file, "40, 7")
    assert shown is not None and shown.size == plain.size
    changed = (np.asarray(shown) != np.asarray(plain)).any(-1)
    rows, columns = changed.nonzero()
    assert abs(columns.mean() - 40.5 * 10) < 1.5 and abs(rows.mean() - 7.5 * 10) < 1.5
    assert marked(viewer, None, "40, 7") is None


def test_wrong_pixels_get_words(loaded: sg.LoadedModel) -> None:
    for text in ("40", "a, b", "1, 2, 3", "-1, 3", 7):
        with pytest.raises(sg.InputError, match="pixel: expected x, y such as 32, 32"):
            with_point(Viewer(loaded), text)
    with pytest.raises(sg.InputError, match="64 pixels wide"):
        with_point(Viewer(loaded), "64, 3")


@pytest.mark.full
def test_the_page_of_a_segmenter_works_over_http(loaded: sg.LoadedModel, file: Path) -> None:
    from gradio_client import Client, handle_file

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Expected")
        with served(loaded) as address:
            client = Client(address, verbose=False)
            rest = (["ixg"], "predicted class", "default of the method")
            said, maps, _ = client.predict(
                handle_file(file), "40, 7", *rest, False, True, api_name="/explain"
            )
            expected = with_point(Viewer(loaded), "40, 7").predictions(file)
            assert said["label"] == max(expected, key=lambda name: expected[name])
            assert said["label"].split()[-1] in maps[0]["caption"]
            *_, words = client.predict(handle_file(file), "", *rest, 50, api_name="/remove_top")
            assert words.startswith("2 of 4 patches hidden from attention")
            with pytest.raises(Exception, match="pixel: expected"):
                client.predict(handle_file(file), "nowhere", *rest, False, True, api_name="/explain")


@pytest.mark.full
def test_a_click_on_the_image_sets_the_pixel(loaded: sg.LoadedModel, file: Path) -> None:
    """As the browser sends it: the first component with a click is the image that the model sees."""
    import httpx

    with served(loaded) as address:
        config = httpx.get(f"{address}config").json()
        selects = [d for d in config["dependencies"] if d["targets"] and d["targets"][0][1] == "select"]
        with file.open("rb") as opened:
            (path,) = httpx.post(f"{address}gradio_api/upload", files={"files": opened}).json()
        sent = {
            "data": [{"path": path, "meta": {"_type": "gradio.FileData"}}],
            "fn_index": selects[0]["id"],
            "session_hash": "clicking",
            "event_data": {"index": [405, 75], "value": None},
        }
        httpx.post(f"{address}gradio_api/queue/join", json=sent).raise_for_status()
        query = {"session_hash": "clicking"}
        with httpx.stream("GET", f"{address}gradio_api/queue/data", params=query, timeout=1800) as lines:
            done = next(line for line in lines.iter_lines() if "process_completed" in line)
    assert json.loads(done.removeprefix("data: "))["output"]["data"] == ["40, 7"]
