"""Nothing is left behind: the model, the random state and torch's modes are what they were, also after an
error midway.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from oracles.models import random_images, tiny
from steadygaze.trace import PLAIN, Seam, Want, frozen

METHODS = [
    "gaze",
    "gae",
    "transatt",
    "full_lrp",
    "alti",
    "fullgrad:implicit=true",
    "decompx:bias=absdot",
    "smoothgrad:samples=2",
    "random",
    "integrated_gradients:steps=2",
    "gradcam:at=norm1",
    "attnlrp",
    "gaze_twice",
]
NAMES = [
    "class",
    "registers",
    "torchvision",
    "transformers ViT",
    "transformers ViT, eager",
    "transformers DINOv3",
    "EVA-02 tiny (rotary, SwiGLU)",
    "BEiT",
    "CaiT",
    "relative positions",
    "attention pool (SigLIP)",
    "Swin",
]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that hangs on a module beside parameters, buffers and children.

    Containers by their length.
    """
    plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
    return {
        k: (type(v), len(v)) if hasattr(v, "__len__") and not isinstance(v, str) else v
        for k, v in plain.items()
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fails if anything of the model, the random state or torch's modes is another afterwards."""
    state = {k: v.clone() for k, v in model.state_dict(keep_vars=False).items()}
    tensors = {k: id(t) for k, t in (*model.named_parameters(), *model.named_buffers())}
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    wants = {k: p.requires_grad for k, p in model.named_parameters()}
    grads = {k: None if p.grad is None else (id(p.grad), p.grad.clone()) for k, p in model.named_parameters()}
    hung = {k: attributes(m) for k, m in model.named_modules()}
    noise = torch.get_rng_state()
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    depth = torch._C._len_torch_function_stack()
    yield
    for k, v in model.state_dict().items():
        assert torch.equal(v, state[k]), k
    assert {k: id(t) for k, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    for k, b in model.named_buffers():
        assert torch.equal(b, buffers[k]), k
    assert {k: p.requires_grad for k, p in model.named_parameters()} == wants
    for k, p in model.named_parameters():
        before = grads[k]
        assert (p.grad is None) == (before is None), k
        assert before is None or (id(p.grad) == before[0] and torch.equal(p.grad, before[1])), k
        assert not hasattr(p, "layout_") and p.is_leaf
    assert {k: attributes(m) for k, m in model.named_modules()} == hung
    assert torch.equal(torch.get_rng_state(), noise)
    assert (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    ) == modes
    assert torch._C._len_torch_function_stack() == depth


def methods_of(model: nn.Module) -> list[str]:
    from steadygaze.methods.registry import unavailable

    able = [m for m in METHODS if not unavailable(sg.method(m), sg.adapt(model))]
    if type(model).__name__ in ("Cait", "SwinTransformer"):
        able = [m for m in able if "implicit" not in m and "bias=" not in m and "norm1" not in m]
    return able


@pytest.mark.parametrize(
    "name",
    tiered(
        NAMES,
        ["registers", "attention pool (SigLIP)", "transformers DINOv3", "transformers ViT, eager", "Swin"],
    ),
)
def test_nothing_is_left(name: str) -> None:
    model = tiny_models.ALL[name]()
    size = sg.adapt(copy.deepcopy(model)).plan.input_size
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = images.clone()
    with unchanged(model):
        sg.explain(model, images, target=1, method=methods_of(model))
    assert torch.equal(images, kept) and not images.requires_grad and not hasattr(images, "layout_")


@pytest.mark.parametrize(
    "name", tiered(["class", "torchvision", "transformers ViT, eager"], ["class", "transformers ViT, eager"])
)
def test_parameters_keep_gradients_and_flags(name: str) -> None:
    """In training mode, with gradients already there, and with parameters that want none."""
    model = tiny_models.ALL[name]().train()
    images = tiny_models.images_of(model)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 > 0)
        p.grad = torch.full_like(p, 0.5) if i % 2 else None
    next(iter(model.modules())).training = True
    wanted = sg.explain(copy.deepcopy(model).eval(), images, target=1, method=methods_of(model))
    with unchanged(model):
        found = sg.explain(model, images, target=1, method=methods_of(model))
    for key in wanted:
        assert torch.equal(found[key].scores, wanted[key].scores), key
    assert model.training


class Trouble(RuntimeError):
    pass


def failing_target(logits: Tensor) -> Tensor:
    raise Trouble("midway")


@pytest.mark.parametrize(
    "name",
    tiered(
        ["registers", "torchvision", "transformers ViT, eager", "Swin"],
        ["registers", "transformers ViT, eager"],
    ),
)
@pytest.mark.parametrize("where", ["target", "block", "head", "backward"])
def test_nothing_is_left_after_an_error(name: str, where: str) -> None:
    model = tiny_models.ALL[name]().train()
    vit, images = sg.adapt(model), tiny_models.images_of(model)

    def fail(*args: Any) -> None:
        raise Trouble(where)

    def fail_later(module: nn.Module, args: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(fail)

    handle: Any = nullcontext()
    if where == "block":
        handle = vit.blocks[-1].module.register_forward_hook(fail)
    elif where == "head":
        handle = [m for m in model.modules() if isinstance(m, nn.Linear)][-1].register_forward_pre_hook(fail)
    elif where == "backward":
        handle = vit.blocks[-1].module.register_forward_hook(fail_later)
    with unchanged(model), pytest.raises(Trouble):
        sg.explain(model, images, target=failing_target if where == "target" else 1, method=["gaze", "ixg"])
    if hasattr(handle, "remove"):
        handle.remove()
    assert all(m.training for m in model.modules())
    assert sg.explain(model, images, method="ixg").scores.isfinite().all()


@pytest.mark.parametrize(
    "name",
    tiered(
        ["class", "transformers DINOv3", "EVA-02 tiny (rotary, SwiGLU)", "Swin"],
        ["class", "transformers DINOv3"],
    ),
)
@pytest.mark.parametrize(
    "context", tiered([torch.inference_mode, torch.no_grad, lambda: torch.set_grad_enabled(False)], 1)
)
def test_callers_modes(name: str, context: Callable[[], Any]) -> None:
    """Under no_grad and inference_mode the maps are the same, and what the model caches then still serves
    gradients.
    """
    model = tiny_models.ALL[name]()
    with context():
        images = tiny_models.images_of(model)
        found = sg.explain(model, images, target=1, method=methods_of(model))
    for key, att in sg.explain(model, images.clone(), target=1, method=methods_of(model)).items():
        assert torch.equal(att.scores, found[key].scores), key
        assert not att.scores.requires_grad and not att.logits.requires_grad


def test_targets_from_inference_mode_and_of_small_dtypes() -> None:
    model = tiny("class")
    images = random_images(model)
    expected = sg.explain(model, images, target=[1, 2]).scores
    with torch.inference_mode():
        target = torch.tensor([1, 2])
    for given in (target, target.to(torch.uint16), target.to(torch.int8)):
        assert torch.equal(sg.explain(model, images, target=given).scores, expected)


def test_maps_are_deterministic_and_leave_the_random_state() -> None:
    model = tiny("registers")
    images = random_images(model)
    names = [tiny_models.SEARCHES.get(name, name) for name in tiny_models.served(model)]
    first = sg.explain(model, images, method=names)
    torch.manual_seed(99)
    again = sg.explain(copy.deepcopy(model), images.clone(), method=names)
    assert all(torch.equal(first[n].scores, again[n].scores) for n in names)


@pytest.mark.parametrize(
    "name",
    tiered(
        ["class", "average", "torchvision", "transformers ViT", "transformers ViT, eager", "Swin"],
        ["class", "transformers ViT, eager"],
    ),
)
def test_half_precision(name: str) -> None:
    """float16 on the CPU: maps come in float16 and point the same way as in float64."""
    model = tiny_models.ALL[name]()
    images = tiny_models.images_of(model)
    names = [
        n
        for n in tiny_models.served(model)
        if n not in ("smoothgrad", "integrated_gradients", "gaze_twice", "gaze_halves", "random")
    ]
    names = [
        n for n in names if n not in ("xgradcam", "hirescam", "transatt", "full_lrp", "gradcam_plus_plus")
    ]  # divide by what may vanish
    names = [
        n for n in names if n not in tiny_models.SEARCHES
    ]  # draw by the image's bits, or subtract what is nearly alike
    wanted = sg.explain(model, images, target=1, method=names)
    found = sg.explain(model.half(), images.half(), target=1, method=names)
    for key in names:
        assert found[key].scores.dtype == torch.float16, key
        a, b = found[key].scores.double().flatten(1), wanted[key].scores.flatten(1)
        assert F.cosine_similarity(a, b).min() > 0.98, key


def test_images_are_taken_in_the_models_precision() -> None:
    model = tiny().float()
    images = random_images(model)
    assert sg.explain(model, images).scores.dtype == torch.float32
    a, b = sg.explain(model, images.half()), sg.explain(model.double(), images.half())
    assert a.scores.dtype == torch.float32 and b.scores.dtype == torch.float64


# -- the seam itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [PLAIN, frozen(1.0), frozen(0.5, "tangent")])
@pytest.mark.parametrize(
    "want", [Want(), Want(attention=True, value=True, bias=True, implicit=True, norm=True)]
)
@pytest.mark.parametrize(
    "name",
    tiered(
        ["class", "QuickGELU (CLIP)", "SwiGLU (DINOv2)", "EVA-02 base (sub-LN)", "BEiT", "torchvision"],
        ["class", "EVA-02 base (sub-LN)", "torchvision"],
    ),
)
def test_rules_never_change_a_value(name: str, rules: Any, want: Want) -> None:
    model = tiny_models.ALL[name]()
    vit, images = sg.adapt(model), tiny_models.images_of(model)
    expected = vit(images).detach()
    with Seam(rules, want):
        got = vit(images)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_double_backward_goes_through_recorded_attention() -> None:
    """Explanation losses take a gradient of a gradient; the fused kernel of the CPU cannot."""
    model = tiny()
    vit = sg.adapt(model)
    seam = Seam(PLAIN, Want(attention=True))
    with seam:
        logits = vit(random_images(model))
    a = seam.record.attention[-1].a
    (g,) = torch.autograd.grad(logits[:, 1].sum(), a, create_graph=True)
    (g * a).clamp(min=0).sum().backward()
    grad = model.blocks[0].attn.qkv.weight.grad
    assert grad is not None and grad.isfinite().all() and grad.abs().max() > 0


def test_trained_norms_get_gradients_under_frozen_rules() -> None:
    """Held norms keep their parameters in the graph where these are trained."""
    norm = nn.LayerNorm(6).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    with Seam(frozen(1.0)):
        y = norm(x)
    y.pow(2).sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.abs().max() > 0
    assert norm.bias.grad is not None and x.grad is not None


@pytest.mark.parametrize(
    "act", ["gelu", "gelu_new", "gelu_fast", "quick_gelu", "mish", "silu", "leaky_relu", "tanh"]
)
def test_every_activation_is_held(act: str) -> None:
    """DecompX with its bias terms adds up to the logit whatever the activation, and however it is written."""
    from transformers import ViTConfig, ViTForImageClassification

    from steadygaze.trace import Want, forward, frozen

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_labels=3,
        hidden_act=act,
    )
    model = ViTForImageClassification(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    vit = sg.adapt(model)
    tokens = vit.embed(torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64))
    run = forward(vit, tokens, rules=frozen(1.0), want=Want(bias=True))
    trace = run.trace(run.logits[:, 1])
    x, g = trace.tokens(0)
    total = (x * g).sum() + sum(trace.bias_terms(l).sum() for l in range(3))
    assert abs(float(total.detach() - run.logits[0, 1].detach())) < 1e-12
    plain = forward(vit, tokens)
    assert not torch.allclose(plain.trace(plain.logits[:, 1]).tokens(0)[1], g)
