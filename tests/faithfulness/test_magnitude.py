"""SaCo, the symmetric relevance gain and the completeness error: naive loops and definitions."""

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


def test_srg_takes_no_pass_of_its_own():
    model, batch, maps = problem("class", seed=4)
    evaluate(model, batch, maps, ["srg"])  # the model is checked once
    passes = []
    hook = model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    evaluate(model, batch, maps, ["insertion_aopc"])
    alone = len(passes)
    found, _ = evaluate(model, batch, maps, ["insertion_aopc", "deletion_aopc", "srg"])
    hook.remove()
    assert len(passes) == 2 * alone
    both = found["insertion_aopc"].value + found["deletion_aopc"].value - 100
    torch.testing.assert_close(found["srg"].value, both, rtol=0, atol=1e-9)


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
    assert declared == {"saco": ("", "higher"), "srg": ("%", "higher"), "completeness": ("", "lower")}
    assert [METRICS[name].label for name in declared] == [
        "SaCo",
        "symmetric relevance gain",
        "completeness error",
    ]
    assert [METRICS[name].title for name in declared] == list(declared), "one name everywhere"
