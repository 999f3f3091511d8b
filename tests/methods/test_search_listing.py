"""What is said of the searched methods is true: class, cost, layers; names differ; float16.

What `all` and `quick` mean and cost.
"""

import copy
import itertools
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import steadygaze as sg
from helpers.tiers import tiered
from steadygaze.data.images import find_images, read_image
from steadygaze.methods.registry import forward_passes
from steadygaze.progress import Progress
from steadygaze.runs.plan import choose, make_plan

SEARCHED = {info.name: info for info in sg.list_methods() if info.family == "black box"}
LONG = ("rise", "lime", "kernel_shap", "hsic", "greedy", "smdl")  # these take any budget
ADAPTIVE = ("greedy", "smdl", "vit_cx", "sufficient", "tis")  # their runs depend on the image or the model


def asked(name: str, budget: int) -> str:
    return f"{name}:budget={budget}" if name in LONG else name


def small(classes: int = 5, sharp: float = 1.0) -> tuple[nn.Module, Tensor]:
    """A random timm ViT with 4 x 4 patches, and two images that float16 can hold."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=24,
        num_heads=3,
        depth=2,
        num_classes=classes,
    )
    with torch.no_grad():
        model.head.weight.mul_(sharp)
        for block in model.blocks:
            block.attn.qkv.weight.mul_(10)  # random attention is even, and hides little
    return model.eval(), torch.randn(2, 3, 16, 16).half().float()


@pytest.mark.parametrize("name", SEARCHED)
def test_a_map_depends_on_the_class_where_that_is_listed(name: str) -> None:
    model, images = small(sharp=30.0)
    a, b = (sg.explain(model, images, target, method=asked(name, 20)).scores for target in (0, 3))
    assert torch.equal(a, b) is not SEARCHED[name].class_specific
    assert not SEARCHED[name].layers


def test_hsic_of_the_class_depends_on_it_and_on_the_score() -> None:
    model, images = small(sharp=30.0)
    a, b = (
        sg.explain(model, images, target, method="hsic:budget=20,output=class").scores for target in (0, 3)
    )
    assert not torch.equal(a, b)
    vit, scores = sg.adapt(model), ["prob", "logit"]
    assert len(make_plan(vit, ["hsic"], ["deletion_aopc"], scores, None, 0).maps) == 1, (
        "the same map would be searched twice"
    )
    assert len(make_plan(vit, ["hsic:output=class"], ["deletion_aopc"], scores, None, 0).maps) == 2


class _Enough(Exception):
    pass


@pytest.mark.parametrize(
    "name", tiered([name for name in SEARCHED if name not in ADAPTIVE], 3)
)  # tis depends on the number of channels of all blocks; greedy and smdl: see test_greedy.py
def test_the_cost_that_is_listed(name: str) -> None:
    """For 14 x 14 patches and 192 channels.

    The pass that gives the logits, or the channels, may be counted too.
    """
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=28, patch_size=2, depth=2, num_classes=3
    ).eval()
    totals: list[int] = []

    def on_progress(progress: Progress) -> None:
        totals.append(progress.total or 0)
        raise _Enough

    with pytest.raises(_Enough):
        sg.explain(model, torch.randn(1, 3, 28, 28), method=name, on_progress=on_progress)
    assert SEARCHED[name].cost - totals[0] in (0, 1)


@pytest.mark.parametrize(
    "name", tiered([name for name in SEARCHED if name not in ("greedy", "smdl")], 3)
)  # an order of nearly equal gains may change
def test_float16(name: str) -> None:
    """As in float32, also for a class that float16 has no number for (p around 1e-12)."""
    if name in (
        "atman",
        "sufficient",
    ):  # small differences of logits, and an order of gradients: the class is a usual one
        model, images = small()
        rare = torch.tensor([1, 2])
    else:
        model, images = small(classes=60, sharp=60.0)
        with torch.no_grad():
            p = model(images).softmax(1)
        rare = (p.log() + 27).abs().argmin(1)
        assert (p.gather(1, rare[:, None]) < 1e-9).all()
    wanted = sg.explain(model, images, rare, method=asked(name, 40)).scores.flatten(1)
    found = sg.explain(copy.deepcopy(model).half(), images, rare, method=asked(name, 40)).scores.flatten(1)
    assert float(_alike(wanted, found).min()) > 0.95


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of two maps, for each image."""
    a, b = (x.double().flatten(1) - x.double().flatten(1).mean(1, keepdim=True) for x in (a, b))
    return nn.functional.cosine_similarity(a, b, eps=1e-300)


@pytest.mark.full
def test_no_two_names_say_the_same() -> None:
    loaded = sg.load_model("embedded")
    files = find_images([Path(sg.__file__).parent / "assets" / "demo"])[:2]
    images = torch.stack([loaded.preprocess(read_image(file)) for file in files])
    budgets = {"tis": 200, "greedy": 400, "smdl": 400}
    named = [f"{name}:budget={budgets[name]}" if name in budgets else asked(name, 40) for name in SEARCHED]
    names = [*named, "gaze", "gae", "cat", "decompx", "rollout", "gradcam"]
    maps = sg.explain(loaded.model, images, method=names)
    for a, b in itertools.combinations(names, 2):
        assert float(_alike(maps[a].scores, maps[b].scores).mean()) < 0.99, f"{a} and {b}"


def test_quick_is_all_but_the_searches() -> None:
    vit = sg.adapt(small()[0])
    everything, quick = ({m.name for m in choose(vit, [word])} for word in ("all", "quick"))
    assert everything - quick == set(SEARCHED) and quick < everything
    assert {m.name for m in choose(vit, ["quick", "rise:budget=9"])} - quick == {"rise:budget=9"}
    assert choose(vit, ["quick+plus"]) == choose(vit, ["all+plus"])
    assert forward_passes(sg.method("rise", budget=9)) == 9 and forward_passes(sg.method("occlusion")) == 197


@pytest.mark.parametrize(("seconds", "said"), [(0.001, ""), (1.0, "5 minutes"), (60.0, "5.0 hours")])
def test_verify_says_what_searches_cost(seconds: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, vit = import_module("steadygaze.cli.verify"), sg.adapt(small()[0])
    plan = make_plan(vit, ["gae", "rise:budget=100"], ["deletion_aopc"], None, None, 0)
    ready: Any = SimpleNamespace(plan=plan, vit=vit, source=SimpleNamespace(count=3))
    assert command._forward_seconds(vit) > 0
    monkeypatch.setattr(command, "_forward_seconds", lambda vit: seconds)
    text = command.search_cost(ready)
    assert said in text and bool(said) == (
        "rise:budget=100: about 100 forward passes per image (the other methods: 2)" in text
    )
