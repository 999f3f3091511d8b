"""Changes by class against scipy, against draws of whole images, and by their coverage."""

import numpy as np
import pytest
import torch
from scipy import stats

from steadygaze.errors import InputError
from steadygaze.robustness.by_class import (
    class_changes,
    mcnemar,
    newcombe,
    over_seeds,
    paired_difference,
    turned,
    wilson,
)


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (8, 10), (0, 50), (50, 50), (37, 400)])
def test_wilson_is_that_of_scipy(right: int, count: int) -> None:
    theirs = stats.binomtest(right, count).proportion_ci(method="wilson")
    got = wilson(right, count)
    assert (got.value, got.low, got.high) == pytest.approx((right / count, theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (200, 260), (700, 640)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    before = np.repeat([False, True, True, False], [gained, lost, 30, 20])
    after = np.repeat([True, False, True, False], [gained, lost, 30, 20])
    wanted = stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert mcnemar(before, after) == pytest.approx(wanted, rel=1e-9)


def test_class_changes_counts_each_class_and_sorts_by_loss() -> None:
    labels = torch.tensor([3, 3, 3, 3, 7, 7, 1, 1, 1])
    before = torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    after = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    three, one, seven = class_changes(labels, before, after)
    assert [c.label for c in (three, one, seven)] == [3, 1, 7]
    assert (three.count, three.gained, three.lost, three.difference) == (4, 1, 2, -0.25)
    assert (one.gained, one.lost, one.difference) == (
        0,
        0,
        0.0,
    ) and one.low < 0 < one.high  # three images prove nothing
    assert (seven.before.value, seven.after.value) == (0, 1) and seven.difference == 1.0
    assert three.verdict == "unclear" and three.before == wilson(3, 4)


def test_a_class_that_lost_for_certain_is_called_so() -> None:
    labels = np.zeros(60, dtype=int)
    before, after = np.ones(60, dtype=bool), np.arange(60) % 2 == 0
    (change,) = class_changes(labels, before, after)
    assert change.verdict == "lost" and change.low < -0.5 < change.high
    (back,) = class_changes(labels, after, before)
    assert back.verdict == "gained" and (back.low, back.high) == pytest.approx((-change.high, -change.low))


@pytest.mark.parametrize(
    ("shares", "count"),
    [((0.5, 0.15, 0.05, 0.3), 20), ((0.7, 0.1, 0.1, 0.1), 50), ((0.2, 0.05, 0.3, 0.45), 30)],
)
def test_the_interval_of_a_paired_difference_covers_the_truth_95_times_in_100(
    shares: tuple[float, ...], count: int
) -> None:
    rng = np.random.default_rng(0)
    truth = shares[1] - shares[2]
    limits = [newcombe(*map(int, cells)) for cells in rng.multinomial(count, shares, size=1500)]
    covered = np.mean([low <= truth <= high for low, high in limits])
    assert 0.93 <= covered <= 0.985


def test_the_interval_narrows_to_the_normal_one_with_many_images() -> None:
    both, gained, lost, neither = 60_000, 9_000, 6_000, 25_000
    n = 100_000
    d = (gained - lost) / n
    half = 1.96 * np.sqrt((gained + lost) / n - d * d) / np.sqrt(n)
    assert newcombe(both, gained, lost, neither) == pytest.approx((d - half, d + half), abs=2e-4)


def test_paired_bootstrap_is_that_of_scipy_and_of_drawn_images() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random(150) < 0.5, rng.random(150) < 0.65
    value, low, high = paired_difference(a, b, repeats=4000)
    theirs = stats.bootstrap(
        (a.astype(float), b.astype(float)),
        lambda x, y, axis: (y - x).mean(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert value == pytest.approx(b.mean() - a.mean())
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.012)
    x, y = rng.normal(size=80), rng.normal(0.3, 1, size=80)
    value, low, high = paired_difference(x, y, repeats=4000, seed=3)
    drawn = rng.integers(0, 80, (4000, 80))
    assert (low, high) == pytest.approx(tuple(np.percentile((y - x)[drawn].mean(1), [2.5, 97.5])), abs=0.05)
    assert (
        paired_difference(x, y, seed=3) == paired_difference(x, y, seed=3) != paired_difference(x, y, seed=4)
    )


def test_turned_names_the_first_images_each_way() -> None:
    names = ["a", "b", "c", "d", "e"]
    before, after = [1, 0, 1, 1, 0], [0, 1, 0, 1, 1]
    assert turned(names, before, after) == {"wrong": ["a", "c"], "right": ["b", "e"]}
    assert turned(names, before, after, limit=1) == {"wrong": ["a"], "right": ["b"]}


def test_seeds_give_mean_and_spread() -> None:
    got = over_seeds([0.71, 0.73, 0.70])
    assert (got.mean, got.deviation) == pytest.approx(
        (np.mean([0.71, 0.73, 0.70]), np.std([0.71, 0.73, 0.70], ddof=1))
    )
    assert np.isnan(over_seeds([0.5]).deviation) and over_seeds([0.5]).seeds == 1


def test_bad_input() -> None:
    with pytest.raises(InputError, match="same images"):
        mcnemar([True], [True, False])
    with pytest.raises(InputError, match="0 and 1"):
        mcnemar([2, 0], [1, 0])
    with pytest.raises(InputError, match="labels"):
        class_changes([0.5, 1.5], [1, 0], [1, 0])
    with pytest.raises(InputError, match="names"):
        turned(["a"], [1, 0], [1, 0])
    with pytest.raises(InputError, match="finite"):
        paired_difference([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(InputError, match="at least one"):
        over_seeds([])
