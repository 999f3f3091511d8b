"""Features against the libraries' own intermediate outputs, PCA against scikit-learn."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.decomposition import PCA as SklearnPCA

import steadygaze as sg
from helpers.tiers import tiered
from helpers.tiny_models import ALL, PLAIN, REPRESENTATIVE, images_of


def backbone():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=5, img_size=64, reg_tokens=2)
    return model.eval()


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("norm", [True, False])
def test_tokens_are_those_of_timm(layer, norm):
    model = backbone()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        taken = model.forward_intermediates(
            images, indices=[layer % 3], norm=norm, return_prefix_tokens=True, intermediates_only=True
        )
    ((patches, prefix),) = taken
    f = sg.features(model, images, layer, norm=norm)
    torch.testing.assert_close(f.values, patches.permute(0, 2, 3, 1))
    torch.testing.assert_close(f.prefix, prefix)


@pytest.mark.parametrize("name", tiered(ALL, REPRESENTATIVE))
def test_every_model_has_features_on_its_grid(name):
    model = ALL[name]()
    images = images_of(model)
    f = sg.features(model, images)
    assert f.values.dim() == 4 and len(f) == len(images) and torch.isfinite(f.values).all()
    batched, single = f.values[1:], sg.features(model, images[1:]).values
    torch.testing.assert_close(batched, single)


@pytest.mark.parametrize("part", ["keys", "queries", "values"])
def test_keys_queries_and_values_are_those_of_the_block(part):
    model = backbone()
    images = torch.randn(2, 3, 64, 64)
    seen = {}
    hook = model.blocks[1].attn.qkv.register_forward_hook(lambda m, i, o: seen.update(qkv=o))
    with torch.no_grad():
        model(images)
    hook.remove()
    qkv = dict(zip(("queries", "keys", "values"), seen["qkv"].chunk(3, -1), strict=True))
    f = sg.features(model, images, 1, part)
    torch.testing.assert_close(f.values.flatten(1, 2), qkv[part][:, 3:])


@pytest.mark.parametrize("name", tiered(PLAIN, [n for n in REPRESENTATIVE if n in PLAIN]))
@pytest.mark.parametrize("part", ["keys", "values"])
def test_every_plain_model_has_keys_and_values(name, part):
    model = PLAIN[name]()
    if name == "CaiT":  # talking heads: queries and keys are mixed before the softmax
        with pytest.raises(sg.MethodUnavailableError):
            sg.features(model, images_of(model), 0, part)
        return
    f = sg.features(model, images_of(model), 0, part)
    assert torch.isfinite(f.values).all() and f.part == part


def test_pca_is_that_of_scikit_learn():
    f = sg.features(backbone(), torch.randn(3, 3, 64, 64))
    ours = f.pca(4)
    flat = f.values.flatten(0, 2).numpy()
    theirs = SklearnPCA(4, svd_solver="full").fit(flat)
    projected = ours.components.flatten(0, 2).numpy()
    np.testing.assert_allclose(np.abs(projected), np.abs(theirs.transform(flat)), atol=1e-3)
    np.testing.assert_allclose(ours.explained.numpy(), theirs.explained_variance_ratio_, rtol=1e-4)
    assert (ours.directions.gather(1, ours.directions.abs().argmax(1, keepdim=True)) > 0).all()


def planted(side=8):
    """Features of two images with an object in the middle, which differs along one direction."""
    torch.manual_seed(1)
    values = 0.1 * torch.randn(2, side, side, 16)
    values[:, 2:6, 2:6, 3] += 5
    return sg.Features(values, torch.zeros(2, 0, 16), "tokens", None, ("a", "b"))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_foreground_is_the_side_away_from_the_border(sign):
    f = planted()
    f.values.mul_(sign)
    split = f.pca(foreground=True)
    assert split.foreground[:, 2:6, 2:6].all() and split.foreground.sum() == 2 * 16
    assert (split.colors[~split.foreground] == 0).all()
    assert split.colors.min() >= 0 and split.colors.max() <= 1


def test_similarity_is_the_cosine_across_images():
    f = planted()
    similar = f.similarity(1, (3, 4))
    a, b = f.values[1, 3, 4], f.values[0, 2, 5]
    assert similar[0, 2, 5].item() == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-5)
    assert similar[1, 3, 4].item() == pytest.approx(1, abs=1e-6)
    assert similar[:, 2:6, 2:6].min() > 0.9
    torch.testing.assert_close(f.similarity(-1, (-5, -4)), similar)
    torch.testing.assert_close(f.norms(), f.values.square().sum(-1).sqrt())


def test_figures_and_files(tmp_path):
    f = planted()
    for figure in (f.figure(), f.figure("norms"), f.figure("similarity", point=(3, 3)), f.pca().figure()):
        assert isinstance(figure, Image.Image) and figure.width > 400
    assert Image.open(f.save(tmp_path / "f.png")).width > 400
    with np.load(f.save(tmp_path / "f.npz")) as stored:
        np.testing.assert_array_equal(stored["values"], f.values.numpy())
    assert f._repr_png_().startswith(b"\x89PNG")


def test_the_patch_that_is_compared_is_framed():
    image = Image.new("RGB", (64, 64), "#808080")
    f = sg.Features(planted().values[:1], torch.zeros(1, 0, 16), "tokens", (image,), ("a",))
    first, second = (np.asarray(f.figure("similarity", point=point)) for point in ((1, 1), (6, 6)))
    assert (first != second).any()


def test_bad_input_is_named():
    f, model = planted(), backbone()
    for wrong in (3, -4, "last"):
        with pytest.raises(sg.InputError, match="layer"):
            sg.features(model, torch.zeros(1, 3, 64, 64), wrong)
    with pytest.raises(sg.UnknownNameError):
        sg.features(model, torch.zeros(1, 3, 64, 64), part="key")
    for image, point in ((2, (0, 0)), (0, (8, 0)), (0, 3)):
        with pytest.raises(sg.InputError):
            f.similarity(image, point)
    with pytest.raises(sg.InputError):
        f.pca(17)
    with pytest.raises(sg.InputError):
        f.save("features.txt")
    with pytest.raises(sg.MethodUnavailableError):
        swin = ALL["Swin"]()
        sg.features(swin, images_of(swin), part="keys")


def test_the_model_is_left_as_it_was():
    model = backbone().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sg.features(model, torch.randn(1, 3, 64, 64), 1, "keys")
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
