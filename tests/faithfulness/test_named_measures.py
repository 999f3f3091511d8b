"""ROAD, stability under noise, concentration, and the randomization tests of Hedström et al.: naive loops."""

import pytest
import torch
from scipy.stats import spearmanr

import steadygaze as sg
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import METRICS, Batch, evaluate
from steadygaze.faithfulness.road import impute, road
from steadygaze.faithfulness.sanity import BINS, SAMPLES, fully_shuffled, gaussian_noise, histogram_entropy
from steadygaze.faithfulness.stability import RADIUS, noisy_images
from steadygaze.faithfulness.stability import SAMPLES as NOISY


def problem(kind: str = "class", seed: int = 5, methods: int = 2):
    model = tiny(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(methods, 2, *model.patch_embed.grid_size, generator=generator, dtype=torch.float64)
    return model, Batch(random_images(model, 2, seed + 1), torch.tensor([1, 4]), names=("a", "b")), maps


def explain(model, images, target):
    both = sg.explain(model, images, target=target, method=["gae", "gaze"])
    return torch.stack([one.scores for one in both.values()])


# -- ROAD


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_imputed_pixels_are_means_of_their_neighbors(share):
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 9, 7, generator=generator, dtype=torch.float64)
    hidden = torch.rand(9, 7, generator=generator) < share
    torch.testing.assert_close(impute(image, hidden), oracle.imputed(image, hidden), rtol=0, atol=1e-10)
    assert torch.equal(impute(image, hidden)[:, ~hidden], image[:, ~hidden])
    assert torch.equal(impute(image, torch.ones(9, 7, dtype=torch.bool)), torch.zeros_like(image))


ROAD_SEEDS = {"class": 5, "average": 6}  # problems whose maps differ in the score


@pytest.mark.parametrize("kind", tiered(["class", "average"], ["class"]))
def test_road_is_that_of_naive_loops(kind):
    model, batch, maps = problem(kind, ROAD_SEEDS[kind])
    ratios = [0.2, 0.5, 0.8]
    with torch.no_grad():
        from steadygaze.faithfulness.inputs import CachedForward

        whole = CachedForward(sg.adapt(model), batch.images)
        target = whole.logits.argmax(1)
        found = road(whole, batch, maps, target, ratios, noise=0.0)
    for m in range(2):
        for b in range(2):
            order = oracle.ordered(maps[m, b].flatten().tolist())
            curves = []
            for patches in (order, order[::-1]):
                right = []
                for ratio in ratios:
                    hidden = torch.zeros(12, 12, dtype=torch.bool)
                    for j in patches[: int(ratio * 16)]:
                        hidden[3 * (j // 4) : 3 * (j // 4) + 3, 3 * (j % 4) : 3 * (j % 4) + 3] = True
                    with torch.no_grad():
                        logits = model(oracle.imputed(batch.images[b], hidden)[None])[0]
                    right.append(100.0 * (int(logits.argmax()) == int(target[b])))
                curves += right
            assert found.detail[m, b].tolist() == curves
            assert float(found.value[m, b]) == pytest.approx((sum(curves[3:]) - sum(curves[:3])) / 3)
    assert found.value.unique().numel() > 1, "the example tells maps apart"


def test_roads_noise_is_the_images_own():
    model, batch, maps = problem()
    first, notes = evaluate(model, batch, maps, ["road"])
    alone = Batch(batch.images[1:], batch.labels[1:], names=batch.names[1:])
    again, _ = evaluate(model, alone, maps[:, 1:], ["road"])
    assert torch.equal(first["road"].detail[:, 1:], again["road"].detail)
    assert notes == {"road": "imputed"} and (first["road"].value.abs() <= 100).all()


# -- stability


def test_sensitivities_are_changes_of_maps_under_noise():
    model, batch, _ = problem()
    maps = explain(model, batch.images, batch.labels)
    names = ["max_sensitivity", "avg_sensitivity"]
    found, _ = evaluate(model, batch, maps, names, explain=explain, seed=3)
    changes = torch.zeros(2, 2, NOISY, dtype=torch.float64)
    for sample in range(NOISY):
        images = noisy_images(batch, sample, seed=3)
        distance = (images - batch.images).abs()
        assert (
            0.9 * RADIUS < float(distance.max()) <= RADIUS
            and abs(float(distance.mean()) / RADIUS - 0.5) < 0.1
        )
        for b in range(2):
            one = explain(model, images[b : b + 1], batch.labels[b : b + 1])
            for m in range(2):
                pair = maps[m, b].flatten().tolist(), one[m, 0].flatten().tolist()
                changes[m, b, sample] = oracle.relative_change(*pair)
    torch.testing.assert_close(found["max_sensitivity"].value, changes.amax(-1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found["avg_sensitivity"].value, changes.mean(-1), rtol=1e-6, atol=1e-9)
    assert (found["avg_sensitivity"].value > 0).all()


def test_stable_and_zero_maps():
    model, batch, maps = problem()
    maps[1] = 0
    found, _ = evaluate(model, batch, maps, ["max_sensitivity"], explain=lambda *_: maps)
    assert found["max_sensitivity"].value[0].tolist() == [0, 0]
    assert found["max_sensitivity"].value[1].isnan().all()


# -- concentration


def test_sparseness_and_complexity_by_hand():
    model, batch, maps = problem()
    maps[0, 0] = 0
    maps[0, 0, 1, 2] = -3.0
    maps[0, 1] = 0.7
    found, _ = evaluate(model, batch, maps, ["sparseness", "complexity"])
    sparseness, complexity = found["sparseness"].value, found["complexity"].value
    assert sparseness[0].tolist() == pytest.approx([15 / 16, 0], abs=1e-12)
    assert complexity[0].tolist() == pytest.approx([0, torch.tensor(16.0).log().item()], abs=1e-6)
    for b in range(2):
        values = maps[1, b].flatten().tolist()
        assert float(sparseness[1, b]) == pytest.approx(oracle.gini(values), abs=1e-12)
        assert float(complexity[1, b]) == pytest.approx(oracle.entropy(values), abs=1e-12)
    zero, _ = evaluate(model, batch, torch.zeros_like(maps), ["sparseness", "complexity"])
    assert all(values.value.isnan().all() for values in zero.values())


# -- randomization


def test_all_weights_are_those_of_the_last_step_of_the_cascade():
    model, batch, maps = problem()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []

    def spy(copy, images, target):
        seen.append({name: tensor.clone() for name, tensor in copy.state_dict().items()})
        return maps

    evaluate(model, batch, maps, ["randomization"], explain=spy, seed=4)
    shuffled = fully_shuffled(sg.adapt(model), batch.images[:1], seed=4).state_dict()
    assert all(torch.equal(tensor, shuffled[name]) for name, tensor in seen[-1].items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_randomization_tests_of_all_weights():
    model, batch, _ = problem()
    maps = explain(model, batch.images, batch.labels)
    names = ["efficient_randomization", "smooth_randomization"]
    found, _ = evaluate(model, batch, maps, names, explain=explain)
    shuffled = fully_shuffled(sg.adapt(model), batch.images[:1])
    again = explain(shuffled, batch.images, batch.labels)
    before = after = torch.zeros_like(maps)
    for sample in range(SAMPLES):
        images = gaussian_noise(batch, sample)
        before = before + explain(model, images, batch.labels) / SAMPLES
        after = after + explain(shuffled, images, batch.labels) / SAMPLES
    spread = batch.images.flatten(1).amax(1) - batch.images.flatten(1).amin(1)
    noise = (gaussian_noise(batch, 0) - batch.images).flatten(1).std(1) / spread
    assert noise.tolist() == pytest.approx([0.1, 0.1], abs=0.01)
    for m in range(2):
        for b in range(2):
            first, last = (oracle.histogram_entropy(x[m, b].flatten().tolist(), BINS) for x in (maps, again))
            assert float(found[names[0]].value[m, b]) == pytest.approx((last - first) / first, abs=1e-9)
            rho = spearmanr(before[m, b].flatten(), after[m, b].flatten()).statistic
            assert float(found[names[1]].value[m, b]) == pytest.approx(1 - abs(rho), abs=1e-9)
    ignores = evaluate(model, batch, maps, names, explain=lambda *_: maps).values
    torch.testing.assert_close(ignores[names[1]].value, torch.zeros(2, 2).double(), rtol=0, atol=1e-12)
    assert ignores[names[0]].value.abs().max() == 0
    assert histogram_entropy(torch.ones(1, 1, 4, 4)).item() == 0


def test_what_they_declare():
    declared = {
        "road": "higher",
        "infidelity": "lower",
        "sensitivity_n": "higher",
        "faithfulness_correlation": "higher",
        "monotonicity": "higher",
        "max_sensitivity": "lower",
        "avg_sensitivity": "lower",
        "sparseness": "higher",
        "complexity": "lower",
        "efficient_randomization": "higher",
        "smooth_randomization": "higher",
    }
    listed = {info.name: info for info in sg.list_metrics()}
    assert {name: listed[name].better for name in declared} == declared
    again = {name for name in declared if listed[name].needs_explain}
    assert again == {"max_sensitivity", "avg_sensitivity", "efficient_randomization", "smooth_randomization"}
    assert all("more explanation" in listed[name].summary for name in again), "their cost is said"
    assert METRICS["infidelity_unscaled"].variant


def test_all_of_them_in_one_run():
    """`verify` gives every measure of several methods, and a resumed batch has the same rows."""
    model, batch, _ = problem()
    names = ["road", "sensitivity_n", "avg_sensitivity", "sparseness", "efficient_randomization"]
    data = [(batch.images, batch.labels)]
    rows = sg.verify(model, data, ["gae", "rollout"], names)
    assert len(rows) == 2 * 2 * len(names) and all(row["value"] is not None for row in rows)
    alone = sg.verify(model, data, "rollout", names)
    values = {(row["metric"], row["image"]): row["value"] for row in rows if row["method"] == "rollout"}
    assert {(row["metric"], row["image"]): row["value"] for row in alone} == pytest.approx(values, abs=1e-9)
