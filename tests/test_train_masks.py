"""TokenCut finds what stands out, from fused and from written-out attention; training takes its masks."""

import numpy as np
import pytest
import torch
from oracles import vit
from test_losses import tiny
from test_train import content, pictures

import steadygaze as sg
from steadygaze.train import masks
from steadygaze.train.reading import make_recipe


def scene() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of an object, of a thing like it in the corner, and of a background that leans a little towards both."""
    generator = torch.Generator().manual_seed(0)
    where = torch.zeros(7, 8, dtype=torch.bool)
    where[2:5, 3:6] = True
    features = torch.tensor([0.0, 1.0, 0.0]) + 0.1 * torch.randn(7, 8, 3, generator=generator)
    features[where] = torch.tensor([1.0, 0.0, 0.0]) + 0.1 * torch.randn(9, 3, generator=generator)
    features[6, 0] = torch.tensor([1.0, 0.0, 0.0])
    return features, where


def test_the_object_is_found_in_one_piece():
    features, where = scene()
    found = masks.cut(features)
    assert torch.equal(found, where), "the corner is alike, but not connected"


def test_it_is_the_generalised_eigenproblem():
    features, _ = scene()
    f = features.reshape(-1, 3).double().numpy()
    f = f / np.linalg.norm(f, axis=1, keepdims=True)
    w = np.where(f @ f.T > 0.2, 1.0, 1e-5)
    d = np.diag(w.sum(1))
    values, vectors = np.linalg.eig(np.linalg.inv(d) @ (d - w))
    v = vectors[:, np.argsort(values.real)[1]].real
    seed = np.abs(v).argmax()
    side = (v > v.mean()) == (v > v.mean())[seed]
    found = masks.cut(features).flatten().numpy()
    assert side[found].all() and found[seed]


def test_keys_are_the_last_blocks():
    model, images = tiny(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    state = vit.run(model, vit.embed(model, images))
    wanted = state.blocks[-1].k.transpose(1, 2).flatten(2)[:, 1:].reshape(2, 4, 4, -1)
    assert torch.allclose(masks.last_keys(model, images), wanted)
    for block in model.blocks:
        block.attn.fused_attn = False
    assert torch.allclose(masks.last_keys(model, images), wanted)
    assert masks.tokencut(model, images).any(-1).any(-1).all()


def test_training_with_masks_that_were_found(tmp_path):
    given = content(pictures(tmp_path / "data"), losses={"relevance": {}}, epochs=1)
    given["data"]["masks"] = "tokencut"
    got = sg.train(make_recipe(given), tmp_path / "run")
    assert float(got.log[-1]["relevance.foreground"]) >= 0


def test_models_without_global_attention_are_refused():
    import timm

    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1), num_heads=(1, 2), num_classes=3)
    with pytest.raises(sg.MethodUnavailable, match="tokencut"):
        masks.tokencut(model, torch.zeros(1, 3, 56, 56))
    with pytest.raises(sg.BadInput, match="tau"):
        masks.tokencut(model, torch.zeros(1, 3, 56, 56), tau=3)
