"""SaCo, the symmetric relevance gain and the completeness error: naive loops and definitions."""

from itertools import permutations

import pytest
import torch

import steadygaze as sg
from benchmarks import zoo
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import METRICS, Batch, evaluate, removal
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.magnitude import saco


def problem(kind: str, seed: int, methods: int = 2):
    model = tiny(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(methods, 2, *model.patch_embed.grid_size, generator=generator, dtype=torch.float64)
    return model, Batch(random_images(model, 2, seed + 1), torch.tensor([1, 4])), maps


@pytest.mark.parametrize(
    "kind", tiered(["class", "registers", "average", "pre_norm"], ["registers", "pre_norm"])
)  # 16 patches; the last 9
def test_saco_and_srg_are_those_of_naive_loops(kind):
    model, batch, maps = problem(kind, seed=3)
    for ratios in (list(removal.RATIOS), [0.2, 0.5, 0.7]):
        found, notes = evaluate(model, batch, maps, ["saco", "srg"], ratios=ratios)
        assert set(notes.values()) == {"removal"}
        for m in range(2):
            for b in range(2):
                given = batch.images[b], maps[m, b], int(batch.labels[b])

                def logits(image, keep):
                    with torch.no_grad():
                        return oracle.kept_logits(model, image, keep)

                expected = oracle.saco(logits, *given)
                assert float(found["saco"].value[m, b]) == pytest.approx(expected, abs=1e-12)
                expected = oracle.srg(logits, *given, ratios)
                assert float(found["srg"].value[m, b]) == pytest.approx(expected, abs=1e-9)


def test_srg_shares_the_passes_of_removal():
    """One of its curves is that of deletion; the other has passes of its own, only where it is requested."""
    model, batch, maps = problem("class", seed=4)
    evaluate(model, batch, maps, ["srg"])  # the model is checked once
    tokens = []
    hook = model.blocks[0].register_forward_hook(lambda _, args, __: tokens.append(args[0][..., 0].numel()))
    counts = []
    for names in (["insertion_aopc"], ["insertion_aopc", "deletion_aopc"], ["insertion_aopc", "srg"]):
        tokens.clear()
        evaluate(model, batch, maps, names)
        counts.append(sum(tokens))
    hook.remove()
    assert counts[0] == counts[1] < counts[2] < 1.7 * counts[1]


@pytest.mark.parametrize("kind", ["class", "average", "pre_norm"])  # 16 patches; the last 9
def test_srg_of_the_negative_map_is_the_negative(kind):
    """Both curves remove the same share, whatever the ratios; so a random map has 0 in expectation."""
    model, batch, maps = problem(kind, seed=5)
    for ratios in (list(removal.RATIOS), [0.15], [0.2, 0.5, 1.0], [0.0, 0.33, 0.8]):
        found, _ = evaluate(model, batch, torch.cat([maps, -maps]), ["srg"], ratios=ratios)
        of_map, of_negative = found["srg"].value.chunk(2)
        torch.testing.assert_close(of_negative, -of_map, rtol=0, atol=1e-9)
        assert of_map.abs().max() > 0.01


def test_srg_of_all_rankings_has_mean_zero():
    """2 x 2 patches: the mean over all 24 orders is the expectation over random maps."""
    model = tiny("class", 6, img_size=6)
    maps = torch.tensor(list(permutations(range(4))), dtype=torch.float64).view(24, 1, 2, 2)
    batch = Batch(random_images(model, 1, seed=7), torch.tensor([1]))
    found, _ = evaluate(model, batch, maps, ["srg"], ratios=[0.3, 0.5, 0.6])
    assert abs(float(found["srg"].value.mean())) < 1e-9


def test_saco_tests_the_size_of_scores():
    """A map that is the true loss of each group has 1, its negative −1; a constant map has none."""
    model, batch, _ = problem("class", seed=5)
    with torch.no_grad():
        whole = CachedForward(sg.adapt(model), batch.images)
        drop = torch.empty(2, 16, dtype=torch.float64)
        for j in range(16):
            keep = torch.tensor([[i for i in range(16) if i != j]] * 2)
            left = whole.vit.logits(whole.vit.select(whole.tokens, keep)).softmax(-1)
            drop[:, j] = (whole.probabilities - left).gather(1, batch.labels[:, None])[:, 0]
        truth = drop.view(1, 2, 4, 4)
        best = saco(whole, torch.cat([truth, -truth, 3 * truth + 7]), batch.labels, groups=16)
        assert best.detail is not None and best.detail.shape == (3, 2, 16)
        torch.testing.assert_close(best.value[0], torch.ones(2, dtype=torch.float64))
        torch.testing.assert_close(best.value[1], -torch.ones(2, dtype=torch.float64))
        torch.testing.assert_close(best.value[2], best.value[0])
        other = problem("class", seed=8, methods=1)[2]
        sizes = saco(whole, torch.cat([other, other**3]), batch.labels).value  # the same order
        assert not torch.allclose(sizes[0], sizes[1])
        assert saco(whole, torch.zeros_like(truth), batch.labels).value.isnan().all()


@pytest.mark.full
def test_patches_that_cannot_be_removed_are_masked():
    model, _ = zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, batch=1)
    maps = torch.randn(1, 1, *vit.grid, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, notes = evaluate(vit, Batch(images, torch.tensor([1])), maps, ["saco", "srg"])
    assert set(notes.values()) == {"attention masking"}
    assert all(values.value.isfinite().all() for values in found.values())


@pytest.mark.parametrize("kind", tiered(["class", "average"], ["average"]))
def test_completeness_of_methods_that_account_for_all(kind):
    model, batch, _ = problem(kind, seed=6)
    complete = ["fullgrad:freeze=1.0", "fullgrad:implicit=True", "decompx:bias=token", "libra_fullgrad"]
    integrated = "integrated_gradients:space=pixels,steps=100"
    methods = [*complete, "ixg", "kernel_shap:budget=40", integrated, "rollout"]
    data = [(batch.images, batch.labels)]
    rows = sg.verify(model, data, methods=methods, metrics=["completeness"], score=None)
    error = {}
    for row in rows:
        error[row["method"]] = max(error.get(row["method"], 0.0), row["value"])
    assert all(error[name] < 1e-9 for name in complete) and error["kernel_shap:budget=40"] < 1e-9
    assert error["ixg"] > 0.1 and error[integrated] < 0.05
    found = sg.explain(model, batch.images, target=batch.labels, method="rollout")
    logit = found.logits.gather(1, batch.labels[:, None])[:, 0]
    assert error["rollout"] == pytest.approx(float((found.scores.sum((1, 2)) - logit).abs().max()), abs=1e-9)


def test_completeness_by_hand():
    model, batch, maps = problem("class", seed=7)
    with torch.no_grad():
        logit = model(batch.images).gather(1, batch.labels[:, None])[:, 0]
    found, _ = evaluate(model, batch, maps, ["completeness"])
    torch.testing.assert_close(found["completeness"].value, (maps.sum((2, 3)) - logit).abs())
    rest, explained = torch.ones(2, 2).double(), torch.full((2, 2), 5.0).double()
    found, _ = evaluate(model, batch, maps, ["completeness"], unattributed=rest, explained=explained)
    torch.testing.assert_close(found["completeness"].value, (maps.sum((2, 3)) + 1 - 5).abs())


def test_what_they_declare():
    declared = {name: (METRICS[name].unit, METRICS[name].better) for name in ("saco", "srg", "completeness")}
    assert declared == {"saco": ("", "higher"), "srg": ("points", "higher"), "completeness": ("", "lower")}
    assert [METRICS[name].label for name in declared] == [
        "SaCo",
        "symmetric relevance gain",
        "completeness error",
    ]
    assert [METRICS[name].title for name in declared] == list(declared), "one name everywhere"
