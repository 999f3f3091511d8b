"""DiffMask training as the authors' code defines it."""

import numpy as np
import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from oracles.models import random_images, tiny
from steadygaze.methods.diffmask import blank, prefix_tokens
from steadygaze.training.diffmask import Settings, Trainer


def quick(**changes) -> Settings:
    return Settings(
        **{"warmup": 1, "gate_rate": 1e-2, "baseline_rate": 1e-2, "shift": 1.0, "batch": 2, **changes}
    )


def trainer(model, settings=None) -> tuple[Trainer, Tensor]:
    return Trainer(sg.adapt(model), settings or quick()), random_images(model)


def reference_l0(model, images: Tensor, made: Trainer, layer: int) -> float:
    """Mean over images and tokens of Σ ln P(z ≠ 0), token by token: state 0 is the class token, then the
    patch embeddings without positions; the others are what the blocks get and give."""
    with torch.no_grad():
        x = model.patch_embed(images) - model.patch_embed.proj.bias  # the gates' own biases hold it
        content = torch.cat([model.cls_token.expand(len(x), -1, -1), x], 1)
        hidden = [content]
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        for block in model.blocks:
            hidden.append(tokens)
            tokens = block(tokens)
        hidden.append(tokens)
        total = 0.0
        for b in range(len(images)):
            for token in range(content.shape[1]):
                for gate, h in list(zip(made.learned.gates, hidden, strict=True))[: layer + 1]:
                    u = gate(torch.cat([content[b, token], h[b, token]])[None])
                    total += float(torch.sigmoid(u + 0.2 * np.log(5)).log())
    return total / (len(images) * content.shape[1])


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_l0_over_all_tokens_is_that_of_the_authors_code(layer: int) -> None:
    model = tiny()
    made, images = trainer(model, quick(l0="log", tokens="all"))
    _, l0, _, _, _ = made._measure(images, layer)
    assert float(l0.detach()) == pytest.approx(reference_l0(model, images, made, layer), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("registers", ["cls_token", "reg_token"]),
        ("distilled DeiT", ["cls_token", "dist_token"]),
        ("torchvision", ["class_token"]),
        ("transformers ViT", ["vit.embeddings.cls_token"]),
        ("average", []),
    ],
)
def test_prefix_tokens_are_the_models_own(name: str, names: list[str]) -> None:
    model = tiny_models.ALL[name]()
    vit, parameters = sg.adapt(model), dict(model.named_parameters())
    got = prefix_tokens(vit, blank(vit, tiny_models.images_of(model)))
    wanted = [parameters[n].detach().flatten(0, -2) for n in names]
    assert got.shape[:2] == (1, vit.prefix) and not got.requires_grad
    if names and sum(map(len, wanted)) == vit.prefix:
        assert torch.equal(got[0], torch.cat(wanted))


def test_lookahead_leaves_parameters_without_a_gradient_in_place(monkeypatch) -> None:
    """After every sync, against the definition applied to one parameter after the other."""
    made, images = trainer(tiny(), quick(sync_every=2, slow="first_sync"))
    slow: dict[str, Tensor] = {}
    real, still = Trainer._sync_slow_weights, []

    def checked(self: Trainer) -> None:
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        real(self)
        for name, p in self.parameters.items():
            if self.steps % 2 or p.grad is None:
                assert torch.equal(p, before[name]), name
                still.append(self.steps % 2 == 0)
                continue
            start = slow.get(name, before[name])
            slow[name] = start + 0.5 * (before[name] - start)
            assert torch.allclose(p, slow[name], atol=1e-12), name

    monkeypatch.setattr(Trainer, "_sync_slow_weights", checked)
    for _ in range(8):
        made.step(images)
    assert any(still), "some gates were not active at a sync"


def test_a_layer_is_drawn_less_often_after_steps_of_its_own() -> None:
    made, _ = trainer(tiny(), quick(layers="weighted"))
    made.steps = 1000
    made.layer_means[:4] = torch.tensor([0.9, 0.05])  # accurate and sparse
    made.layer_steps[:] = torch.tensor([101, 5000, 100, 0, 900])
    drawn = np.bincount([made._draw_layer() for _ in range(3000)], minlength=5) / 3000
    assert np.abs(drawn - np.array([0.1, 0.1, 1, 1, 1]) / 3.2).max() < 0.04


def test_steps_of_a_layer_are_counted_and_resumed() -> None:
    made, images = trainer(tiny(), quick(layers="weighted"))
    assert made.layer_means.tolist() == [[1.0, 1.0]] * 5
    layers = [made.step(images).layer for _ in range(7)]
    assert made.layer_steps.tolist() == np.bincount(layers, minlength=5).tolist()
    facts, tensors = made.state()
    again, _ = trainer(tiny(), Settings(**facts["settings"]))
    again.restore(made.learned, facts, tensors)
    assert torch.equal(again.layer_steps, made.layer_steps)
