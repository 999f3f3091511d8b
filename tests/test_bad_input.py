"""Bad input gets its own message: what was expected, what came, what to do; never a silent map."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import steadygaze as sg
from helpers import tiny_models
from oracles.models import random_images, tiny

MODEL = tiny()
IMAGES = random_images(MODEL)


def refuse(error: type, message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, sg.SteadygazeError)
    assert isinstance(caught.value, (ValueError, TypeError, ArithmeticError))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([1], r"2 classes \(one per image\).*got shape \(1,\) for a batch of 2"),
        ([1, 2, 3], r"got shape \(3,\) for a batch of 2"),
        (torch.zeros(3, 2, dtype=torch.long), r"got shape \(3, 2\)"),
        (torch.zeros(2, 0, dtype=torch.long), r"got shape \(2, 0\)"),
        (torch.zeros(2, 1, 1, dtype=torch.long), r"got shape \(2, 1, 1\)"),
        (5, r"class 5 is out of range; the model has classes 0\.\.4"),
        ([1, -1], r"class -1 is out of range"),
        (1.0, "a class index.*got 1.0"),
        (True, "got True"),
        ("cat", "class index, got the text 'cat'"),
        (torch.tensor([1.0, 2.0]), "integer class indices, got torch.float32"),
        (torch.tensor([True, False]), "integer class indices, got torch.bool"),
        (torch.tensor([1 + 1j, 2]), "integer class indices, got torch.complex64"),
        (["cat", "dog"], "class index, got the text 'cat'"),
        (lambda y: y, r"shape \(2,\), got \(2, 5\)"),
        (lambda y: y.sum(), r"shape \(2,\), got \(\)"),
        (lambda y: y[:, 0].detach(), r"differentiable tensor of shape \(2,\), got \(2,\) without a gradient"),
        (lambda y: 3, "got int"),
    ],
)
def test_targets(target: Any, message: str) -> None:
    refuse(sg.InputError, f"target.*{message}", sg.explain, MODEL, IMAGES, target=target)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES[0], r"batch axis is missing. Use image.unsqueeze\(0\)"),
        (IMAGES[0, 0], r"expected floating-point images of shape \(B, 3, 12, 12\), got \(12, 12\)"),
        ((IMAGES * 50).long(), "got torch.int64. Scale to 0..1"),
        ((IMAGES.abs() * 50).to(torch.uint8), "got torch.uint8"),
        (IMAGES > 0, "got torch.bool"),
        (IMAGES[:, :1], r"got \(2, 1, 12, 12\)"),
        (IMAGES.permute(0, 2, 3, 1), r"got \(2, 12, 12, 3\)"),
        (IMAGES[:, :, :9], r"got \(2, 3, 9, 12\). Resize"),
        (IMAGES[:0], "empty batch"),
        (torch.where(IMAGES > 2, torch.nan, IMAGES), "NaN or infinite"),
        (torch.where(IMAGES > 2, torch.inf, IMAGES), "NaN or infinite"),
        (IMAGES.numpy(), r"got float64 of shape \(2, 3, 12, 12\).*torch.from_numpy"),
        ([1, 2], "got a list with int"),
        ([], "empty list"),
        (list(IMAGES), "torch.stack"),
        (None, "got NoneType"),
    ],
)
def test_images(images: Any, message: str) -> None:
    refuse(sg.InputError, message, sg.explain, MODEL, images)
    if isinstance(images, torch.Tensor):
        refuse(sg.InputError, message, sg.adapt(MODEL).embed, images)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("gazze", sg.UnknownNameError, "unknown method 'gazze'. Did you mean 'gaze'"),
        ("decompx+plsu", sg.UnknownNameError, "unknown aggregator 'plsu'. Did you mean 'plus'"),
        ("decompx+", sg.UnknownNameError, "unknown aggregator ''"),
        ("", sg.UnknownNameError, "unknown method ''"),
        (
            "cat+plus",
            sg.InputError,
            "'cat' is an alias of 'ixg\\+plus' and takes no aggregator. Use 'ixg\\+plus'",
        ),
        (
            "gaze+skipplus",
            sg.InputError,
            r"takes no aggregator\. Use 'decompx\+skipplus:freeze=0.75' with score='log_odds'",
        ),
        ("GAE", sg.UnknownNameError, "Did you mean 'gae'"),
        (
            "gradcam++",
            sg.UnknownNameError,
            "unknown method 'gradcam[+][+]'. Did you mean 'gradcam_plus_plus'",
        ),
        ("attention_rollout", sg.UnknownNameError, "Did you mean 'rollout'"),
        ("saliency", sg.UnknownNameError, "Did you mean 'vanilla_grad'"),
        (
            "ixg+rollout",
            sg.InputError,
            "rollout multiplies token-by-token matrices.*It works with raw_attention",
        ),
        ("smoothgrad+plus", sg.InputError, "'smoothgrad' has no layers"),
        (
            "attixg:paring=next",
            sg.UnknownNameError,
            "unknown option of 'attixg' 'paring'. Did you mean 'pairing'",
        ),
        ("attixg:pairing=nxt", sg.UnknownNameError, "unknown pairing 'nxt'. Did you mean 'next'"),
        ("attixg:pairing", sg.InputError, "options as key=value"),
        ("ixg:cut=ceil", sg.UnknownNameError, "unknown option of 'ixg' 'cut'"),
        ("ixg+skipplus:cut=middle", sg.UnknownNameError, "unknown cut 'middle'"),
        ("raw_attention:freeze=1", sg.UnknownNameError, "unknown option of 'raw_attention' 'freeze'"),
        ("attnlrp:freeze=1", sg.UnknownNameError, "unknown option of 'attnlrp' 'freeze'"),
        ("ixg:freeze=2", sg.InputError, "a number in 0..1, got 2"),
        ("ixg:freeze=nan", sg.InputError, "a number in 0..1, got nan"),
        ("ixg:freeze=true", sg.InputError, "a number in 0..1, got True"),
        ("ixg:freeze=half", sg.InputError, "a number in 0..1, got 'half'"),
        ("decompx:slope=flat", sg.UnknownNameError, "unknown slope 'flat'"),
        ("decompx:bias=abs", sg.UnknownNameError, "unknown bias 'abs'. Did you mean 'absdot'"),
        ("decompx:bias=absdot,freeze=0.5", sg.InputError, "attention held constant, got freeze=0.5"),
        ("gaze:bias=norm", sg.InputError, "attention held constant, got freeze=0.75"),
        ("ixg+plus:start=3", sg.InputError, r"start=3, but the model has layers 0\.\.2"),
        ("attixg+last:pairing=next", sg.InputError, r"no map to add from layer 2 on \(layers 0..2\)"),
        ("attixg+plus:pairing=next,start=2", sg.InputError, "no map to add"),
        ("ixg+plus:start=-1", sg.InputError, "an integer >= 0, got -1"),
        ("ixg+plus:start=1.5", sg.InputError, "an integer >= 0, got 1.5"),
        ("attin:form=m", sg.UnknownNameError, "unknown form 'm'"),
        ("alti:against=mlp", sg.UnknownNameError, "unknown against 'mlp'"),
        ("vanilla_grad:reduce=max", sg.UnknownNameError, "unknown reduce 'max'"),
        ("gradcam:at=output", sg.UnknownNameError, "unknown at 'output'. Did you mean 'input'"),
        ("gradcam:tokens=some", sg.UnknownNameError, "unknown tokens 'some'"),
        ("attcam:relu=maybe", sg.InputError, "expected true or false for relu.*got 'maybe'"),
        ("fullgrad:implicit=1", sg.InputError, "expected true or false for implicit.*got 1"),
        ("smoothgrad:samples=0", sg.InputError, "samples must be an integer >= 1, got 0"),
        ("smoothgrad:samples=2.5", sg.InputError, "expected an integer for samples.*got 2.5"),
        ("smoothgrad:noise=-1", sg.InputError, "a number >= 0, got -1"),
        ("smoothgrad:noise=nan", sg.InputError, "a number >= 0, got nan"),
        ("smoothgrad:noise=much", sg.InputError, "expected a number for noise.*got 'much'"),
        ("random:seed=x", sg.InputError, "expected an integer for seed"),
        ("integrated_gradients:steps=0", sg.InputError, "steps must be an integer >= 1, got 0"),
        ("integrated_gradients:space=image", sg.UnknownNameError, "unknown space 'image'"),
        ([], sg.InputError, "at least one method, got an empty list"),
        (["ixg", "gaee"], sg.UnknownNameError, "unknown method 'gaee'. Did you mean 'gae'"),
        (3, sg.InputError, "expected a name, a steadygaze.method.*got 3"),
        (None, sg.InputError, "expected a name.*got None"),
        (["ixg", None], sg.InputError, "expected a name"),
    ],
)
def test_methods(method: Any, error: type, message: str) -> None:
    refuse(error, message, sg.explain, MODEL, IMAGES, method=method)


@pytest.mark.parametrize("method", ["gaze", "rollout", "random", "integrated_gradients:steps=1"])
@pytest.mark.parametrize("score", ["logits", "probs", 3])
def test_scores(method: str, score: Any) -> None:
    """Also for methods that need no score: a typing error must not go unseen."""
    refuse(
        sg.UnknownNameError,
        f"unknown score '{score}'.*contrast, log_odds, log_prob, logit",
        sg.explain,
        MODEL,
        IMAGES,
        method=method,
        score=score,
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 2), "torch.nn.modules.linear.Linear is not a vision transformer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(432, 5)), "Sequential is not a vision transformer"),
        (None, "got NoneType"),
        (tiny("class", global_pool=""), "no pooled head"),
    ],
)
def test_models(model: Any, message: str) -> None:
    refuse(sg.UnsupportedModelError, message, sg.explain, model, IMAGES)


def test_a_view_needs_a_model_not_its_name() -> None:
    refuse(sg.UnsupportedModelError, "expected a model, got the name", sg.adapt, "deit_tiny_patch16_224")


def test_a_view_that_does_not_give_the_models_logits() -> None:
    """A subclass that does something between its blocks is found out."""

    class Odd(type(MODEL)):  # type: ignore[misc]
        def forward_features(self, x: Any, **more: Any) -> Any:
            x = self._pos_embed(self.patch_embed(x))
            for block in self.blocks:
                x = block(x) * 1.1
            return self.norm(x)

    odd = tiny()
    odd.__class__ = Odd
    refuse(sg.UnsupportedModelError, "its own logits and those of the view.*differ", sg.adapt, odd)


ATTENTION = [
    "raw_attention",
    "rollout",
    "attn_grad",
    "attcam",
    "genatt",
    "gae",
    "gradsam",
    "attixg",
    "attcat",
    "attin",
    "globenc",
    "alti",
    "transatt",
    "full_lrp",
    "gaze_twice",
    "gaze_halves",
    "atman",
    "legrad",
    "grad_eclip",
    "libra_attcat",
    "tokentm",
    "beyond_intuition",
    "beyond_intuition_token",
    "caap",
]


@pytest.mark.parametrize("name", tiny_models.HIERARCHICAL)
def test_methods_that_a_hierarchical_model_cannot_serve(name: str) -> None:
    model = tiny_models.ALL[name]()
    images = tiny_models.images_of(model)
    for method in ATTENTION:
        refuse(
            sg.MethodUnavailableError,
            f"{method}: .*no attention matrix over all tokens.*Use a gradient or CAM method",
            sg.explain,
            model,
            images,
            method=method,
        )
    assert set(tiny_models.served(model)) == {info.name for info in sg.list_methods()} - {
        *ATTENTION,
        "calibrated",
        "diffmask",
        "vit_shapley",
    }  # the last three: no file
    refuse(sg.MethodUnavailableError, "grids change", sg.explain, model, images, method="decompx:bias=norm")
    vit = sg.adapt(model)
    refuse(
        sg.InputError,
        "cannot be removed",
        vit.select,
        vit.embed(images),
        torch.zeros(2, 1, dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("norms behind", "alti", "defined for pre-norm blocks"),
        ("parallel branches", "globenc", "defined for pre-norm blocks"),
        ("EVA-02 tiny (rotary, SwiGLU)", "transatt", "without rotary positions.*Use attnlrp"),
        ("attention pool (SigLIP)", "transatt", "a class or mean head"),
        ("attention pool (SigLIP)", "full_lrp", "a class or mean head"),
        ("average", "decompx:bias=cls", "class token"),
        ("CaiT", "fullgrad:implicit=true", "mixes attention after softmax"),
        ("CaiT", "decompx:bias=absdot", "do not sum to the logits"),
        ("CaiT", "attin", "pre-norm"),
        ("Swin", "gradcam:at=norm1", "does not begin with a norm"),
    ],
)
def test_methods_that_other_models_cannot_serve(name: str, method: str, message: str) -> None:
    model = tiny_models.ALL[name]()
    refuse(sg.MethodUnavailableError, message, sg.explain, model, tiny_models.images_of(model), method=method)


def test_full_lrp_needs_patches_of_one_convolution() -> None:
    """Its last rule is for pixels; a stem of several convolutions would need one more rule."""
    model = tiny()
    stem = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 24, 3, stride=3)).double()
    model.patch_embed.proj = stem  # type: ignore[assignment]
    message = "one convolution of the image.* has 2 convolutions. Use transatt"
    refuse(sg.MethodUnavailableError, message, sg.explain, model, random_images(model), method="full_lrp")


def test_selection_of_patches() -> None:
    vit = sg.adapt(MODEL)
    tokens = vit.embed(IMAGES)
    for keep, message in (
        (torch.tensor([0, 1]), r"shape \(2, k\), got torch.int64 \(2,\)"),
        (torch.tensor([[0.0], [1.0]]), "integer patch indices"),
        (torch.tensor([[0], [16]]), r"must lie in 0\.\.15"),
        (torch.tensor([[-1], [0]]), r"must lie in 0\.\.15"),
        (torch.tensor([[0]]), r"shape \(2, k\)"),
    ):
        refuse(sg.InputError, message, vit.select, tokens, keep)
    refuse(sg.InputError, "have lost their layout", vit.logits, torch.zeros(2, 9, 24, dtype=torch.float64))


def test_broken_and_empty_maps() -> None:
    """NaN among the weights raises; a map of zeros warns."""
    broken = tiny()
    sg.adapt(broken)
    with torch.no_grad():
        broken.head.weight[1] = torch.nan
    refuse(sg.BrokenMapError, "NaN or infinite", sg.explain, broken, IMAGES, target=1)
    empty = tiny()
    with torch.no_grad():
        empty.head.weight[1] = 0
    with pytest.warns(
        sg.DegenerateMapWarning, match=r"ixg: the map is zero everywhere for image\(s\) \[0, 1\]"
    ) as seen:
        att = sg.explain(empty, IMAGES, target=1, method="ixg")
    assert att.scores.abs().max() == 0
    assert seen[0].filename == __file__, "the warning points at the caller"


def test_bf16_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything runs: nothing is ever computed in bf16 here."""
    from steadygaze.vit import clean_forward

    model = tiny()
    sg.adapt(model)
    monkeypatch.setattr(clean_forward, "_cpu_has_bfloat16", lambda: False)
    model.bfloat16()
    refuse(sg.InputError, "bfloat16 on a CPU without.*Use model.float", sg.explain, model, IMAGES)


def test_names_in_text_and_in_code_are_the_same() -> None:
    """What a name is written as is what it is read from."""
    for text in (
        "attixg+plus:freeze=0.75,pairing=next",
        "gradcam:at=norm1,relu=True",
        "decompx:bias=none",
        "ixg:start=2",
    ):
        assert sg.method(text).name == text and str(sg.method(text)) == text
    assert sg.method("ixg", freeze=np.float64(0.5).item()).option("freeze") == 0.5
    a, b = sg.method("gaze", freeze=0.5), sg.method("gaze:freeze=0.5")
    assert a == b and a.score == "log_odds" and a.option("freeze") == 0.5


def test_a_size_that_the_patches_do_not_divide() -> None:
    model = tiny(dynamic_img_size=True)
    refuse(
        sg.InputError,
        r"takes no images of shape \(1, 3, 13, 12\).*divisible",
        sg.explain,
        model,
        torch.zeros(1, 3, 13, 12),
    )


def test_indices_of_maps() -> None:
    maps = sg.explain(MODEL, IMAGES)
    image = torch.rand(3, 12, 12)
    for one in (np.int64(1), torch.tensor(1)):
        assert np.array_equal(maps.overlay(image, one), maps.overlay(image, 1))
    for wrong in (2, (0, 0)):
        refuse(sg.InputError, r"an index into \(2,\) maps", maps.overlay, image, wrong)


def test_images_and_class_names_for_display() -> None:
    maps = sg.explain(MODEL, IMAGES[:1])
    image = Image.new("RGB", (12, 12))
    assert maps.with_images(image)._repr_html_() == maps.with_images([image])._repr_html_()
    refuse(sg.InputError, "expected 5 class names, got 1", maps.with_images, [image], ["ant"])


@pytest.mark.parametrize("kind", ["sparse", "nested", "vmap"])
def test_tensors_of_other_kinds_are_refused_in_words(kind: str) -> None:
    model, images = sg.load_model("embedded"), torch.zeros(2, 3, 32, 32)
    with pytest.raises(sg.InputError, match="expected images as a"):
        if kind == "vmap":
            torch.vmap(lambda x: sg.explain(model, x, 0, "ixg").scores)(images[:, None])
        elif kind == "sparse":
            sg.explain(model, images.to_sparse(), 0, "ixg")
        else:
            sg.explain(model, torch.nested.nested_tensor(list(images)), 0, "ixg")


@pytest.mark.parametrize("name", ["vit_cx:budget=2", "scorecam:budget=2", "tis:budget=2,clusters=2"])
def test_images_that_overflow_inside_the_model_are_named(name):
    images = 1e30 * torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scores = sg.explain(sg.load_model("embedded"), images, method=name).scores
        except sg.SteadygazeError:
            return
    assert torch.isfinite(scores).all()
