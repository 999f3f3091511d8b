"""Models in use: compiled, wrapped, with LoRA, quantized, without a classifier, other precisions, threads."""

import copy
import pickle
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from helpers.tiers import tiered
from oracles.models import random_images, tiny

READERS = [
    "gaze_removal",
    "gae",
    "transatt",
    "full_lrp",
    "alti",
    "globenc",
    "attnlrp",
    "gradcam:at=norm1",
    "decompx:bias=absdot",
    "gaze_twice",
]


def agree(model: nn.Module, expected: nn.Module, methods: list[str], tolerance: float = 1e-9) -> None:
    images = random_images(expected)  # type: ignore[arg-type]
    for method in methods:
        one, other = (sg.explain(m, images, target=1, method=method).scores for m in (model, expected))
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max()), method


@pytest.mark.parametrize("wrapped", tiered([False, True], [True]))
def test_compiled_blocks_are_seen_into(wrapped: bool) -> None:
    """Compiled code calls no mode of torch: rules would be passed over and attention not be recorded."""
    plain = tiny("class")
    model = copy.deepcopy(plain)
    for i, block in enumerate(model.blocks):
        if wrapped:
            model.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        else:
            block.compile(backend="aot_eager")
    agree(model, plain, READERS)


def test_wrappers_in_any_order() -> None:
    model = tiny("class")
    assert sg.adapt(nn.DataParallel(torch.compile(model))).model is model  # type: ignore[arg-type]
    assert sg.adapt(torch.compile(nn.DataParallel(model))).model is model


def test_a_model_without_parameters_or_of_no_kind() -> None:
    with pytest.raises(sg.UnsupportedModelError, match=r"has no parameters"):
        sg.adapt(nn.Sequential(nn.Identity()))
    with pytest.raises(sg.UnsupportedModelError, match=r"docs/models.md"):
        sg.adapt(nn.Sequential(nn.Linear(2, 2)))


class Adapted(nn.Module):
    """LoRA: a linear layer plus a low-rank update. It has no `weight` of its own."""

    def __init__(self, base: nn.Linear, product: bool) -> None:
        super().__init__()
        self.base, self.product = base, product
        self.down, self.up = (
            nn.Linear(*size, bias=False).double() for size in ((base.in_features, 2), (2, base.out_features))
        )

    def forward(self, x: Tensor) -> Tensor:
        change = x @ self.down.weight.T @ self.up.weight.T if self.product else self.up(self.down(x))
        return self.base(x) + change

    def merged(self) -> nn.Linear:
        base = copy.deepcopy(self.base)
        with torch.no_grad():
            base.weight += self.up.weight @ self.down.weight
        return base


def adapted(product: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model with adapters at its attention, and the same with the adapters merged into its weights."""
    model = tiny("class")
    for block in model.blocks:
        block.attn.qkv, block.attn.proj = Adapted(block.attn.qkv, product), Adapted(block.attn.proj, product)
    merged = copy.deepcopy(model)
    for block in merged.blocks:
        block.attn.qkv, block.attn.proj = block.attn.qkv.merged(), block.attn.proj.merged()
    return model, merged


def test_adapters_count_as_what_they_do() -> None:
    """The decomposition methods read the weights of attention including LoRA, not those of the base alone."""
    agree(*adapted(), ["alti", "alti:against=block", "globenc", "attin", "gradcam:at=norm1", "gaze_removal"])


def test_lrp_through_a_product_with_a_weight_is_that_of_a_linear_map() -> None:
    written, called = adapted(product=True)[0], adapted()[0]
    called.load_state_dict(written.state_dict())
    agree(written, called, ["transatt"])


def test_biases_of_a_wrapped_qkv_are_shared_out_apart() -> None:
    model, plain = adapted()[0], tiny("class")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("up.weight"):
                parameter.zero_()
    agree(model, plain, ["decompx:bias=absdot", "decompx:bias=norm"])


def test_what_stands_for_a_linear_map_and_is_none() -> None:
    class Bent(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model = tiny("class")
    model.blocks[1].attn.proj = Bent(24, 24).double()
    with pytest.raises(sg.MethodUnavailableError, match="a Bent stands where attention has a linear map"):
        sg.explain(model, random_images(model), method="alti")
    assert sg.explain(model, random_images(model), method="gae").scores.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_models_are_explained_without_gradients_or_not_at_all() -> None:
    model = tiny("class").float()
    images = random_images(model).float()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for method in ("gaze_removal", "gae", "cat", "integrated_gradients", "gaze_twice"):
        with pytest.raises(
            sg.MethodUnavailableError, match="no gradient passes through the model's quantized layers"
        ):
            sg.explain(quantized, images, method=method)
    with pytest.raises(sg.MethodUnavailableError, match="linear map"):
        sg.explain(quantized, images, method="globenc")
    assert sg.explain(quantized, images, method="rollout").scores.isfinite().all()


@torch.library.custom_op("steadygaze_test::attend", mutates_args=())
def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


kernel.register_autograd(lambda ctx, g: (g, g, g.sum(-2, keepdim=True).expand_as(g)))


def test_attention_in_a_kernel_of_its_own_is_refused_where_it_is_read_or_held() -> None:
    model = tiny("class", depth=1)
    attn = model.blocks[0].attn

    def forward(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        return attn.proj(kernel(q, k, v).transpose(1, 2).flatten(2))

    attn.forward = forward  # type: ignore[method-assign]
    for method in ("gae", "rollout", "decompx", "gaze_removal"):
        with pytest.raises(
            sg.MethodUnavailableError, match=r"the attention of block 0 .* cannot be inspected"
        ):
            sg.explain(model, random_images(model), method=method)
    assert sg.explain(model, random_images(model), method="cat").scores.any()


def test_a_block_that_does_nothing_has_no_attention_to_read() -> None:
    model = tiny("class")
    model.blocks[1] = nn.Identity()
    with pytest.raises(
        sg.MethodUnavailableError, match="block 1 of this timm VisionTransformer has no attention"
    ):
        sg.explain(model, random_images(model), method="gae")
    assert sg.explain(model, random_images(model), method="gaze").scores.any()


def test_half_precision_is_checked_and_bright_images_are_finite() -> None:
    torch.manual_seed(0)

    class Swapped(VisionTransformer):
        def forward_features(self, x: Tensor, *rest: Any, **more: Any) -> Tensor:
            x = self.blocks[0](self._pos_embed(self.patch_embed(x)))
            return self.norm(self.blocks[1](x.flip(0)))

    model = Swapped(img_size=12, patch_size=3, embed_dim=24, depth=2, num_heads=2, num_classes=5)
    with pytest.raises(sg.UnsupportedModelError, match="differ"):
        sg.adapt(model.half())
    large = VisionTransformer(
        img_size=240, patch_size=48, embed_dim=24, depth=1, num_heads=2, num_classes=5
    ).half()
    assert sg.explain(large, torch.full((1, 3, 240, 240), 2.0).half(), method="gae").scores.shape == (
        1,
        5,
        5,
    )  # their sum is no half


def test_autocast_is_left_outside() -> None:
    model = tiny("class").float()
    images = random_images(model).float()
    expected = sg.explain(model, images)
    with torch.autocast("cpu", torch.float16):
        found = sg.explain(copy.deepcopy(model), images)
    assert found.logits.dtype == torch.float32 and torch.equal(found.scores, expected.scores)


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny("class")
    with pytest.raises(sg.UnsupportedModelError, match=r"torch.inference_mode.*copy.deepcopy"):
        sg.explain(model, random_images(model))
    assert sg.explain(copy.deepcopy(model), random_images(model)).scores.shape == (2, 4, 4)


def test_threads_share_a_model_and_leave_it_as_it_was() -> None:
    model = tiny("class", proj_drop_rate=0.5).train()
    model.blocks[0].eval()
    images = random_images(model)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    expected, found, gate = sg.explain(model, images, method="cat").scores, [], Barrier(4)

    def work() -> None:
        gate.wait()
        found.extend(sg.explain(model, images, method="cat").scores for _ in range(15))

    threads = [Thread(target=work) for _ in range(4)]
    for step in (Thread.start, Thread.join):
        for thread in threads:
            step(thread)
    assert len(found) == 60 and all(torch.equal(scores, expected) for scores in found)
    assert before == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))], ids=["copied", "pickled"]
)
def test_a_copied_view_is_of_the_copied_model(again: Callable[[sg.ViT], sg.ViT]) -> None:
    model = tiny("class")
    view, images = sg.adapt(model), random_images(model)
    copied = again(view)
    assert copied.model is not model and torch.equal(copied(images), view(images))
    with torch.no_grad():
        copied.model.head.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(copied(images), copied.model(images)) and not torch.equal(copied(images), view(images))
    assert copy.copy(view) is view


def test_a_model_without_a_classifier_has_no_class_but_a_quantity() -> None:
    for model in (
        tiny("class", num_classes=0),
        zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0],
    ):
        model.reset_classifier(0)
        images = zoo.image_of(model, sg.adapt(model).plan.input_size)
        for target in (None, 3):
            with pytest.raises(sg.InputError, match=r"has no classifier.*callable target"):
                sg.explain(model, images, target=target)
        towards = torch.ones(model.num_features, dtype=torch.float64)
        assert (
            sg.explain(model, images, target=lambda f, towards=towards: f @ towards).scores.isfinite().all()
        )


def test_clip_of_transformers_for_images_and_text() -> None:
    transformers = pytest.importorskip("transformers")
    vision: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 12,
        "patch_size": 3,
        "projection_dim": 6,
    }
    model = zoo.randomize(transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision)))
    images = zoo.image_of(model, (3, 12, 12), batch=2)
    text = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def similarity(embedding: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(embedding, text[None])

    found = sg.explain(model, images, target=similarity, method="ixg").scores
    x = sg.adapt(model).embed(images).detach().requires_grad_()
    x.layout_ = sg.adapt(model).layout(sg.adapt(model).embed(images))  # type: ignore[attr-defined]
    embedded = sg.adapt(model).logits(x)
    assert torch.allclose(embedded, model(images).image_embeds)
    (gradient,) = torch.autograd.grad(similarity(embedded).sum(), x)
    assert torch.allclose(found.flatten(1), (x * gradient).sum(-1)[:, 1:])
    with pytest.raises(sg.InputError, match="has no classifier"):
        sg.explain(model, images)
    words = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    both = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=words, vision_config=vision, projection_dim=6)
    )
    assert sg.adapt(both).plan.outputs == "features"
    with pytest.raises(sg.InputError, match="compares images with text and has no classes"):
        sg.explain(both, images.float())


def test_one_logit_says_yes_or_no() -> None:
    """The same as two classes, the second of which always has logit 0."""
    one, two = tiny("class", num_classes=1), tiny("class", num_classes=2)
    heads = {f"head.{name}": torch.cat([t, torch.zeros_like(t)]) for name, t in one.head.state_dict().items()}
    two.load_state_dict(one.state_dict() | heads)
    images = random_images(one)
    for score in ("log_odds", "log_prob", "prob", "contrast"):
        for method in ("cat", "occlusion:budget=20", "gaze_removal"):
            found, expected = (
                sg.explain(m, images, target=0, method=method, score=score).scores for m in (one, two)
            )
            assert found.any() and torch.allclose(found, expected, atol=1e-12), (score, method)
    a, b = (sg.explain(m, images, target=0) for m in (one, two))
    assert a.probability(1) == pytest.approx(b.probability(1)) and a.probability(1) < 1


def test_outputs_without_logits() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=12,
        patch_size=3,
        encoder_stride=3,
    )
    with pytest.raises(sg.UnsupportedModelError, match="MaskedImageModelingOutput without them"):
        sg.adapt(transformers.ViTForMaskedImageModeling(config))
