"""`sg.calibrate`: what it measures, what it writes, and that its file serves one model only."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import steadygaze as sg
from steadygaze.faithfulness import calibrate as module
from steadygaze.faithfulness.calibrate import removal_scores


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def found(images: Tensor) -> sg.Calibration:
    return sg.calibrate("embedded", images)


def test_scores_are_those_of_verify(images: Tensor) -> None:
    """The mean of the four removal scores of the predicted class, image by image."""
    loaded = sg.load_model("embedded")
    labels = loaded.model(images).argmax(1)
    names = ["gaze_removal:limit=8", "gae"]
    scores = removal_scores(sg.adapt(loaded), images, names)
    rows = sg.verify(loaded, [(images, labels)], names, ratios=module.FAST_RATIOS).to_pandas()
    for name in names:
        wanted = rows[rows.method == name].groupby("image", sort=False).value.mean()
        assert np.allclose(scores[name], wanted.to_numpy(), atol=1e-4)


def test_a_setting_is_kept_only_beyond_two_standard_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting is better by 5 for every image, another by 1 on average with a large spread."""
    noise = np.array([9.0, -8.0, 11.0, -8.0])

    def planted(vit: object, some: Tensor, names: list[str]) -> dict[str, np.ndarray]:
        gains = {name: 5.0 * ("first=3" in name) + noise[: len(some)] * ("keys=2" in name) for name in names}
        return {name: np.full(len(some), 50.0) + gain for name, gain in gains.items()}

    monkeypatch.setattr(module, "removal_scores", planted)
    found = sg.calibrate("embedded", torch.zeros(8, 3, 32, 32))
    assert found.method.option("first") == 3 and found.method.option("keys") is None
    assert found.gain == (5.0, 5.0, 5.0)


def test_half_of_the_images_report(found: sg.Calibration, images: Tensor) -> None:
    assert (found.chosen_on, found.reported_on) == (4, 4)
    scores = removal_scores(sg.adapt(sg.load_model("embedded")), images[1::2], [found.name, "random"])
    assert found.scores[found.name] == pytest.approx(scores[found.name].mean(), abs=1e-2)
    assert found.scores["random"] == pytest.approx(scores["random"].mean(), abs=1e-2)


def test_explain_and_verify_take_it_where_it_is_named(
    found: sg.Calibration, images: Tensor, tmp_path: Path
) -> None:
    file = tmp_path / "cal.json"
    found.save(file)
    read = sg.Calibration.read(file)
    assert str(read) == str(found) and found.name in str(found)
    wanted = sg.explain("embedded", images[:2], method=found.method).scores
    for given in (found, file, str(file)):
        att = sg.explain("embedded", images[:2], method="calibrated", calibration=given)
        assert torch.equal(att.scores, wanted)
    several = sg.explain("embedded", images[:2], method=["gae", "calibrated"], calibration=file)
    assert torch.equal(several["calibrated"].scores, wanted)
    batch = [(images[:2], torch.tensor([0, 1]))]
    measured = sg.verify("embedded", batch, ["calibrated", found.name], calibration=file).to_pandas()
    by_method = [part.value.tolist() for _, part in measured.groupby("method", observed=True)]
    assert by_method[0] == by_method[1]


def test_it_is_never_used_silently(found: sg.Calibration, images: Tensor) -> None:
    with pytest.raises(sg.MethodUnavailableError, match="calibrate"):
        sg.explain("embedded", images[:1], method="calibrated")
    with pytest.raises(sg.InputError, match="calibrated"):
        sg.explain("embedded", images[:1], method="gae", calibration=found)


def test_another_model_is_refused(found: sg.Calibration, images: Tensor) -> None:
    loaded = sg.load_model("embedded")
    with torch.no_grad():
        loaded.model.head.bias.add_(1)
    with pytest.raises(sg.MethodUnavailableError, match="weights"):
        sg.explain(loaded, images[:1], method="calibrated", calibration=found)


def test_bad_input(images: Tensor, tmp_path: Path) -> None:
    with pytest.raises(sg.InputError, match="at least 8"):
        sg.calibrate("embedded", images[:3])
    bad = tmp_path / "bad.json"
    for content in ("[]", "not json", '{"calibration": {"name": 3}}', '{"calibration": {"name": "nothing"}}'):
        bad.write_text(content)
        with pytest.raises(sg.SteadygazeError):
            sg.Calibration.read(bad)
    bad.write_text(json.dumps({"calibration": {"name": "calibrated"}}))
    with pytest.raises(sg.InputError, match="another"):
        sg.Calibration.read(bad)
