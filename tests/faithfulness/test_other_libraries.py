"""Measures that Quantus and captum have too: equal on the same inputs; where not, the test says how.

For both libraries, an image is the grid of its patches, of ones: a zero is a patch that is removed. So they
measure true removal. Neither is needed to use the package; what is not installed is skipped.
"""

from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn

import steadygaze as sg
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import Batch, concentration, evaluate
from steadygaze.faithfulness.hiding import kept_logits
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.road import impute, road
from steadygaze.faithfulness.sanity import efficient_randomization, fully_shuffled, smooth_randomization
from steadygaze.faithfulness.stability import noisy_images
from steadygaze.faithfulness.subsets import attributed_to, infidelity, lost_with, pearson

pytestmark = pytest.mark.full
QUIET = {"disable_warnings": True, "display_progressbar": False}


class Cells(nn.Module):
    """Logits of a grid of ones (a patch is kept) and zeros; row i belongs to image i."""

    def __init__(self, whole: CachedForward) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, cells):
        keep = cells.flatten(1) > 0.5
        return kept_logits(self.whole, keep, torch.arange(len(keep)))


@pytest.fixture
def problem():
    model = tiny("class", 3)
    batch = Batch(random_images(model, 3, 4), torch.tensor([1, 4, 0]), names=("a", "b", "c"))
    maps = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        yield model, batch, maps, CachedForward(sg.adapt(model), batch.images)


def asked(whole, maps, batch) -> dict:
    """What Quantus is given: the model of cells, grids of ones, labels and maps."""
    cells = np.ones((len(maps), 1, 4, 4))
    return {
        "model": Cells(whole).eval(),
        "x_batch": cells,
        "y_batch": batch.labels.numpy(),
        "a_batch": maps.numpy()[:, None].copy(),
        "device": "cpu",
        "softmax": True,
    }


def hidden_from(sets) -> torch.Tensor:
    """(B, S, P) from sets[s][b], lists of patches."""
    hidden = torch.zeros(len(sets[0]), len(sets), 16, dtype=torch.bool)
    for s, of_images in enumerate(sets):
        for b, patches in enumerate(of_images):
            hidden[b, s, torch.as_tensor(patches)] = True
    return hidden


def test_faithfulness_correlation_is_that_of_quantus(problem):
    """sensitivity_n is its mean over sizes; Quantus' SensitivityN is another measure: it correlates over the
    images of a batch, at each step of a removal in the order of the map."""
    quantus = pytest.importorskip("quantus")
    _, batch, maps, whole = problem
    options = {"subset_size": 5, "nr_runs": 12, "return_aggregate": False, "perturb_baseline": 0.0, **QUIET}
    np.random.seed(0)  # noqa: NPY002
    theirs = quantus.FaithfulnessCorrelation(**options)(**asked(whole, maps, batch))
    drawn = np.random.RandomState(0)
    sets = [[drawn.choice(16, 5, replace=False) for _ in range(3)] for _ in range(12)]
    hidden = hidden_from(sets)
    ours = pearson(attributed_to(maps[None], hidden), lost_with(whole, batch.labels, hidden))[0]
    assert ours.tolist() == pytest.approx(np.ravel(theirs).tolist(), abs=1e-6)


def test_infidelity_is_that_of_captum_and_quantus(problem):
    """Captum: on any sets, scaled or not. Quantus: not scaled, on its sets, which grow patch by patch, since
    it does not restore a block before it perturbs the next."""
    captum = pytest.importorskip("captum.metrics")
    quantus = pytest.importorskip("quantus")
    _, batch, maps, whole = problem
    generator = torch.Generator().manual_seed(1)
    hidden = torch.rand(3, 10, 16, generator=generator) < 0.4
    attributed = attributed_to(maps[None], hidden)
    lost = lost_with(whole, batch.labels, hidden)
    ones = torch.ones(3, 1, 4, 4, dtype=torch.float64)
    for scaled in (True, False):
        sets = cycle(range(10))

        def perturb(cells, sets=sets):
            removed = hidden[:, next(sets)].view(3, 1, 4, 4).double()
            return removed, cells - removed

        theirs = captum.infidelity(
            lambda cells: Cells(whole)(cells).softmax(1),
            perturb,
            ones,
            maps[:, None],
            target=batch.labels,
            n_perturb_samples=10,
            max_examples_per_batch=3,
            normalize=scaled,
        )
        ours = infidelity(attributed, lost, scaled=scaled)[0]
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-9)
    options = {"perturb_patch_sizes": [1], "n_perturb_samples": 1, "perturb_baseline": 0.0, **QUIET}
    theirs = quantus.Infidelity(**options)(**asked(whole, maps, batch))
    growing = hidden_from([[list(range(n + 1))] * 3 for n in range(16)])
    lost = lost_with(whole, batch.labels, growing)
    ours = infidelity(attributed_to(maps[None], growing), lost, scaled=False)[0]
    assert ours.tolist() == pytest.approx(np.ravel(theirs).tolist(), rel=1e-5)


def test_monotonicity_of_quantus_is_always_true(problem):
    """Quantus 0.6 fills an image of baseline values with baseline values. With what AIX360 defines, and
    Quantus means, ours is 100 where the curve never falls."""
    quantus = pytest.importorskip("quantus")
    _, batch, maps, whole = problem
    options = {"features_in_step": 2, "abs": False, "normalise": False, "perturb_baseline": 0.0, **QUIET}
    theirs = quantus.Monotonicity(**options)(**asked(whole, maps, batch))
    assert np.all(theirs)
    ratios = [k / 16 for k in range(2, 16, 2)]
    found, _ = evaluate(whole.vit, batch, maps[None], ["monotonicity"], ratios=ratios)
    for b in range(3):
        ascending = oracle.ordered((-maps[b]).flatten().tolist())
        left = [oracle.kept_logits(whole.vit.model, batch.images[b], ascending[:k]) for k in range(2, 17, 2)]
        curve = [float(logits.softmax(0)[batch.labels[b]]) for logits in left]
        assert (float(found["monotonicity"].value[0, b]) == 100) == bool(np.all(np.diff(curve) >= 0))


def test_roads_imputation_and_curve_are_those_of_quantus():
    """Most relevant first; images of one channel: Quantus 0.6 fails on three."""
    quantus = pytest.importorskip("quantus")
    from quantus.functions.perturb_func import noisy_linear_imputation

    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 10, 8, generator=generator, dtype=torch.float64)
    hidden = torch.rand(10, 8, generator=generator) < 0.7
    theirs = noisy_linear_imputation(image.numpy(), hidden.flatten().nonzero()[:, 0].numpy(), noise=0.0)
    torch.testing.assert_close(impute(image, hidden), torch.from_numpy(theirs), rtol=0, atol=1e-10)

    model = tiny("class", 3, in_chans=1)
    images = torch.randn(3, 1, 12, 12, generator=generator, dtype=torch.float64)
    maps = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        whole = CachedForward(sg.adapt(model), images)
        target = whole.logits.argmax(1)
        ratios = [0.125, 0.25, 0.5, 0.75]
        ours = road(whole, Batch(images, target), maps[None], target, ratios, noise=0.0)
        percentages = [100 * ratio for ratio in ratios]
        for b in range(3):
            theirs = quantus.ROAD(percentages=percentages, noise=0.0, normalise=False, **QUIET)(
                model=Doubles(model).eval(),
                x_batch=images[b : b + 1].numpy(),
                y_batch=target[b : b + 1].numpy(),
                a_batch=by_pixels(maps[b : b + 1]),
                device="cpu",
            )
            assert ours.detail[0, b, :4].tolist() == [100 * theirs[p] for p in percentages]


class Doubles(nn.Module):
    """A model in float64 that takes float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.double())


def explain(model, images, target):
    return sg.explain(model, images, target=target, method="gae").scores


def by_pixels(maps):
    """What Quantus takes for an image: (B, 1, H, W), each score on the 3 x 3 pixels of its patch."""
    return maps.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, None].numpy().copy()


def test_sensitivities_are_those_of_captum_and_quantus(problem):
    captum = pytest.importorskip("captum.metrics")
    quantus = pytest.importorskip("quantus")
    model, batch, _, _ = problem
    again = lambda *given: explain(*given)[None]  # noqa: E731
    maps = again(model, batch.images, batch.labels)
    found, _ = evaluate(model, batch, maps, ["max_sensitivity", "avg_sensitivity"], explain=again)
    samples = cycle([noisy_images(batch, sample) for sample in range(10)])
    theirs = captum.sensitivity_max(
        lambda images: (explain(model, images[0] if isinstance(images, tuple) else images, batch.labels),),
        batch.images,
        perturb_func=lambda images, radius: next(samples),
        n_perturb_samples=10,
        max_examples_per_batch=3,
    )
    torch.testing.assert_close(found["max_sensitivity"].value[0], theirs.double(), rtol=1e-9, atol=1e-12)
    for name, metric in (("max_sensitivity", "MaxSensitivity"), ("avg_sensitivity", "AvgSensitivity")):
        samples = cycle([noisy_images(batch, sample) for sample in range(10)])
        theirs = getattr(quantus, metric)(
            nr_samples=10,
            perturb_func=lambda samples=samples, **_: next(samples).flatten(1).numpy(),
            **QUIET,
        )(
            model=Doubles(model).eval(),
            x_batch=batch.images.numpy(),
            y_batch=batch.labels.numpy(),
            a_batch=by_pixels(maps[0]),
            device="cpu",
            explain_func=lambda model, inputs, targets, **_: by_pixels(
                explain(model.model, torch.as_tensor(inputs).double(), torch.as_tensor(targets))
            ),
        )
        assert found[name].value[0].tolist() == pytest.approx(np.ravel(theirs).tolist(), rel=1e-5)


def test_sparseness_and_complexity_are_those_of_quantus(problem):
    quantus = pytest.importorskip("quantus")
    _, batch, maps, whole = problem
    theirs = quantus.Sparseness(**QUIET)(**asked(whole, maps, batch))
    assert concentration.sparseness(maps[None])[0].tolist() == pytest.approx(theirs, abs=1e-6)
    theirs = quantus.Complexity(**QUIET)(**asked(whole, maps, batch))
    assert concentration.complexity(maps[None])[0].tolist() == pytest.approx(theirs, abs=1e-6)


class Resettable(nn.Module):
    """Quantus initializes weights anew; this model takes ours, which are shuffled, when it is told to."""

    def __init__(self, model: nn.Module, shuffled: nn.Module) -> None:
        super().__init__()
        self.both = (model, shuffled)
        self.register_buffer("number", torch.zeros(1, dtype=torch.long))

    def reset_parameters(self) -> None:
        self.number.fill_(1)

    def forward(self, x):
        return self.both[int(self.number)](x.double())


def test_randomization_tests_are_those_of_quantus(problem, monkeypatch):
    quantus = pytest.importorskip("quantus")
    model, batch, _, _ = problem
    shuffled = fully_shuffled(sg.adapt(model), batch.images[:1])

    def again(model, inputs, targets, **_):
        used = model.both[int(model.number)]
        images = torch.as_tensor(np.asarray(inputs)).double()
        return by_pixels(explain(used, images, torch.as_tensor(targets)))

    given = {
        "model": Resettable(model, shuffled).eval(),
        "x_batch": batch.images.numpy(),
        "y_batch": batch.labels.numpy(),
        "device": "cpu",
        "explain_func": again,
        "batch_size": 3,
    }
    theirs = quantus.EfficientMPRT(**QUIET)(a_batch=None, **given)
    ours = efficient_randomization(
        explain(model, batch.images, batch.labels)[None], explain(shuffled, batch.images, batch.labels)[None]
    )
    assert ours.value[0].tolist() == pytest.approx(theirs, abs=1e-9)

    # Quantus 0.6 calls its own `explain` whatever it is given, and leaves the last image without noise
    draws = np.random.default_rng(0).normal(size=(4, *batch.images.shape))
    draws[-1] = 0
    drawn = cycle(draws[:-1])
    monkeypatch.setattr(np.random, "randn", lambda *_: next(drawn))
    monkeypatch.setattr(quantus, "explain", again)
    smooth = quantus.SmoothMPRT(
        nr_samples=4, abs=False, normalise=False, return_last_correlation=True, **QUIET
    )
    theirs = smooth(a_batch=None, **given)
    spread = batch.images.flatten(1).amax(1) - batch.images.flatten(1).amin(1)
    noise = 0.1 * spread[:, None, None, None] * torch.from_numpy(draws)
    means = [
        torch.stack([explain(one, batch.images + sample, batch.labels) for sample in noise]).mean(0)
        for one in (model, shuffled)
    ]
    ours = smooth_randomization(means[0][None], means[1][None])
    assert ours.detail[0, :, 0].tolist() == pytest.approx(theirs, abs=1e-9)
