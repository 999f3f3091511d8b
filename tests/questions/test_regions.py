"""Regions of segmenters: scores against the libraries' own, gradients, removal and masking, refusals."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import steadygaze as sg
from benchmarks import checks, region_zoo, zoo
from helpers.tiers import tiered
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.methods.sufficient import gate_gradient
from steadygaze.questions.regions import RegionClassifier, region_weights
from steadygaze.trace import Want, forward
from steadygaze.vit.masking import masked_logits

SEGMENTERS = [kind for kind in region_zoo.KINDS if "Yolos" not in kind]
TRANSFORMERS = [kind for kind in SEGMENTERS if "ForSemantic" in kind]
BOX = (4, 8, 20, 28)


@cache
def model_of(kind: str) -> nn.Module:
    return region_zoo.KINDS[kind]()


def images_of(kind: str, batch: int = 2) -> Tensor:
    return zoo.image_of(model_of(kind), (3, *region_zoo.IMAGE_SIZES[kind]), batch=batch)


def asked(kind: str, region: sg.Region | None = None) -> RegionClassifier:
    return sg.ask(model_of(kind), region=region or sg.Region(box=BOX), image=images_of(kind))


def own_scores(kind: str, images: Tensor) -> Tensor:
    """An oracle: the model's own scores, upsampled as its users do."""
    output = model_of(kind)(images)
    scores = output if isinstance(output, Tensor) else output.logits
    return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)


def own_region_score(kind: str, images: Tensor) -> Tensor:
    left, top, right, bottom = BOX
    return own_scores(kind, images)[..., top:bottom, left:right].mean((-2, -1))


@pytest.mark.parametrize(
    "kind", tiered(SEGMENTERS, ["Segmenter of a ViT", "SegformerForSemanticSegmentation"])
)
def test_the_outputs_are_the_mean_of_the_model_s_own_scores(kind: str) -> None:
    images = images_of(kind)
    mask = torch.rand(images.shape[-2:], generator=torch.Generator().manual_seed(0)) < 0.1
    height, width = mask.shape
    ring = torch.zeros(height, width)
    ring[2:5, 3:7] = 1
    with torch.no_grad():
        pixels = own_scores(kind, images)
        for region, expected in (
            (sg.Region(box=BOX), own_region_score(kind, images)),
            (sg.Region(point=(9.7, 3)), pixels[..., 3, 9]),
            (sg.Region(mask=mask), pixels[..., mask].mean(-1)),
            (sg.Region(mask=ring.numpy().astype(np.uint8)), pixels[..., ring.bool()].mean(-1)),
        ):
            question = asked(kind, region)
            torch.testing.assert_close(question(images), expected)
            torch.testing.assert_close(sg.adapt(question)(images), expected)


@pytest.mark.parametrize("kind", SEGMENTERS)
def test_views_reproduce_the_model_and_removal_is_masking(kind: str) -> None:
    found = checks.check(asked(kind))
    assert not isinstance(found["logits"], str) and found["logits"] <= 1e-12, found
    assert (found["removal"] == "not removable") == (kind != "Segmenter of a ViT"), found
    assert found["removal"] == "not removable" or float(found["removal"]) <= 1e-12, found
    assert not isinstance(found["decompx"], str) and found["decompx"] <= 1e-10, found


# A Swin block reshapes its tokens before its module sees them, and the MLP decoder reads them before that: so
# the gradient at the module's input, which the next test takes as expected, lacks the decoder's own share.
HOOKED = [kind for kind in SEGMENTERS if kind != "Segmenter of a Swin, MLP decoder"]


@pytest.mark.parametrize("kind", HOOKED)
def test_gradients_at_every_layer_are_those_of_the_model_itself(kind: str) -> None:
    """Plain autograd in the model's own forward pass, also for tokens that its head reads directly."""
    images, vit = images_of(kind), sg.adapt(asked(kind))
    run = forward(vit, vit.embed(images).detach())
    trace = run.trace(run.logits[:, 3])
    inputs: list[Tensor] = []
    handles = [
        block.module.register_forward_pre_hook(lambda m, args: inputs.append(args[0])) for block in vit.blocks
    ]
    try:
        score = own_region_score(kind, images)[:, 3].sum()
    finally:
        for handle in handles:
            handle.remove()
    gradients = torch.autograd.grad(score, inputs)
    for layer, (x, expected) in enumerate(zip(inputs, gradients, strict=True)):
        value, gradient = trace.tokens(layer)
        torch.testing.assert_close(value, x.detach().reshape(value.shape))
        torch.testing.assert_close(gradient, expected.reshape(value.shape), rtol=1e-8, atol=1e-12)
    ixg = sg.explain(model_of(kind), images, sg.Region(3, box=BOX), "ixg", score="logit").scores
    product = (inputs[0].detach() * gradients[0]).reshape(trace.tokens(0)[0].shape)
    expected = vit.blocks[0].patches(product, run.layout).sum(-1)
    if expected.shape != ixg.shape:  # maps of a finer grid are resized; their sum stays
        expected, ixg = expected.sum((1, 2)), ixg.sum((1, 2))
    torch.testing.assert_close(ixg, expected)


@pytest.mark.filterwarnings("ignore:.*cannot be removed")
@pytest.mark.parametrize("method", tiered(["gaze", "ixg", "occlusion"], ["gaze", "occlusion"]))
@pytest.mark.parametrize(
    "kind", tiered(SEGMENTERS, ["Segmenter of a ViT", "SegformerForSemanticSegmentation"])
)
def test_batch_equals_singles_and_every_image_may_have_its_own_region(kind: str, method: str) -> None:
    model, images = model_of(kind), images_of(kind)
    regions = [sg.Region(1, box=BOX), sg.Region(2, point=(3, 4))]
    same = sg.explain(model, images, regions[0], method)
    each = sg.explain(model, images, regions, method=[method])[method]
    for index in range(2):
        alone = sg.explain(model, images[index : index + 1], regions[index], method)
        torch.testing.assert_close(each[index].scores, alone.scores)
        torch.testing.assert_close(each[index].logits, alone.logits)
    torch.testing.assert_close(same[1].scores, sg.explain(model, images[1:], regions[0], method).scores)
    assert each.target.tolist() == [1, 2] and same.target.tolist() == [1, 1]


def test_without_a_label_the_predicted_class_is_explained() -> None:
    kind = "SegformerForSemanticSegmentation"
    images = images_of(kind)
    found = sg.explain(model_of(kind), images, sg.Region(point=(5, 6)), "ixg")
    assert found.target.tolist() == own_scores(kind, images)[..., 6, 5].argmax(1).tolist()


@pytest.mark.parametrize("kind", SEGMENTERS)
def test_masking_hides_patches_of_all_layers_from_the_head(kind: str) -> None:
    question, images = asked(kind), images_of(kind)
    vit = sg.adapt(question)
    rows, columns = vit.grid
    keep = torch.ones(2, rows, columns, dtype=torch.bool)
    with torch.no_grad():
        tokens = vit.embed(images)
        torch.testing.assert_close(masked_logits(vit, tokens, keep), vit.logits(tokens))
        keep[0, -1, -1] = False
        keep[1] = False
        keep[1, -1, -1] = True  # a corner outside the region's bilinear support in most grids
        masked = masked_logits(vit, tokens, keep)
        assert masked.isfinite().all() and not torch.allclose(masked[0], vit.logits(tokens)[0])
        if vit.plan.removable:
            for row in range(2):
                kept = keep[row].flatten().nonzero()[:, 0][None]
                removed = vit.logits(vit.select(tokens[row : row + 1], kept))
                torch.testing.assert_close(masked[row : row + 1], removed)


def test_a_region_without_patches_has_scores_of_zero() -> None:
    vit = sg.adapt(asked("Segmenter of a ViT", sg.Region(point=(1, 1))))
    tokens = vit.embed(images_of("Segmenter of a ViT"))
    assert not vit.logits(vit.select(tokens, torch.tensor([[15], [14]]))).any()
    one = vit.logits(vit.select(tokens, torch.tensor([[0], [0]])))
    assert one.all()


def test_weights_are_the_adjoint_of_bilinear_upsampling() -> None:
    mask = torch.rand(21, 34, generator=torch.Generator().manual_seed(0)) < 0.3
    cells = torch.zeros(1, 1, 5, 7, dtype=torch.float64, requires_grad=True)
    pixels = F.interpolate(cells, size=(21, 34), mode="bilinear", align_corners=False)
    pixels[0, 0, mask].mean().backward()
    torch.testing.assert_close(region_weights(mask, (5, 7)), cells.grad[0, 0])  # type: ignore[index]


def test_attention_methods_read_the_rows_of_the_region() -> None:
    """Rollout by hand: the weights of the region times the product of (A + I) / 2."""
    question, images = asked("Segmenter of a ViT"), images_of("Segmenter of a ViT")
    vit = sg.adapt(question)
    run = forward(vit, vit.embed(images), want=Want(attention=True), grad=False)
    matrices = [record.attention[0].a.mean(1) for record in run.records[:-1]]
    row = torch.cat([torch.zeros(1, dtype=torch.float64), region_weights(question.mask, (4, 4)).flatten()])
    product = torch.eye(17, dtype=torch.float64).expand(2, -1, -1)
    for matrix in matrices:
        product = (matrix / 2 + torch.eye(17, dtype=torch.float64) / 2) @ product
    expected = torch.einsum("i,bij->bj", row, product)[:, 1:].unflatten(1, (4, 4))
    torch.testing.assert_close(sg.explain(question, images, method="rollout").scores, expected)


@pytest.mark.parametrize("kind", tiered(["Segmenter of a ViT", *TRANSFORMERS], ["Segmenter of a ViT"]))
def test_verify_removes_or_masks_and_says_which(kind: str) -> None:
    data = [(images_of(kind), torch.tensor([1, 2]))]
    rows = sg.verify(asked(kind), data, methods=["ixg", "random"]).to_pandas()
    assert rows["value"].notna().all() and set(rows["method"]) == {"ixg", "random"}
    means = "removal" if kind == "Segmenter of a ViT" else "attention masking"
    assert set(rows["note"]) == {means}


@pytest.mark.parametrize("kind", tiered(SEGMENTERS, ["Segmenter of a ViT", "DPTForSemanticSegmentation"]))
def test_nothing_is_left_on_the_model(kind: str) -> None:
    model, images = model_of(kind), images_of(kind)
    own_scores(kind, images)  # transformers installs hooks of its own in the first run
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [sorted(vars(m)) for m in model.modules()]
    model.train()
    sg.explain(model, images, sg.Region(1, box=BOX), method=["gaze", "ixg"])
    with pytest.raises(InputError):
        sg.explain(model, images, sg.Region(99, box=BOX))
    assert all(module.training for module in model.modules())
    model.eval()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [sorted(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_names_of_the_configuration_are_labels() -> None:
    kind = "SegformerForSemanticSegmentation"
    model, images = model_of(kind), images_of(kind)
    names = {0: "road", 1: "sky", 2: "car", 3: "tree", 4: "person"}
    before, model.config.id2label = model.config.id2label, names
    try:
        found = sg.explain(model, images, sg.Region("car", box=BOX), "ixg")
        assert found.target.tolist() == [2, 2]
        question = sg.ask(model, region=sg.Region(box=BOX), image=images)
        assert question.class_names == tuple(names.values()) and question.class_index("tree") == 3
        assert torch.equal(sg.explain(question, images, "car", "ixg").scores, found.scores)
        with pytest.raises(UnknownNameError, match=r"raod.*road"):
            sg.explain(model, images, sg.Region("raod", box=BOX))
    finally:
        model.config.id2label = before


def test_the_size_is_that_of_the_image_the_mask_or_the_model() -> None:
    own, segformer = model_of("Segmenter of a ViT"), model_of("SegformerForSemanticSegmentation")
    assert sg.ask(own, region=sg.Region(point=(31, 31))).size == (32, 32)
    assert sg.ask(segformer, region=sg.Region(mask=np.ones((96, 64), bool))).size == (96, 64)
    wide = zoo.image_of(segformer, (3, 64, 96))
    assert sg.explain(segformer, wide, sg.Region(point=(90, 10)), "ixg").scores.shape == (1, 2, 3)


def test_refusals_say_what_to_do() -> None:
    model, images = model_of("Segmenter of a ViT"), images_of("Segmenter of a ViT")

    def refused(match: str, region: sg.Region, error: type[Exception] = InputError) -> None:
        with pytest.raises(error, match=match):
            sg.explain(model, images, region)

    refused("empty mask", sg.Region(mask=np.zeros((32, 32))))
    refused(r"expected shape \(32, 32\).*got \(8, 8\)", sg.Region(mask=np.ones((8, 8))))
    refused("other values", sg.Region(mask=np.full((32, 32), 255)))
    refused("right <= 32", sg.Region(box=(0, 0, 33, 10)))
    refused("left < right", sg.Region(box=(10, 0, 10, 10)))
    refused("no pixel", sg.Region(box=(1.6, 1.6, 2.4, 2.4)))
    refused("expected 4 numbers", sg.Region(box=(1, 2)))
    refused("32 pixels wide", sg.Region(point=(32, 0)))
    refused("class 7 is out of range; the model has classes 0..4", sg.Region(7, point=(0, 0)))
    refused("names of the classes of this Segmenter are not known", sg.Region("road", point=(0, 0)))
    with pytest.raises(InputError, match="got none"):
        sg.Region("road")
    with pytest.raises(InputError, match="got box and point"):
        sg.Region("road", box=BOX, point=(1, 2))
    with pytest.raises(InputError, match="label by name or index"):
        sg.Region(1.5, point=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2, one for each, got 1"):
        sg.explain(model, images, [sg.Region(0, point=(1, 2))])
    with pytest.raises(UnsupportedModelError, match=r"Detection: expected a Yolos.*Region"):
        sg.explain(model, images[:1], sg.Detection(0, BOX))
    classifier = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    with pytest.raises(UnsupportedModelError, match="Region: VisionTransformer: expected a segmenter"):
        sg.explain(classifier, images.float(), sg.Region(0, point=(1, 2)))
    with pytest.raises(InputError, match=r"give one question.*region="):
        sg.ask(model)
    with pytest.raises(UnsupportedModelError, match=r"target=steadygaze\.Region"):
        sg.explain(model_of("DPTForSemanticSegmentation"), images, 1)
    with pytest.raises(InputError, match="tokens remember 1"):
        vit = sg.adapt(asked("DPTForSemanticSegmentation"))
        vit.head(vit.embed(images).clone())


@pytest.mark.filterwarnings("ignore:.*cannot be removed")
def test_hsic_of_outputs_that_are_mostly_equal_is_finite() -> None:
    """A region without any of its patches has scores of zero, so the median distance may be zero."""
    kind = "SegformerForSemanticSegmentation"
    scores = sg.explain(model_of(kind), images_of(kind, 1), sg.Region(box=BOX), "hsic:budget=4").scores
    assert scores.isfinite().all() and scores.any()


class OwnSegmenter(nn.Module):
    """A ViT of timm, and a decoder of one's own that mixes patches by convolutions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
        self.backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes)
        self.decode = nn.Sequential(nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        patches = self.backbone.forward_features(images)[:, 1:]
        scores = self.decode(patches.transpose(1, 2).unflatten(2, (4, 4)))
        return {"out": F.interpolate(scores, scale_factor=4, mode="bilinear", align_corners=False)}


def test_a_segmenter_of_one_s_own_around_a_vit() -> None:
    model = zoo.randomize(OwnSegmenter())
    images = zoo.image_of(model, (3, 32, 32), batch=2)
    question = sg.ask(model, region=sg.Region(2, box=BOX), image=images)
    with torch.no_grad():
        scores = F.interpolate(model(images)["out"], size=(32, 32), mode="bilinear", align_corners=False)
    expected = scores[..., 8:28, 4:20].mean((-2, -1))
    vit = sg.adapt(question)
    torch.testing.assert_close(vit(images), expected)
    assert not vit.plan.removable
    keep = torch.ones(2, 4, 4, dtype=torch.bool)
    torch.testing.assert_close(masked_logits(vit, vit.embed(images), keep), expected)
    found = sg.explain(model, images, sg.Region(2, box=BOX), method=["ixg", "gae"])
    assert found["gae"].scores.shape == (2, 4, 4)
    rows = sg.verify(question, [(images, torch.tensor([1, 2]))], methods=["ixg"]).to_pandas()
    assert rows["value"].notna().all() and set(rows["note"]) == {"attention masking"}


class Gates(TorchFunctionMode):
    """Attention to patch j from every other token times m_j, and normalized again."""

    def __init__(self, m: Tensor) -> None:
        super().__init__()
        other = 1 - torch.eye(17, dtype=torch.float64)
        self.mask = other * F.pad(m.log(), (1, 0))[:, None, None, :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"attn_mask": self.mask} if func is F.scaled_dot_product_attention else {}
        return func(*args, **{**(kwargs or {}), **more})


def test_the_gradient_of_sufficient_subsets_weighs_the_region() -> None:
    """∂ log p / ∂m of gates that stand in every attention and in the weighted mean, by autograd."""
    question, images = asked("Segmenter of a ViT"), images_of("Segmenter of a ViT", 1)
    model, vit = question.model, sg.adapt(question)
    run = forward(vit, vit.embed(images), want=Want(attention=True, norm=True))
    found = gate_gradient(run.trace(run.logits.log_softmax(-1)[:, 2]))
    m = torch.ones(1, 16, dtype=torch.float64, requires_grad=True)
    with Gates(m):
        x = vit.embed(images).detach()
        for block in vit.blocks:
            x = block(x)
    scores = model.decoder(model.backbone.get_submodule(model.norm)(x[:, 1:]))
    weights = m * region_weights(question.mask, (4, 4)).flatten()
    y = torch.einsum("bp,bpc->bc", weights, scores) / weights.sum(1, keepdim=True)
    (gradient,) = torch.autograd.grad(y.log_softmax(-1)[0, 2], m)
    torch.testing.assert_close(found, -gradient)


def test_legrad_reads_the_mean_token_of_the_region() -> None:
    model, images = model_of("Segmenter of a ViT"), images_of("Segmenter of a ViT")
    left, right = (
        sg.explain(model, images, sg.Region(2, box=box), "legrad", score="logit").scores
        for box in ((0, 0, 16, 32), (16, 0, 32, 32))
    )
    assert not torch.allclose(left, right, rtol=0.01)
