"""Sanity checks of methods, and rank statistics against scipy and scikit-learn."""

import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import average_precision_score, roc_auc_score

import benchmarks.zoo as zoo
import steadygaze as sg
from oracles.models import random_images, tiny
from steadygaze.faithfulness import Batch, agreement, evaluate
from steadygaze.faithfulness import localization as ranks
from steadygaze.faithfulness.sanity import class_sensitivity, parameter_groups, randomization

BOTH = ["randomization", "class_sensitivity"]


def explainer(*names):
    def explain(model, images, target):
        return torch.stack(
            [a.scores for a in sg.explain(model, images, target=target, method=list(names)).values()]
        )

    return explain


def blind(model, images, target):
    """A "method" that depends on the image alone, as an edge detector would."""
    return images.mean(1).unfold(1, 3, 3).unfold(2, 3, 3).flatten(3).std(-1)[None]


@pytest.mark.parametrize("seed", range(4))
def test_rank_statistics(seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-4, 5, (3, 40), generator=generator).double() for _ in range(2))
    if seed % 2:
        x = x + torch.randn(x.shape, generator=generator, dtype=torch.float64)
    positive = torch.rand(40, generator=generator) < 0.4
    for i in range(3):
        assert ranks.ranks(x)[i].tolist() == rankdata(x[i].numpy()).tolist()
        assert ranks.spearman(x, y)[i] == pytest.approx(spearmanr(x[i], y[i]).statistic, abs=1e-12)
        assert ranks.auroc(x, positive)[i] == pytest.approx(roc_auc_score(positive, x[i]), abs=1e-12)
        assert ranks.average_precision(x, positive)[i] == pytest.approx(
            average_precision_score(positive, x[i]), abs=1e-12
        )
    assert ranks.auroc(x, torch.ones(40, dtype=torch.bool)).isnan().all()
    assert ranks.spearman(x, torch.zeros_like(x)).isnan().all()


def test_a_blind_method_fails_and_a_true_one_passes():
    model = tiny("class")
    images = random_images(model, 3)
    labels = model(images).argmax(1)
    explain = lambda *a: torch.cat([blind(*a), explainer("gaze")(*a)])  # noqa: E731
    results, _ = evaluate(model, Batch(images, labels), explain(model, images, labels), BOTH, explain=explain)
    torch.testing.assert_close(results["randomization"].value[0], torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        results["class_sensitivity"].value[0], torch.ones(3).double(), rtol=0, atol=1e-12
    )
    assert float(results["randomization"].value[1].min()) > 0.3
    assert float(results["class_sensitivity"].value[1].max()) < 0.9
    assert results["randomization"].detail.shape == (2, 3, 5)  # head, three blocks, embedding


@pytest.mark.parametrize("cascade", [True, False])
def test_the_model_is_not_touched_and_seeds_decide(cascade):
    model = tiny("registers")
    images = random_images(model, 2)
    target = torch.tensor([1, 2])
    explain = explainer("gaze", "gae")
    maps = explain(model, images, target)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    values_by_seed = [
        randomization(explain, sg.adapt(model), images, maps, target, seed=s, cascade=cascade).value
        for s in (0, 0, 1)
    ]
    assert torch.equal(values_by_seed[0], values_by_seed[1]) and not torch.equal(
        values_by_seed[0], values_by_seed[2]
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(maps, explain(model, images, target))


def test_cascade_adds_up_and_single_layers_are_put_back():
    model = tiny("class")
    images, target = random_images(model, 1), torch.tensor([0])
    seen = []

    def spy(copy, images, target):
        seen.append({k: v.clone() for k, v in copy.state_dict().items()})
        return blind(copy, images, target)

    for cascade in (True, False):
        seen.clear()
        randomization(spy, sg.adapt(model), images, blind(model, images, target), target, cascade=cascade)
        original = model.state_dict()
        changed = [{k for k in original if not torch.equal(s[k], original[k])} for s in seen]
        assert "head.weight" in changed[0] and not any("blocks" in k for k in changed[0])
        assert all(any(f"blocks.{2 - i}." in k for k in c) for i, c in enumerate(changed[1:4]))
        assert ("head.weight" in changed[-1]) is cascade and "patch_embed.proj.weight" in changed[-1]
        for s in seen:  # shuffled: the same values in another order
            for k in original:
                assert torch.equal(s[k].flatten().sort().values, original[k].flatten().sort().values)


def test_every_parameter_belongs_to_one_layer():
    for model in (tiny("class"), zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0]):
        vit = sg.adapt(model)
        groups = parameter_groups(vit, zoo.image_of(model, vit.plan.input_size))
        ids = [id(p) for group in groups for p in group]
        assert len(ids) == len(set(ids)) == len(list(model.parameters()))
        assert len(groups) == len(vit.blocks) + 2
        assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_which_class_is_compared():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    targets = []

    def explain(model, images, target):
        targets.append(target.tolist())
        return torch.zeros(1, 2, 4, 4)

    images, maps = torch.zeros(2, 3, 12, 12), torch.zeros(1, 2, 4, 4)
    for other in ("least", "second"):
        class_sensitivity(explain, torch.nn.Identity(), images, maps, torch.tensor([0, 0]), logits, other)
    assert targets == [[3, 1], [1, 3]]


def test_a_map_turned_into_its_negative_counts_as_the_same_map():
    model = tiny("class")
    images, target = random_images(model, 2), torch.tensor([0, 1])
    maps = blind(model, images, target)
    turned = lambda *_: -maps  # noqa: E731
    results, _ = evaluate(model, Batch(images, target), maps, BOTH, explain=turned)
    torch.testing.assert_close(results["randomization"].value, torch.zeros(1, 2).double())
    torch.testing.assert_close(results["class_sensitivity"].value, -torch.ones(1, 2).double())


def test_constant_maps_are_undefined():
    model = tiny("class")
    images, target = random_images(model, 2), torch.tensor([0, 1])
    constant = torch.ones(1, 2, 4, 4, dtype=torch.float64)
    explain = lambda *_: constant  # noqa: E731
    results, _ = evaluate(model, Batch(images, target), constant, BOTH, explain=explain)
    assert results["randomization"].value.isnan().all() and results["class_sensitivity"].value.isnan().all()


def test_agreement_is_the_mean_of_scipys():
    maps = torch.randn(3, 4, 3, 5, generator=torch.Generator().manual_seed(0)).mul(2).round()
    results = agreement(maps)
    for i in range(3):
        for j in range(3):
            each = [spearmanr(maps[i, b].flatten(), maps[j, b].flatten()).statistic for b in range(4)]
            assert results[i, j] == pytest.approx(sum(each) / 4, abs=1e-12)


def test_maps_of_another_shape_are_told():
    model = tiny("class")
    images, target = random_images(model, 1), torch.tensor([0])
    maps = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    with pytest.raises(sg.InputError, match="explain: expected maps"):
        evaluate(model, Batch(images, target), maps, ["class_sensitivity"], explain=blind)
