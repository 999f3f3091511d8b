"""Losses: values against slow oracles, gradients against finite differences in float64, and what each must
refuse."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor

import steadygaze as sg
from helpers.losses import gradmask_terms, relevance_terms, rrr_terms, tiny
from oracles import attention, vit
from steadygaze.losses import CFT
from steadygaze.training.losses import LOSSES, input_gradient, relevance
from steadygaze.training.losses.adl import adl
from steadygaze.training.losses.cft import CFTOptions, cross_entropies
from steadygaze.training.losses.distillation import distillation
from steadygaze.training.losses.relevance import differentiable_map, object_and_background, to_pixels
from steadygaze.training.objective import Objective


def batch(size: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 16, 16, dtype=torch.float64, generator=generator)
    masks = torch.zeros(size, 16, 16, dtype=torch.uint8)
    masks[:, 3:9, 2:12] = 255
    masks[:, 9, 2:12] = 128
    return images, masks, torch.arange(size) % 5


# -- relevance -------------------------------------------------------------------------------------


def gae_parts(model, images, labels) -> tuple[list[Tensor], list[Tensor], Tensor]:
    state, scalar = vit.trace(model, images, labels)
    a = [block.A for block in state.blocks]
    return [x.detach() for x in a], vit.gradients(scalar, a), state.logits.detach()


def relevance_oracle(model, images, masks, labels, gradients=None) -> dict[str, float]:
    """Pixel by pixel, from the formulas; `gradients`: G held at other weights than these."""
    a, g, logits = gae_parts(model, images, labels)
    g = gradients or g
    matrices = [(x * y).clamp(min=0).mean(1) for x, y in zip(a, g, strict=True)]
    rows = vit.read(model, attention.plus_identity(matrices)).reshape(-1, 1, 4, 4)
    r = F.interpolate(rows, size=(16, 16), mode="bilinear", align_corners=False)[:, 0]
    background = foreground = count = 0.0
    for one, mask in zip(r, masks, strict=True):
        one = (one - one.min()) / (one.max() - one.min())
        for value, code in zip(one.flatten().tolist(), mask.flatten().tolist(), strict=True):
            background += value**2 if code == 0 else 0.0
            foreground += (value - 1) ** 2 if code == 255 else 0.0
            count += code != 128
    said = [math.log(sum(math.exp(v) for v in y)) - max(y) for y in logits.tolist()]
    return {
        "background": background / count,
        "foreground": foreground / count,
        "confidence": sum(said) / len(said),
    }


def test_relevance_is_the_formula():
    model, (images, masks, labels) = tiny(), batch()
    found = relevance_terms(model, images, masks, labels)
    wanted = relevance_oracle(model, images, masks, labels)
    assert {k: v.item() for k, v in found.items()} == pytest.approx(wanted, rel=1e-9)


def cft_oracle(model, images, masks, labels) -> dict[str, float]:
    """Pixel by pixel, from the formulas, of the union of the concepts."""
    a, g, _ = gae_parts(model, images, labels)
    matrices = [(x * y).clamp(min=0).mean(1) for x, y in zip(a, g, strict=True)]
    rows = vit.read(model, attention.plus_identity(matrices)).reshape(-1, 1, 4, 4)
    r = F.interpolate(rows, size=(16, 16), mode="bilinear", align_corners=False)[:, 0]

    def bce(x: float, t: float) -> float:
        return -sum(share * (math.log(p) if p > 0 else -100.0) for share, p in ((t, x), (1 - t, 1 - x)))

    context = concept = count = 0.0
    for one, parts in zip(r, masks, strict=True):
        one = (one - one.min()) / (one.max() - one.min())
        for value, *codes in zip(one.flatten().tolist(), *(m.flatten().tolist() for m in parts), strict=True):
            code = max(codes)
            context += bce(value if code == 0 else 0.0, 0.0)
            concept += bce(value, 1.0) if code == 255 else 0.0
            count += code != 128
    return {"context": context / count, "concept": concept / count}


def cft_terms(model, images, masks, labels) -> dict[str, Tensor]:
    """In a recipe, beside cross-entropy."""
    options = {"cft": CFTOptions(), "cross_entropy": LOSSES["cross_entropy"].Options()}
    total, terms, _ = Objective(model, options)(images, labels, None, masks)
    weights = {"cft.context": 0.96, "cft.concept": 0.4, "cft.accuracy": 0.2, "cross_entropy": 1.0}
    assert total.item() == pytest.approx(sum(w * terms[name].item() for name, w in weights.items()), rel=1e-9)
    return {name.removeprefix("cft."): terms[name] for name in weights if name != "cross_entropy"}


def test_cft_is_the_formula_of_the_union_of_concepts():
    model, (images, masks, labels) = tiny(), batch()
    r = to_pixels(sg.explain(model, images, labels, method="gae").scores, (16, 16))
    masks = torch.where(r > 0.9, 255, torch.where(r < 0.1, 0, masks))  # at 0 and 1, log is up to rounding
    left, right = masks.clone(), masks.clone()
    left[..., 8:], right[..., :6] = 0, 0
    concepts = torch.stack([left, torch.zeros_like(masks), right], 1)
    found = cft_terms(model, images, concepts, labels)
    wanted = cft_oracle(model, images, concepts, labels)
    wanted["accuracy"] = relevance_oracle(model, images, masks, labels)["confidence"]
    assert {k: v.item() for k, v in found.items()} == pytest.approx(wanted, rel=1e-9)


def test_the_gradient_of_cft_is_that_of_torch_s_cross_entropy_without_its_rounding():
    torch.manual_seed(0)
    scores = torch.randn(2, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    s = torch.zeros(2, 16, 16, dtype=torch.float64)
    s[:, 3:12, 2:9] = 1.0

    def gradient(own: bool, dtype: torch.dtype) -> tuple[Tensor, float]:
        r, mask = to_pixels(scores.to(dtype)[:, 0], (16, 16)), s.to(dtype)
        if own:
            terms = cross_entropies(r, mask, 1 - mask, torch.ones_like(mask))
            value = terms["context"] + terms["concept"]
        else:
            outside = F.binary_cross_entropy(r * (1 - mask), torch.zeros_like(r))
            value = outside + F.binary_cross_entropy(r * mask, mask)
        return torch.autograd.grad(value, scores)[0], value.item()

    exact, value = gradient(own=True, dtype=torch.float64)
    reference, expected = gradient(own=False, dtype=torch.float64)
    assert value == pytest.approx(expected, rel=1e-12)  # with log 0 = -100
    assert torch.allclose(reference, exact, atol=1e-3)
    assert torch.allclose(gradient(own=True, dtype=torch.float32)[0], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("second_order", [False, True])
def test_cft_trains_by_attnlrp(second_order):
    model, (images, masks, labels) = tiny(), batch()
    cft = CFT(method="attnlrp", second_order=second_order, accuracy=0.0)
    value = cft(model, images, masks, labels)
    grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    reached = sum(g is not None and bool(g.any()) for g in grads)
    assert reached > len(grads) / 2 if second_order else 0 < reached < 5


def slope(model, value, step: float = 1e-6) -> tuple[float, list[Tensor]]:
    """Central difference of `value()` along one random direction of all weights, and that direction."""
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in model.parameters()]
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(sign * step * d)
        ends.append(float(value()))
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.sub_(sign * step * d)
    return (ends[0] - ends[1]) / (2 * step), direction


def along(loss: Tensor, model, direction: list[Tensor]) -> float:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return float(sum((g * d).sum() for g, d in zip(grads, direction, strict=True) if g is not None))


@pytest.mark.parametrize("term", ["background", "foreground", "confidence"])
@pytest.mark.parametrize("second_order", [False, True])
def test_relevance_gradient_is_the_finite_difference(term, second_order):
    model, (images, masks, labels) = tiny(), batch()
    held = None if second_order else gae_parts(model, images, labels)[1]
    wanted, direction = slope(model, lambda: relevance_oracle(model, images, masks, labels, held)[term])
    found = along(
        relevance_terms(model, images, masks, labels, second_order=second_order)[term],
        model,
        direction,
    )
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    "method",
    ["raw_attention", "rollout", "ixg+plus", "attixg+plus", "gradcam", "attcam", "gradsam", "fullgrad"],
)
def test_any_differentiable_method_makes_the_map(method):
    model, (images, masks, labels) = tiny(), batch()
    found = differentiable_map(model, images, labels, method)[0]
    assert torch.allclose(
        found.detach(), sg.explain(model, images, labels, method=method).scores, rtol=1e-9, atol=1e-12
    )

    def value(keep: bool = False) -> Tensor:
        terms = relevance_terms(model, images, masks, labels, method=method, second_order=True)
        return terms["background"] if keep else terms["background"].detach()

    wanted, direction = slope(model, value)
    assert along(value(keep=True), model, direction) == pytest.approx(wanted, rel=1e-4, abs=1e-8)


def test_gaze_maps_are_those_of_explain_and_reach_the_weights():
    model, (images, _, labels) = tiny(), batch()
    found, logits = differentiable_map(model, images, labels, "gaze", second_order=True)
    assert torch.allclose(
        found.detach(), sg.explain(model, images, labels, method="gaze").scores, rtol=1e-9, atol=1e-12
    )
    assert torch.allclose(logits, model(images), rtol=1e-10)
    grads = torch.autograd.grad(logits.sum(), list(model.parameters()), retain_graph=True)
    plain = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(grads, plain, strict=True)), (
        "logits must have the ordinary gradient"
    )
    assert all(
        g is not None and g.abs().sum() > 0
        for g in torch.autograd.grad(found.square().sum(), [model.patch_embed.proj.weight])
    )


def test_first_order_leaves_the_last_value_and_head_alone_and_second_does_not():
    model, (images, masks, labels) = tiny(), batch()
    for second_order in (False, True):
        terms = relevance_terms(model, images, masks, labels, second_order=second_order)
        asked = [model.head.weight, model.blocks[-1].attn.proj.weight, model.blocks[-1].mlp.fc1.weight]
        grads = torch.autograd.grad(terms["background"] + terms["foreground"], asked, allow_unused=True)
        assert all((g is not None and g.abs().max() > 0) == second_order for g in grads)


def test_one_pass_gives_map_and_logits():
    model, (images, masks, labels) = tiny(), batch()
    sg.adapt(model)  # checked once; that runs the model
    calls = []
    handle = model.head.register_forward_hook(lambda *_: calls.append(1))
    relevance_terms(model, images, masks, labels)
    handle.remove()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "loss",
    [relevance_terms, gradmask_terms, rrr_terms],
)
def test_the_value_alone_needs_no_graph(loss):
    model, given = tiny(), batch()
    wanted = loss(model, *given)
    with torch.no_grad():
        found = loss(model, *given)
    assert {k: v.item() for k, v in found.items()} == {k: v.item() for k, v in wanted.items()}
    assert not any(v.requires_grad for v in found.values())
    with torch.inference_mode(), pytest.raises(sg.InputError, match=r"torch.inference_mode\(\) forbids"):
        loss(model, *given)


@pytest.mark.parametrize(
    "loss",
    [relevance_terms, gradmask_terms, rrr_terms],
)
@pytest.mark.parametrize(
    ("labels", "message"), [([0, 1, 9], "class 9 is out of range"), ([0, 1], "for a batch of 3")]
)
def test_labels_that_do_not_fit_are_refused(loss, labels, message):
    images, masks, _ = batch()
    with pytest.raises(sg.InputError, match=message):
        loss(tiny(), images, masks, torch.tensor(labels))
    if loss is relevance_terms:
        with pytest.raises(sg.InputError, match=message):
            loss(tiny(), images, masks, torch.tensor(labels), explained="predicted", confidence="label")


def test_label_or_own_prediction():
    model, (images, masks, _) = tiny(), batch()
    labels = (model(images).argmax(-1) + 1) % 5
    by = {
        (e, c): relevance_terms(model, images, masks, labels, explained=e, confidence=c)
        for e in ("label", "predicted")
        for c in ("label", "predicted")
    }
    assert by["label", "label"]["background"] != by["predicted", "label"]["background"]
    assert by["label", "label"]["confidence"].item() == pytest.approx(
        F.cross_entropy(model(images), labels).item()
    )
    alone = relevance_terms(model, images, masks, explained="predicted")
    assert alone["background"].item() == by["predicted", "predicted"]["background"].item()
    with pytest.raises(sg.InputError, match="expected labels"):
        relevance_terms(model, images, masks)


def test_shares_of_a_mask_are_reversed_as_asked():
    images = torch.zeros(1, 3, 1, 3)
    s, rest, _ = object_and_background(torch.tensor([[[0.0, 0.25, 1.0]]]), images, reverse="reference")
    assert rest[0, 0].tolist() == [1.0, 0.25, 0.0] and s[0, 0].tolist() == [0.0, 0.25, 1.0]
    assert object_and_background(torch.tensor([[[0.0, 0.25, 1.0]]]), images)[1][0, 0].tolist() == [
        1.0,
        0.75,
        0.0,
    ]


def test_bad_masks_are_refused():
    model, (images, masks, labels) = tiny(), batch()
    empty = masks.clone()
    empty[1] = 0
    with pytest.raises(sg.InputError, match=r"image\(s\) \[1\].*background everywhere"):
        relevance_terms(model, images, empty, labels)
    with pytest.raises(sg.InputError, match=r"expected \(3, 16, 16\).*got \(3, 8, 8\)"):
        gradmask_terms(model, images, masks[:, :8, :8], labels)
    with pytest.raises(sg.InputError, match="got \\[7\\]"):
        rrr_terms(model, images, torch.where(masks == 0, 7, masks).to(torch.uint8), labels)
    with pytest.raises(sg.InputError, match=r"shares of the object in 0..1 or 0..255, got nan"):
        relevance_terms(model, images, torch.full(masks.shape, float("nan")), labels)
    with pytest.raises(sg.MethodUnavailableError, match="cannot be trained"):
        relevance_terms(model, images, masks, labels, method="integrated_gradients")
    with pytest.raises(sg.UnknownNameError, match="form"):
        adl([torch.ones(1, 1, 2, 2)], form="papers")
    with pytest.raises(sg.InputError, match="sequence"):
        adl(torch.ones(1, 1, 2, 2))


# -- gradients of the image ----------------------------------------------------------------------


def pixel_gradient_oracle(model, images, masks, labels, which: str) -> float:
    total = count = 0.0
    pixels = images.clone().requires_grad_()
    y = vit.run(model, vit.embed(model, pixels)).logits
    if which == "gradmask":
        quantity = sum(row[c] for row, c in zip(y, labels.tolist(), strict=True))
    else:
        quantity = sum((row.exp() / row.exp().sum() + 1e-11).log().sum() for row in y)
    (g,) = torch.autograd.grad(quantity, pixels)
    for one, mask in zip(g, masks, strict=True):
        for channel in one:
            for value, code in zip(channel.flatten().tolist(), mask.flatten().tolist(), strict=True):
                total += value**2 if code == 0 else 0.0
                count += code != 128
    return total / count if which == "gradmask" else total


@pytest.mark.parametrize("which", ["gradmask", "rrr"])
def test_input_gradient_losses(which):
    model, (images, masks, labels) = tiny(), batch()
    function = {"gradmask": gradmask_terms, "rrr": rrr_terms}[which]
    wanted, direction = slope(model, lambda: pixel_gradient_oracle(model, images, masks, labels, which))
    terms = function(model, images, masks, labels)
    assert terms["background"].item() == pytest.approx(
        pixel_gradient_oracle(model, images, masks, labels, which), rel=1e-9
    )
    assert along(terms["background"], model, direction) == pytest.approx(wanted, rel=1e-5)
    ran = function(model, images, masks, labels, form="code")
    assert (
        ran["background"].item() == pytest.approx(terms["background"].item())
        and not ran["background"].requires_grad
    )
    assert ran["classification"].requires_grad
    assert (
        {"ViT-B", "AR-S", "AR-B", "DeiT-S", "DeiT-B"}
        == set(input_gradient.RRR)
        == set(input_gradient.GRADMASK)
    )


# -- attention diversification ---------------------------------------------------------------------


def maps(
    batch_size: int, heads: int = 2, tokens: int = 6, layers: int = 3, sharp: float = 3.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch_size, heads, tokens, tokens)
    leaning = (
        torch.arange(tokens, dtype=torch.float64) / tokens * sharp
    )  # some columns get more, as in a trained model
    return [
        (sharp * torch.randn(shape, dtype=torch.float64, generator=generator) + leaning).softmax(-1)
        for _ in range(layers)
    ]


def adl_oracle(attentions: list[Tensor], tau: float, form: str) -> float:
    """Row by row, with lists."""
    layers = []
    for a in attentions:
        n = a.shape[-1]
        matrices = [m for image in a for m in (image if form == "per_head" else [image.mean(0)])]
        rows = []
        for m in matrices:
            if form == "code":
                cut = [[v if v > tau / n else 0.0 for v in row] for row in m.tolist()]
                middle = [v if v > tau / n else 0.0 for v in m.mean(0).tolist()]
            else:
                cut = [[v if v >= tau / n else 0.0 for v in row] for row in m.tolist()]
                middle = [sum(column) / n for column in zip(*cut, strict=True)]
            for row in cut:
                dot = sum(x * y for x, y in zip(row, middle, strict=True))
                rows.append(dot / max(math.hypot(*row), 1e-8) / max(math.hypot(*middle), 1e-8))
        layers.append(sum(rows) / len(rows))
    return sum(layers) / (len(layers) + (1e-6 if form == "code" else 0))


@pytest.mark.parametrize("form", ["paper", "code", "per_head"])
@pytest.mark.parametrize("size", [1, 3])
def test_adl_is_the_formula(form, size):
    found = adl(maps(size), form=form)
    assert found.shape == ()
    assert found.item() == pytest.approx(adl_oracle(maps(size), 2.0, form), rel=1e-9)
    assert found.item() > 0, "also at batch 1"


def test_adl_of_uniform_and_of_random_attention():
    even = [torch.full((2, 2, 8, 8), 1 / 8, dtype=torch.float64)]
    assert adl(even).item() == 0.0  # nothing reaches 2/N
    assert adl(even, tau=1.0).item() == pytest.approx(1.0)  # ≥: everything does
    random = [torch.randn(2, 2, 40, 40, generator=torch.Generator().manual_seed(0)).softmax(-1)]
    assert adl(random, form="code").item() == 0.0 and 0.1 < adl(random).item() < 0.5
    one_column = torch.full((1, 1, 4, 4), 0.02, dtype=torch.float64)
    one_column[..., 0] = 0.94
    assert adl([one_column]).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "given",
    [None, [], [[1.0]], torch.ones(1, 1, 3, 3), [torch.ones(1, 3, 3)], iter(())],
    ids=["none", "empty", "numbers", "bare tensor", "no heads", "empty iterator"],
)
def test_adl_of_something_else(given):
    with pytest.raises(sg.InputError, match="adl: expected"):
        adl(given)


@pytest.mark.parametrize("form", ["paper", "code", "per_head"])
def test_adl_gradient(form):
    logits = [a.log().requires_grad_() for a in maps(2, tokens=3, layers=2)]
    assert torch.autograd.gradcheck(lambda *s: adl([x.softmax(-1) for x in s], form=form), logits)


# -- distillation ----------------------------------------------------------------------------------


def test_distillation():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    assert distillation(student, teacher, form="soft").item() == pytest.approx(
        9 * (p * (p / q).log()).sum(-1).mean().item()
    )
    assert distillation(student, teacher).item() == pytest.approx(
        F.cross_entropy(student, teacher.argmax(-1)).item()
    )
    pair = (torch.randn_like(student), student)
    assert distillation(pair, teacher) == distillation(student, teacher)
    for form in ("soft", "hard"):
        assert torch.autograd.gradcheck(
            lambda s, form=form: distillation(s, teacher, form=form),
            student.requires_grad_(),
        )
    with pytest.raises(sg.InputError, match="same classes"):
        distillation(student, teacher[:, :3])


def test_relevance_of_a_distilled_model_in_training_keeps_both_heads():
    torch.manual_seed(0)
    model = VisionTransformerDistilled(
        img_size=16, patch_size=4, num_classes=5, embed_dim=8, depth=2, num_heads=2
    ).double()
    images, masks, labels = batch()
    sg.adapt(model)
    model.train()
    model.set_distilled_training(True)
    terms, logits = relevance.relevance_pass(model, images, masks, labels)
    assert len(logits) == 2 and torch.allclose(logits[1], model(images)[1])
    assert all(torch.isfinite(t) for t in terms.values())
