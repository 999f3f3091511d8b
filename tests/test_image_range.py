"""Images far outside of what a model's normalization gives, and other input that has no meaning."""

import warnings

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import steadygaze as sg
from helpers.runs import thousand

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def small(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**{**options, **changes}).eval()


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in IMAGENET)
    return (pixels - mean) / std


def declared() -> VisionTransformer:
    model = small()
    model.pretrained_cfg = {"mean": IMAGENET[0], "std": IMAGENET[1]}
    return model


@pytest.mark.parametrize("make", [small, declared])
@pytest.mark.parametrize("factor", [255.0, -100.0])
def test_images_far_outside_are_warned_of(make, factor):
    pixels = torch.rand(2, 3, 16, 16)
    with pytest.warns(sg.ImagesOutOfRangeWarning, match="images: expected values") as caught:
        sg.explain(make(), factor * pixels, method="ixg")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert ("divide by 255" in str(caught[0].message)) == (factor > 0)


def test_the_normalization_of_a_loaded_model_is_used():
    loaded = thousand()
    with pytest.warns(
        sg.ImagesOutOfRangeWarning, match=r"mean \[0.5, 0.5, 0.5\] and std \[0.25, 0.25, 0.25\]"
    ):
        sg.explain(loaded, torch.full((1, 3, 32, 32), 19.0), method="ixg")


@pytest.mark.parametrize("make", [small, declared])
@pytest.mark.parametrize("kind", ["random", "black", "white", "adversarial", "noise", "unnormalized"])
def test_ordinary_images_are_no_alarm(make, kind):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, 16, 16, generator=generator)
    images = {
        "random": normalized(pixels),
        "black": normalized(torch.zeros_like(pixels)),
        "white": normalized(torch.ones_like(pixels)),
        "adversarial": normalized(pixels + 16 / 255 * (2 * (pixels > 0.5) - 1)),
        "noise": torch.randn(2, 3, 16, 16, generator=generator),
        "unnormalized": pixels,
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error", sg.ImagesOutOfRangeWarning)
        sg.explain(make(), images, method="ixg")


def test_verify_warns_once():
    images, labels = 255 * torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    with pytest.warns() as caught:
        sg.verify(small(), [(images, labels)], methods=["ixg", "rollout"], batch_size=1)
    assert sum(issubclass(warning.category, sg.ImagesOutOfRangeWarning) for warning in caught) == 1


@pytest.mark.parametrize("ratios", [[float("nan")], [0.1, float("nan")], [float("inf")], ["x"], [None]])
def test_ratios_are_numbers(ratios):
    data = [(torch.rand(1, 3, 16, 16), torch.tensor([0]))]
    with pytest.raises(sg.InputError, match="ratios: expected increasing numbers"):
        sg.verify(small(), data, methods=["ixg"], ratios=ratios)


@pytest.mark.parametrize("seed", [2**70, 2**64])
def test_a_seed_has_63_bits(seed):
    data = [(torch.rand(1, 3, 16, 16), torch.tensor([0]))]
    with pytest.raises(sg.InputError, match=r"seed: expected a whole number below 2\*\*63"):
        sg.verify(small(), data, methods=["ixg"], seed=seed)


def test_meta_tensors_have_no_values():
    images = torch.rand(1, 3, 16, 16)
    with pytest.raises(sg.InputError, match="images on the meta device"):
        sg.explain(small(), images.to("meta"), method="ixg")
    with pytest.raises(sg.UnsupportedModelError, match="the model is on the meta device"):
        sg.explain(small().to("meta"), images, method="ixg")
    with pytest.raises(sg.SteadygazeError, match="meta device"):
        sg.verify(small(), [(images.to("meta"), torch.tensor([0]))], methods=["ixg"])
    with pytest.raises(sg.UnsupportedModelError, match="the model is on the meta device"):
        sg.verify(small().to("meta"), [(images, torch.tensor([0]))], methods=["ixg"])


@pytest.mark.parametrize("method", ["gaze_twice", "gaze_halves"])
def test_methods_of_two_parts_need_two_patches(method: str):
    with pytest.raises(sg.MethodUnavailableError, match="at least 2 patches"):
        sg.explain(small(img_size=8), torch.rand(1, 3, 8, 8), method=method)


def test_hsic_of_a_model_with_one_class():
    """Its probability is a sigmoid: a softmax over one class would be 1 whatever the image."""
    result = sg.explain(small(num_classes=1), torch.rand(1, 3, 16, 16), method="hsic:budget=16")
    assert torch.isfinite(result.scores).all() and (result.scores > 0).any()
