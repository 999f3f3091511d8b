"""Scores of ImageNet-C and ImageNet-P against hand-made numbers and naive loops."""

from itertools import pairwise

import numpy as np
import pytest

from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS, PERTURBATIONS
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness import scores
from steadygaze.robustness.protocols import STILL

MEANS = {  # AlexNet's published mean errors
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816,
    "frost": 0.826572, "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204,
    "elastic_transform": 0.646056, "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip


def flat(value: float, names: tuple[str, ...] = COMMON) -> dict[str, list[float]]:
    return {name: [value] * 5 for name in names}


def some_errors(names: tuple[str, ...] = COMMON) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: np.sort(rng.uniform(0.3, 0.95, 5)) for name in names}


def test_alexnet_table_has_the_published_means():
    assert set(scores.ALEXNET) == set(MEANS) == set(COMMON)
    for name, mean in MEANS.items():
        assert np.mean(scores.ALEXNET[name]) == pytest.approx(mean, abs=1e-6)


def test_alexnet_scores_one_hundred():
    assert scores.mean_corruption_error(scores.ALEXNET) == pytest.approx(100)
    assert scores.relative_mean_corruption_error(scores.ALEXNET, scores.ALEXNET_CLEAN) == pytest.approx(100)
    assert scores.mean_flip_rate(scores.ALEXNET_FLIPS) == pytest.approx(100)


def test_mce_by_hand():
    wanted = 100 * sum(0.5 / mean for mean in MEANS.values()) / 15
    assert scores.mean_corruption_error(flat(0.5)) == pytest.approx(wanted, rel=1e-6)
    one = flat(0.0) | {"fog": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert scores.mean_corruption_error(one) == pytest.approx(100 * 1.5 / (5 * 0.819324) / 15, rel=1e-6)


def test_mce_and_relative_mce_against_a_loop():
    errors, clean = some_errors(), 0.28
    ratio = relative = 0.0
    for name in COMMON:
        top = bottom = top_r = bottom_r = 0.0
        for severity in range(5):
            top += errors[name][severity]
            bottom += scores.ALEXNET[name][severity]
            top_r += errors[name][severity] - clean
            bottom_r += scores.ALEXNET[name][severity] - 0.4348
        ratio += top / bottom
        relative += top_r / bottom_r
    assert scores.mean_corruption_error(errors) == pytest.approx(100 * ratio / 15)
    assert scores.relative_mean_corruption_error(errors, clean) == pytest.approx(100 * relative / 15)


def test_fifteen_or_nineteen():
    errors = some_errors(CORRUPTIONS)
    few = {name: errors[name] for name in COMMON}
    assert scores.mean_corruption_error(errors) == scores.mean_corruption_error(few)
    assert scores.mean_error(errors) == pytest.approx(np.mean(list(few.values())))
    assert scores.mean_error(errors, extra=True) == pytest.approx(np.mean(list(errors.values())))
    card, small = scores.corruption_scores(errors, 0.25), scores.corruption_scores(few, 0.25)
    assert (card.corruptions, small.corruptions) == (19, 15)
    assert card.mean_error == small.mean_error == small.mean_error_all != card.mean_error_all
    assert card.by_corruption["spatter"] == pytest.approx(errors["spatter"].mean())
    own = scores.mean_corruption_error(errors, baseline=flat(0.5, CORRUPTIONS))
    assert own == pytest.approx(100 * np.mean(list(errors.values())) / 0.5)


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ({name: [0.5] * 5 for name in COMMON[1:]}, InputError, "gaussian_noise"),
        (flat(0.5) | {"fogg": [0.5] * 5}, UnknownNameError, "Did you mean .fog"),
        (flat(0.5) | {"fog": [0.5] * 4}, InputError, "5 errors of fog"),
        (flat(50.0), InputError, "divide percentages by 100"),
        (flat(float("nan")), InputError, "in 0"),
    ],
)
def test_bad_errors(errors, kind, words):
    with pytest.raises(kind, match=words):
        scores.mean_corruption_error(errors)


def test_a_baseline_needs_its_clean_error():
    with pytest.raises(InputError, match="together"):
        scores.relative_mean_corruption_error(flat(0.5), 0.3, baseline=flat(0.6))
    with pytest.raises(InputError, match="clean error in"):
        scores.relative_mean_corruption_error(flat(0.5), 30)


def test_flip_probability_by_hand():
    predictions = np.array([[1, 2, 2, 1, 1], [3, 3, 3, 3, 4]])
    assert scores.flip_probability(predictions, "tilt") == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert scores.flip_probability(predictions, "shot_noise") == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert scores.flip_probability(np.array([[1, 2, 2, 2]]), "gaussian_noise") == 1
    assert scores.flip_probability(np.array([[1, 2, 2, 2]]), "rotate") == pytest.approx(1 / 3)


def naive_pairs(frames: int, name: str, difficulty: int) -> list[tuple[int, int]]:
    if name in STILL:
        return [(0, frame) for frame in range(1, frames)]
    pairs = []
    for start in range(difficulty):
        chain = list(range(start, frames, difficulty))
        pairs += list(pairwise(chain))
    return pairs


def naive_top5(a: np.ndarray, b: np.ndarray) -> int:
    """The paper's sum, place by place."""
    order_a, order_b = sorted(range(len(a)), key=lambda c: -a[c]), sorted(range(len(b)), key=lambda c: -b[c])
    total = 0
    for i in range(1, 6):
        sigma = order_b.index(order_a[i - 1]) + 1
        total += sum(1 for j in range(min(i, sigma) + 1, max(i, sigma) + 1) if 1 <= j - 1 <= 5)
    return total


@pytest.mark.parametrize("name", ["gaussian_noise", "brightness"])
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_sequences_against_a_loop(name, difficulty):
    rng = np.random.default_rng(difficulty)
    logits = rng.normal(size=(4, 11, 12))
    flips, moves = [], []
    for one in logits:
        pairs = naive_pairs(11, name, difficulty)
        flips.append(np.mean([one[a].argmax() != one[b].argmax() for a, b in pairs]))
        moves.append(np.mean([naive_top5(one[a], one[b]) for a, b in pairs]))
    assert scores.flip_probability(logits.argmax(2), name, difficulty=difficulty) == pytest.approx(
        np.mean(flips)
    )
    assert scores.top5_distance(logits, name, difficulty=difficulty) == pytest.approx(np.mean(moves))


def test_top5_distance_by_hand():
    best = np.arange(10, 0, -1.0)
    swapped = best[[1, 0, 2, 3, 4, 5, 6, 7, 8, 9]]
    gone = best[[5, 6, 7, 8, 9, 0, 1, 2, 3, 4]]
    assert scores.top5_distance(np.stack([best, best])[None], "scale") == 0
    assert scores.top5_distance(np.stack([best, swapped])[None], "scale") == 2
    assert scores.top5_distance(np.stack([best, gone])[None], "scale") == 15


def test_mean_flip_rate_and_distance_by_hand():
    half = {name: value / 2 for name, value in scores.ALEXNET_FLIPS.items()}
    assert scores.mean_flip_rate(half) == pytest.approx(50)
    assert scores.mean_flip_rate(half | {"snow": 0.1193}) == pytest.approx(55)
    distances = {name: float(k) for k, name in enumerate(PERTURBATIONS)}
    assert scores.mean_top5_distance(distances) == pytest.approx(4.5)
    assert scores.mean_top5_distance(distances, baseline=dict.fromkeys(PERTURBATIONS, 9.0)) == pytest.approx(
        50
    )


def test_bad_sequences():
    with pytest.raises(UnknownNameError, match="'rotate'"):
        scores.flip_probability(np.zeros((2, 3), dtype=int), "rotated")
    with pytest.raises(InputError, match="integers"):
        scores.flip_probability(np.zeros((2, 3)), "rotate")
    with pytest.raises(InputError, match="more than 3 frames"):
        scores.flip_probability(np.zeros((2, 3), dtype=int), "rotate", difficulty=3)
    with pytest.raises(InputError, match="6 classes"):
        scores.top5_distance(np.zeros((2, 3, 5)), "rotate")
    with pytest.raises(InputError, match="missing: tilt"):
        scores.mean_flip_rate({name: 0.1 for name in PERTURBATIONS if name != "tilt"})
    with pytest.raises(InputError, match="divide percentages"):
        scores.mean_flip_rate(dict.fromkeys(PERTURBATIONS, 10.0))
