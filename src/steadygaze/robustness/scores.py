"""Scores of ImageNet-C and ImageNet-P (D. Hendrycks, T. Dietterich, arXiv:1903.12261). All: lower is better.

    CE_c  = sum_s E_{s,c} / sum_s E^Alex_{s,c}                       mCE  = 100 mean_c CE_c
    rel_c = sum_s (E_{s,c} - E_clean) / sum_s (E^Alex_{s,c} - E^Alex_clean); relative mCE = 100 mean_c rel_c
    FP_p  = mean over sequences and frames of 1[prediction differs]  mFR  = 100 mean_p FP_p / FP^Alex_p
    T5D_p = mean over sequences and frames of the top-5 distance     mT5D = 100 mean_p T5D_p / T5D^Alex_p

E are top-1 errors in 0..1 by corruption c and severity s. AlexNet's, 75 of them, are those that the authors
published in issue 10 of hendrycks/robustness; their means are the 15 numbers that every mCE in use divides by
(0.886428 for Gaussian noise, ...). AlexNet's clean error is that of torchvision's weights, which the authors
used. AlexNet's flip probabilities are in a sheet linked from issue 49 there. The numbers here could not be
checked against it, so use mFR with care, or pass your own baseline to `mean_flip_rate`. mCE is
defined on the 15 common corruptions: AlexNet's errors on the 4 extra ones are not published, so 19 give a
mean error, and an mCE only with a custom baseline.

Formulas: docs/equations.md#corruption-error, docs/equations.md#flip-rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS, PERTURBATIONS
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.protocols import STILL

ALEXNET_CLEAN = 0.4348  # torchvision's weights

ALEXNET: dict[str, tuple[float, ...]] = {  # top-1 error at severities 1 to 5
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.9487, 0.9872, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.5843, 0.70048, 0.82108, 0.8975, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.9187, 0.94952),
    "frost": (0.6139, 0.79734, 0.8879, 0.89942, 0.9343),
    "fog": (0.67474, 0.7605, 0.84378, 0.8726, 0.945),
    "brightness": (0.4514, 0.48502, 0.54048, 0.62166, 0.7244),
    "contrast": (0.64548, 0.7615, 0.88874, 0.9776, 0.9927),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.5462, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}

# flip probabilities at difficulty 1; not confirmed, see above
ALEXNET_FLIPS: dict[str, float] = {
    "gaussian_noise": 0.2365, "shot_noise": 0.3006, "motion_blur": 0.0930, "zoom_blur": 0.0594,
    "snow": 0.1193, "brightness": 0.0489, "translate": 0.1101, "rotate": 0.1310, "tilt": 0.0705,
    "scale": 0.2353,
}  # fmt: skip

Errors = Mapping[str, Sequence[float]]


def _checked(errors: Errors, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Five errors in 0..1 for each of `wanted`, in that order."""
    for name in errors:
        if name not in CORRUPTIONS:
            raise UnknownNameError("corruption", str(name), CORRUPTIONS)
    missing = [name for name in wanted if name not in errors]
    if missing:
        raise InputError(f"expected errors for {len(wanted)} corruptions; missing: {', '.join(missing)}")
    checked = {name: np.asarray(errors[name], dtype=np.float64) for name in wanted}
    for name, values in checked.items():
        if values.shape != (5,):
            raise InputError(f"expected 5 errors of {name}, one for each severity, got shape {values.shape}")
        if not ((values >= 0) & (values <= 1)).all():
            raise InputError(f"expected errors of {name} in 0..1, got {values}; divide percentages by 100")
    return checked


def _names(baseline: Errors | None) -> tuple[str, ...]:
    """Return the corruptions of an mCE: the 15 common ones, or all that a custom baseline has."""
    return COMMON if baseline is None else tuple(name for name in CORRUPTIONS if name in baseline)


def mean_corruption_error(errors: Errors, *, baseline: Errors | None = None) -> float:
    """mCE in percent of AlexNet's (100: as bad as AlexNet), from {corruption: errors at severities 1..5}.

    Over the 15 common corruptions, whatever else `errors` holds; with a `baseline` of the same form, over all
    it holds.

    Examples:
        >>> errors = {name: [0.5] * 5 for name in COMMON}  # at severities 1 to 5
        >>> round(mean_corruption_error(errors), 1)
        64.7
    """
    names = _names(baseline)
    ours, theirs = _checked(errors, names), _checked(ALEXNET if baseline is None else baseline, names)
    return 100 * float(np.mean([ours[name].sum() / theirs[name].sum() for name in names]))


def relative_mean_corruption_error(
    errors: Errors, clean: float, *, baseline: Errors | None = None, baseline_clean: float | None = None
) -> float:
    """Relative mCE in percent: how much the error grows from `clean` (0..1), against AlexNet's growth.

    Examples:
        >>> round(relative_mean_corruption_error({name: [0.5] * 5 for name in COMMON}, clean=0.3), 1)
        65.1
    """
    if (baseline is None) != (baseline_clean is None):
        raise InputError("expected baseline and baseline_clean together, got one of them")
    if not 0 <= clean <= 1:
        raise InputError(f"expected a clean error in 0..1, got {clean}; divide percentages by 100")
    names = _names(baseline)
    ours, theirs = _checked(errors, names), _checked(ALEXNET if baseline is None else baseline, names)
    start = ALEXNET_CLEAN if baseline_clean is None else baseline_clean
    return 100 * float(np.mean([(ours[name] - clean).sum() / (theirs[name] - start).sum() for name in names]))


def mean_error(errors: Errors, *, extra: bool = False) -> float:
    """Mean top-1 error in 0..1 over severities and the 15 common corruptions, or, `extra`, over all 19.

    Examples:
        >>> round(mean_error({name: [0.1, 0.2, 0.3, 0.4, 0.5] for name in COMMON}), 2)
        0.3
    """
    names = CORRUPTIONS if extra else COMMON
    return float(np.mean([values.mean() for values in _checked(errors, names).values()]))


@dataclass(frozen=True)
class CorruptionScores:
    """All scores of one model.

    Attributes:
        corruptions: Number of corruptions in `mean_error_all`, 15 or 19.
    """

    clean: float
    mce: float
    relative_mce: float
    mean_error: float  # over the 15
    corruptions: int
    mean_error_all: float
    by_corruption: dict[str, float]  # mean error over severities


def corruption_scores(errors: Errors, clean: float) -> CorruptionScores:
    """mCE, relative mCE and mean errors from errors on 15 or 19 corruptions.

    Examples:
        >>> round(corruption_scores({name: [0.5] * 5 for name in COMMON}, clean=0.3).mce, 1)
        64.7
    """
    extra = any(name not in COMMON for name in errors)
    names = CORRUPTIONS if extra else COMMON
    checked = _checked(errors, names)
    return CorruptionScores(
        clean=clean,
        mce=mean_corruption_error(errors),
        relative_mce=relative_mean_corruption_error(errors, clean),
        mean_error=mean_error(errors),
        corruptions=len(names),
        mean_error_all=mean_error(errors, extra=extra),
        by_corruption={name: float(values.mean()) for name, values in checked.items()},
    )


def _pairs(frames: int, name: str, difficulty: int) -> tuple[np.ndarray, np.ndarray]:
    """Which frame is compared with which: noise with frame 0, all else with the frame `difficulty` before."""
    if name not in PERTURBATIONS:
        raise UnknownNameError("perturbation", str(name), PERTURBATIONS)
    if difficulty not in (1, 2, 3):
        raise InputError(f"expected a difficulty of 1, 2 or 3, got {difficulty!r}")
    step = 1 if name in STILL else difficulty
    if frames <= step:
        raise InputError(f"expected more than {step} frames in a sequence, got {frames}")
    later = np.arange(step, frames)
    return (np.zeros_like(later) if name in STILL else later - step), later


def flip_probability(predictions: np.ndarray, name: str, *, difficulty: int = 1) -> float:
    """Share of compared frames whose predicted class differs, 0..1.

    Args:
        predictions: Class indices, (sequences, frames).

    Examples:
        >>> round(flip_probability(np.array([[1, 1, 2, 2]]), "translate"), 3)
        0.333
    """
    predictions = np.asarray(predictions)
    if predictions.ndim != 2 or not np.issubdtype(predictions.dtype, np.integer) or not len(predictions):
        got = f"{predictions.dtype} {predictions.shape}"
        raise InputError(f"expected predicted classes, integers (sequences, frames), got {got}")
    before, later = _pairs(predictions.shape[1], name, difficulty)
    return float((predictions[:, before] != predictions[:, later]).mean())


def top5_distance(logits: np.ndarray, name: str, *, difficulty: int = 1) -> float:
    """Mean top-5 distance between compared frames, from 0 (the same five in order) to 15.

    With tau and tau' the rankings of the two frames and sigma_i the rank in tau' of the class that is i-th in
    tau, d = sum_{i=1..5} #{j : 1 <= j - 1 <= 5, min(i, sigma_i) < j <= max(i, sigma_i)}: each of the first
    five counts the places it moved, as far as place 6.

    Args:
        logits: (sequences, frames, classes).

    Examples:
        >>> top5_distance(np.tile(np.arange(10.0), (1, 3, 1)), "translate")  # three equal frames
        0.0
    """
    logits = np.asarray(logits)
    if logits.ndim != 3 or logits.shape[2] < 6 or not len(logits):
        raise InputError(f"expected logits (sequences, frames, at least 6 classes), got shape {logits.shape}")
    before, later = _pairs(logits.shape[1], name, difficulty)
    order = np.argsort(-logits, axis=2, kind="stable")
    rank = np.argsort(order, axis=2, kind="stable")  # 0 is the best
    moved = np.take_along_axis(rank[:, later], order[:, before, :5], axis=2)
    return float(np.abs(np.minimum(moved, 5) - np.arange(5)).sum(2).mean())


def _mean_ratio(values: Mapping[str, float], baseline: Mapping[str, float]) -> float:
    for name in values:
        if name not in PERTURBATIONS:
            raise UnknownNameError("perturbation", str(name), PERTURBATIONS)
    missing = [name for name in PERTURBATIONS if name not in values or name not in baseline]
    if missing:
        raise InputError(f"expected all {len(PERTURBATIONS)} perturbations; missing: {', '.join(missing)}")
    return 100 * float(np.mean([values[name] / baseline[name] for name in PERTURBATIONS]))


def mean_flip_rate(flips: Mapping[str, float], *, baseline: Mapping[str, float] = ALEXNET_FLIPS) -> float:
    """mFR in percent of AlexNet's, from {perturbation: flip probability in 0..1} for all ten.

    Examples:
        >>> round(mean_flip_rate(dict.fromkeys(ALEXNET_FLIPS, 0.1)), 1)
        99.1
    """
    for name, value in flips.items():
        if not 0 <= value <= 1:
            raise InputError(f"expected flips of {name} in 0..1, got {value}; divide percentages by 100")
    return _mean_ratio(flips, baseline)


def mean_top5_distance(
    distances: Mapping[str, float], *, baseline: Mapping[str, float] | None = None
) -> float:
    """mT5D in percent of a baseline's top-5 distances.

    AlexNet's are not included: without a baseline this is the plain mean over the ten perturbations (uT5D in
    the paper: not standardized).

    Examples:
        >>> round(mean_top5_distance(dict.fromkeys(ALEXNET_FLIPS, 2.0)), 1)
        2.0
    """
    if baseline is None:
        return _mean_ratio(distances, dict.fromkeys(PERTURBATIONS, 1.0)) / 100
    return _mean_ratio(distances, baseline)
