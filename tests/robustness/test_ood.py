"""Out-of-distribution detection: equal to scikit-learn, and the suite to its own rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score, roc_curve
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.robustness import auroc, fpr95, max_probability, negative_energy


def peers(inside: np.ndarray, outside: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """AUROC and the false positive rate at a true positive rate of 95 %, by scikit-learn."""
    labels = np.repeat([1, 0], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    false, true, _ = roc_curve(labels, scores, sample_weight=weights, drop_intermediate=False)
    return roc_auc_score(labels, scores, sample_weight=weights), false[np.argmax(true >= 0.95 - 1e-12)]


@pytest.mark.parametrize("ties", [False, True])
def test_equal_to_scikit_learn(ties: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 20, 137):
        inside, outside = rng.normal(1, 1, size), rng.normal(0, 1, 2 * size + 1)
        if ties:
            inside, outside = inside.round(), outside.round()
        assert (auroc(inside, outside), fpr95(inside, outside)) == pytest.approx(
            peers(inside, outside), abs=1e-12
        )
        own, other = (rng.integers(0, 4, len(x)).astype(float) for x in (inside, outside))
        own[0] = other[0] = 1
        weights = {"inside_weights": own, "outside_weights": other}
        found = auroc(inside, outside, **weights), fpr95(inside, outside, **weights)
        assert found == pytest.approx(peers(inside, outside, np.concatenate([own, other])), abs=1e-12)


def test_scores_of_logits() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    exp = np.exp(logits.double().numpy())
    assert max_probability(logits).numpy() == pytest.approx(exp.max(1) / exp.sum(1), abs=1e-12)
    assert negative_energy(logits).numpy() == pytest.approx(np.log(exp.sum(1)), abs=1e-12)
    for bad in ([], [float("nan")]):
        with pytest.raises(sg.InputError, match="score for each image"):
            auroc(bad, [1.0])


def test_the_suite(tmp_path: Path) -> None:
    data = image_folder(tmp_path / "data")
    (tmp_path / "plain").mkdir()
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 0, 90)).save(tmp_path / "plain" / f"{number}.png")
    words = ["-m", "embedded", "-d", data, "--suites", f"ood:{tmp_path / 'plain'}", "-o", tmp_path / "run"]
    words += ["--num-workers", 0]
    told = CliRunner().invoke(app, ["stress", *map(str, words)])
    assert told.exit_code == 0, told.output
    assert "out-of-distribution detection" in told.output
    rows = sg.Rows.read(tmp_path / "run")
    (card,) = rows.cards()
    table = rows.to_pandas()
    for metric in ("max_probability", "energy"):
        own = table[table["metric"] == metric]
        inside, outside = (
            own[own["setting"] == s]["value"].to_numpy() for s in ("in_distribution", "ood/plain")
        )
        assert (len(inside), len(outside)) == (24, 6)
        found = [card.numbers["ood/plain", f"{name}_{metric}"] for name in ("auroc", "fpr95")]
        assert [number.value for number in found] == pytest.approx(peers(inside, outside), abs=1e-9)
        assert all(number.low <= number.value <= number.high for number in found)


@pytest.mark.parametrize(
    ("suites", "message"), [("ood", "expected ood:NAME=FOLDER"), ("ood:a=b,ood:a=c", "once")]
)
def test_bad_arguments(suites: str, message: str) -> None:
    with pytest.raises(sg.InputError, match=message):
        sg.stress("embedded", None, suites=suites)


def test_batches_are_refused(tmp_path: Path) -> None:
    batch = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
    with pytest.raises(sg.InputError, match="ood: expected data in a folder"):
        sg.stress("embedded", [batch], suites=f"ood:{tmp_path}")
