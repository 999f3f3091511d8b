"""ViT-Shapley: the game, the kernel, the loss and training against definitions; files; refusals."""

import copy
from math import comb

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from oracles import search
from oracles.models import random_images, tiny
from steadygaze.methods.perturbation import shapley_pairs
from steadygaze.methods.vit_shapley import (
    efficient,
    kernel_shap_loss,
    read_file,
    value_of_nothing,
    values,
    write,
)
from steadygaze.training.vit_shapley import Settings, Trainer, divergence, uniform_sizes

SMALL = {"img_size": 6}  # 2 x 2 patches
QUICK = {"batch": 4, "warmup": 20, "rate": 3e-3, "pairs": 2}


def trained(model, images: Tensor, steps: int, **options) -> Trainer:
    trainer = Trainer(sg.adapt(model), Settings(**QUICK | options))
    for _ in range(steps):
        trainer.step(images)
    return trainer


def saved(path, trainer: Trainer, **more) -> str:
    facts, tensors = trainer.state()
    write(path, trainer.learned, facts | more, tensors)
    return str(path)


def shapley(model, images: Tensor, file: str, target=None) -> Tensor:
    return sg.explain(model, images, target=target, method=sg.method("vit_shapley", file=file)).scores


# -- the game and its loss -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["class", "average", "registers"])
def test_values_are_probabilities_with_patches_removed(kind: str) -> None:
    model = tiny(kind, **SMALL)
    images, vit = random_images(model), sg.adapt(model)
    keep = torch.tensor([[bool(s >> j & 1) for j in range(4)] for s in range(16)]).expand(2, -1, -1)
    with torch.no_grad():
        tokens = vit.embed(images)
        got = values(vit, images, tokens, keep, "remove")
        null = value_of_nothing(vit, torch.zeros_like(images), vit.embed(torch.zeros_like(images)), "remove")
    for b in range(2):
        for s in range(16):
            wanted = search.logits(model, images[b], [j for j in range(4) if s >> j & 1]).softmax(0)
            assert torch.allclose(got[b, s], wanted, atol=1e-12)
        assert torch.allclose(got[b, 0], null, atol=1e-12), "v(∅) does not depend on the image"


def test_sizes_are_drawn_by_the_shapley_kernel() -> None:
    """Frequencies of sizes, of patches within a size, and pairs."""
    P, draws = 6, 200_000
    uniform = torch.rand(1, draws, P + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep = shapley_pairs(uniform)[0]
    assert torch.equal(keep[::2], ~keep[1::2]), "S and its complement"
    kernel = [(P - 1) / (comb(P, s) * s * (P - s)) * comb(P, s) for s in range(1, P)]
    sizes = keep.sum(1)
    for s, weight in enumerate(kernel, 1):
        share, wanted = float((sizes == s).double().mean()), weight / sum(kernel)
        assert abs(share - wanted) < 0.004, s
        of_size = keep[sizes == s].double().mean(0)
        assert (of_size - s / P).abs().max() < 0.01, "every set of a size is as likely"
    assert int(sizes.min()) == 1 and int(sizes.max()) == P - 1


def test_sizes_of_the_surrogate_are_uniform() -> None:
    draws = torch.rand(70_000, 7, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(uniform_sizes(draws).sum(1), minlength=7)
    assert len(counts) == 7 and (counts - 10_000).abs().max() < 400


def test_loss_and_normalization_by_naive_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    raw, value, whole = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 3), (2, 5, 3), (2, 3))
    )
    null = torch.randn(3, generator=generator, dtype=torch.float64)
    keep = torch.rand(2, 5, 4, generator=generator) < 0.5
    phi = efficient(raw, whole, null)
    assert torch.allclose(phi.sum(1), whole - null, atol=1e-14)
    assert torch.allclose(phi - phi.mean(1, keepdim=True), raw - raw.mean(1, keepdim=True), atol=1e-14)
    total = 0.0
    for b in range(2):
        for r in range(5):
            for c in range(3):
                part = sum(float(phi[b, j, c]) for j in range(4) if keep[b, r, j])
                total += (float(value[b, r, c]) - float(null[c]) - part) ** 2
    assert float(kernel_shap_loss(phi, keep, value, null)) == pytest.approx(total / 10, rel=1e-12)


def test_exact_shapley_values_have_the_least_loss() -> None:
    """Over all subsets, weighted by the kernel; any other values that add up to the same lose."""
    model = tiny("class", **SMALL)
    image = random_images(model, 1)
    exact = search.exact_shapley_of_removal(model, image[0])[None]
    keep = torch.tensor([[bool(s >> j & 1) for j in range(4)] for s in range(1, 15)])
    weight = torch.tensor([1 / (comb(4, n) * n * (4 - n)) for n in keep.sum(1).tolist()])
    keep = keep[torch.multinomial(weight.double(), 20_000, True, generator=torch.Generator().manual_seed(0))]
    vit = sg.adapt(model)
    with torch.no_grad():
        tokens = vit.embed(image)
        value = values(vit, image, tokens, keep[None], "remove")
        null = value_of_nothing(vit, image, tokens, "remove")
    least = float(kernel_shap_loss(exact, keep[None], value, null))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        other = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64) * 0.05
        other = exact + other - other.mean(1, keepdim=True)
        assert float(kernel_shap_loss(other, keep[None], value, null)) > least


@pytest.mark.parametrize("outputs", ["classes", "labels", "values"])
def test_divergence(outputs: str) -> None:
    p, q = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = float(divergence(outputs, p, q))
    if outputs == "classes":
        a, b = p.softmax(1), q.softmax(1)
        wanted = (a * (a / b).log()).sum(1).mean()
    elif outputs == "labels":
        a, b = p.sigmoid(), q.sigmoid()
        wanted = (a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()).sum(1).mean()
    else:
        wanted = ((p - q) ** 2).sum(1).mean()
    assert got == pytest.approx(float(wanted), rel=1e-12)
    assert float(divergence(outputs, p, p)) == pytest.approx(0, abs=1e-14)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trunk", tiered(["model", "train"], 1))
def test_training_approaches_the_exact_shapley_values(tmp_path, trunk: str) -> None:
    """2 x 2 patches, four images: their exact values by enumeration of all sets of removed patches."""
    model = tiny("class", **SMALL)
    images = random_images(model, 4)
    before = copy.deepcopy(model.state_dict())
    trainer = trained(model, images, 0, trunk=trunk, pairs=4, trunk_rate=1e-3)
    assert trainer.evaluate(images).explained == pytest.approx(0, abs=1e-12), "equal shares before training"
    for _ in range(80):
        trainer.step(images)
    assert trainer.evaluate(images).explained > 0.3, "the game is not additive: the most is 0.44"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    exact = torch.stack([search.exact_shapley_of_removal(model, image) for image in images])
    file = saved(tmp_path / "s.safetensors", trainer)
    got = shapley(model, images, file, target=torch.arange(5).expand(4, -1)).flatten(2).transpose(1, 2)
    centered = [x - x.mean(1, keepdim=True) for x in (exact, got)]  # efficiency gives the mean for nothing
    correlation = torch.corrcoef(torch.stack([x.flatten() for x in centered]))[0, 1]
    assert correlation > 0.95, float(correlation)
    with torch.no_grad():
        whole = model(images).softmax(1)
        null = search.logits(model, images[0], []).softmax(0)
    assert torch.allclose(got.sum(1), whole - null, atol=1e-12), "efficiency, exactly"


@pytest.mark.full
def test_a_surrogate_is_trained_on_removed_patches(tmp_path) -> None:
    """Its values are explained; it comes nearer to the model's whole prediction under removal."""
    model = tiny("average", **SMALL)
    images = random_images(model, 4)
    options = {"surrogate": "train", "trunk": "train", "surrogate_steps": 60, "surrogate_rate": 3e-3}
    trainer = trained(model, images, 0, **options)
    losses = [trainer.step(images).loss for _ in range(60)]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert trainer.step(images).even is not None, "then the explainer follows"
    with torch.no_grad():
        whole = trainer.surrogate.model(images).softmax(1)
    assert (whole - model(images).softmax(1)).abs().max() > 1e-3
    got = shapley(model, images, saved(tmp_path / "s", trainer), target=2)
    assert torch.allclose(got.flatten(1).sum(1), whole[:, 2] - 0.2, atol=1e-12), "of the surrogate"
    with pytest.raises(
        sg.MethodUnavailableError, match=r"surrogate='train' needs patches that can be removed"
    ):
        Trainer(sg.adapt(tiny_models.HIERARCHICAL["Swin"]()), Settings(surrogate="train"))


@pytest.mark.parametrize(
    "options", tiered([{}, {"surrogate": "train", "trunk": "train", "surrogate_steps": 3}], 1)
)
def test_a_restored_trainer_continues_exactly(tmp_path, options) -> None:
    model = tiny("registers", **SMALL)
    images = random_images(model, 4)
    whole = trained(model, images, 6, **options)
    for at in (2, 4):
        cut = trained(model, images, at, **options)
        saved(tmp_path / "s", cut)
        again = Trainer(sg.adapt(model), Settings(**QUICK | options))
        again.restore(*read_file(tmp_path / "s"))
        for _ in range(6 - at):
            again.step(images)
        one, two = (trainer.state()[1] | dict(trainer.learned.state_dict()) for trainer in (whole, again))
        assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.full
def test_a_model_whose_patches_cannot_be_removed(tmp_path) -> None:
    model = tiny_models.HIERARCHICAL["Swin"]()
    images = tiny_models.images_of(model)
    trainer = trained(model, images, 3)
    assert trainer.mode == "mask"
    scores = shapley(model, images, saved(tmp_path / "s", trainer))
    assert scores.shape[1:] == sg.adapt(model).grid and torch.isfinite(scores).all()


# -- the method ------------------------------------------------------------------------------------


def test_batches_classes_and_other_methods(tmp_path) -> None:
    model = tiny("class")
    images = random_images(model)
    trainer = trained(model, images, 4)
    file = saved(tmp_path / "s", trainer)
    both = shapley(model, images, file, target=1)
    for b in range(2):
        assert torch.allclose(shapley(model, images[b : b + 1], file, target=1)[0], both[b], atol=1e-12)
    pairs = shapley(model, images, file, target=[[0, 1], [2, 1]])
    assert torch.allclose(pairs[:, 1], both, atol=1e-12) and not torch.allclose(pairs[:, 0], both)
    method = sg.method("vit_shapley", file=file)
    together = sg.explain(model, images, target=1, method=["ixg", method])
    assert torch.allclose(together[method.name].scores, both, atol=1e-12)
    assert together[method.name].score == "prob"
    half = copy.deepcopy(model).float()
    assert torch.allclose(shapley(half, images.float(), file, target=1).double(), both, atol=1e-4)


def test_files_and_what_is_refused(tmp_path) -> None:
    model = tiny("class")
    images = random_images(model)
    with pytest.raises(sg.MethodUnavailableError, match=r"vit_shapley: it needs an explainer.*shapley train"):
        sg.explain(model, images, method="vit_shapley")
    trainer = trained(model, images, 2)
    file = saved(tmp_path / "s.safetensors", trainer)
    content = (tmp_path / "s.safetensors").read_bytes()
    torch.save({"null": torch.zeros(1)}, tmp_path / "pickle.pt")
    (tmp_path / "short").write_bytes(content[:200])
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    facts, tensors = trainer.state()
    write(tmp_path / "null", trainer.learned, facts, tensors | {"null": torch.zeros(2)})
    for name, message in (
        ("none", "expected a file of weights of ViT-Shapley.*no such file"),
        ("pickle.pt", "not a readable"),
        ("short", "not a readable"),
        ("other", "holds no weights of ViT-Shapley. Train them with `steadygaze shapley train`"),
        ("null", "do not match its metadata"),
    ):
        with pytest.raises(sg.CheckpointError, match=message):
            shapley(model, images, str(tmp_path / name))
    for other in (tiny("class", embed_dim=32), tiny("class", num_classes=3)):
        with pytest.raises(
            sg.MethodUnavailableError, match=r"was trained for states of widths 24.*and 5 classes"
        ):
            shapley(other, images, file)
    with pytest.raises(sg.MethodUnavailableError, match=r"expected score 'prob'.*got logit"):
        sg.explain(model, images, score="logit", method=sg.method("vit_shapley", file=file))
    with pytest.raises(sg.MethodUnavailableError, match="got a callable"):
        shapley(model, images, file, target=lambda logits: logits[:, 0])
    bad = saved(tmp_path / "bad", trainer, diverged="the loss is not finite")
    with pytest.warns(UserWarning, match="bad is not trained: the loss is not finite"):
        shapley(model, images, bad)
    for options, message in (
        ({"surrogate": "none"}, "unknown surrogate 'none'"),
        ({"rate": 0.0}, "rate: expected a number above 0, got 0.0"),
        ({"pairs": 0}, "pairs: expected a number above 0, got 0"),
    ):
        with pytest.raises(sg.SteadygazeError, match=message):
            Settings(**options)
