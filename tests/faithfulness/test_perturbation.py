"""Pixel perturbation against naive loops; fills; noise that belongs to the image, not to the batch."""

import pytest
import torch
from scipy.ndimage import gaussian_filter

import benchmarks.zoo as zoo
import steadygaze as sg
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import METRICS, Batch, evaluate
from steadygaze.faithfulness.localization import upsample
from steadygaze.faithfulness.perturbation import FRACTIONS, blur, fill_values

MEAN, STD = (
    torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64),
    torch.tensor([0.2, 0.25, 0.3], dtype=torch.float64),
)
CHEFER = ["positive_perturbation", "negative_perturbation"]
DIFFMASK = [
    f"{sign}_{kind}{code}"
    for sign in ("positive", "negative")
    for kind in ("kl", "accuracy")
    for code in ("", "_code")
]


def problem(kind="class", seed=0, batch=2, ties=False):
    model = tiny(kind, seed)
    images = random_images(model, batch, seed + 1)
    maps = torch.randn(
        2,
        batch,
        *model.patch_embed.grid_size,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    names = tuple(f"image {i}" for i in range(batch))
    labels = model(images).argmax(1) if seed % 2 == 0 else torch.arange(batch) % 5
    return model, Batch(images, labels, mean=MEAN, std=STD, names=names), maps.round() if ties else maps


@pytest.mark.parametrize("fill", ["zero", "mean", "blur", "noise"])
@pytest.mark.parametrize("kind", tiered(["class", "average"], ["average"]))
def test_chefers_tests_by_naive_loops(kind, fill):
    model, batch, maps = problem(kind)
    results, notes = evaluate(model, batch, maps, CHEFER, fill=fill, seed=4)
    assert set(notes.values()) == {fill}
    paint = fill_values(batch, fill, 4)
    size = batch.images.shape[-1]
    with torch.no_grad():
        for m, b in ((0, 0), (1, 1)):
            pixels = (
                upsample(maps[m, b], (size, size)).flatten().tolist()
            )  # the last bit decides between equal pixels
            assert pixels == pytest.approx(
                [v for row in oracle.bilinear(maps[m, b], size, size) for v in row], abs=1e-12
            )
            for name, sign in zip(CHEFER, (1, -1), strict=True):
                right = []
                for f in FRACTIONS:
                    image = oracle.painted(
                        batch.images[b], [sign * v for v in pixels], int(size * size * f), paint[b]
                    )
                    right.append(100.0 * (int(model(image[None]).argmax()) == int(batch.labels[b])))
                assert results[name].detail[m, b].tolist() == right
                assert results[name].value[m, b] == pytest.approx(sum(right) / 9)


def test_chefers_tests_with_ties_take_raster_order():
    model, batch, _ = problem()
    constant = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    results, _ = evaluate(model, batch, constant, CHEFER)
    assert torch.equal(results["positive_perturbation"].detail, results["negative_perturbation"].detail)
    black = fill_values(batch, "zero")
    with torch.no_grad():
        for column, f in enumerate(FRACTIONS):
            image = oracle.painted(batch.images[0], [0.0] * 144, int(144 * f), black[0])
            right = 100.0 * (int(model(image[None]).argmax()) == int(batch.labels[0]))
            assert results["positive_perturbation"].detail[0, 0, column] == right


@pytest.mark.parametrize(("kind", "ties"), [("class", False), ("registers", True)])
def test_diffmasks_curves_by_naive_loops(kind, ties):
    model, batch, maps = problem(kind, seed=1, ties=ties)
    results, notes = evaluate(model, batch, maps, DIFFMASK, seed=7)
    assert set(notes.values()) == {"noise"}
    noise = fill_values(batch, "noise", 7)
    with torch.no_grad():
        for m, b in ((0, 1), (1, 0)):
            pixels = maps[m, b].repeat_interleave(3, 0).repeat_interleave(3, 1).flatten().tolist()
            for sign, factor in (("positive", 1), ("negative", -1)):
                expected = oracle.diffmask(model, batch.images[b], [factor * v for v in pixels], noise[b])
                for name, value in expected.items():
                    assert results[f"{sign}_{name}"].value[m, b] == pytest.approx(value, abs=1e-8), name
                    assert results[f"{sign}_{name}"].detail.shape == (2, 2, 29)


@pytest.mark.full
def test_ranges_and_a_swin():
    model, _ = zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, 1)
    maps = torch.randn(1, 1, *vit.grid, dtype=torch.float64)
    results, _ = evaluate(
        model, Batch(images, torch.tensor([1]), mean=MEAN, std=STD), maps, [*CHEFER, *DIFFMASK]
    )
    for name, values in results.items():
        assert METRICS[name].low <= float(values.value) <= METRICS[name].high


def test_fills():
    _, batch, _ = problem()
    black = fill_values(batch, "zero") * STD[:, None, None] + MEAN[:, None, None]
    torch.testing.assert_close(black, torch.zeros_like(black), rtol=0, atol=1e-12)
    assert torch.equal(fill_values(batch, "mean"), torch.zeros_like(batch.images))
    noise = fill_values(batch, "noise", 1)
    assert noise.abs().max() <= 1 and noise.std() == pytest.approx(3**-0.5, abs=0.05)
    assert not torch.equal(noise[0], noise[1]) and not torch.equal(noise, fill_values(batch, "noise", 2))
    alone = Batch(batch.images[1:], batch.labels[1:], names=batch.names[1:])
    assert torch.equal(fill_values(alone, "noise", 1)[0], noise[1])
    with pytest.raises(sg.UnknownNameError, match="noise"):
        fill_values(batch, "nois")
    with pytest.raises(sg.InputError, match="mean and std"):
        fill_values(alone, "zero")


def test_blur_is_scipys():
    image = torch.randn(1, 2, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = blur(image, 1.5)
    for c in range(2):
        expected = gaussian_filter(image[0, c].numpy(), 1.5, mode="mirror", radius=5)
        torch.testing.assert_close(results[0, c], torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_half_precision_is_not_rounded_again():
    """Sums over float16 images may overflow float16, and probabilities are computed in float32."""
    model, batch, maps = problem()
    model, images = model.half(), (batch.images + 200).half()
    assert torch.isinf(images.sum())
    half = Batch(images, batch.labels, mean=MEAN, std=STD, names=batch.names)
    full = Batch(images.double(), batch.labels, mean=MEAN, std=STD, names=batch.names)
    results = evaluate(model, half, maps.half(), [*CHEFER, *DIFFMASK]).values
    wanted = evaluate(model.double(), full, maps.half().double(), [*CHEFER, *DIFFMASK]).values
    for name in ("positive_kl", "negative_kl", "positive_kl_code", "positive_accuracy_code"):
        assert results[name].value.dtype == torch.float32
        torch.testing.assert_close(results[name].value.double(), wanted[name].value, rtol=0.05, atol=1e-3)
