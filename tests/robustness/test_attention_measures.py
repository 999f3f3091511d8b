"""Attention measures against plain loops over the oracle's attention, for fused and eager attention."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from helpers.tiny_models import HIERARCHICAL, PLAIN, images_of
from oracles.models import random_images, tiny
from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.robustness import attention as measured
from steadygaze.robustness.attention import attention_figure, attention_measures, attention_stability, walk


def attention_by_hand(model: nn.Module, images: Tensor) -> list[np.ndarray]:
    """A of every block of a timm ViT, written out from its weights: (B, H, N, N)."""
    found = []
    with torch.no_grad():
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        for block in model.blocks:
            att = block.attn
            b, n = x.shape[:2]
            q, k, _ = att.qkv(block.norm1(x)).reshape(b, n, 3, att.num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k = att.q_norm(q), att.k_norm(k)
            found.append(((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1).numpy())
            x = block(x)
    return found


def naive(a: np.ndarray, prefix: int, grid: tuple[int, int], top: int) -> dict[str, float]:
    """Every measure of one head's map (N, N), by loops."""
    n = len(a)
    rows = [-sum(p * math.log(p) for p in row if p > 0) for row in a]
    given = sorted((sum(a[i][j] for i in range(n)) / n for j in range(n)), reverse=True)
    spread = sum(abs(x - y) for x in given for y in given) / (2 * n * n * (sum(given) / n))
    far = []
    for i in range(prefix, n):
        weights = a[i][prefix:] / a[i][prefix:].sum()
        yi, xi = divmod(i - prefix, grid[1])
        far.append(sum(w * math.dist((yi, xi), divmod(j, grid[1])) for j, w in enumerate(weights)))
    return {
        "entropy": sum(rows) / n,
        "overfocus": sum(given[:top]),
        "gini": spread,
        "peak": n * given[0],
        "distance": sum(far) / len(far),
        "token_similarity": float(np.mean([cosine(a[i], a[j]) for i in range(n) for j in range(i)])),
    }


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("kind", ["class", "registers", "average"])
def test_measures_are_the_loops(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    got = attention_measures(model, images, top=3)
    maps = attention_by_hand(model, images)
    for b, l, h in np.ndindex(2, 3, 2):
        for name, value in naive(maps[l][b, h], model.num_prefix_tokens, (4, 4), 3).items():
            assert getattr(got, name)[b, l, h].item() == pytest.approx(value, abs=1e-10), name
    for b, l in np.ndindex(2, 3):
        assert got.head_similarity[b, l].item() == pytest.approx(
            cosine(maps[l][b, 0], maps[l][b, 1]), abs=1e-10
        )
    with torch.no_grad():
        assert torch.allclose(got.logits, model(images), atol=1e-10)


def test_stability_is_the_cosine_by_layer_and_head() -> None:
    model = tiny()
    clean, noisy = random_images(model), random_images(model, seed=9)
    got = attention_stability(model, clean, noisy)
    one, two = attention_by_hand(model, clean), attention_by_hand(model, noisy)
    for b, l, h in np.ndindex(2, 3, 2):
        assert got[b, l, h].item() == pytest.approx(cosine(one[l][b, h], two[l][b, h]), abs=1e-10)
    assert torch.allclose(attention_stability(model, clean, clean), torch.ones_like(got), atol=1e-12)


def test_three_heads_are_compared_pair_by_pair() -> None:
    a = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h = a[0].numpy()
    wanted = (cosine(h[0], h[1]) + cosine(h[0], h[2]) + cosine(h[1], h[2])) / 3
    assert measured.head_similarity(a).item() == pytest.approx(wanted, abs=1e-12)
    assert measured.head_similarity(a[:, :1]).isnan().all()


def test_the_ends_of_every_range() -> None:
    n = 6
    even, one = torch.full((1, 1, n, n), 1 / n), torch.zeros(1, 1, n, n)
    one[..., 2] = 1
    assert measured.entropy(even).item() == pytest.approx(math.log(n)) and measured.entropy(one).item() == 0
    assert measured.gini(even).item() == pytest.approx(0, abs=1e-6) and measured.gini(
        one
    ).item() == pytest.approx(1 - 1 / n)
    assert measured.peak(even).item() == pytest.approx(1) and measured.peak(one).item() == pytest.approx(n)
    assert (
        measured.overfocus(even, 2).item() == pytest.approx(2 / n) and measured.overfocus(one, 1).item() == 1
    )
    far = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert measured.distance(torch.eye(2)[None, None], far).item() == 0
    assert measured.distance(torch.eye(2).flip(0)[None, None], far).item() == 1


@pytest.mark.parametrize(
    "name", ["distilled DeiT", "EVA-02 base (sub-LN)", "BEiT", "torchvision", "transformers DINOv2 registers"]
)
def test_fused_attention_of_every_make_is_seen(name: str) -> None:
    model = PLAIN[name]()
    vit = sg.adapt(model)
    images = images_of(model)
    got = attention_measures(model, images, top=1)
    tokens = vit.prefix + vit.grid[0] * vit.grid[1]
    assert got.entropy.shape[:2] == (2, len(vit.blocks))
    assert (got.entropy > 0).all() and (got.entropy <= math.log(tokens) + 1e-6).all()
    assert torch.allclose(got.peak, tokens * got.overfocus)
    with torch.no_grad():
        assert torch.allclose(got.logits, vit(images), atol=1e-8)


def test_only_one_layer_is_held_at_a_time() -> None:
    model = tiny(depth=4)
    seen: list[weakref.ref[Tensor]] = []

    def see(layer: int, a: Tensor) -> None:
        assert all(old() is None for old in seen), "a map of an earlier layer is still alive"
        seen.append(weakref.ref(a))
        assert not a.requires_grad

    walk(sg.adapt(model), [random_images(model)], see)
    assert len(seen) == 4 and all(old() is None for old in seen)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny().train()
    attention_measures(model, random_images(model))
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_image_has_a_row_for_clean_and_corrupted_and_a_column_for_each_head() -> None:
    model = tiny()
    clean, noisy = random_images(model, batch=1), random_images(model, batch=1, seed=4)
    wide = attention_figure(model, clean, noisy, cell=40)
    one = attention_figure(model, clean, cell=40)
    alone = attention_figure(model, clean, heads=False, cell=40)
    beside = attention_figure(model, clean, cell=40, images=[torch.rand(3, 12, 12)])
    assert wide.height > one.height and one.width > alone.width and beside.width > one.width
    assert np.asarray(attention_figure(model, clean, layer=0, cell=40)).tolist() != np.asarray(one).tolist()


def test_bad_input() -> None:
    model = tiny()
    images = random_images(model)
    with pytest.raises(MethodUnavailableError, match="windows"):
        swin = HIERARCHICAL["Swin"]()
        attention_measures(swin, images_of(swin))
    with pytest.raises(InputError, match=r"from 1 to 17"):
        attention_measures(model, images, top=18)
    with pytest.raises(InputError, match="one shape"):
        attention_stability(model, images, images[:1])
    with pytest.raises(InputError, match=r"0\.\.2"):
        attention_figure(model, images[:1], layer=3)
    with pytest.raises(InputError, match="one image"):
        attention_figure(model, images)
