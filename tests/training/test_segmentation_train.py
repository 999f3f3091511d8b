"""A segmenter of any ViT: its shape, its tokens, its training by recipe, its checkpoints."""

import copy
import csv
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadygaze as sg
from helpers.segmentation import MODEL, SIDE, recipe, squares
from helpers.tiers import tiered
from helpers.tiny_models import ALL, images_of
from steadygaze.training.recipe import make_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"))


@pytest.mark.full
def test_it_learns_to_segment_and_can_be_used(data, tmp_path):
    got = sg.train(recipe(data, epochs=12), tmp_path / "run")
    assert got.top1 is None and got.miou is not None and got.miou > 0.8
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert float(rows[-1]["test_miou"]) == pytest.approx(got.miou) and "test_top1" not in rows[0]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    loaded = sg.load_model(str(tmp_path / "run"))
    assert loaded.class_names == ("background", "object") and loaded.size == (SIDE, SIDE)
    image = loaded.preprocess(Image.open(data / "images" / "0.png"))[None]
    assert torch.equal(loaded.model(image), got.model(image))
    said, truth = (
        loaded.model(image).argmax(1)[0],
        torch.from_numpy(np.array(Image.open(data / "masks" / "0.png"))),
    )
    assert (said[truth == 255] == 1).float().mean() > 0.8 and (said[truth == 0] == 0).float().mean() > 0.8


@pytest.mark.parametrize(
    "more",
    [
        {"modules": {"tap": {}}},
        {
            "modules": {"cb": {}},
            "losses": {"cross_entropy": {"smoothing": 0.1}, "adl": {}},
            "ema": {"decay": 0.5},
        },
    ],
    ids=["tap", "cb, adl, average"],
)
def test_modules_and_losses_go_along(data, tmp_path, more):
    got = sg.train(recipe(data, epochs=1, **more), tmp_path / "run")
    loaded = sg.load_model(str(tmp_path / "run")).model
    assert set(sg.modules.inserted(loaded)) == set(sg.modules.inserted(got.model)) != set()
    images = torch.rand(2, 3, SIDE, SIDE)
    assert torch.equal(loaded(images), got.model.eval()(images)) and loaded(images).shape == (
        2,
        2,
        SIDE,
        SIDE,
    )
    assert ("adl" in got.log[0]) == ("losses" in more)


def test_a_run_goes_on_to_the_same_weights(data, tmp_path):
    whole = sg.train(recipe(data), tmp_path / "whole")
    sg.train(recipe(data), tmp_path / "broken", stop_after=1)
    parts = sg.train(recipe(data), tmp_path / "broken")
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.state_dict().values(), parts.model.state_dict().values(), strict=True)
    )


@pytest.mark.full
def test_a_run_begins_with_another_ones_weights(data, tmp_path):
    first = sg.train(recipe(data), tmp_path / "first")
    onward = recipe(
        data, model={"name": str(tmp_path / "first")}, modules={"tap": {}}, epochs=1, optimizer={"lr": 1e-9}
    )
    second = sg.train(onward, tmp_path / "second")
    assert torch.allclose(first.model.decoder.weight, second.model.decoder.weight, atol=1e-6)
    assert sg.modules.inserted(sg.load_model(str(tmp_path / "second")).model)
    with pytest.raises(sg.InputError, match="its weights are of a segmenter"):
        sg.train(
            make_recipe({"model": {"name": str(tmp_path / "first")}, "data": {"train": str(data)}}),
            tmp_path / "third",
        )


def test_ignored_pixels_teach_nothing(data, tmp_path):
    """The same run over maps whose border says something else: the weights do not differ."""
    from steadygaze.training.losses.cross_entropy import cross_entropy

    logits, labels = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randint(0, 3, (2, 4, 4))
    labels[:, :2] = 255
    loss = cross_entropy(logits, labels)
    assert torch.isclose(loss, torch.nn.functional.cross_entropy(logits[:, :, 2:], labels[:, 2:]))
    loss.backward()
    assert not logits.grad[:, :, :2].any() and logits.grad[:, :, 2:].any()
    assert cross_entropy(logits, torch.full((2, 4, 4), 255)) == 0


@pytest.mark.parametrize("crop", ["pad", "resized", "resize", "none"])
def test_image_and_map_move_together(data, crop):
    from steadygaze.data.label_maps import find_label_maps
    from steadygaze.data.preprocess import Preprocess
    from steadygaze.training.images import TrainingImages
    from steadygaze.training.recipe import Augment

    shape = Preprocess.from_timm(
        {
            "input_size": (3, SIDE, SIDE),
            "mean": (0, 0, 0),
            "std": (1, 1, 1),
            "interpolation": "nearest",
            "crop_pct": 1.0,
        }
    )
    training_images = TrainingImages(
        find_label_maps(data), shape, Augment(crop=crop, pad=6, resize=40), seed=0
    )
    for epoch in range(4):
        image, labels, mask = training_images[epoch, 3]
        assert (
            labels.shape == (SIDE, SIDE) and not mask.numel() and set(labels.unique().tolist()) <= {0, 1, 255}
        )
        assert image[0][labels == 1].min() > 0.6 and image[0][labels == 0].max() < 0.3
    if crop == "pad":
        black = [(training_images[e, 3][0] == 0).all(0) & (training_images[e, 3][1] == 255) for e in range(4)]
        assert any(b[0].any() or b[-1].any() for b in black), "what is padded has no class"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"losses": {"relevance": {}}}, "losses.relevance: it is defined for classifiers"),
        ({"augment": {"mixup": 0.8}}, "masks cannot follow augment.mixup"),
        ({"data": {"train": "x", "only": ["1"]}}, "data.only: images for segmentation have no class"),
        ({"data": {"train": "x", "masks": "tokencut"}}, "expected a folder of ground truth for segmentation"),
    ],
)
def test_what_does_not_go_with_a_segmentation_is_said(data, more, words):
    with pytest.raises(sg.InputError, match=words):
        recipe(data, **more)


def test_masks_are_asked_for_and_looked_at(tmp_path):
    folder = squares(tmp_path / "data", 4)
    Image.fromarray(np.full((SIDE, SIDE), 128, np.uint8)).save(folder / "masks" / "2.png")
    with pytest.raises(sg.ImageError, match=r"2\.png.*has no pixel with a class"):
        sg.train(recipe(folder), tmp_path / "run")
    (tmp_path / "plain" / "1").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "plain" / "1" / "a.png")
    with pytest.raises(sg.InputError, match="segmentation: expected a folder of masks"):
        sg.train(recipe(tmp_path / "plain"), tmp_path / "run")


# -- the segmenter by itself -----------------------------------------------------------------------


def test_it_is_the_linear_decoder_of_normed_patches():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **MODEL).eval()
    made = sg.modules.segmenter(model, 5)
    images = torch.randn(2, 3, SIDE, SIDE)
    z = model.forward_features(images)[:, 1:]  # behind the final norm, without the class token
    scores = made.decoder(z).transpose(1, 2).unflatten(2, (4, 4))
    assert torch.allclose(
        made(images), torch.nn.functional.interpolate(scores, size=(SIDE, SIDE), mode="bilinear"), atol=1e-5
    )
    assert made.no_weight_decay() >= {"backbone.pos_embed", "backbone.cls_token"}
    assert not any(m._forward_hooks for m in model.modules())
    twin = copy.deepcopy(made)
    torch.nn.init.zeros_(model.norm.weight)
    assert not torch.allclose(twin(images), made(images)), "a copy runs its own modules"


@pytest.mark.parametrize(
    "name",
    tiered(
        ["Swin", "PVT v2", "torchvision", "transformers ViT", "EVA (mean)", "CaiT", "transformers SigLIP"], 2
    ),
)
def test_it_is_made_of_any_view(name):
    model = ALL[name]()
    images = images_of(model)
    got = sg.modules.segmenter(model, 4)(images)
    assert got.shape == (2, 4, *images.shape[-2:]) and got.dtype == images.dtype and got.std() > 0


def test_it_is_the_mlp_decoder_of_several_blocks():
    """SegFormer's decoder by hand: project each map, upsample, concatenate, fuse, classify."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **{**MODEL, "depth": 8}).eval()
    made = sg.modules.segmenter(model, 5, decoder="segformer")
    assert made.layers == (2, 4, 6, 8) and made.decoder_name == "segformer"
    images = torch.randn(2, 3, SIDE, SIDE)
    states = model.get_intermediate_layers(images, n=[1, 3, 5, 7], norm=False)
    d = made.decoder
    parts = [p(n(z)) for p, n, z in zip(d.project, d.norms, states, strict=True)]
    batch_norm = d.fuse[1]
    fused = torch.cat(parts, -1) @ d.fuse[0].weight[:, :, 0, 0].T
    fused = (fused - batch_norm.running_mean) / (batch_norm.running_var + 1e-5).sqrt()
    fused = torch.relu(fused * batch_norm.weight + batch_norm.bias)
    scores = (fused @ d.predict.weight[:, :, 0, 0].T + d.predict.bias).transpose(1, 2).unflatten(2, (4, 4))
    expected = torch.nn.functional.interpolate(scores, size=(SIDE, SIDE), mode="bilinear")
    assert torch.allclose(made(images), expected, atol=1e-5)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", tiered(["Swin", "PVT v2", "torchvision", "transformers ViT", "CaiT"], 1))
def test_the_mlp_decoder_is_made_of_any_view(name):
    model = ALL[name]()
    images = images_of(model)
    made = sg.modules.segmenter(model, 4, decoder="segformer")
    got = made.eval()(images)
    assert got.shape == (2, 4, *images.shape[-2:]) and got.dtype == images.dtype and got.std() > 0
    grids = [tuple(z.shape[1:3]) for z in made.maps(images, made.layers)]
    if name in ("Swin", "PVT v2"):
        assert len(set(grids)) == len(grids) > 1 and grids == sorted(grids, reverse=True), "one map a stage"


@pytest.mark.full
def test_the_mlp_decoder_is_trained_loaded_and_explained(tmp_path):
    folder = squares(tmp_path / "data", 8)
    model = {"name": "vit_tiny_patch16_224", "arguments": MODEL, "decoder": "segformer"}
    asked = recipe(folder, model=model, modules={"tap": {}}, losses={"cross_entropy": {}, "adl": {}})
    got = sg.train(asked, tmp_path / "run")
    loaded = sg.load_model(str(tmp_path / "run"))
    images = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), got.model.eval()(images))
    again = sg.train(recipe(folder, model={"name": str(tmp_path / "run")}, epochs=1), tmp_path / "again")
    assert again.model.decoder_name == "segformer", "the weights bring their decoder"
    region = sg.Region("object", box=(8, 8, 24, 24))
    assert sg.explain(loaded, images, target=region, method="ixg").scores.shape[0] == 1
    with pytest.raises(sg.InputError, match="the weights have a segformer decoder, got 'linear'"):
        sg.train(recipe(folder, model={"name": str(tmp_path / "run"), "decoder": "linear"}), tmp_path / "no")
    with pytest.raises(sg.InputError, match="it is of task = 'segmentation'"):
        make_recipe({"model": {"name": "x", "decoder": "linear"}})


def test_bad_input_is_named():
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    with pytest.raises(sg.UnknownNameError, match="segformer"):
        sg.modules.segmenter(model, 2, decoder="segforme")
    for classes in (1, 300, 2.0, True):
        with pytest.raises(sg.InputError, match="expected an integer from 2 to 255"):
            sg.modules.segmenter(model, classes)
    with pytest.raises(sg.InputError, match="got a Segmenter"):
        sg.modules.segmenter(sg.modules.segmenter(model, 2), 2)
    with pytest.raises(sg.UnsupportedModelError):
        sg.modules.segmenter(torch.nn.Linear(2, 2), 2)
