"""TokenCut finds what stands out, from fused and from written-out attention; training takes its masks."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadygaze as sg
from helpers.losses import tiny
from helpers.tiers import tiered
from helpers.training import content, image_folder
from oracles import vit
from steadygaze.training import loop
from steadygaze.training import tokencut as bilateral
from steadygaze.training import tokencut as masks
from steadygaze.training.images import check_masks, select_images
from steadygaze.training.model import build_recipe_model
from steadygaze.training.recipe import make_recipe


def scene() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of an object, of a thing like it in the corner, and of a background that leans a little
    towards both."""
    generator = torch.Generator().manual_seed(0)
    where = torch.zeros(7, 8, dtype=torch.bool)
    where[2:5, 3:6] = True
    features = torch.tensor([0.0, 1.0, 0.0]) + 0.1 * torch.randn(7, 8, 3, generator=generator)
    features[where] = torch.tensor([1.0, 0.0, 0.0]) + 0.1 * torch.randn(9, 3, generator=generator)
    features[6, 0] = torch.tensor([1.0, 0.0, 0.0])
    return features, where


def test_the_object_is_found_in_one_piece():
    features, where = scene()
    found = masks.normalized_cut(features)
    assert torch.equal(found, where), "the corner is alike, but not connected"


def test_it_is_the_generalized_eigenproblem():
    features, _ = scene()
    f = features.reshape(-1, 3).double().numpy()
    f = f / np.linalg.norm(f, axis=1, keepdims=True)
    w = np.where(f @ f.T > 0.2, 1.0, 1e-5)
    d = np.diag(w.sum(1))
    values, vectors = np.linalg.eig(np.linalg.inv(d) @ (d - w))
    v = vectors[:, np.argsort(values.real)[1]].real
    seed = np.abs(v).argmax()
    side = (v > v.mean()) == (v > v.mean())[seed]
    found = masks.normalized_cut(features).flatten().numpy()
    assert side[found].all() and found[seed]


def test_keys_are_the_last_blocks():
    model, images = tiny(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    state = vit.run(model, vit.embed(model, images))
    wanted = state.blocks[-1].k.transpose(1, 2).flatten(2)[:, 1:].reshape(2, 4, 4, -1)
    assert torch.allclose(masks.last_keys(model, images), wanted)
    for block in model.blocks:
        block.attn.fused_attn = False
    assert torch.allclose(masks.last_keys(model, images), wanted)
    assert masks.tokencut(model, images).any(-1).any(-1).all()


def test_what_all_keys_have_in_common_can_be_taken_away():
    """Nothing stands out beside a large common part; attention does not see it, and centered keys do not have
    it."""
    features, where = scene()
    features[6, 0] = features[6, 1]  # without the thing in the corner
    shifted = features + torch.tensor([0.0, 0.0, 50.0])
    assert not torch.equal(masks.normalized_cut(shifted), where)
    assert torch.equal(masks.normalized_cut(shifted - shifted.mean((0, 1))), where)
    model, images = tiny(), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    keys = masks.last_keys(model, images)
    wanted = torch.stack([masks.normalized_cut(one - one.mean((0, 1))) for one in keys])
    assert torch.equal(masks.tokencut(model, images, centered=True), wanted)
    common = model.blocks[-1].attn.qkv.bias.data.view(3, -1)[1]
    before = model(images)
    common += 30.0
    assert torch.allclose(model(images), before)
    assert torch.equal(masks.tokencut(model, images, centered=True), wanted)


def test_masks_that_cover_nothing_are_noted(tmp_path, monkeypatch):
    given = content(image_folder(tmp_path / "data"), losses={"relevance": {}}, epochs=1)
    given["data"]["masks"] = "tokencut"
    small = torch.zeros(14, 14, dtype=torch.bool)
    small[3, 3] = True
    monkeypatch.setattr(masks, "tokencut", lambda model, images, **options: small.expand(len(images), 14, 14))
    assert any(
        "cut_centered" in note for note in loop.TrainingRun(make_recipe(given), tmp_path / "run").notes
    )


def test_training_with_masks_that_were_found(tmp_path):
    given = content(image_folder(tmp_path / "data"), losses={"relevance": {}}, epochs=1)
    given["data"]["masks"] = "tokencut"
    got = sg.train(make_recipe(given), tmp_path / "run")
    assert float(got.log[-1]["relevance.foreground"]) >= 0


def test_training_with_masks_found_by_another_model(tmp_path):
    given = content(image_folder(tmp_path / "data"), losses={"relevance": {}}, epochs=1)
    given["data"] |= {"masks": "tokencut", "cut_by": "embedded", "cut_edges": "bilateral"}
    run = loop.TrainingRun(make_recipe(given), tmp_path / "run")
    assert run.images.generated_masks is not None
    assert {tuple(mask.shape) for mask in run.images.generated_masks.values()} == {(32, 32)}, (
        "pixels of the embedded model's size"
    )
    assert all(
        set(mask.unique().tolist()) <= {0, 255} and mask.any() for mask in run.images.generated_masks.values()
    )
    given["data"] |= {"cut_by": None, "cut_checkpoint": "some.safetensors"}
    with pytest.raises(sg.InputError, match="cut_by"):
        make_recipe(given)


def test_an_empty_mask_is_named_before_the_first_step(tmp_path):
    data = image_folder(tmp_path / "data")
    for number, file in enumerate(sorted(data.rglob("*.png"))):
        mask = tmp_path / "masks" / file.relative_to(data)
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16), 0 if number == 3 else 255, np.uint8)).save(mask)
    given = content(data, losses={"relevance": {}}, epochs=1)
    given["data"]["masks"] = str(tmp_path / "masks")
    with pytest.raises(sg.ImageError, match="background everywhere"):
        loop.TrainingRun(make_recipe(given), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mask_of_another_size_is_named_before_the_first_step(tmp_path):
    data = image_folder(tmp_path / "data")
    for number, file in enumerate(sorted(data.rglob("*.png"))):
        mask = tmp_path / "masks" / file.relative_to(data)
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 16) if number == 3 else (16, 16), 255, np.uint8)).save(mask)
    given = content(data, losses={"relevance": {}}, epochs=1)
    given["data"]["masks"] = str(tmp_path / "masks")
    with pytest.raises(sg.ImageError, match=r"the mask is 16x8, its image bright/3\.png is 16x16"):
        loop.TrainingRun(make_recipe(given), tmp_path / "run")


def test_long_preparations_report_their_progress(tmp_path):
    data = image_folder(tmp_path / "data")
    recipe = make_recipe(
        content(data, losses={"relevance": {}}) | {"data": {"train": str(data), "masks": "tokencut"}}
    )
    images = select_images(recipe.data, "train", build_recipe_model(recipe).classes, None)
    reported = []
    check_masks(images, reported.append)
    assert [(p.task, p.done, p.total) for p in reported] == [("check masks", done, 12) for done in range(13)]
    reported.clear()
    loop.TrainingRun(recipe, tmp_path / "run", on_progress=reported.append).close()
    assert [(p.task, p.done, p.total) for p in reported] == [("TokenCut masks", done, 12) for done in (0, 12)]


# -- models with stages ----------------------------------------------------------------------------


def swin(**options):
    small = {
        "img_size": 56,
        "embed_dim": 12,
        "depths": (1, 2),
        "num_heads": (1, 2),
        "window_size": 7,
        "num_classes": 3,
    }
    return timm.create_model("swin_tiny_patch4_window7_224", **{**small, **options}).double().eval()


@pytest.mark.parametrize("window", [7, 4, (2, 3)])
def test_keys_of_windows_are_put_together(window):
    size = (48, 48) if window != 7 else (56, 56)
    model, images = swin(img_size=size, window_size=window), torch.randn(2, 3, *size, dtype=torch.float64)
    block, seen = model.layers[-1].blocks[-1], []
    block.norm1.register_forward_hook(lambda module, given, out: seen.append(out))
    found = masks.last_keys(model, images)
    normed = next(
        out for out in reversed(seen) if len(out) == 2
    )  # after the last forward pass its windows are probed
    dim = normed.shape[-1]
    wanted = normed @ block.attn.qkv.weight[dim : 2 * dim].T + block.attn.qkv.bias[dim : 2 * dim]
    assert torch.allclose(found, wanted), "the key of every place is that of the token there"
    assert masks.tokencut(model, images).shape == found.shape[:3]


@pytest.mark.parametrize(
    "name", tiered(["pvt_v2_b0", "pit_ti_224", "rvt_tiny", "pvt_tiny", "hiera_tiny_224"], 2)
)
def test_models_with_stages_have_keys_in_their_last_block(name):
    model = timm.create_model(name, num_classes=3)
    side = model.default_cfg["input_size"][-1] if hasattr(model, "default_cfg") else 224
    found = masks.tokencut(model, torch.randn(1, 3, side, side))
    assert found.any() and found.shape[1] == found.shape[2]


@pytest.mark.full
def test_keys_made_of_several_patches_are_refused():
    model = timm.create_model("mvitv2_tiny", num_classes=3)
    with pytest.raises(sg.MethodUnavailableError, match="tokencut"):
        masks.tokencut(model, torch.randn(1, 3, 224, 224))
    with pytest.raises(sg.InputError, match="tau"):
        masks.tokencut(tiny(), torch.zeros(1, 3, 16, 16), tau=3)


# -- the bilateral solver --------------------------------------------------------------------------


def dense(target: np.ndarray, image: np.ndarray) -> np.ndarray:
    """The same system by dictionaries and a direct solver."""
    colors = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
    yuv = np.einsum("kc,chw->khw", colors, image * 255)
    yuv[1:] += 128
    height, width = target.shape
    cell = {
        (y, x): (y // 16, x // 16, int(yuv[0, y, x] // 16), int(yuv[1, y, x] // 8), int(yuv[2, y, x] // 8))
        for y in range(height)
        for x in range(width)
    }
    number = {c: i for i, c in enumerate(sorted(set(cell.values())))}
    blur = np.eye(len(number)) * 10
    for c, i in number.items():
        for axis in range(5):
            for step in (-1, 1):
                other = number.get(tuple(v + step * (a == axis) for a, v in enumerate(c)))
                if other is not None:
                    blur[i, other] = 1
    pixels, sums = np.zeros(len(number)), np.zeros(len(number))
    for place, c in cell.items():
        pixels[number[c]] += 1
        sums[number[c]] += target[place]
    n = np.ones(len(number))
    for _ in range(10):
        n = np.sqrt(n * pixels / (blur @ n))
    system = 256 * (np.diag(n * (blur @ n)) - np.diag(n) @ blur @ np.diag(n)) + np.diag(0.999 * pixels)
    y = np.linalg.solve(system, 0.999 * sums)
    return np.array([[y[number[cell[a, b]]] for b in range(width)] for a in range(height)])


@pytest.mark.parametrize("seed", range(3))
def test_the_solver_solves_the_papers_system(seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.nn.functional.interpolate(
        torch.rand(1, 3, 5, 6, generator=generator), size=(40, 33), mode="bilinear"
    )[0]
    target = (torch.rand(40, 33, generator=generator) > 0.5).double()
    wanted = dense(target.numpy(), image.double().numpy())
    assert np.allclose(bilateral.solve(target, image, iterations=2000, tolerance=1e-12), wanted, atol=1e-7)
    assert np.abs(bilateral.solve(target, image).numpy() - wanted).max() < 0.02, "25 steps come close"


def test_a_coarse_mask_takes_the_images_edge():
    image = torch.full((3, 64, 64), 0.2)
    true = torch.zeros(64, 64, dtype=torch.bool)
    true[13:47, 9:51] = True
    image[:, true] = torch.tensor([0.9, 0.4, 0.1])[:, None]
    coarse = torch.zeros(64, 64, dtype=torch.bool)
    coarse[16:48, 16:48] = True
    assert torch.equal(bilateral.refine(coarse, image), true)
    pierced = image.clone()
    pierced[:, 24:36, 24:36] = 0.2
    assert not (bilateral.solve(coarse.double(), pierced) > 0.5)[30, 30]
    assert torch.equal(bilateral.refine(coarse, pierced), true), "holes are filled"
    elsewhere = torch.zeros(64, 64, dtype=torch.bool)
    elsewhere[:4, 60:] = True
    assert torch.equal(bilateral.refine(elsewhere, image), elsewhere), (
        "a mask that the solver loses stays as it was"
    )


def test_the_largest_piece():
    inside = torch.zeros(5, 6, dtype=torch.bool)
    inside[0, 0] = inside[2:4, 2:5] = inside[4, 5] = True
    wanted = torch.zeros(5, 6, dtype=torch.bool)
    wanted[2:4, 2:5] = True
    assert np.array_equal(bilateral.largest_component(inside.numpy()), wanted.numpy())
    assert not bilateral.largest_component(np.zeros((2, 2), bool)).any()
