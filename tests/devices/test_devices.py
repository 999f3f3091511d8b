"""Results on a GPU agree with those on the CPU, also in half precision and under autocast.

Every test here is marked `cuda` or `mps` and skipped where there is no such device: pytest -m "cuda or mps".
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import steadygaze as sg

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NO_MPS = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs Apple's GPU (MPS)")
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])
MPS = pytest.param("mps", marks=[pytest.mark.mps, NO_MPS])
METHODS = ["gaze_removal", "gae", "decompx+skipplus", "attnlrp", "rollout", "gradcam", "occlusion"]

on_each_device = pytest.mark.parametrize("device", [CUDA, MPS])


@pytest.fixture(scope="module")
def loaded() -> sg.LoadedModel:
    return sg.load_model("embedded", device="cpu")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """In the range of normalized images, since `stress` checks it."""
    return 2 * torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)) - 1


def on(device: str, model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of the model there; the fixture stays where it is."""
    return copy.deepcopy(model).to(device, dtype)


def correlation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's, over the patches of each image: (B,)"""
    maps = torch.stack([one.detach().cpu().float().flatten(1), other.detach().cpu().float().flatten(1)])
    centered = maps - maps.mean(2, keepdim=True)
    unit = centered / centered.norm(dim=2, keepdim=True)
    return (unit[0] * unit[1]).sum(1)


@on_each_device
def test_maps_agree_with_the_cpu(device, loaded, images):
    expected = sg.explain(loaded.model, images, target=3, method=METHODS)
    maps = sg.explain(on(device, loaded.model), images.to(device), target=3, method=METHODS)
    for name, attribution in maps.items():
        assert attribution.scores.device.type == device, name
        torch.testing.assert_close(
            attribution.scores.cpu(), expected[name].scores, rtol=1e-2, atol=1e-3, msg=name
        )


@on_each_device
def test_maps_are_drawn_and_saved(device, loaded, images, tmp_path: Path):
    attribution = sg.explain(on(device, loaded.model), images[:1].to(device))
    assert attribution.overlay(loaded.to_image(images[0])).size[0] > 0
    attribution.save(tmp_path)
    assert list(tmp_path.iterdir())


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_keeps_the_order_of_patches(device, dtype, loaded, images):
    expected = sg.explain(loaded.model, images, target=3, method="gaze_removal").scores
    half = on(device, loaded.model, dtype)
    attribution = sg.explain(half, images.to(device, dtype), target=3, method="gaze_removal")
    assert attribution.scores.dtype == dtype
    assert attribution.scores.isfinite().all()
    assert (correlation(attribution.scores, expected) > 0.95).all()


@on_each_device
def test_autocast_around_explain_changes_nothing(device, loaded, images):
    model, images = on(device, loaded.model), images.to(device)
    expected = sg.explain(model, images, target=3, method="gaze_removal").scores
    with torch.autocast(device, dtype=torch.float16):
        scores = sg.explain(model, images, target=3, method="gaze_removal").scores
        assert torch.is_autocast_enabled(device)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected)


@on_each_device
def test_verify_agrees_with_the_cpu(device, loaded, images):
    data = [(images, torch.tensor([3, 5, 0, 8]))]
    options = {
        "methods": ["gaze_removal", "random"],
        "metrics": ["insertion_aopc", "deletion_aopc"],
        "seed": 0,
    }
    expected = sg.verify(loaded.model, data, **options)
    rows = sg.verify(on(device, loaded.model), data, **options)
    values = [[row["value"] for row in each] for each in (expected, rows)]
    torch.testing.assert_close(torch.tensor(values[1]), torch.tensor(values[0]), rtol=0, atol=1.0)


@on_each_device
def test_stress_runs(device, loaded, images):
    rows = sg.stress(on(device, loaded.model), [(images, torch.tensor([3, 5, 0, 8]))], suites=["occlusion"])
    assert len(rows) > 0


@pytest.mark.cuda
@NO_CUDA
def test_no_memory_stays_allocated(loaded, images):
    model, images = on("cuda", loaded.model), images.cuda()
    sg.explain(model, images, method=METHODS)  # libraries allocate their workspaces in the first call
    before = torch.cuda.memory_allocated()
    sg.explain(model, images, method=METHODS)
    assert torch.cuda.memory_allocated() <= before
