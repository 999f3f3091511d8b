"""Calibration against torchmetrics and against loops."""

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from steadygaze.errors import InputError
from steadygaze.robustness.calibration import reliability, reliability_of


def answers(sharpness: float, count: int = 400, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = sharpness * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("bins", [15, 4])
def test_ece_is_that_of_torchmetrics(sharpness: float, bins: int) -> None:
    logits, labels = answers(sharpness)
    theirs = multiclass_calibration_error(logits.softmax(1), labels, num_classes=7, n_bins=bins, norm="l1")
    got = reliability(logits, labels, bins=bins)
    assert got.ece == pytest.approx(theirs.item(), abs=1e-6)
    assert got.confidence == pytest.approx(logits.softmax(1).max(1).values.mean().item())
    assert got.accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_bins_are_the_loops() -> None:
    logits, labels = answers(2.0)
    got = reliability(logits, labels)
    p = logits.softmax(1)
    total = 0.0
    for m in range(15):
        inside = [i for i in range(len(p)) if m / 15 < p[i].max() <= (m + 1) / 15]
        assert got.count[m] == len(inside)
        if not inside:
            assert got.bin_accuracy[m].isnan()
            continue
        sure = math.fsum(float(p[i].max()) for i in inside) / len(inside)
        ok = sum(int(p[i].argmax() == labels[i]) for i in inside) / len(inside)
        assert (got.bin_confidence[m].item(), got.bin_accuracy[m].item()) == pytest.approx((sure, ok))
        total += len(inside) / len(p) * abs(ok - sure)
    assert got.ece == pytest.approx(total)


def test_certainty_belongs_to_the_last_bin_and_booleans_are_taken() -> None:
    sure = torch.tensor([1.0, 1.0, 0.95, 0.95])
    right = torch.tensor([True, True, True, False])
    got = reliability_of(sure, right)
    assert got.count[-1] == 4 and got.ece == pytest.approx(abs(0.75 - 0.975))
    logits, labels = answers(1.0)
    assert reliability(logits, logits.argmax(1) == labels).ece == reliability(logits, labels).ece


def test_too_sure_and_not_sure_enough_do_not_cancel_out() -> None:
    sure = torch.tensor([0.9] * 10 + [0.4] * 10)
    right = torch.tensor([True] * 4 + [False] * 6 + [True] * 9 + [False])
    assert reliability_of(sure, right).ece == pytest.approx(0.5)


def test_bad_input() -> None:
    logits, labels = answers(1.0)
    with pytest.raises(InputError, match="labels or booleans"):
        reliability(logits, labels[:3])
    with pytest.raises(InputError, match="bins"):
        reliability(logits, labels, bins=0)
    with pytest.raises(InputError, match=r"0\.\.1"):
        reliability_of(torch.tensor([93.0]), torch.tensor([True]))
    with pytest.raises(InputError, match="logits"):
        reliability(labels, labels)
