"""Measures of random sets of patches, monotonicity, and painted instead of removed patches: naive loops."""

from itertools import chain

import pytest
import torch

import steadygaze as sg
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import Batch, evaluate, removal
from steadygaze.faithfulness.subsets import MORE_SUBSETS, SHARE, SHARES, SUBSETS, random_subsets

NAMES = ["sensitivity_n", "faithfulness_correlation", "infidelity", "infidelity_unscaled", "monotonicity"]
MEAN, STD = torch.full((3,), 0.4), torch.full((3,), 0.3)


def problem(kind: str = "class", seed: int = 3, methods: int = 2):
    model = tiny(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(methods, 2, *model.patch_embed.grid_size, generator=generator, dtype=torch.float64)
    images = random_images(model, 2, seed + 1)
    return model, Batch(images, torch.tensor([1, 4]), mean=MEAN, std=STD, names=("a", "b")), maps


def remembered(logits_of):
    """The maps of an image share their sets."""
    known = {}

    def logits(image, keep):
        key = image.data_ptr(), tuple(sorted(keep))
        if key not in known:
            known[key] = logits_of(image, keep)
        return known[key]

    return logits


def remover(model):
    def logits_of(image, keep):
        with torch.no_grad():
            return oracle.kept_logits(model, image, keep)

    return remembered(logits_of)


def painter(model, fill: str):
    """Logits with patches of 3 x 3 pixels that are not kept painted black, or with the mean color."""
    color = -MEAN.double() / STD.double() if fill == "zero" else torch.zeros(3)

    def logits_of(image, keep):
        image, across = image.clone(), image.shape[-1] // 3
        for j in range(across * across):
            if j not in keep:
                y, x = 3 * (j // across), 3 * (j % across)
                image[:, y : y + 3, x : x + 3] = color[:, None, None]
        with torch.no_grad():
            return model(image[None])[0]

    return remembered(logits_of)


@pytest.mark.parametrize("hide,fill", [("remove", "zero"), ("paint", "zero")])
@pytest.mark.parametrize("kind", tiered(["class", "registers", "average", "pre_norm"], ["registers"]))
def test_they_are_those_of_naive_loops(kind, hide, fill):
    model, batch, maps = problem(kind)
    ratios = [0.2, 0.5, 0.7]
    found, notes = evaluate(model, batch, maps, NAMES, ratios=ratios, hide=hide, fill=fill)
    assert set(notes.values()) == {"removal" if hide == "remove" else f"painted, {fill}"}
    logits_of = remover(model) if hide == "remove" else painter(model, fill)
    patches = maps[0, 0].numel()
    sizes = [max(1, int(share * patches)) for share in SHARES]
    hidden = random_subsets(batch, patches, sizes, [MORE_SUBSETS] * len(sizes))
    for b in range(2):
        sets = [[row.nonzero()[:, 0].tolist() for row in part[b]] for part in hidden]
        assert [len(one[0]) for one in sets] == sizes
        for m in range(2):
            given = batch.images[b], maps[m, b], int(batch.labels[b])
            of_size = [oracle.subset_scores(logits_of, *given, some[:SUBSETS]) for some in sets]
            attributed, lost = (list(chain(*parts)) for parts in zip(*of_size, strict=True))
            correlations = [oracle.correlation(*pair) for pair in of_size]
            one_size = oracle.correlation(*oracle.subset_scores(logits_of, *given, sets[SHARE]))
            expected = {
                "sensitivity_n": sum(correlations) / len(correlations),
                "faithfulness_correlation": one_size,
                "infidelity": oracle.infidelity(attributed, lost, scaled=True),
                "infidelity_unscaled": oracle.infidelity(attributed, lost, scaled=False),
                "monotonicity": oracle.monotonicity(logits_of, *given, ratios),
            }
            assert {name: float(found[name].value[m, b]) for name in NAMES} == pytest.approx(
                expected, abs=1e-9
            )
            assert found["sensitivity_n"].detail[m, b].tolist() == pytest.approx(correlations, abs=1e-9)


@pytest.mark.parametrize("kind", ["registers", "average"])
def test_every_metric_of_removal_can_paint(kind):
    model, batch, maps = problem(kind, methods=1)
    names = [*removal.NAMES, "srg", "saco"]
    ratios = [0.3, 0.6, 1.0]
    found, _ = evaluate(model, batch, maps, names, ratios=ratios, hide="paint", fill="mean")
    logits_of = painter(model, "mean")
    for b in range(2):
        given = batch.images[b], maps[0, b], int(batch.labels[b])
        expected = {name: score for name, (score, _) in oracle.removal(logits_of, *given, ratios).items()}
        expected |= {
            "srg": oracle.srg(logits_of, *given, ratios),
            "saco": oracle.saco(logits_of, *given),
        }
        assert {name: float(found[name].value[0, b]) for name in names} == pytest.approx(expected, abs=1e-9)
    with pytest.raises(sg.UnknownNameError, match="paint, remove"):
        evaluate(model, batch, maps, ["saco"], hide="blur")


def test_sets_belong_to_the_image_and_are_shared():
    """One of the metrics alone has the same number as together with others, for any batch and any map."""
    model, batch, maps = problem()
    together, _ = evaluate(model, batch, maps, NAMES)
    last = Batch(batch.images[1:], batch.labels[1:], names=batch.names[1:])
    for name in NAMES:
        alone, _ = evaluate(model, last, maps[1:, 1:], [name])
        torch.testing.assert_close(alone[name].value[0, 0], together[name].value[1, 1], rtol=0, atol=1e-12)
    other, _ = evaluate(model, batch, maps, ["sensitivity_n"], seed=1)
    assert not torch.allclose(other["sensitivity_n"].value, together["sensitivity_n"].value)


def test_their_passes_do_not_grow_with_the_maps():
    model, batch, maps = problem(methods=4)
    evaluate(model, batch, maps, ["infidelity"])  # the model is checked once
    tokens = []
    hook = model.blocks[0].register_forward_hook(lambda _, args, __: tokens.append(args[0][..., 0].numel()))
    counts = []
    for some in (maps[:1], maps):
        tokens.clear()
        evaluate(model, batch, some, ["infidelity", "sensitivity_n", "faithfulness_correlation"])
        counts.append(sum(tokens))
    tokens.clear()
    evaluate(model, batch, maps, ["deletion_aopc"])
    removed = sum(tokens)
    tokens.clear()
    evaluate(model, batch, maps, ["deletion_aopc", "monotonicity"])
    hook.remove()
    assert counts[0] == counts[1]
    assert removed == sum(tokens), "monotonicity reads the curve of deletion"


def test_what_they_do_not_depend_on():
    """Factors for all; the sign for infidelity; NaN where a correlation is undefined."""
    model, batch, maps = problem()
    maps = torch.cat([maps[:1], 3 * maps[:1], -maps[:1], torch.zeros_like(maps[:1])])
    found, _ = evaluate(model, batch, maps, NAMES)
    for name in ("sensitivity_n", "faithfulness_correlation", "infidelity", "monotonicity"):
        torch.testing.assert_close(found[name].value[1], found[name].value[0])
    for name in ("sensitivity_n", "faithfulness_correlation"):
        torch.testing.assert_close(found[name].value[2], -found[name].value[0])
        assert found[name].value[3].isnan().all()
    torch.testing.assert_close(found["infidelity"].value[2], found["infidelity"].value[0])
    torch.testing.assert_close(found["infidelity"].value[3], found["infidelity_unscaled"].value[3])
    assert not torch.allclose(found["infidelity_unscaled"].value[1], found["infidelity_unscaled"].value[0])


def test_a_run_paints_and_says_so():
    model, batch, _ = problem()
    data = [(batch.images, batch.labels)]
    both = {}
    for hide in ("remove", "paint"):
        rows = sg.verify(
            model, data, "gae", ["sensitivity_n", "deletion_aopc"], hide=hide, fill="mean", seed=2
        )
        assert {row["note"] for row in rows} == {"removal" if hide == "remove" else "painted, mean"}
        both[hide] = [row["value"] for row in rows]
    assert both["remove"] != both["paint"]
    with pytest.raises(sg.UnknownNameError, match="paint, remove"):
        sg.verify(model, data, "gae", "saco", hide="mask")
