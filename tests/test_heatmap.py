"""Attribution: pixels, images, files, notebook."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from steadygaze.errors import InputError
from steadygaze.quantity import percent
from steadygaze.results.attribution import Attribution, comparison_grid, overlay_name
from steadygaze.results.drawing import COOL, WARM, Row, paint, ramp, robust_scale, tile, to_pil_image


def attribution(scores: torch.Tensor, **other) -> Attribution:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(len(scores), 1)
    target = other.pop("target", torch.ones(scores.shape[:-2], dtype=torch.long))
    return Attribution(scores=scores, target=target, logits=logits, method="gaze", score="log_odds", **other)


@pytest.fixture
def maps() -> Attribution:
    return attribution(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_grid_and_length(maps):
    assert maps.grid == (4, 6) and len(maps) == 2


def test_nearest_upsampling_repeats_each_patch(maps):
    expected = maps.scores.repeat_interleave(3, 1).repeat_interleave(5, 2)
    assert torch.equal(maps.upsample((12, 30), "nearest"), expected)


def test_bilinear_upsampling_keeps_constants_mean_and_type():
    flat = attribution(torch.full((1, 3, 3), -2.5, dtype=torch.float64))
    assert torch.allclose(flat.upsample(9), torch.tensor(-2.5, dtype=torch.float64))
    half = attribution(torch.ones(1, 3, 3, dtype=torch.float16))
    assert half.upsample(9).dtype == torch.float16


def test_bilinear_upsampling_puts_a_patch_where_it_is():
    scores = torch.zeros(1, 4, 4)
    scores[0, 1, 2] = 1
    pixels = attribution(scores).upsample((40, 80))[0]
    row, column = divmod(int(pixels.argmax()), 80)
    assert 10 <= row < 20 and 40 <= column < 60


def test_upsampling_of_several_targets():
    assert attribution(torch.randn(2, 3, 4, 4)).upsample((8, 12)).shape == (2, 3, 8, 12)


def test_unknown_mode_is_refused(maps):
    with pytest.raises(InputError, match="bilinear"):
        maps.upsample(8, "lanczos")


def test_normalized_keeps_sign_and_zero():
    scores = torch.tensor([[[-4.0, 2.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    expected = torch.tensor([[[-1.0, 0.5], [0.0, 0.25]], [[0.0, 0.0], [0.0, 0.0]]])
    assert torch.equal(attribution(scores).normalized(), expected)


def test_overlay_has_the_size_of_its_image(maps, image):
    assert maps.overlay(image).size == (60, 40)


def test_overlay_is_warm_for_and_cool_against():
    scores = torch.zeros(1, 2, 2)
    scores[0, 0, 0], scores[0, 1, 1] = 3.0, -3.0
    att, gray = attribution(scores), Image.new("RGB", (40, 40), (128, 128, 128))
    plain = np.asarray(att.overlay(gray, mode="nearest"), dtype=int)
    signed = np.asarray(att.overlay(gray, mode="nearest", signed=True), dtype=int)
    red, blue = plain[5, 5], signed[35, 35]
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0]
    assert (plain[35, 35] == plain[5, 35]).all(), "without signed, evidence against looks like none"
    assert (signed[35, 35] != signed[5, 35]).any()


def test_one_outlier_does_not_blank_the_map():
    scores = torch.zeros(1, 8, 8)
    scores[0, 4, 4:6] = 1.0
    calm = np.asarray(attribution(scores).overlay(Image.new("RGB", (64, 64))), dtype=int)
    scores[0, 0, 0] = 1e6
    loud = np.asarray(attribution(scores).overlay(Image.new("RGB", (64, 64))), dtype=int)
    assert np.abs(calm[32:, 32:] - loud[32:, 32:]).max() <= 2
    assert robust_scale(scores[0].numpy()) == 1.0


def test_an_empty_map_shows_only_the_image(image):
    att = attribution(torch.zeros(1, 4, 4))
    assert np.array_equal(att.overlay(image), attribution(-torch.ones(1, 4, 4)).overlay(image))


def test_a_map_above_zero_everywhere_is_drawn_from_its_smallest_score(image):
    scores = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[0, 0, 0] = 0.0
    above = attribution(scores + 100).overlay(image)
    assert np.abs(np.asarray(above, int) - np.asarray(attribution(scores).overlay(image), int)).max() <= 1


@pytest.mark.parametrize("kind", ["array", "tensor", "gray"])
def test_kinds_of_images(maps, image, kind):
    array = np.asarray(image)
    given = {
        "array": array,
        "tensor": torch.from_numpy(array.copy()).permute(2, 0, 1) / 255,
        "gray": np.asarray(image.convert("L")),
    }[kind]
    expected = image.convert("L").convert("RGB") if kind == "gray" else image
    assert np.array_equal(to_pil_image(given), expected)
    assert maps.overlay(given).size == image.size


@pytest.mark.parametrize(
    "bad", [torch.randn(3, 8, 8) * 3, torch.rand(2, 3, 8, 8), torch.rand(8, 8), np.zeros((8, 8, 5), np.uint8)]
)
def test_other_images_are_refused(maps, bad):
    with pytest.raises(InputError, match=r"expected|must lie"):
        maps.overlay(bad)


@pytest.mark.parametrize("index", [2, -3, (0, 0)])
def test_index_out_of_range(maps, image, index):
    with pytest.raises(InputError, match="index"):
        maps.overlay(image, index)


def test_title_and_probability():
    att = attribution(torch.zeros(1, 2, 2))
    expected = float(torch.tensor([0.0, 2.0, 1.0]).softmax(0)[1])
    assert att.probability() == pytest.approx(expected)
    assert att.title(classes=["a", "tabby", "c"]) == "tabby 67 %"
    assert att.title() == "class 1 67 %"
    assert attribution(torch.zeros(1, 2, 2), target=None).title() == ""


def test_title_of_several_targets():
    att = attribution(torch.zeros(1, 2, 2, 2), target=torch.tensor([[1, 2]]))
    assert [att.title(place) for place in att.indices()] == ["class 1 67 %", "class 2 24 %"]


@pytest.mark.parametrize(("share", "text"), [(0.5, "50 %"), (0.997, "99.7 %"), (0.003, "0.3 %"), (None, "")])
def test_percent(share, text):
    assert percent(share) == text


def test_save_writes_images_scores_and_manifest(tmp_path, maps, image):
    files = maps.save(tmp_path / "new", [image, image], ["left", "right"])
    assert [file.name for file in files] == ["left.gaze.png", "right.gaze.png", "scores.npz", "manifest.json"]
    assert Image.open(files[0]).size == image.size
    with np.load(files[2]) as stored:
        assert np.array_equal(stored["scores"], maps.scores.numpy())
        assert stored["names"].tolist() == ["left", "right"] and stored["target"].tolist() == [1, 1]
    manifest = json.loads(files[3].read_text())
    assert manifest["methods"] == [{"name": "gaze", "score": "log_odds"}] and manifest["grid"] == [4, 6]
    assert [entry["overlays"] for entry in manifest["images"]] == [
        {"gaze": ["left.gaze.png"]},
        {"gaze": ["right.gaze.png"]},
    ]
    assert [entry["targets"][0]["class"] for entry in manifest["images"]] == [1, 1]
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_save_without_images_and_with_several_targets(tmp_path):
    files = attribution(torch.randn(1, 2, 4, 6)).save(tmp_path)
    assert [file.name for file in files[:2]] == ["0.gaze.0.png", "0.gaze.1.png"]
    assert Image.open(files[0]).size == (224, 149)


def test_save_refuses_other_counts(tmp_path, maps, image):
    with pytest.raises(InputError, match="expected 2 images"):
        maps.save(tmp_path, [image])
    with pytest.raises(InputError, match="expected 2 names"):
        maps.save(tmp_path, names=["one"])
    for names in (
        ["one", "one"],
        ["one", "folder/two"],
    ):  # one file would replace the other; a folder is not made
        with pytest.raises(InputError, match="a different file name for each image"):
            maps.save(tmp_path, names=names)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="got a file"):
        maps.save(tmp_path / "file")


def test_images_of_an_attribution(maps, image):
    first, last = maps.with_images([image, image])
    assert (
        len(first) == len(last) == 1
        and torch.equal(last.scores, maps.scores[1:])
        and torch.equal(last.logits, maps.logits[1:])
    )
    assert last.title() == maps.title(1) and len(last.images) == 1
    assert (
        torch.equal(maps[-1].target, maps.target[1:])
        and len(maps[:1]) == 1
        and torch.equal(maps[np.int64(0)].scores, maps.scores[:1])
    )
    with pytest.raises(IndexError, match="into 2 images, got 2"):
        maps[2]
    no_class = Attribution(maps.scores, None, maps.logits, "gaze", "callable")
    assert no_class[0].target is None


def test_percentile_out_of_range(maps, image):
    with pytest.raises(InputError, match=r"percentile: expected a number in 0\.\.100, got 101"):
        maps.overlay(image, percentile=101)


def test_file_names_of_methods_with_options():
    assert (
        overlay_name("cat", "attixg+plus:pairing=next,freeze=0.75")
        == "cat.attixg+plus-pairing=next-freeze=0.75.png"
    )


def test_notebook_shows_maps_with_and_without_images(maps, image):
    bare = maps._repr_html_()
    assert bare.count("<img") == 2 and "gaze" in bare
    shown = maps.with_images([image, image], ["a", "<b>", "c"])
    assert "&lt;b&gt; 67 %" in shown._repr_html_()
    assert shown._repr_html_() != bare
    assert maps._repr_png_().startswith(b"\x89PNG") and shown._repr_png_() != maps._repr_png_()


def test_to_moves_every_tensor(maps):
    moved = maps.to("meta")
    assert {moved.scores.device.type, moved.logits.device.type, moved.target.device.type} == {"meta"}
    assert moved.method == maps.method


def test_comparison_grid_has_a_row_for_each_image_and_a_column_for_each_method(maps, image):
    small = comparison_grid([image, image], {"gaze": maps}, cell=64)
    wide = comparison_grid([image, image], {"gaze": maps, "gae": maps}, cell=64)
    assert wide.width - small.width == 64 + 4 and wide.height == small.height
    several = attribution(torch.randn(2, 2, 4, 6))
    assert comparison_grid([image, image], {"gaze": several}, cell=64).height > small.height


def test_comparison_grid_survives_long_words(maps, image):
    names = ["word " * 40] * 3
    grid = comparison_grid(
        [image, image], {"attixg+plus:pairing=next,freeze=0.75": maps}, classes=names, cell=64
    )
    assert grid.width < 200


def test_comparison_grid_refuses_what_does_not_match(maps, image):
    with pytest.raises(InputError, match="at least one"):
        comparison_grid([image], {})
    with pytest.raises(InputError, match="2 images"):
        comparison_grid([image], {"gaze": maps})
    with pytest.raises(InputError, match="same images"):
        comparison_grid([image] * 2, {"gaze": maps, "gae": attribution(torch.zeros(1, 4, 6))})
    with pytest.raises(InputError, match="heading"):
        tile([Row([image])], ["one", "two"])


@pytest.mark.parametrize("anchors", [WARM, COOL])
def test_ramps_get_lighter_step_by_step(anchors):
    light = ramp(anchors) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(light) > 0).all()
    steps = np.abs(np.diff(ramp(anchors), axis=0)).max(1)
    assert steps.max() < 0.03, "no visible edge between two colors"


def test_bare_map_is_black_where_nothing_is():
    values = np.zeros((4, 4))
    values[0, 0] = 1
    pixels = np.asarray(paint(values, None))
    assert pixels[3, 3].tolist() == [0, 0, 0] and pixels[0, 0].min() > 100
