"""The losses for loops that are not ours: equal to those of recipes, nothing left behind, clear errors; and
the code of the how-to page runs."""

import copy
import inspect
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import steadygaze as sg
from helpers.losses import tiny
from steadygaze.losses import ADL, CFT, RRR, GradMask, PatchConsistency, Relevance
from steadygaze.training.losses import LOSSES, LossSetup
from steadygaze.training.objective import Objective

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own_loop.md"
ROLLOUT = {"method": "rollout", "background": 3.0}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=generator)
    masks = torch.zeros(3, 16, 16, dtype=torch.bool)
    masks[:, 3:9, 2:12] = True
    return images, masks, torch.arange(3)


def objective(model: nn.Module, preprocess: sg.Preprocess | None = None, **losses: dict) -> Objective:
    options = {name: LOSSES[name].Options(**given) for name, given in losses.items()}
    return Objective(model, options, LossSetup(model, preprocess=preprocess))


def equal(value: Tensor, expected: Tensor, model: nn.Module) -> None:
    """The same value, and the same gradient of every weight."""
    weights = list(model.parameters())
    one, other = (torch.autograd.grad(loss, weights, allow_unused=True) for loss in (value, expected))
    assert torch.equal(value, expected) and any(g is not None and bool(g.any()) for g in one)
    assert all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_adl_is_that_of_recipes(fused):
    model, (images, _, labels) = tiny(noise=0.8), batch()
    for block in model.blocks:
        block.attn.fused_attn = fused
    adl = ADL(tau=1.5, form="per_head")
    with adl:
        logits = model(images)
    expected, _, _ = objective(model, cross_entropy={}, adl={"tau": 1.5, "form": "per_head", "weight": 0.5})(
        images, labels
    )
    equal(F.cross_entropy(logits, labels) + 0.5 * adl.value, expected, model)


@pytest.mark.parametrize(
    ("loss", "name", "options"),
    [
        (Relevance, "relevance", ROLLOUT),
        (CFT, "cft", {"context": 3.0}),
        (GradMask, "gradmask", {}),
        (RRR, "rrr", {"background": 1e-3}),
    ],
)
def test_losses_by_masks_are_those_of_recipes(loss, name, options):
    model, (images, masks, labels) = tiny(), batch()
    before, names = copy.deepcopy(model.state_dict()), set(vars(model))
    own = loss(**options)
    value = own(model, images, masks, labels)
    codes = masks.to(torch.uint8) * 255
    expected, terms, logits = objective(model, **{name: options})(images, labels, None, codes)
    assert {f"{name}.{term}": float(x) for term, x in own.terms.items()} == {
        key: float(x) for key, x in terms.items()
    }
    assert torch.equal(own.logits, logits) and own.logits.requires_grad
    equal(value, expected, model)
    for same in (masks[:, None], masks.double(), codes, codes.float(), codes.long(), codes.numpy()):
        assert own(model, images, same, labels.tolist()).item() == value.item()
    assert set(vars(model)) == names and model.training
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_one_pass_serves_adl_and_relevance():
    model, (images, masks, labels) = tiny(noise=0.8), batch()
    adl, relevance = ADL(), Relevance(method="rollout")
    with adl:
        value = relevance(model, images, masks, labels)
    together = objective(model, cross_entropy={}, relevance={"method": "rollout"}, adl={})
    expected, _, _ = together(images, labels, None, masks)
    total = F.cross_entropy(relevance.logits, labels) + value + adl.value
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_shares_and_borders_of_masks():
    model, (images, masks, labels) = tiny(), batch()
    relevance = Relevance(method="rollout", reverse="complement")
    shares = masks.double().masked_fill(~masks, 0.25)
    assert relevance(model, images, 255 * shares, labels).item() == pytest.approx(
        relevance(model, images, shares, labels).item(), rel=1e-12
    )
    border = masks.to(torch.uint8) * 255
    border[:, 9] = 128
    values = [relevance(model, images, m, labels).item() for m in (masks, border, border.double())]
    assert values[0] != values[1] == values[2]


def test_patch_consistency_is_that_of_recipes():
    model, (images, _, labels) = tiny().train(), batch()
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    options = {"patch": 4, "crop": 0.5, "noisy": 0.5, "noise": 0.2, "flip": 0.5}
    preprocess = sg.Preprocess.resize_and_crop((16, 16), mean=mean, std=std)
    recipe = objective(model, preprocess, patch_augmentation=options)
    own = PatchConsistency(mean=mean, std=std, **options)
    torch.manual_seed(3)
    value = own(model, images, labels)
    torch.manual_seed(3)
    equal(value, recipe(images, labels)[0], model)
    torch.manual_seed(3)
    assert own(model, images, F.one_hot(labels, 5).double()).item() == pytest.approx(value.item(), rel=1e-12)
    assert own(model.eval(), images, labels).item() == 0
    with pytest.raises(sg.InputError, match="mean and std of 3 channels, got 1"):
        PatchConsistency(mean=[0.5], std=[0.5])(model, images, labels)


@pytest.mark.parametrize("loss", [ADL, Relevance, CFT, GradMask, RRR, PatchConsistency])
def test_options_and_defaults_are_those_of_recipes(loss):
    parameters = inspect.signature(loss).parameters
    own = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    fields = LOSSES[loss.loss].Options().model_dump(exclude={"weight"})
    assert {key: list(x) if isinstance(x, tuple) else x for key, x in own.items()} == fields


def test_a_copy_has_the_options_and_nothing_of_the_last_batch():
    model, (images, masks, labels) = tiny(), batch()
    adl, relevance = ADL(tau=3.0), Relevance(method="rollout")
    with adl:
        relevance(model, images, masks, labels)
    adl, relevance = copy.deepcopy((adl, relevance))
    assert repr(adl) == "ADL(tau=3.0, form='paper')" and relevance.options.method == "rollout"
    with pytest.raises(sg.InputError, match=r"Relevance\.logits: expected a call before"):
        _ = relevance.logits


def test_what_is_wrong_is_named():
    model, (images, masks, labels) = tiny(), batch()
    adl, relevance = ADL(), Relevance()
    with pytest.raises(sg.InputError, match=r"adl\.value: expected a forward pass before.*with adl"):
        _ = adl.value
    with adl:
        model(images)
        with pytest.raises(sg.InputError, match="open already"), adl:
            pass
    assert 0 < adl.value.item() <= 1
    with pytest.raises(RuntimeError), adl:  # a pass that fails leaves no value of an earlier one
        model(images[:, :1].expand(-1, 7, -1, -1))
    with pytest.raises(sg.InputError, match=r"adl\.value"):
        _ = adl.value
    with pytest.raises(sg.MethodUnavailableError, match="no attention between tokens was seen"), adl:
        nn.Linear(16, 2).double()(images)
    with pytest.raises(sg.InputError, match=r"ADL\.tau.*above 0"):
        ADL(tau=0.0)
    with pytest.raises(sg.UnknownNameError, match=r"GradMask\.form"):
        GradMask(form="formulas")
    with pytest.raises(sg.InputError, match=r"expected \(3, 16, 16\).*got \(3, 8, 8\)"):
        relevance(model, images, masks[:, :8, :8], labels)
    with pytest.raises(sg.InputError, match=r"0\.\.1 or 0\.\.255, got 0\.\.510"):
        relevance(model, images, masks * 510.0, labels)
    with pytest.raises(sg.InputError, match=r"got \[7\].*masks / 255"):
        relevance(model, images, masks * 255 + 7 * ~masks, labels)
    with pytest.raises(sg.InputError, match=r"images as a tensor \(B, C, H, W\), got \(3, 16, 16\)"):
        relevance(model, images[0], masks, labels)
    with pytest.raises(sg.InputError, match="expected labels"):
        relevance(model, images, masks)
    with pytest.raises(sg.UnsupportedModelError):
        relevance(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)).double(), images, masks, labels)
    with pytest.raises(sg.UnsupportedModelError, match=r"expected a torch\.nn\.Module, got str"):
        relevance("deit_tiny_patch16_224", images, masks, labels)


def test_masks_of_other_forms():
    model, (images, masks, labels) = tiny(), batch()
    for loss in (Relevance(method="rollout"), GradMask()):
        expected = loss(model, images, masks, labels).item()
        pictures = [Image.fromarray(mask.numpy()) for mask in masks]
        for same in (pictures, [p.convert("L") for p in pictures], list(masks), tuple(masks.numpy())):
            assert loss(model, images, same, labels).item() == expected
        name = type(loss).__name__
        with pytest.raises(sg.InputError, match=rf"{name}: expected masks as a tensor .*, got NoneType"):
            loss(model, images, None, labels)
        with pytest.raises(sg.InputError, match=r"got a list of 3: \(8, 16\), \(16, 16\)"):
            loss(model, images, [masks[0][:8], *masks[1:]], labels)
        with pytest.raises(sg.InputError, match="got a list of 3: NoneType"):
            loss(model, images, [None] * 3, labels)


def test_labels_are_checked_though_a_map_does_not_use_them():
    model, (images, masks, _) = tiny(), batch()
    relevance = Relevance(method="rollout")
    with pytest.raises(sg.InputError, match=r"labels: class 9 is out of range"):
        relevance(model, images, masks, [0, 1, 9])
    with pytest.raises(sg.InputError, match=r"labels: .* for a batch of 3"):
        relevance(model, images, masks, [0, 1])


@pytest.mark.parametrize("loss", [Relevance, CFT])
def test_a_method_is_checked_when_a_loss_is_made(loss):
    with pytest.raises(sg.UnknownNameError, match="Did you mean 'rollout'"):
        loss(method="rolout")


def test_advice_names_only_methods_that_the_model_has():
    options = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 1)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_heads=(1, 2), num_classes=5, **options)
    images, masks = torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool)
    masks[:, 8:16] = True
    with pytest.raises(sg.MethodUnavailableError, match="rollout cannot be trained") as raised:
        Relevance(method="rollout")(model, images, masks, [0])
    reason, _, advice = str(raised.value).rpartition(" Use ")
    assert ".." not in str(raised.value) and reason.endswith(".") and "rollout" not in advice
    for method in advice.rstrip(".").replace(" or ", ", ").split(", "):
        assert Relevance(method=method)(model, images, masks, [0]).requires_grad


def code_of(section: str) -> str:
    """The Python code below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1, section
    return blocks[0]


@pytest.mark.parametrize("section", ["A plain loop", "Lightning", "The Trainer of transformers", "Callbacks"])
def test_the_loops_of_the_page_train(section, tmp_path, monkeypatch):
    if section == "Lightning":
        pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    names: dict = {"__name__": "own_loop"}
    exec(compile(code_of(section), section, "exec"), names)
    assert len(names["losses"]) >= (1 if section == "Callbacks" else 2) and all(
        0 < float(loss) < 20 for loss in names["losses"]
    )
    changed = [
        not torch.equal(now.cpu(), then)
        for now, then in zip(names["model"].parameters(), names["start"], strict=True)
    ]
    assert sum(changed) > len(changed) / 2
    if section == "Callbacks":
        assert len(names["scores"]) == 3 and all(-0.5 <= score <= 0.5 for score in names["scores"])
