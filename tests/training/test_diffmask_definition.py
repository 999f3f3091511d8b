"""DiffMask training as the authors' code defines it, and files of version 0.1, which continue as they
began."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from oracles.models import random_images, tiny
from steadygaze.methods.diffmask import HardConcrete, blank, prefix_tokens, read_file, write
from steadygaze.training.diffmask import DiffMaskRequest, DiffMaskRun, Settings, Trainer, hidden_widths

QUICK = Settings(warmup=1, gate_rate=1e-2, baseline_rate=1e-2, shift=1.0, batch=2)
NEW_IN_2 = {"definition"}


def trainer(model, settings=QUICK) -> tuple[Trainer, Tensor]:
    vit, images = sg.adapt(model), random_images(model)
    return Trainer(vit, settings, hidden_widths(vit, images)), images


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
                for gate, h in list(zip(made.mask.gates, hidden, strict=True))[: layer + 1]:
                    u = gate(torch.cat([content[b, token], h[b, token]])[None])
                    total += float(torch.sigmoid(u + 0.2 * np.log(5)).log())
    return total / (len(images) * content.shape[1])


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_l0_over_all_tokens_is_that_of_the_authors_code(layer: int) -> None:
    model = tiny()
    made, images = trainer(model, replace(QUICK, l0="log", tokens="all"))
    _, l0, _, _, _ = made._measure(images, layer)
    wanted = reference_l0(model, images, made, layer)
    assert float(l0.detach()) == pytest.approx(wanted, rel=1e-9)
    old, _ = trainer(model, replace(QUICK, l0="log", tokens="all", definition=1))
    assert abs(float(old._measure(images, layer)[1].detach()) - wanted) > 1e-3, (
        "0.1 gave the class token's gate zeros"
    )


def test_patches_do_not_depend_on_the_definition() -> None:
    model = tiny()
    reports = [trainer(model, replace(QUICK, definition=d))[0].evaluate(random_images(model)) for d in (1, 2)]
    assert reports[0] == reports[1] and HardConcrete() == trainer(model)[0].mask.concrete


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
    made, images = trainer(tiny(), replace(QUICK, sync_every=2, slow="first_sync"))
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
    made, _ = trainer(tiny(), replace(QUICK, layers="weighted"))
    made.steps = 1000
    made.layer_means[:4] = torch.tensor([0.9, 0.05])  # accurate and sparse
    made.layer_steps[:] = torch.tensor([101, 5000, 100, 0, 900])
    drawn = np.bincount([made._draw_layer() for _ in range(3000)], minlength=5) / 3000
    assert np.abs(drawn - np.array([0.1, 0.1, 1, 1, 1]) / 3.2).max() < 0.04


def test_steps_of_a_layer_are_counted_and_resumed() -> None:
    made, images = trainer(tiny(), replace(QUICK, layers="weighted"))
    assert made.layer_means.tolist() == [[1.0, 1.0]] * 5
    layers = [made.step(images).layer for _ in range(7)]
    assert made.layer_steps.tolist() == np.bincount(layers, minlength=5).tolist()
    facts, tensors = made.state()
    again, _ = trainer(tiny(), Settings.read(facts["settings"]))
    again.restore(made.mask, facts, tensors)
    assert torch.equal(again.layer_steps, made.layer_steps)


# -- files of version 0.1 --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number in range(4):
        pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def run(data: Path, out: Path, steps: int, **options) -> DiffMaskRun:
    options = {"batch": 2, "warmup": 1, "gate_rate": 1e-3, "layers": "weighted", **options}
    request = DiffMaskRequest(
        model="embedded", data=[data], out=out, presets=("reference",), options=options, steps=steps
    )
    return DiffMaskRun(request)


def as_version_0_1_wrote_it(path: Path) -> None:
    mask, facts, tensors = read_file(path)
    for settings in (facts["settings"], facts["identity"]["asked"]):
        del settings["definition"]
    del tensors["layer_steps"]
    write(path, mask, facts, tensors)


def test_a_file_of_version_0_1_continues_as_it_began(data, tmp_path) -> None:
    """The same command resumes it, twice, to the weights of an unbroken run of that definition."""
    whole, cut, new = (tmp_path / f"{name}.safetensors" for name in ("whole", "cut", "new"))
    run(data, whole, 14, definition=1).execute()
    run(data, cut, 5, definition=1).execute()
    as_version_0_1_wrote_it(cut)
    resumed = run(data, cut, 10)
    assert resumed.trainer.settings.definition == 1 and resumed.resumed == 5
    resumed.execute()
    run(data, cut, 14).execute()
    run(data, new, 14).execute()
    (old, _, _), (continued, facts, _), (other, _, _) = (read_file(path) for path in (whole, cut, new))
    assert facts["settings"]["definition"] == 1
    pairs = zip(old.parameters(), continued.parameters(), other.parameters(), strict=True)
    same, differs = zip(*((torch.equal(a, b), not torch.equal(a, c)) for a, b, c in pairs), strict=True)
    assert all(same) and any(differs)
