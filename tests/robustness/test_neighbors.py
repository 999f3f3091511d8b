"""k-NN against scikit-learn, and features of any classifier without a trace left on it."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

import steadygaze as sg
from helpers.tiny_models import PLAIN, images_of
from oracles.models import random_images, tiny
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.robustness.neighbors import features, knn_accuracy, knn_predict


def clusters(count: int, seed: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator) * 3 + 1
    middle = torch.randn(classes * 3 + 1, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return middle[labels] + 0.9 * torch.randn(count, 6, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 2, 10])
def test_predictions_are_those_of_scikit_learn(metric: str, k: int) -> None:
    train, train_labels = clusters(120, 0)
    test, test_labels = clusters(60, 1)
    judge = KNeighborsClassifier(n_neighbors=k, metric=metric, algorithm="brute").fit(
        train.numpy(), train_labels.numpy()
    )
    wanted = judge.predict(test.numpy())
    got = knn_predict(train, train_labels, test, k=k, metric=metric)
    assert np.array_equal(got.numpy(), wanted)
    accuracy = knn_accuracy(train, train_labels, test, test_labels, ks=(1, 2, 10))
    assert accuracy[metric, k] == pytest.approx(judge.score(test.numpy(), test_labels.numpy()))
    assert 0.3 < accuracy[metric, k] < 1


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = clusters(50, 0)
    test, _ = clusters(33, 1)
    whole = knn_predict(train, labels, test, k=5)
    monkeypatch.setattr("steadygaze.robustness.neighbors.CELLS", 250)
    assert torch.equal(whole, knn_predict(train, labels, test, k=5))


@pytest.mark.parametrize("kind", ["class", "average"])
def test_features_are_what_timm_calls_pre_logits(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(images), pre_logits=True)
    assert torch.allclose(features(model, images), wanted, atol=1e-12)
    assert torch.allclose(features(sg.adapt(model), images), wanted, atol=1e-12)


def test_features_of_a_cnn_with_a_linear_map_of_the_same_width_before_the_last() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4), nn.Tanh()
    )
    model = nn.Sequential(body, nn.Linear(4, 4)).eval()
    images = torch.randn(3, 3, 8, 8)
    assert torch.allclose(features(model, images), body(images).detach())


@pytest.mark.parametrize("name", ["transformers ViT", "torchvision", "distilled DeiT"])
def test_features_lead_to_the_logits(name: str) -> None:
    model = PLAIN[name]()
    images = images_of(model)
    got = features(model, images)
    heads = {
        "transformers ViT": "classifier",
        "torchvision": "heads.head",
        "distilled DeiT": "head head_dist",
    }[name].split()
    parts = got.chunk(len(heads), 1)
    with torch.no_grad():
        out = sum(model.get_submodule(head)(part) for head, part in zip(heads, parts, strict=True)) / len(
            heads
        )
        assert torch.allclose(out, sg.adapt(model)(images), atol=1e-8)


def test_nothing_is_left_behind_even_after_a_failure() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.head(x)
            raise RuntimeError("broken")

    broken = Breaks()
    with pytest.raises(RuntimeError, match="broken"):
        features(broken, torch.zeros(1, 3))
    whole = tiny().train()
    features(whole, random_images(whole))
    for model in (broken, whole):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) and model.training


def test_bad_input() -> None:
    train, labels = clusters(20, 0)
    with pytest.raises(InputError, match="from 1 to 20"):
        knn_predict(train, labels, train, k=21)
    with pytest.raises(UnknownNameError, match="cosine"):
        knn_predict(train, labels, train, k=1, metric="cosin")
    with pytest.raises(InputError, match="like the training ones"):
        knn_predict(train, labels, train[:, :3], k=1)
    with pytest.raises(InputError, match="20 class indices"):
        knn_predict(train, labels[:3], train, k=1)
    with pytest.raises(InputError, match="NaN"):
        knn_predict(train / 0, labels, train, k=1)
    with pytest.raises(UnsupportedModelError, match="linear layer"):
        features(nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten()), torch.zeros(1, 3, 4, 4))
