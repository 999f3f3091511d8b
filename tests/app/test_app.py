"""The interactive page: what its viewer computes, and the page itself, served and used over HTTP."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.app.viewer import Viewer
from steadygaze.cli import app as command
from steadygaze.data.preprocess import Preprocess
from steadygaze.loading.loaded import LoadedModel

DEMO = Path(sg.__file__).parent / "assets" / "demo"
IMAGE_FILE = sorted(DEMO.glob("*.png"))[0]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def viewer(loaded: LoadedModel) -> Viewer:
    return Viewer(loaded)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.open(IMAGE_FILE)


def test_predictions_are_those_of_the_model(viewer: Viewer, loaded: LoadedModel, image: Image.Image) -> None:
    with torch.no_grad():
        expected = loaded.model(loaded.preprocess(image.convert("RGB"))[None])[0].softmax(-1)
    found = viewer.predictions(image)
    assert list(found.values()) == pytest.approx(expected.tolist(), abs=1e-6)
    assert list(found) == list(loaded.class_names or ())


def test_patches_are_removed_as_tokens(viewer: Viewer, loaded: LoadedModel, image: Image.Image) -> None:
    vit, gone = sg.adapt(loaded.model), [3, 40, 41]
    tokens = vit.embed(loaded.preprocess(image.convert("RGB"))[None])
    keep = torch.tensor([[p for p in range(64) if p not in gone]])
    with torch.no_grad():
        expected = vit.logits(vit.select(tokens, keep))[0].softmax(-1)
    assert list(viewer.predictions(image, gone).values()) == pytest.approx(expected.tolist(), abs=1e-5)


def test_maps_are_those_of_explain(viewer: Viewer, loaded: LoadedModel, image: Image.Image) -> None:
    images = loaded.preprocess(image.convert("RGB"))[None]
    expected = sg.explain(loaded.model, images, 2, method=["gae", "ixg+plus"], score="log_odds")
    found = viewer.maps(image, ["gae", "ixg+plus"], viewer.classes[2], "log_odds")
    for name, attribution in expected.items():
        torch.testing.assert_close(found[name].scores, attribution.scores)
    assert found["gae"].target is not None and found["gae"].target.tolist() == [2]


def test_removal_curves_are_those_of_verify(viewer: Viewer, loaded: LoadedModel, image: Image.Image) -> None:
    images = loaded.preprocess(image.convert("RGB"))[None]
    found = {truth.method: truth for truth in viewer.removal_curves(image, viewer.maps(image, ["gae"]))}
    label = loaded.model(images).argmax(1)
    rows = sg.verify(loaded.model, [(images, label)], methods=["gae"]).to_pandas()
    for metric, value in rows.set_index("metric").value.items():
        assert found["gae"].scores[metric] == pytest.approx(value, abs=1e-3)
    chance = max(viewer.predictions(image).values())
    assert set(found) == {"gae", "random"}
    assert found["gae"].deletion[0] == pytest.approx((0, chance), abs=1e-6)
    assert found["gae"].insertion[-1] == pytest.approx((1, chance), abs=1e-6)


def test_images_are_shown_sharp(viewer: Viewer, image: Image.Image) -> None:
    shown = np.asarray(viewer.shown(image))
    assert shown.shape == (672, 672, 3)
    scale = 672 // viewer.loaded.size[0]  # every pixel of a small image is a square of one color
    assert (shown[::scale, ::scale].repeat(scale, 0).repeat(scale, 1) == shown).all()
    ((overlay, caption),) = viewer.overlays(image, viewer.maps(image, ["gae"]))
    assert overlay.size == (672, 672) and caption.startswith("gae: ")


def test_classes_that_share_a_name_have_their_number(loaded: LoadedModel, image: Image.Image) -> None:
    names = ("crane", "stork", "crane", *(loaded.class_names or ())[3:])
    viewer = Viewer(replace(loaded, class_names=names))
    assert viewer.classes[:4] == ["crane (0)", "stork", "crane (2)", names[3]]
    assert len(viewer.predictions(image)) == len(names)
    attribution = viewer.maps(image, ["gae"], "crane (2)")["gae"]
    assert attribution.target is not None and attribution.target.tolist() == [2]


def test_split_and_summary(viewer: Viewer, image: Image.Image) -> None:
    attribution = viewer.maps(image, ["gae"])["gae"]
    top, rest = viewer.split(attribution, 0.25)
    scores = attribution.scores.flatten()
    assert len(top) == 16 and sorted([*top, *rest]) == list(range(64))
    assert scores[top].min() >= scores[rest].max()
    assert viewer.summary(image, top).startswith("16 of 64 patches removed. The model ")
    assert "still predicts" in viewer.summary(image, [])


def test_a_model_that_needs_its_whole_grid_is_masked(image: Image.Image) -> None:
    import timm

    torch.manual_seed(0)
    tiny = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}
    model = timm.create_model("swin_tiny_patch4_window7_224", **tiny, num_classes=5).eval()
    preprocess = Preprocess.resize_and_crop((64, 64), mean=(0.0,) * 3, std=(1.0,) * 3)
    asked = Viewer(LoadedModel(model, "tiny", preprocess))
    assert "rollout" not in asked.methods and "gradcam" in asked.methods
    assert asked.removal_mode == "mask" and "hidden from attention" in asked.summary(image, [0])
    assert asked.classes == ["class 0", "class 1", "class 2", "class 3", "class 4"]
    (truth, chance) = asked.removal_curves(image, asked.maps(image, ["gradcam"]))
    assert chance.method == "random" and all(0 <= p <= 1 for _, p in truth.deletion)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda v, p: v.maps(p, []), "at least one method"),
        (lambda v, p: v.maps(p, ["gay"]), "gae"),
        (lambda v, p: v.maps(p, ["gae"], "unicorn"), "unicorn"),
        (lambda v, p: v.predictions(None), "upload one or choose an example"),
    ],
)
def test_bad_requests_are_refused(viewer: Viewer, image: Image.Image, ask, words: str) -> None:
    with pytest.raises(sg.SteadygazeError, match=words):
        ask(viewer, image)


def test_a_module_is_accepted(image: Image.Image) -> None:
    import timm

    model = timm.create_model("test_vit", num_classes=3).eval()
    assert Viewer.of(model).loaded.name == "test_vit" and len(Viewer.of(model).predictions(image)) == 3
    with pytest.raises(sg.InputError, match="the preprocessing of Linear is not known"):
        Viewer.of(torch.nn.Linear(2, 2))


def test_without_gradio_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(command, ["app"])
    assert result.exit_code == 2 and 'pip install "steadygaze[app]"' in result.output


def test_the_page_works_over_http(loaded: LoadedModel) -> None:
    gradio = pytest.importorskip("gradio")
    from gradio_client import Client, handle_file

    from steadygaze.app import page

    with warnings.catch_warnings():
        # gradio warns so of a function that does not fit its inputs
        warnings.filterwarnings("error", message="Expected")
        made = page(loaded)
    _, address, _ = made.launch(prevent_thread_lock=True, quiet=True, inbrowser=False)
    try:
        client = Client(address, verbose=False)
        asked = (handle_file(IMAGE_FILE), ["gae", "gradcam"], "predicted class", "default of the method")
        said, maps, checks = client.predict(*asked, False, True, api_name="/explain")
        assert said["confidences"][0]["label"] == said["label"]
        assert [one["caption"].split(":")[0] for one in maps] == ["gae", "gradcam"]
        assert checks.count("<li>") == 2 and "<b>gae</b>: Removing the 6 brightest patches" in checks
        *_, table = client.predict(*asked, api_name="/verify")
        assert [row[0] for row in table["data"]] == ["gae", "gradcam", "random"]
        *_, words = client.predict(*asked, 25, api_name="/remove_top")
        assert words.startswith("16 of 64 patches removed")
        *_, words = client.predict(*asked, 25, api_name="/keep_top")
        assert words.startswith("48 of 64 patches removed")
        *_, words = client.predict(handle_file(IMAGE_FILE), [3, 40, 41, 3], api_name="/what_if")
        assert words.startswith("3 of 64 patches removed")
        for wrong in ([64], [True], ["3"], {"3": 4}, None):
            with pytest.raises(Exception, match="removed patches: expected a list of numbers"):
                client.predict(handle_file(IMAGE_FILE), wrong, api_name="/what_if")
        with pytest.raises(Exception, match="at least one method"):
            client.predict(asked[0], [], *asked[2:], False, True, api_name="/explain")
    finally:
        made.close()
        gradio.close_all()


def test_explain_checks_each_map_and_shows_both_scores(viewer: Viewer) -> None:
    from steadygaze.app.layout import BOTH_SCORES, DEFAULT_SCORE, PREDICTED, Events

    events = Events(viewer)
    _, plain, no_words = events.explain(IMAGE_FILE, ["gae"], PREDICTED, DEFAULT_SCORE, False, False)
    _, checked, words = events.explain(IMAGE_FILE, ["gae"], PREDICTED, DEFAULT_SCORE, False, True)
    assert no_words == "" and words.count("<li>") == 1 and "brightest patches" in words
    assert checked[0][0].height > plain[0][0].height and checked[0][0].width == plain[0][0].width
    asked = (IMAGE_FILE, ["rollout", "gaze"], PREDICTED, BOTH_SCORES)
    _, both, words = events.explain(*asked, False, True)
    names = ["gaze, log_odds", "gaze, logit", "rollout"]
    assert [caption.split(":")[0] for _, caption in both] == names and words.count("<li>") == 3
    *_, table = events.verify(*asked)
    assert [row[0] for row in table] == [*names, "random"]
    board, *_ = events.remove_top(*asked, 20, False)
    assert len(board.value) == 13


def test_names_in_checks_are_text() -> None:
    from steadygaze.app.layout import check_list

    assert check_list({"<b>": "lowers <script> from 1 % to 0.0 %."}).count("<") == 6
