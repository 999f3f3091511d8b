"""Token removal against naive loops; packing, ties, cost, bounds, bad input."""

import pytest
import torch

import benchmarks.zoo as zoo
import steadygaze as sg
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import METRICS, Batch, evaluate, metric, removal
from steadygaze.vit import removal as packing
from steadygaze.vit import removal as subsets

FOUR = list(removal.NAMES)


def problem(kind: str, seed: int, methods: int = 2, batch: int = 2, ties: bool = False):
    model = tiny(kind, seed)
    images = random_images(model, batch, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(methods, batch, *model.patch_embed.grid_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (batch,), generator=generator)
    return model, Batch(images, labels), maps.round() if ties else maps


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "kind",
    tiered(["class", "registers", "average", "average_with_class", "pre_norm"], ["registers", "average"]),
)
def test_the_four_scores_are_those_of_naive_loops(kind, ties):
    model, batch, maps = problem(kind, seed=3, ties=ties)
    ratios = [0.0, 0.1, 0.37, 0.5, 0.9, 1.0] if ties else list(removal.RATIOS)
    results, notes = evaluate(model, batch, maps, FOUR, ratios=ratios)
    assert set(notes.values()) == {"removal"}
    with torch.no_grad():
        for m in range(2):
            for b in range(2):
                expected = oracle.removal(
                    lambda image, keep: oracle.kept_logits(model, image, keep),
                    batch.images[b],
                    maps[m, b],
                    int(batch.labels[b]),
                    ratios,
                    empty="average" not in kind,
                )
                for name, (value, curve) in expected.items():
                    assert results[name].value[m, b] == pytest.approx(value, abs=1e-9), name
                    assert results[name].detail[m, b].tolist() == pytest.approx(curve, abs=1e-9), name


@pytest.mark.parametrize(
    "name",
    tiered(
        [
            "eva02_tiny_patch14_224",
            "vit_small_patch16_rope_mixed_224",
            "beit_base_patch16_224",
            "cait_xxs24_224",
            "vit_base_patch16_siglip_224",
            "deit_tiny_distilled_patch16_224",
        ],
        3,
    ),
)
def test_other_models_by_one_subset_at_a_time(name):
    model, _ = zoo.plain(name)
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, 2)
    maps = torch.randn(2, 2, *vit.grid, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = Batch(images, torch.tensor([0, 3]))
    results, _ = evaluate(vit, batch, maps, FOUR, ratios=[0.3, 0.6])

    def logits(image, keep):
        return vit.logits(vit.select(vit.embed(image[None]), torch.tensor([keep])))[0]

    with torch.no_grad():
        for m, b in ((0, 0), (1, 1)):
            expected = oracle.removal(logits, images[b], maps[m, b], int(batch.labels[b]), [0.3, 0.6])
            for four, (value, _) in expected.items():
                assert results[four].value[m, b] == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("kind", ["class", "average", "registers"])
def test_packed_runs_give_what_separate_runs_give(kind, monkeypatch):
    model, batch, maps = problem(kind, seed=5, methods=3)
    assert packing.packable(sg.adapt(model), sg.adapt(model).embed(batch.images))
    packed, _ = evaluate(model, batch, maps, FOUR)
    monkeypatch.setattr(subsets, "packable", lambda vit, tokens: False)
    apart, _ = evaluate(model, batch, maps, FOUR)
    for name in FOUR:
        torch.testing.assert_close(packed[name].detail, apart[name].detail, rtol=0, atol=1e-10)


def test_a_model_that_stops_being_packable_is_noticed():
    model, batch, maps = problem("class", seed=6)
    before, _ = evaluate(model, batch, maps, FOUR)
    for block in model.blocks:
        block.attn.fused_attn = False  # eager attention: a packed sequence would mix its subsets
    after, _ = evaluate(model, batch, maps, FOUR)
    for name in FOUR:
        torch.testing.assert_close(before[name].detail, after[name].detail, rtol=0, atol=1e-10)


def test_one_image_and_method_costs_less_than_ten_and_a_half_forwards_and_chunks_are_bounded():
    model = tiny("class", img_size=42)  # 14 x 14 patches
    images, lengths, embeds = random_images(model, 1), [], []
    hooks = [
        model.blocks[1].register_forward_hook(
            lambda _, args, __: lengths.append(args[0].shape[0] * args[0].shape[1])
        ),
        model.patch_embed.register_forward_hook(lambda *_: embeds.append(1)),
    ]
    vit = sg.adapt(model)
    tokens = vit.embed(images)
    packing.packable(vit, tokens)
    cost, most = {}, {}
    for methods in (1, 6):
        lengths.clear(), embeds.clear()
        maps = torch.randn(methods, 1, 14, 14, dtype=torch.float64)
        evaluate(vit, Batch(images, torch.tensor([1])), maps, FOUR)
        cost[methods], most[methods] = sum(lengths) / tokens.shape[1] / methods, max(lengths)
        assert len(embeds) == 1
    for hook in hooks:
        hook.remove()
    assert cost[6] < cost[1] <= 10.5
    assert max(most.values()) <= subsets.TOKENS["cpu"]


def test_scaling_a_map_changes_nothing_and_batches_equal_single_images():
    model, batch, maps = problem("class", seed=8, batch=3)
    results, _ = evaluate(model, batch, maps, FOUR)
    scaled, _ = evaluate(model, batch, 3 * maps + 7, FOUR)
    for name in FOUR:
        assert torch.equal(results[name].value, scaled[name].value)
        for b in range(3):
            alone, _ = evaluate(
                model, Batch(batch.images[b : b + 1], batch.labels[b : b + 1]), maps[:, b : b + 1], [name]
            )
            torch.testing.assert_close(alone[name].value[:, 0], results[name].value[:, b], rtol=0, atol=1e-10)


def test_values_stay_in_their_range_and_a_target_may_be_given():
    model, batch, maps = problem("class", seed=9, methods=4, batch=4)
    results, _ = evaluate(model, batch, maps, FOUR)
    for name, values in results.items():
        assert (
            METRICS[name].low <= float(values.value.min()) and float(values.value.max()) <= METRICS[name].high
        )
    target = (batch.labels + 1) % 5
    other, _ = evaluate(model, batch, maps, FOUR, target=target)
    again, _ = evaluate(model, Batch(batch.images, target), maps, FOUR)
    assert all(torch.equal(other[n].value, again[n].value) for n in FOUR)
    assert any(not torch.equal(other[n].value, results[n].value) for n in FOUR)


def test_the_model_is_left_as_it_was():
    model, batch, maps = problem("class", seed=1)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluate(model, batch, maps, FOUR)
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ["insertion_acuracy"]}, "insertion_accuracy"),
        ({"metrics": ["miou"]}, "masks"),
        ({"metrics": ["randomization"]}, "explain"),
        ({"ratios": [0.5, 0.1]}, "increasing"),
        ({"ratios": [0.5, 1.2]}, "0 to 1"),
        ({"maps": torch.zeros(2, 2, 3, 3)}, "maps: expected"),
        ({"maps": torch.full((1, 2, 4, 4), float("nan"))}, "NaN"),
        ({"target": torch.tensor([0, 5])}, r"0\.\.4"),
        ({"target": torch.tensor([0])}, "target: expected"),
    ],
)
def test_bad_input_is_told(change, message):
    model, batch, maps = problem("class", seed=1)
    arguments = {"maps": maps, "metrics": FOUR, "target": None, "ratios": removal.RATIOS} | change
    with pytest.raises(sg.SteadygazeError, match=message):
        evaluate(model, batch, arguments.pop("maps"), arguments.pop("metrics"), **arguments)


def test_batches_that_do_not_fit_are_told():
    images = torch.zeros(2, 3, 8, 8)
    with pytest.raises(sg.InputError, match="labels"):
        Batch(images, torch.zeros(3, dtype=torch.long))
    with pytest.raises(sg.InputError, match="masks"):
        Batch(images, torch.zeros(2, dtype=torch.long), torch.zeros(2, 9, 8, dtype=torch.uint8))
    with pytest.raises(sg.InputError, match="names"):
        Batch(images, torch.zeros(2, dtype=torch.long), names=("a",))


def test_every_metric_states_what_it_is():
    for name, m in METRICS.items():
        assert metric(name) is m and m.name == name and m.summary and m.low < m.high
        if m.suite != "funnybirds":  # its details are curves over thresholds
            assert m.combine([1.0, float("nan"), 3.0], [[1.0, 2.0]] * 3) in (2.0, 50.0)
