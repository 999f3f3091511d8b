"""Content and position: the two parts of input x gradient at block 0, and what no patch gets."""

import numpy as np
import pytest
import torch

import steadygaze as sg
from helpers import tiny_models
from oracles import vit
from oracles.models import KINDS, random_images, tiny

TARGET = torch.tensor([1, 3])
METHODS = ["ixg", "decompx", "libra_ixg", "attnlrp"]
RULES = {
    "ixg": vit.Rule(),
    "decompx": vit.rule(1.0),
    "libra_ixg": vit.rule(1.0),
    "attnlrp": vit.Rule(norm=True, slope="origin", halve=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_the_embedding_by_hand(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    found = sg.explain(model, images, target=TARGET, method=METHODS, score="logit")
    position = vit.weight(model.pos_embed)
    position = position if model.no_embed_class else position[:, model.num_prefix_tokens :]
    for name in METHODS:
        state, scalar = vit.trace(model, images, TARGET, how=RULES[name])
        (g,) = vit.gradients(scalar, [state.x[0]])
        g = g[:, model.num_prefix_tokens :]
        content = state.x[0].detach()[:, model.num_prefix_tokens :] - position
        parts = found[name].parts
        assert parts is not None and list(parts) == ["content", "position"]
        for part, wanted in (("content", content), ("position", position)):
            torch.testing.assert_close(parts[part].flatten(1), (wanted * g).sum(-1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parts["content"] + parts["position"], found[name].scores)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("attention pool (SigLIP)", "added"),
        ("EVA-02 tiny (rotary, SwiGLU)", "added"),
        ("torchvision", "added"),
        ("CaiT", "added"),
        ("BEiT", "none"),
        ("transformers DINOv3", "none"),
        ("Swin", "unknown"),
    ],
)
def test_other_models_have_parts_that_add_up_or_none(name: str, positions: str) -> None:
    model = tiny_models.ALL[name]()
    found = sg.explain(model, tiny_models.images_of(model), target=1, method="ixg")
    assert found.unattributed is not None and found.unattributed.shape == (2,)
    if positions == "unknown":
        assert found.parts is None
        with pytest.raises(sg.InputError, match="patch \\+ position"):
            found.part("content")
        return
    assert found.parts is not None
    torch.testing.assert_close(found.parts["content"] + found.parts["position"], found.scores)
    assert bool((found.parts["position"] == 0).all()) == (positions == "none")


def test_parts_of_several_targets_slices_devices_and_files(tmp_path) -> None:
    model = tiny("class")
    images = random_images(model)
    many = sg.explain(model, images, target=[[0, 1], [2, 3]], method="decompx")
    assert many.parts is not None and many.unattributed is not None
    assert many.parts["position"].shape == many.scores.shape and many.unattributed.shape == (2, 2)
    one = many[1].to("cpu")
    assert one.parts is not None and torch.equal(one.parts["content"], many.parts["content"][1:])
    alone = sg.explain(model, images[1:], target=3, method="decompx")
    torch.testing.assert_close(alone.parts["content"], one.parts["content"][:, 1])
    part = alone.part("position")
    assert torch.equal(part.scores, alone.parts["position"]) and part.method == "decompx.position"
    part.save(tmp_path / "part")
    alone.save(tmp_path)
    with np.load(tmp_path / "scores.npz") as saved:
        np.testing.assert_allclose(saved["content"] + saved["position"], saved["scores"], atol=1e-5)
    with pytest.raises(sg.UnknownNameError, match="content"):
        alone.part("contnet")


@pytest.mark.parametrize(
    "method", ["ixg+plus", "ixg:start=1", "fullgrad", "rollout", "decompx:bias=norm", "gaze"]
)
def test_other_maps_have_no_parts(method: str) -> None:
    model = tiny("class")
    found = sg.explain(model, random_images(model), method=method)
    assert found.parts is None
    with pytest.raises(sg.InputError, match="block 0"):
        found.part("content")
