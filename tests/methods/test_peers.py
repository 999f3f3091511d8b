"""Against captum and pytorch-grad-cam, where definitions coincide."""

import numpy as np
import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients
from pytorch_grad_cam import (
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    ShapleyCAM,
    XGradCAM,
)
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from oracles.gradient import patch_sums
from oracles.models import DEFAULT_KINDS, KINDS, random_images, tiny

TARGET = torch.tensor([1, 3])
CAMS = {
    "gradcam": GradCAM,
    "xgradcam": XGradCAM,
    "gradcam_plus_plus": GradCAMPlusPlus,
    "hirescam": HiResCAM,
    "elementwise_gradcam": GradCAMElementWise,
    "layercam": LayerCAM,
}


def close(got: Tensor, wanted: Tensor, what: str) -> None:
    assert got.shape == wanted.shape
    assert wanted.abs().max() > 1e-3, f"{what}: nothing to compare"
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max(), what


@pytest.mark.parametrize(
    "name",
    tiered(
        [*(k for k in KINDS if k != "pre_norm"), "torchvision", "transformers ViT", "BEiT"], DEFAULT_KINDS
    ),
)
def test_input_x_gradient_of_captum_on_tokens(name: str) -> None:
    """pre_norm is left out: there x^0 · gradient is O(eps), see test_oracles.expected_to_vanish."""
    model = tiny_models.ALL[name]()
    vit, images = sg.adapt(model), tiny_models.images_of(model)
    tokens = vit.embed(images).detach()
    theirs = InputXGradient(vit.logits).attribute(tokens.clone().requires_grad_(), target=TARGET)
    ours = sg.explain(model, images, target=TARGET, method="ixg").scores.flatten(1)
    close(ours, theirs.sum(-1)[:, vit.prefix :].detach(), name)


@pytest.mark.parametrize("name", tiered([*KINDS, "torchvision", "transformers ViT"], DEFAULT_KINDS))
def test_integrated_gradients_of_captum_on_tokens(name: str) -> None:
    model = tiny_models.ALL[name]()
    vit, images = sg.adapt(model), tiny_models.images_of(model)
    tokens = vit.embed(images).detach()
    theirs = IntegratedGradients(vit.logits).attribute(
        tokens, target=TARGET, n_steps=20, method="riemann_middle"
    )
    ours = sg.explain(model, images, target=TARGET, method="integrated_gradients").scores.flatten(1)
    close(ours, theirs.sum(-1)[:, vit.prefix :], name)


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_integrated_gradients_of_captum_on_pixels(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    theirs = IntegratedGradients(model).attribute(images, target=TARGET, n_steps=20, method="riemann_middle")
    ours = sg.explain(
        model, images, target=TARGET, method="integrated_gradients:space=pixels"
    ).scores.flatten(1)
    close(ours, patch_sums(model, theirs), kind)


def drawn(scores: Tensor) -> Tensor:
    """As pytorch-grad-cam finishes a map: negative scores away, then min-max with its 1e-7."""
    maps = scores.clamp(min=0).numpy()
    for i, image in enumerate(maps):
        maps[i] = (image - image.min()) / (1e-7 + (image - image.min()).max())
    return torch.from_numpy(maps)


@pytest.mark.parametrize("name", CAMS)
@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_cam_family_of_pytorch_grad_cam(kind: str, name: str) -> None:
    """On blocks[-1].norm1 with their reshape_transform, before they resize to the image."""
    model = tiny(kind)
    images = random_images(model)
    rows, columns = model.patch_embed.grid_size

    def reshape(x: Tensor) -> Tensor:
        return x[:, model.num_prefix_tokens :].unflatten(1, (rows, columns)).permute(0, 3, 1, 2)

    with CAMS[name](model, [model.blocks[-1].norm1], reshape_transform=reshape) as peer:
        peer.get_target_width_height = lambda _: (columns, rows)  # no resizing
        theirs = peer(images.requires_grad_(), [ClassifierOutputTarget(int(c)) for c in TARGET])
    ours = sg.explain(tiny(kind), images.detach(), target=TARGET, method=sg.method(name, at="norm1")).scores
    wanted = torch.from_numpy(np.asarray(theirs)).double()
    assert (drawn(drawn(ours)) - wanted).abs().max() <= 1e-5
    assert wanted.max() > 0.9, "a map of zeros compares nothing"


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_shapley_cam_of_pytorch_grad_cam(kind: str) -> None:
    """Its weights of channels, of activations and gradients given by hand: the whole call fails on tokens."""
    model = tiny(kind)
    for block in model.blocks:
        block.attn.fused_attn = False  # fused kernels have no second derivative
    images = random_images(model)
    rows, columns = model.patch_embed.grid_size

    def reshape(x: Tensor) -> Tensor:
        return x[:, model.num_prefix_tokens :].unflatten(1, (rows, columns)).permute(0, 3, 1, 2)

    seen: list[Tensor] = []
    hook = model.blocks[-1].norm1.register_forward_hook(lambda _, __, y: seen.append(y))
    logits = model(images.requires_grad_())
    hook.remove()
    (a,) = seen
    (g,) = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), a, create_graph=True)
    with ShapleyCAM(model, [model.blocks[-1].norm1], reshape_transform=reshape) as peer:
        weights = torch.from_numpy(peer.get_cam_weights(images, None, None, a, g))
    theirs = torch.einsum("bk,bkhw->bhw", weights, reshape(a.detach()))
    ours = sg.explain(
        tiny(kind), images.detach(), target=TARGET, method="shapley_cam:weights=channels"
    ).scores
    close(ours, theirs, kind)


@pytest.mark.parametrize("kind", DEFAULT_KINDS)
def test_eigen_cam_of_pytorch_grad_cam(kind: str) -> None:
    """The projection before they scale it; its sign is left to the decomposition there."""
    model = tiny(kind).double()
    images = random_images(model).double()
    prefix, side = model.num_prefix_tokens, model.patch_embed.grid_size[0]
    seen = []
    handle = model.blocks[-1].norm1.register_forward_hook(lambda _module, _given, out: seen.append(out))
    with torch.no_grad():
        model(images)
    handle.remove()
    activations = seen[0][:, prefix:].unflatten(1, (side, -1)).permute(0, 3, 1, 2)
    theirs = torch.from_numpy(get_2d_projection(activations.numpy()))
    ours = sg.explain(model, images, target=0, method="eigen").scores
    sign = (ours * theirs).sum((1, 2)).sign()[:, None, None]
    assert torch.allclose(ours, sign * theirs.to(ours), atol=1e-5)
