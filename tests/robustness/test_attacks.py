"""Attacks against an obvious loop, and their limits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from oracles.models import tiny
from steadygaze.errors import InputError
from steadygaze.robustness.attacks import fgsm, pgd

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalized(nn.Module):
    """Pixels in, logits out."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.model = model
        self.m, self.s = (torch.tensor(v, dtype=dtype).view(1, 3, 1, 1) for v in (MEAN, STD))

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - self.m) / self.s)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    return net.double().eval()


def batch(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels with many at both ends of the scale, the same normalized, labels."""
    generator = torch.Generator().manual_seed(3)
    pixels = (1.4 * torch.rand(count, 3, 12, 12, generator=generator, dtype=torch.float64) - 0.2).clamp(0, 1)
    m, s = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    return pixels, (pixels - m) / s, torch.arange(count) % 5


def to_pixels(images: Tensor) -> Tensor:
    m, s = (torch.tensor(v, dtype=images.dtype).view(1, 3, 1, 1) for v in (MEAN, STD))
    return images * s + m


MODELS: dict[str, Any] = {"ViT": tiny, "CNN": cnn}


def naive(
    model: nn.Module, pixels: Tensor, labels: Tensor, eps: float, alpha: float, steps: int, start: Tensor
) -> Tensor:
    """Image by image, in double precision, straight from the papers."""
    out = []
    for x, y, x0 in zip(pixels, labels, start, strict=True):
        now = x0.clone()
        for _ in range(steps):
            leaf = now.clone().requires_grad_()
            loss = -torch.log_softmax(Normalized(model)(leaf[None]), 1)[0, y]
            loss.backward()
            now = now + alpha * torch.sign(leaf.grad)
            now = torch.maximum(torch.minimum(now, x + eps), x - eps).clip(0, 1)
        out.append(now.detach())
    return torch.stack(out)


@pytest.mark.parametrize("name", MODELS)
def test_fgsm_is_one_signed_step(name: str) -> None:
    model = MODELS[name]()
    pixels, images, labels = batch()
    got = to_pixels(fgsm(model, images, labels, epsilon=8 / 255, mean=MEAN, std=STD))
    wanted = naive(model, pixels, labels, 8 / 255, 8 / 255, 1, pixels)
    assert torch.allclose(got, wanted, atol=1e-12)
    assert (got - pixels).abs().max() <= 8 / 255 + 1e-12 and got.min() >= -1e-12 and got.max() <= 1 + 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_pgd_is_the_loop_of_the_paper_from_the_drawn_start(name: str) -> None:
    model = MODELS[name]()
    pixels, images, labels = batch()
    noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    start = (pixels + 4 / 255 * (2 * noise - 1)).clip(0, 1)
    options: dict[str, Any] = {"epsilon": 4 / 255, "steps": 5, "step": 1 / 255, "mean": MEAN, "std": STD}
    got = to_pixels(pgd(model, images, labels, generator=torch.Generator().manual_seed(7), **options))
    assert torch.allclose(got, naive(model, pixels, labels, 4 / 255, 1 / 255, 5, start), atol=1e-12)
    again = to_pixels(pgd(model, images, labels, generator=torch.Generator().manual_seed(7), **options))
    other = to_pixels(pgd(model, images, labels, generator=torch.Generator().manual_seed(8), **options))
    assert torch.equal(got, again) and not torch.equal(got, other)


def test_pgd_is_stronger_than_fgsm_and_both_raise_the_loss() -> None:
    model = tiny()
    _, images, labels = batch(8)
    options: dict[str, Any] = {"epsilon": 4 / 255, "mean": MEAN, "std": STD}

    def loss(x: Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(model(x), labels).detach())

    clean, one, many = (
        loss(x)
        for x in (images, fgsm(model, images, labels, **options), pgd(model, images, labels, **options))
    )
    assert clean < one < many


def test_batch_equals_singles_and_a_view_equals_its_model() -> None:
    model = tiny()
    _, images, labels = batch()
    options: dict[str, Any] = {"epsilon": 2 / 255, "mean": MEAN, "std": STD, "steps": 3}
    whole = pgd(model, images, labels, **options)
    singles = torch.cat(
        [pgd(model, images[i : i + 1], labels[i : i + 1], **options) for i in range(len(images))]
    )
    assert torch.allclose(whole, singles, atol=1e-10)
    assert torch.allclose(whole, pgd(sg.adapt(model), images, labels, **options), atol=1e-10)


def test_a_random_start_of_its_own_for_each_image() -> None:
    model = tiny()
    _, images, labels = batch(4)
    options: dict[str, Any] = {"epsilon": 2 / 255, "mean": MEAN, "std": STD, "steps": 2}

    def run(places: list[int]) -> Tensor:
        return pgd(
            model,
            images[places],
            labels[places],
            generator=[torch.Generator().manual_seed(i) for i in places],
            **options,
        )

    whole = run([0, 1, 2, 3])
    assert torch.allclose(whole[[3, 1]], run([3, 1]), atol=1e-10) and torch.allclose(
        whole[2:3], run([2]), atol=1e-10
    )
    assert not torch.allclose(whole, pgd(model, images, labels, **options), atol=1e-6)
    with pytest.raises(InputError, match="one for each of 4 images, got 1"):
        pgd(model, images, labels, generator=[torch.Generator()], **options)


def test_the_model_is_left_as_it_was() -> None:
    model = cnn().train()
    _, images, labels = batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        pgd(
            model,
            images,
            labels,
            epsilon=1 / 255,
            mean=MEAN,
            std=STD,
            generator=torch.Generator().manual_seed(0),
        )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state()) and images.grad is None


def test_nothing_happens_with_a_budget_of_zero() -> None:
    model = cnn()
    _, images, labels = batch()
    assert torch.allclose(fgsm(model, images, labels, epsilon=0, mean=MEAN, std=STD), images, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epsilon": 8}, "pass 8/255"),
        ({"epsilon": 1.0}, "pass 1/255"),
        ({"epsilon": -0.1}, "expected a number from 0 to 1"),
        ({"epsilon": float("nan")}, "expected a number from 0 to 1"),
        ({"step": 2, "epsilon": 0.1}, "pass 2/255"),
        ({"steps": 0}, "steps"),
        ({"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, "normalized with"),
        ({"mean": (0.5,)}, "3 numbers each"),
        ({"labels": torch.tensor([0, 1])}, "3 class indices"),
        ({"labels": torch.tensor([0, 1, 5])}, r"classes 0\.\.4"),
        ({"images": torch.zeros(0, 3, 12, 12), "labels": torch.zeros(0, dtype=torch.long)}, "at least one"),
        ({"images": torch.full((3, 3, 12, 12), float("nan"))}, "nan"),
        ({"images": torch.zeros(3, 12, 12)}, r"\(B, C, H, W\)"),
    ],
)
def test_bad_input(changes: dict[str, Any], says: str) -> None:
    _, images, labels = batch()
    options: dict[str, Any] = {
        "images": images,
        "labels": labels,
        "epsilon": 8 / 255,
        "mean": MEAN,
        "std": STD,
    } | changes
    with pytest.raises(InputError, match=says):
        pgd(cnn(), **options)
