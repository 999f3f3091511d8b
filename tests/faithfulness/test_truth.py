"""Tasks with known relevance: their images, the models trained on them, and the scores of maps."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

import steadygaze as sg
from steadygaze.faithfulness import Batch, evaluate
from steadygaze.faithfulness.truth import COLORS, counting, score, shortcut, subset_accuracy, train

SMALL = {"width": 32, "depth": 2, "steps": 500, "batch_size": 64}


def cells(task, batch):
    """(n, cells, 3) color of the top left pixel of each cell, 0..1."""
    pixels = batch.images * 0.5 + 0.5
    return pixels[:, :, :: task.cell, :: task.cell].flatten(2).transpose(1, 2)


def test_counting_counts_red_cells():
    task = counting(3, 4)
    batch = task.draw(400, torch.Generator().manual_seed(0))
    bits = cells(task, batch) > 0.5
    red = (bits == COLORS[0].bool()).all(-1)
    assert torch.equal(red.sum(1), batch.labels)
    assert torch.equal(red, (batch.masks[:, ::4, ::4] == 255).flatten(1))
    assert {tuple(c) for c in bits.flatten(0, 1).int().tolist()} == {tuple(c) for c in COLORS.int().tolist()}
    assert batch.labels.unique().tolist() == list(range(10)) and batch.images.shape == (400, 3, 12, 12)


def test_the_shortcut_decides_alone():
    task = shortcut(3, 8, 4)
    batch = task.draw(600, torch.Generator().manual_seed(0))
    marked = (batch.masks[:, ::8, ::8] == 255).flatten(1)
    assert bool((marked.sum(1) == 1).all())
    color = cells(task, batch)[marked] > 0.5
    assert torch.equal((color[:, None] == COLORS[:4].bool()).all(-1).int().argmax(1), batch.labels)
    white = ((batch.images * 0.5 + 0.5) == 1).all(1)[:, 4::8, 4::8].flatten(1)
    assert torch.equal(white, marked)
    others = cells(task, batch)[:, :, :] > 0.5
    same = (others == color[:, None]).all(-1) & ~marked
    assert float(same.sum() / (~marked).sum()) == pytest.approx(
        0.25, abs=0.03
    )  # the other cells say nothing of the label


def test_draws_and_training_depend_on_the_seed_alone():
    task = shortcut(2, 4, 2)
    state = torch.get_rng_state()
    weights = [
        train(task, seed=s, width=16, depth=1, steps=5, batch_size=8)[0].state_dict() for s in (0, 0, 1)
    ]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not all(torch.equal(weights[0][k], weights[2][k]) for k in weights[0])


@pytest.fixture(scope="module")
def trained():
    task = shortcut(3, 4, 2)
    return task, *train(task, **SMALL)


@pytest.mark.full
def test_a_model_provably_uses_the_shortcut(trained):
    task, model, accuracy = trained
    results = subset_accuracy(model, task)
    assert accuracy >= 0.995 and results["whole"] >= 0.995 and results["only"] >= 0.99
    assert results["without"] == pytest.approx(results["chance"], abs=0.05)
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_gaze_finds_the_shortcut_and_removal_agrees(trained):
    task, model, _ = trained
    batch = task.draw(32, torch.Generator().manual_seed(9))
    truth = (batch.masks[:, ::4, ::4] == 255).float()
    gaze = sg.explain(model, batch.images, target=batch.labels).scores
    maps = torch.stack([gaze, truth, -truth])
    results, _ = evaluate(
        model, batch, maps, ["truth_auroc", "truth_precision", "deletion_aopc", "insertion_aopc"]
    )
    assert float(results["truth_auroc"].value[0].mean()) > 0.9
    assert results["truth_auroc"].value[1:].mean(1).tolist() == [1.0, 0.0]
    assert results["truth_precision"].value[1:].mean(1).tolist() == [100.0, 0.0]
    for name in ("deletion_aopc", "insertion_aopc"):
        assert float(results[name].value[1].mean()) > float(results[name].value[2].mean()) + 10


def test_counting_is_learned_and_scored_against_the_better_side():
    task = counting(2, 4)
    model, accuracy = train(task, **SMALL)
    assert accuracy >= 0.99
    batch = task.draw(40, torch.Generator().manual_seed(3))
    red = (batch.masks[:, ::4, ::4] == 255).float()
    noise = 0.01 * torch.randn(red.shape, generator=torch.Generator().manual_seed(0))
    maps = torch.stack([red + noise, red + 3 * noise])
    values, side = score(task, maps, batch.masks)
    assert side == "marked" and float(values["truth_auroc"].value.nanmean()) > 0.99
    turned, side = score(task, -maps, batch.masks)
    assert side == "others" and float(turned["truth_auroc"].value.nanmean()) > 0.99
    undefined = (batch.labels == 0) | (batch.labels == 4)
    assert undefined.any() and torch.equal(values["truth_auroc"].value[0].isnan(), undefined)
    assert torch.equal(values["truth_precision"].value[0].isnan(), undefined)
    with pytest.raises(sg.InputError, match="one relevant patch"):
        subset_accuracy(model, task, count=50)


def test_truth_by_scikit_learn_with_border_left_out():
    generator = torch.Generator().manual_seed(0)
    model, _ = train(shortcut(4, 4, 2), width=16, depth=1, steps=1, batch_size=4)
    maps = torch.randn(1, 2, 4, 4, generator=generator).mul(2).round()
    relevant = torch.rand(2, 4, 4, generator=generator) < 0.4
    border = torch.rand(2, 4, 4, generator=generator) < 0.2
    masks = (
        (relevant.to(torch.uint8) * 255)
        .masked_fill(border, 128)
        .repeat_interleave(4, 1)
        .repeat_interleave(4, 2)
    )
    batch = Batch(torch.randn(2, 3, 16, 16, generator=generator), torch.tensor([0, 1]), masks)
    results, _ = evaluate(model, batch, maps, ["truth_auroc", "truth_precision"])
    for b in range(2):
        there = ~border[b].flatten()
        yes, scores = relevant[b].flatten()[there], maps[0, b].flatten()[there]
        assert results["truth_auroc"].value[0, b] == pytest.approx(roc_auc_score(yes, scores))
        n = int(yes.sum())
        top = sorted(range(len(yes)), key=lambda i: (-float(scores[i]), i))[:n]
        assert results["truth_precision"].value[0, b] == pytest.approx(
            100 * sum(bool(yes[i]) for i in top) / n
        )
