"""Center square, and drop curves against a loop that removes tokens by hand."""

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers.tiny_models import HIERARCHICAL, images_of
from oracles.models import random_images, tiny
from steadygaze.errors import InputError
from steadygaze.robustness.occlusion import center_square, random_drop, salient_drop

LABELS = torch.tensor([1, 3])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(model: torch.nn.Module, image: Tensor, gone: list[int]) -> Tensor:
    """Logits of a timm ViT whose own forward is run on the tokens that are left."""
    x = model.patch_embed(image[None])
    x = model.norm_pre(model._pos_embed(x))
    prefix = model.num_prefix_tokens
    left = [*range(prefix), *(prefix + i for i in range(x.shape[1] - prefix) if i not in gone)]
    x = x[:, left]
    for block in model.blocks:
        x = block(x)
    return model.forward_head(model.norm(x))[0].detach()


def test_center_square_is_half_the_side_and_nothing_else() -> None:
    images = torch.rand(2, 3, 224, 224) + 1
    before = images.clone()
    out = center_square(images)
    changed = out != images
    assert (
        changed.sum() == 2 * 3 * 112 * 112
        and changed[:, :, 56:168, 56:168].all()
        and (out[changed] == 0).all()
    )
    assert torch.equal(images, before)


def test_black_is_black_in_pixels() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
    images = (torch.rand(1, 3, 9, 12) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    out = center_square(images, share=0.34, fill="black", mean=mean, std=std)
    pixels = out * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    assert pixels[:, :, 3:6, 4:8].abs().max() < 1e-6
    assert (out != images).sum() == 3 * 3 * 4


@pytest.mark.parametrize("kind", ["class", "registers", "average"])
def test_salient_drop_removes_the_highest_first(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    scores = torch.rand(2, 4, 4, generator=seeded(0), dtype=torch.float64).round(decimals=1)  # with ties
    curve = salient_drop(model, images, LABELS, scores, shares=(0, 0.3, 0.75))
    assert curve.means == "removal"
    for i, image in enumerate(images):
        ranked = sorted(range(16), key=lambda j: (-float(scores[i].flatten()[j]), j))
        for column, k in enumerate((0, 4, 12)):
            logits = by_hand(model, image, ranked[:k])
            assert torch.allclose(curve.probability[i, column], logits.softmax(0)[LABELS[i]], atol=1e-10)
            assert curve.right[i, column] == float(logits.argmax() == LABELS[i])
    assert torch.equal(curve.accuracy, curve.right.mean(0))


def test_random_drop_is_seeded_nested_and_independent_of_the_batch() -> None:
    model = tiny()
    images = random_images(model, batch=3)
    labels = torch.tensor([0, 1, 2])
    whole = random_drop(model, images, labels, generator=[seeded(5 + i) for i in range(3)])
    again = random_drop(model, images, labels, generator=[seeded(5 + i) for i in range(3)])
    single = random_drop(model, images[2:], labels[2:], generator=[seeded(7)])
    other = random_drop(model, images[2:], labels[2:], generator=seeded(8))
    assert torch.equal(whole.probability, again.probability)
    assert torch.allclose(whole.probability[2], single.probability[0], atol=1e-12)
    assert not torch.allclose(single.probability, other.probability, atol=1e-6)
    gone = torch.randperm(16, generator=seeded(7)).tolist()
    for column, share in enumerate(whole.shares):
        wanted = by_hand(model, images[2], gone[: int(share * 16)]).softmax(0)[2]
        assert torch.allclose(whole.probability[2, column], wanted, atol=1e-10)


def test_nothing_left_is_chance_for_a_head_that_reads_patches_and_the_class_token_otherwise() -> None:
    mean, cls = tiny("average"), tiny("class")
    curve = random_drop(mean, random_images(mean), LABELS, generator=seeded(0), shares=(0.5, 1.0))
    assert torch.allclose(curve.probability[:, 1], torch.full((2,), 0.2, dtype=torch.float64))
    assert torch.allclose(curve.right[:, 1], torch.full((2,), 0.2, dtype=torch.float64))
    curve = random_drop(cls, random_images(cls), LABELS, generator=seeded(0), shares=(1.0,))
    alone = by_hand(cls, random_images(cls)[0], list(range(16)))
    assert torch.allclose(curve.probability[0, 0], alone.softmax(0)[1], atol=1e-10)


def test_a_model_with_windows_is_masked_and_says_so() -> None:
    model = HIERARCHICAL["Swin"]()
    images = images_of(model)
    curve = random_drop(model, images, torch.tensor([0, 1]), generator=seeded(0), shares=(0.0, 0.5, 1.0))
    assert curve.means == "attention masking" and torch.isfinite(curve.probability).all()
    with torch.no_grad():
        whole = sg.adapt(model)(images).softmax(1)
    assert torch.allclose(curve.probability[:, 0], whole[[0, 1], [0, 1]])
    assert not torch.allclose(curve.probability[:, 1], curve.probability[:, 0], atol=1e-6)


def test_bad_input() -> None:
    model = tiny()
    images = random_images(model)
    with pytest.raises(InputError, match="rising order"):
        random_drop(model, images, LABELS, generator=seeded(0), shares=(0.5, 0.1))
    with pytest.raises(InputError, match="16 patches"):
        salient_drop(model, images, LABELS, torch.zeros(2, 3, 3))
    with pytest.raises(InputError, match="NaN"):
        salient_drop(model, images, LABELS, torch.full((2, 4, 4), float("nan")))
    with pytest.raises(InputError, match=r"classes 0\.\.4"):
        random_drop(model, images, torch.tensor([0, 9]), generator=seeded(0))
    with pytest.raises(InputError, match="one for each of 2"):
        random_drop(model, images, LABELS, generator=[seeded(0)])
    with pytest.raises(InputError, match="0 to 1"):
        center_square(images, share=112)
    with pytest.raises(InputError, match="mean and std"):
        center_square(images, fill="black")
    with pytest.raises(InputError, match="'zero'"):
        center_square(images, fill="gray")
