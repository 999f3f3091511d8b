"""start="identity": a new module changes no output, learns at once, and is used like any other."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import checks
from helpers.inserted import MODELS, images_of, plain, trained
from helpers.losses import SMALL, small
from helpers.tiers import tiered
from oracles import modules as oracle
from steadygaze.errors import CheckpointError, InputError, UnknownNameError
from steadygaze.modules import CB, TAP, ContextBroadcast, TokenPool, insert, inserted, remove
from steadygaze.modules import tap as tap_module
from steadygaze.trace import Want, forward
from steadygaze.vit.outputs import logits_of

KINDS = ("dilated", "kernels", "average3", "average5", "depthwise", "convolution")
VARIANTS = ("plain", "scaled", "gate", "hybrid")
ALL: list[dict[str, Any]] = [
    *({"tap": TAP(kind=kind, start="identity")} for kind in KINDS),
    *({"cb": CB(variant, where="both", start="identity")} for variant in VARIANTS),
    {"cb": CB(position="front", start="identity")},
    {"tap": TAP(start="identity"), "cb": CB("scaled", start="identity")},
]
BOTH: dict[str, Any] = {"tap": TAP(branches=3, start="identity"), "cb": CB(start="identity")}


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{name}.{key}": p for name, m in inserted(model).items() for key, p in m.named_parameters()}


def backward(model: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    logits = logits_of(model(images))
    nn.functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]).backward()


# -- it begins as the identity, and learns ----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    tiered(
        [*MODELS, *SMALL],
        [
            "timm class",
            "timm registers, mean",
            "EVA-02",
            "torchvision",
            "transformers DINOv3",
            "transformers ViT, eager",
            "CaiT",
            "Swin",
            "rvt_tiny",
        ],
    ),
)
def test_a_new_module_changes_no_output(name: str) -> None:
    """Bit for bit, in evaluation and in training mode, in every library and family."""
    model = plain(name) if name in MODELS else small(name)
    images, better = images_of(model), insert(model, **BOTH)
    with torch.no_grad():
        assert len(inserted(better)) == 2 * len(sg.adapt(model).blocks)
        assert torch.equal(logits_of(better(images)), logits_of(model(images)))
        again = insert(remove(better), cb=CB("scaled", start="identity"))
        assert torch.equal(logits_of(again(images)), logits_of(model(images)))


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.float64], [torch.float64]), ids=str)
def test_every_kind_changes_no_output_and_learns(options: dict[str, Any], dtype: torch.dtype) -> None:
    """First the gates and Λ have a gradient; after one step, all new parameters have one."""
    torch.manual_seed(0)
    arguments = {"img_size": 24, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **arguments).to(dtype).train()
    images, better = torch.randn(4, 3, 24, 24, dtype=dtype), insert(model, **options)
    assert torch.equal(better(images), model(images))
    backward(better, images)
    backward(model, images)
    for name, parameter in model.named_parameters():  # the rest of the model learns as if there were none
        torch.testing.assert_close(better.get_parameter(name).grad, parameter.grad)
    new = new_parameters(better)
    at_first = {name for name, p in new.items() if p.grad is not None and p.grad.abs().max() > 0}
    assert at_first == {name for name in new if name.endswith((".gate", ".scale"))} != set()
    optimizer = torch.optim.SGD(better.parameters(), lr=0.1)
    optimizer.step()
    assert not torch.equal(better(images), model(images))
    backward(better, images)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in new.values())


def test_the_papers_initialization_is_the_default() -> None:
    assert TAP().start == CB().start == "paper"
    model = plain("timm class")
    for options in ({"tap": TAP()}, {"cb": CB()}):
        better = insert(model, **options)  # type: ignore[arg-type]
        assert not torch.equal(better(images_of(model)), model(images_of(model)))
        assert not any(name.endswith("gate") for name in new_parameters(better))
    scale = insert(model, cb=CB("scaled", init=0.3)).blocks[0].cb_mlp.scale
    assert scale.tolist() == pytest.approx([0.3] * len(scale))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TAP(start="identical"), UnknownNameError, "identity"),  # type: ignore[arg-type]
        (lambda: CB(start=None), UnknownNameError, "paper"),  # type: ignore[arg-type]
        (
            lambda: CB("scaled", init=0.1, start="identity"),
            InputError,
            "init: expected 0 with start='identity'",
        ),
    ],
)
def test_bad_starts(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# -- the formula with a gate that has learned --------------------------------------------------------


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tap_is_g_of_the_way(kind: Any, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_module, "DENSE", 512 if dense else 0)
    paper = TokenPool(6, TAP(kind=kind), grid=(4, 3), prefix=1).double().eval()
    pool = TokenPool(6, TAP(kind=kind, start="identity"), grid=(4, 3), prefix=1).double().eval()
    pool.load_state_dict({k: v for k, v in paper.state_dict().items() if "extra" not in k}, strict=False)
    x = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    assert torch.equal(pool(x), x)
    for g in (0.3, -1.2, 1.0):
        nn.init.constant_(pool.gate, g)
        torch.testing.assert_close(pool(x), x + g * (paper(x) - x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cb_is_g_of_the_way(variant: Any) -> None:
    cb = ContextBroadcast(5, CB(variant, start="identity")).double()
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(cb(x), x)
    (parameter,) = cb.parameters()
    g = nn.init.constant_(parameter, 0.3)
    expected = oracle.broadcast(x, variant, g)
    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(cb(x), expected if variant == "scaled" else x + g * (expected - x), **close)

    def run(x: Tensor, g: Tensor) -> Tensor:
        return torch.func.functional_call(cb, {next(iter(dict(cb.named_parameters()))): g}, x)

    point = (x, parameter.detach().clone().requires_grad_())
    assert torch.autograd.gradcheck(run, point, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, point)
    if variant in ("plain", "scaled"):
        first = ContextBroadcast(5, CB(variant, start="identity"), channels_first=True).double()
        first.load_state_dict(cb.state_dict())
        torch.testing.assert_close(first(x.unflatten(1, (2, 3)).permute(0, 3, 1, 2)).flatten(2).mT, cb(x))


# -- used like any other ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dense"),
    [*((options, True) for options in ALL), *((options, False) for options in ALL if "tap" in options)],
    ids=str,
)
def test_frozen_passes_stay_exact(
    options: dict[str, Any], dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is a weight: with it, DecompX in one backward pass is still the whole decomposition."""
    monkeypatch.setattr(tap_module, "DENSE", 512 if dense else 0)
    found = checks.check(trained(insert(plain("timm class"), **options)))
    assert float(found["logits"]) <= 1e-12 and float(found["decompx"]) <= 1e-10, found


@pytest.mark.parametrize("options", tiered(ALL, 3), ids=str)
def test_fullgrad_is_complete(options: dict[str, Any]) -> None:
    model = trained(insert(plain("timm class"), **options))
    vit = sg.adapt(model)
    with torch.no_grad():
        tokens = vit.embed(images_of(model, batch=1))
    run = forward(vit, tokens, want=Want(bias=True, implicit=True))
    trace = run.trace(run.logits[:, 1])
    x, g = trace.tokens(0)
    terms = sum(trace.bias_terms(l, implicit=True).sum() for l in range(trace.depth + 1))
    rest = sum(trace.bias_rest(l, implicit=True).sum() for l in range(trace.depth))
    assert torch.allclose((x * g).sum() + terms + rest, run.logits[0, 1])


@pytest.mark.full
def test_explain_verify_and_stress_give_the_plain_models_numbers() -> None:
    model = plain("timm class")
    better = insert(model, tap=TAP(start="identity"), cb=CB("scaled", start="identity"))
    images, labels = images_of(model, batch=4).clamp(-1, 1), torch.tensor([0, 1, 0, 1])
    for method in ("gaze_removal", "decompx+plus", "gae", "ixg"):
        maps = [sg.explain(m, images, method=method).scores for m in (model, better)]
        torch.testing.assert_close(maps[1], maps[0], rtol=1e-9, atol=1e-9)
    options = {"suites": ["attacks", "attention"], "mean": (0.5,) * 3, "std": (0.5,) * 3}
    rows = [sg.stress(m, [(images, labels)], **options).to_pandas().value for m in (model, better)]
    torch.testing.assert_close(*(torch.tensor(values.to_numpy()) for values in rows), rtol=1e-6, atol=1e-6)
    checked = sg.verify(better, [(images, labels)], methods=["gae"], metrics=["deletion_aopc"]).to_pandas()
    assert len(checked) == 4 and checked.value.notna().all()


@pytest.mark.parametrize("options", tiered(ALL, 3), ids=str)
def test_checkpoints_keep_the_start(options: dict[str, Any], tmp_path: Path) -> None:
    model = insert(timm.create_model("test_vit", num_classes=3), **options).eval()
    for parameter in new_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = sg.load_model("test_vit", tmp_path / "model.safetensors")
    assert [m.spec for m in inserted(loaded.model).values()] == [m.spec for m in inserted(model).values()]
    images = torch.randn(1, 3, *loaded.size)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), model(images))
    other = {key: type(value)(**{**value.__dict__, "start": "paper"}) for key, value in options.items()}
    with pytest.raises(CheckpointError, match=r"start='identity'.*where the model has"):
        insert(timm.create_model("test_vit", num_classes=3), **other).load_state_dict(
            model.state_dict(), strict=False
        )
