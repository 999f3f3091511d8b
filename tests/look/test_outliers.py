"""Outlier tokens: the rule on constructed norms, and a model with a planted outlier and register neuron."""

import copy
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import steadygaze as sg
from helpers.inserted import plain
from oracles.models import tiny
from steadygaze.errors import InputError, MethodUnavailableError
from steadygaze.look.outliers import high_patches
from steadygaze.modules import Registers, insert

PATCH, NEURON, BLOCK = 5, 11, 1


def norms(seed: int = 0, spread: float = 0.1) -> Tensor:
    """Norms around 1, (2 images, 3 blocks, 8, 8)."""
    return 1 + spread * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)


def planted(kind: str = "class") -> nn.Module:
    """A tiny model whose block 1 writes a large vector to patch 5, by a neuron that knows its position."""
    model, seen = tiny(kind), []
    direction = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    block, prefix = model.blocks[BLOCK], model.num_prefix_tokens
    with torch.no_grad():
        model.pos_embed[0, (0 if model.no_embed_class else prefix) + PATCH] += direction
        handle = block.norm2.register_forward_hook(lambda m, i, o: seen.append(o))
        model(pictures(20))
        handle.remove()
        patch = seen[0][:, prefix + PATCH]
        others = torch.cat([seen[0][:, : prefix + PATCH], seen[0][:, prefix + PATCH + 1 :]], 1)
        reads = patch.mean(0) - others.mean((0, 1))
        low, high = (others @ reads).max(), (patch @ reads).min()
        assert low < high
        block.mlp.fc1.weight[NEURON] = 10 * reads / (high - low)
        block.mlp.fc1.bias[NEURON] = -10 * low / (high - low)
        block.mlp.fc2.weight[:, NEURON] = 10 * direction.roll(3)
    return model


def pictures(batch: int = 3) -> Tensor:
    noise = torch.randn(batch, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return 0.2 * noise


def test_no_outliers_without_any():
    mask, _, first = high_patches(norms())
    assert not mask.any() and first is None


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_planted_norms_are_found_at_any_scale(scale):
    x = norms()
    x[0, 1, 2, 3], x[0, 2, 2, 3], x[1, 2, 7, 7] = 3.0, 6.0, 4.0
    mask, layer, first = high_patches(scale * x)
    assert mask.nonzero().tolist() == [[0, 2, 3], [1, 7, 7]]
    assert layer == 2 and first == 1  # half of them are high behind block 1


def test_twice_the_median_within_a_wide_spread_is_not_an_outlier():
    x = torch.linspace(0, 1.8, 64).square().unflatten(0, (8, 8)).expand(2, 3, -1, -1)  # up to 4 medians
    assert not high_patches(x)[0].any()


def test_far_outside_the_spread_but_below_twice_the_median_is_not_an_outlier():
    x = norms(spread=0.001)
    x[0, 1, 4, 4] = 1.9
    assert not high_patches(x)[0].any()


def test_equal_norms_and_zeros():
    for x in (torch.ones(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)):
        mask, layer, first = high_patches(x)
        assert not mask.any() and layer == 0 and first is None


@pytest.mark.parametrize("kind", ["class", "registers", "average"])
def test_a_planted_outlier_is_found_and_moved_to_a_register(kind):
    model, x = planted(kind), pictures()
    before = copy.deepcopy(model.state_dict())
    out = sg.outliers(model, x)
    assert out.mask.flatten(1).nonzero().tolist() == [[0, PATCH], [1, PATCH], [2, PATCH]]
    assert out.first == BLOCK and out.layer >= BLOCK
    assert out.norms.shape == out.attention.shape == (3, 3, 4, 4)
    assert torch.allclose(out.attention.sum((2, 3)), torch.ones(3, 3, dtype=out.attention.dtype))
    assert out.query == ("mean" if kind == "average" else "class")
    assert f"block {BLOCK}" in out.advice and len(out) == 3
    found = sg.find_registers(model, x, neurons=1)
    assert found == Registers(((BLOCK, NEURON),))
    after = sg.outliers(insert(model, registers=found), x)
    assert not after.mask.any() and "No outlier tokens" in after.advice
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_norms_and_attention_are_the_model_s():
    model, x = tiny(), pictures()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: seen.append(o[:, 1:].norm(dim=-1)))
    model(x)
    model = tiny()
    out = sg.outliers(model, x)
    assert torch.allclose(out.norms.flatten(2), torch.stack(seen, 1))
    raw = sg.explain(model, x, method="raw_attention").scores
    assert torch.allclose(out.attention[:, -1].to(raw), raw / raw.sum((1, 2), keepdim=True), atol=1e-5)


def test_sinks_by_their_share_of_attention():
    x = norms()
    x[:, :, 0, 0] = 9.0
    mask, layer, first = high_patches(x)
    even = torch.full((2, 3, 8, 8), 1 / 64)
    sunk = even.clone()
    sunk[:, :, 0, 0] = 0.3
    for attention, is_sink in ((even, False), (sunk, True)):
        out = sg.Outliers(mask, x, attention, layer, first, "class")
        assert out.sinks == is_sink
        assert ("register" in out.advice) == is_sink


def to_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(np.asarray(image) / 255).permute(2, 0, 1)


def test_figures(tmp_path):
    model = planted()
    shown = [Image.new("RGB", (12, 12), color) for color in ("red", "navy")]
    with_images = sg.outliers(model, shown, transform=to_tensor)
    bare = sg.outliers(model, pictures(2))
    for out, columns in ((with_images, 4), (bare, 3)):
        size = out.figure(cell=60).size
        assert size[0] > 60 * columns and Image.open(out.save(tmp_path / "o" / "a.png")).size[0] > 0
        assert Image.open(io.BytesIO(out._repr_png_())).format == "PNG"


def test_batches_are_single_images():
    model, x = tiny(), pictures(11)
    together, alone = sg.outliers(model, x), sg.outliers(model, x[9:10])
    assert torch.allclose(together.norms[9:10], alone.norms)
    assert torch.allclose(together.attention[9:10], alone.attention)


def test_no_outliers_no_registers():
    model, x = tiny(), pictures()
    found = sg.find_registers(model, x)
    assert found == Registers(count=0)
    assert torch.equal(insert(model, registers=found)(x), model(x))


def test_scores_of_neurons_are_means_at_outliers():
    model, x = planted(), pictures()
    seen: dict[int, Tensor] = {}
    for number, block in enumerate(model.blocks):
        block.mlp.act.register_forward_hook(lambda m, i, o, number=number: seen.__setitem__(number, o))
    model(x)
    mask = sg.outliers(model, x).mask.flatten(1)
    table = torch.stack([seen[n][:, 1:][mask].abs().mean(0) for n in range(3)])  # one outlier each
    wanted = [(p // 48, p % 48) for p in table.flatten().argsort(descending=True).tolist()]
    assert list(sg.find_registers(model, x, neurons=6, last_layer=-1).neurons) == wanted[:6]
    assert len(sg.find_registers(model, x, neurons=4000, last_layer=0).neurons) == 48


def test_bad_requests():
    model, x = planted(), pictures()
    for options in ({"neurons": 0}, {"neurons": True}, {"last_layer": 3}, {"count": -1}):
        with pytest.raises(InputError, match=next(iter(options))):
            sg.find_registers(model, x, **options)
    swin = plain("Swin")
    for look in (sg.outliers, sg.find_registers):
        with pytest.raises(MethodUnavailableError, match="windows"):
            look(swin, torch.zeros(1, *sg.adapt(swin).plan.input_size, dtype=torch.float64))
