"""Patch-wise augmentation: against a slow oracle with the same draws, how often each operation happens, and
as a loss of a training run."""

import pytest
import torch

import steadygaze as sg
from helpers.training import content, recipe, same, weights
from oracles import patches as oracle
from steadygaze.training.losses import patch_augmentation as ours
from steadygaze.training.losses.cross_entropy import CrossEntropyOptions, cross_entropy
from steadygaze.training.losses.patch_augmentation import PatchAugmentationOptions
from steadygaze.training.losses.registry import LossSetup
from steadygaze.training.model import build_recipe_model
from steadygaze.training.objective import Objective

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def often(**more) -> PatchAugmentationOptions:
    return PatchAugmentationOptions(
        **{"patch": 8, "crop": 0.5, "noisy": 0.5, "flip": 0.5, "noise": 0.3} | more
    )


def as_dicts(draws: ours.PatchDraws) -> list[dict]:
    names = ("side", "top", "left")
    numbers = zip(*(getattr(draws, name).tolist() for name in names), strict=True)
    return [
        {**dict(zip(names, row, strict=True)), "noise": noise, "flipped": flipped}
        for row, noise, flipped in zip(numbers, draws.noise, draws.flipped.tolist(), strict=True)
    ]


def test_agrees_with_the_oracle_for_the_same_draws(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = 2 * torch.randn(3, 3, 16, 24, dtype=torch.float64, generator=generator)
    options, drawn = often(scale=[0.3, 1.0]), []
    real = ours.draw_patches
    monkeypatch.setattr(ours, "draw_patches", lambda *given: drawn.append(real(*given)) or drawn[-1])
    torch.manual_seed(1)
    mean, std = torch.tensor(MEAN).double(), torch.tensor(STD).double()
    got = ours.augment_images(images, options, mean, std)
    draws = drawn[0]
    wanted = oracle.augmented_images(images, as_dicts(draws), 8, mean.tolist(), std.tolist())
    assert torch.allclose(got, wanted, atol=1e-12) and not torch.allclose(got, images, atol=0.1)
    assert 0 < (draws.side < 8).sum() < 18 and draws.flipped.any() and (draws.noise == 0).any()
    low, high = ((v - mean) / std for v in (0, 1))
    assert (got >= low[:, None, None]).all() and (got <= high[:, None, None]).all()


def test_each_operation_happens_as_often_as_the_options_say():
    torch.manual_seed(0)
    patches = torch.zeros(20_000, 3, 16, 16)
    draws = ours.draw_patches(patches, PatchAugmentationOptions())
    cropped, noisy = draws.side < 16, draws.noise.abs().amax((1, 2, 3)) > 0
    for happened in (cropped, noisy, draws.flipped):
        assert happened.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert set(draws.side.tolist()) == {15, 16}, (
        "√.85 · 16 = 14.75 rounds to 15; a whole patch is drawn again"
    )
    assert set(draws.top[cropped].tolist()) == {0, 1} and not draws.top[~cropped].any()
    assert draws.noise[noisy].std().item() == pytest.approx(0.01, rel=0.02)
    whole = PatchAugmentationOptions(crop_draw="batch", crop=0.5)
    counts = {int((ours.draw_patches(patches[:50], whole).side < 16).sum()) for _ in range(20)}
    assert counts == {0, 50}, "one draw decides for all patches"


def test_it_is_added_to_the_loss_of_the_clean_images(data):
    """The gradient is the sum of both: nothing between them resets it."""
    built = build_recipe_model(recipe(data))
    model = built.model.train()
    setup = LossSetup(model, 1, built.num_classes, built.preprocess)
    options = {"cross_entropy": CrossEntropyOptions(), "patch_augmentation": often(weight=2.0)}
    objective = Objective(model, options, setup)
    images, targets = torch.randn(4, 3, 16, 16), torch.rand(4, 2).softmax(1)
    torch.manual_seed(5)
    total, terms, _ = objective(images, torch.zeros(4).long(), targets)
    parameters = list(model.parameters())
    got = torch.autograd.grad(total, parameters)
    torch.manual_seed(5)
    loss = objective.losses["patch_augmentation"]
    augmented = ours.augment_images(images, loss.options, loss.mean, loss.std)
    clean, extra = (cross_entropy(model(x), targets) for x in (images, augmented))
    assert terms["patch_augmentation"].item() == pytest.approx(extra.item())
    gradients = (torch.autograd.grad(value, parameters) for value in (clean, extra))
    for found, a, b in zip(got, *gradients, strict=True):
        assert torch.allclose(found, a + 2 * b, atol=1e-6)
    model.eval()
    assert objective(images, torch.zeros(4).long(), targets)[1]["patch_augmentation"] == 0, "not in testing"


def test_a_run_with_it_resumes_exactly(data, tmp_path):
    more = {
        "losses": {"cross_entropy": {}, "patch_augmentation": {"patch": 8, "crop": 0.5}},
        "augment": {"crop": "pad", "mixup": 0.8, "repeats": 2, "interpolation": "random"},
        "schedule": {"cooldown_epochs": 1},
    }
    whole = sg.train(recipe(data, **more), tmp_path / "whole")
    assert all(float(row["patch_augmentation"]) > 0 for row in whole.log if row["patch_augmentation"])
    sg.train(recipe(data, **more), tmp_path / "cut", stop_after=3)
    sg.train(recipe(data, **more), tmp_path / "cut")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    without = sg.train(recipe(data, **{**more, "losses": {}}), tmp_path / "without")
    assert not same(weights(tmp_path / "whole"), weights(without.folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 7}, r"patch_augmentation.patch: images of 16x16 cannot be divided into patches of 7x7"),
        ({"patch": 0}, r"patch_augmentation.patch: expected a number above 0, got 0"),
        ({"scale": [0.9, 0.5]}, r"patch_augmentation.scale: expected \[least, most\]"),
        ({"crop": 1.5}, r"patch_augmentation.crop: expected a share between 0 and 1, got 1.5"),
        ({"crop_draw": "image"}, r"patch_augmentation.crop_draw 'image'"),
    ],
)
def test_wrong_options_are_refused(data, tmp_path, options, message):
    with pytest.raises(sg.SteadygazeError, match=message):
        sg.train(content(data, losses={"patch_augmentation": options}), tmp_path / "run")
