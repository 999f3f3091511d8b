"""The lens against the model's own head, and what is written against the logit."""

import pytest
import torch
from PIL import Image

import steadygaze as sg
from helpers.tiers import tiered
from helpers.tiny_models import ALL, PLAIN, REPRESENTATIVE, images_of
from oracles.models import tiny


@pytest.mark.parametrize("name", tiered(PLAIN, [n for n in REPRESENTATIVE if n in PLAIN]))
def test_what_is_written_adds_up_to_the_logit(name):
    model = PLAIN[name]()
    images = images_of(model)
    seen = sg.lens(model, images, target=1)
    with torch.no_grad():
        logit = sg.adapt(model)(images)[:, 1]
    torch.testing.assert_close(seen.logit, logit)
    written = seen.embedding + seen.attention.sum(1) + seen.mlp.sum(1) + seen.bias
    torch.testing.assert_close(written, logit)
    assert seen.patches.shape[:2] == seen.top.shape[:2] == (2, len(sg.adapt(model).blocks))


def states_of(model, images):
    """Output of every block, by hooks."""
    states = []
    hooks = [b.register_forward_hook(lambda m, i, o: states.append(o)) for b in model.blocks]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return states


@pytest.mark.parametrize("kind", ["class", "average", "registers"])
def test_patches_are_the_head_on_each_patch(kind):
    model = tiny(kind)
    images = images_of(model)
    vit = sg.adapt(model)
    seen = sg.lens(model, images, target=2)
    for layer, x in enumerate(states_of(model, images)):
        with torch.no_grad():
            patches = model.norm(x[:, vit.prefix :])
            said = model.head(model.fc_norm(patches))
        torch.testing.assert_close(seen.patches[:, layer].flatten(1), said[..., 2])
        assert torch.equal(seen.top[:, layer].flatten(1), said.argmax(-1))


def test_heads_and_mlp_are_what_the_block_adds():
    model = tiny("class")
    images = images_of(model)
    seen = sg.lens(model, images, target=0)
    x = states_of(model, images)
    norm, classify = model.norm, model.head
    sigma = (x[-1][:, 0].var(-1, unbiased=False) + norm.eps).sqrt()
    direction = classify.weight[0] * norm.weight
    g = (direction - direction.mean()) / sigma[:, None]  # of the class token, σ held constant
    block, before = model.blocks[1], x[0]
    with torch.no_grad():
        attended = block.ls1(block.attn(block.norm1(before)))[:, 0]
        mlp = x[1][:, 0] - before[:, 0] - attended
    torch.testing.assert_close(seen.attention[:, 1], (g * attended).sum(-1))
    torch.testing.assert_close(seen.mlp[:, 1], (g * mlp).sum(-1))
    output_bias = (g * block.ls1(block.attn.proj.bias)).sum(-1)
    torch.testing.assert_close(seen.heads[:, 1].sum(-1) + output_bias, seen.attention[:, 1])
    with torch.no_grad():  # silencing a head's values takes away what it writes
        width = model.blocks[1].attn.head_dim
        block.attn.proj.weight[:, :width] = 0
    without = sg.lens(model, images, target=0)
    assert without.heads[:, 1, 0].abs().max() == 0 and seen.heads[:, 1, 0].abs().min() > 0
    torch.testing.assert_close(seen.bias, (classify.weight[0] @ norm.bias + classify.bias[0]).expand(2))


def test_tables_and_figures(tmp_path):
    seen = sg.lens(sg.load_model("embedded"), torch.zeros(2, 3, 32, 32))
    table = seen.table()
    rows = table[~table.part.str.startswith("head")].groupby("image").logit.sum()
    assert rows["0"] == pytest.approx(float(seen.logit[0]), abs=1e-4)
    assert Image.open(seen.save(tmp_path / "lens.png")).width > 100
    assert isinstance(seen.patch_figure(1), Image.Image)
    assert "logit" in repr(seen) and seen._repr_png_().startswith(b"\x89PNG")


def test_models_without_a_class_or_with_several_grids_are_refused():
    swin = ALL["Swin"]()
    with pytest.raises(sg.MethodUnavailableError):
        sg.lens(swin, images_of(swin))
    model = tiny("class")
    with pytest.raises(sg.InputError, match="target"):
        sg.lens(model, images_of(model), target=[[0, 1], [0, 1]])
    with pytest.raises(sg.InputError):
        sg.lens(model, images_of(model), target=99)
