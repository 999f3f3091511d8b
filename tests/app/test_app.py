"""The page to click in: its answers, asked of the viewer; and the page itself, served and asked as a browser would."""

import sys
import warnings
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
PICTURE = sorted(DEMO.glob("*.png"))[0]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def viewer(loaded: LoadedModel) -> Viewer:
    return Viewer(loaded)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.open(PICTURE)


def test_answers_are_the_models(viewer: Viewer, loaded: LoadedModel, picture: Image.Image) -> None:
    with torch.no_grad():
        expected = loaded.model(loaded.preprocess(picture.convert("RGB"))[None])[0].softmax(-1)
    found = viewer.answers(picture)
    assert list(found.values()) == pytest.approx(expected.tolist(), abs=1e-6)
    assert [name.split(" ", 1)[1] for name in found] == list(loaded.classes or ())


def test_patches_that_are_gone_are_removed_for_real(
    viewer: Viewer, loaded: LoadedModel, picture: Image.Image
) -> None:
    vit, gone = sg.adapt(loaded.model), [3, 40, 41]
    tokens = vit.embed(loaded.preprocess(picture.convert("RGB"))[None])
    keep = torch.tensor([[p for p in range(64) if p not in gone]])
    with torch.no_grad():
        expected = vit.logits(vit.select(tokens, keep))[0].softmax(-1)
    assert list(viewer.answers(picture, gone).values()) == pytest.approx(expected.tolist(), abs=1e-5)


def test_maps_are_explains(viewer: Viewer, loaded: LoadedModel, picture: Image.Image) -> None:
    images = loaded.preprocess(picture.convert("RGB"))[None]
    expected = sg.explain(loaded.model, images, 2, method=["gae", "ixg+plus"], score="log_odds")
    found = viewer.maps(picture, ["gae", "ixg+plus"], viewer.classes[2], "log_odds")
    for name, attribution in expected.items():
        torch.testing.assert_close(found[name].scores, attribution.scores)
    assert found["gae"].target is not None and found["gae"].target.tolist() == [2]


def test_truths_are_verifys(viewer: Viewer, loaded: LoadedModel, picture: Image.Image) -> None:
    images = loaded.preprocess(picture.convert("RGB"))[None]
    found = {truth.method: truth for truth in viewer.truths(picture, viewer.maps(picture, ["gae"]))}
    label = loaded.model(images).argmax(1)
    rows = sg.verify(loaded.model, [(images, label)], methods=["gae"]).to_pandas()
    for metric, value in rows.set_index("metric").value.items():
        assert found["gae"].scores[metric] == pytest.approx(value, abs=1e-3)
    chance = max(viewer.answers(picture).values())
    assert set(found) == {"gae", "random"}
    assert found["gae"].deletion[0] == pytest.approx((0, chance), abs=1e-6)
    assert found["gae"].insertion[-1] == pytest.approx((1, chance), abs=1e-6)


def test_a_click_finds_its_patch_and_strikes_it_out(viewer: Viewer, picture: Image.Image) -> None:
    whole = np.asarray(viewer.shown(picture))
    side = whole.shape[0] // 8
    patch = viewer.patch_at(picture, 2.5 * side, 5.5 * side)
    assert patch == 5 * 8 + 2
    changed = (np.asarray(viewer.shown(picture, [patch])) != whole).any(-1)
    inside = np.zeros_like(changed)
    inside[5 * side : 6 * side, 2 * side : 3 * side] = True
    assert not changed[~inside].any() and changed[inside].mean() > 0.9
    assert viewer.patch_at(picture, whole.shape[1], whole.shape[0]) == 63


def test_split_and_words(viewer: Viewer, picture: Image.Image) -> None:
    attribution = viewer.maps(picture, ["gae"])["gae"]
    top, rest = viewer.split(attribution, 0.25)
    scores = attribution.scores.flatten()
    assert len(top) == 16 and sorted([*top, *rest]) == list(range(64))
    assert scores[top].min() >= scores[rest].max()
    assert viewer.words(picture, top).startswith("16 of 64 patches taken out. The model ")
    assert "still says" in viewer.words(picture, [])


def test_a_model_that_needs_its_whole_grid_is_masked(picture: Image.Image) -> None:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2, embed_dim=12, depths=(1, 1), num_heads=(2, 2),
                              num_classes=5).eval()  # fmt: skip

    preprocess = Preprocess.resize_and_crop((64, 64), mean=(0.0,) * 3, std=(1.0,) * 3)
    asked = Viewer(LoadedModel(model, "tiny", preprocess))
    assert "rollout" not in asked.methods and "gradcam" in asked.methods
    assert asked.way == "mask" and "hidden from attention" in asked.words(picture, [0])
    assert asked.classes == ["0", "1", "2", "3", "4"]
    (truth, chance) = asked.truths(picture, asked.maps(picture, ["gradcam"]))
    assert chance.method == "random" and all(0 <= p <= 1 for _, p in truth.deletion)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda v, p: v.maps(p, []), "at least one method"),
        (lambda v, p: v.maps(p, ["gay"]), "gae"),
        (lambda v, p: v.maps(p, ["gae"], "unicorn"), "unicorn"),
        (lambda v, p: v.answers(None), "drop one on the page"),
    ],
)
def test_what_cannot_be_answered_is_said(viewer: Viewer, picture: Image.Image, ask, words: str) -> None:
    with pytest.raises(sg.SteadygazeError, match=words):
        ask(viewer, picture)


def test_without_gradio_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(command, ["app"])
    assert result.exit_code == 2 and 'pip install "steadygaze[app]"' in result.output


def test_the_page_answers_over_http(loaded: LoadedModel) -> None:
    gradio = pytest.importorskip("gradio")
    from gradio_client import Client, handle_file

    from steadygaze.app import page

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message="Expected"
        )  # gradio's word for a function that does not fit its inputs
        made = page(loaded)
    _, address, _ = made.launch(prevent_thread_lock=True, quiet=True, inbrowser=False)
    try:
        client = Client(address, verbose=False)
        asked = (handle_file(PICTURE), ["gae", "gradcam"], "what the model says", "the method's own")
        said, maps = client.predict(*asked, False, api_name="/look")
        assert said["confidences"][0]["label"] == said["label"]
        assert [one["caption"].split(":")[0] for one in maps] == ["gae", "gradcam"]
        *_, table = client.predict(*asked, api_name="/judge")
        assert [row[0] for row in table["data"]] == ["gae", "gradcam", "random"]
        *_, words = client.predict(*asked, 25, api_name="/without")
        assert words.startswith("16 of 64 patches taken out")
        *_, words = client.predict(*asked, 25, api_name="/alone")
        assert words.startswith("48 of 64 patches taken out")
        with pytest.raises(Exception, match="at least one method"):
            client.predict(asked[0], [], *asked[2:], False, api_name="/look")
    finally:
        made.close()
        gradio.close_all()
