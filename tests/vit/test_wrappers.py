"""A model around a ViT is viewed as what it is: its own logits, the ViT's blocks, nothing left behind."""

import copy
import gc
import warnings
from functools import partial
from threading import Barrier, Thread
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from helpers.tiers import tiered
from helpers.tiny_models import HIERARCHICAL, SEARCHES, images_of, served
from helpers.wrapped import STD, Lit, Normalize, OwnHead
from oracles.models import random_images, tiny
from steadygaze.vit.view import ViT

IMAGES = random_images(tiny("class"))
DRAWN = (
    "rise",
    "lime",
    "kernel_shap",
    "hsic",
    "vit_cx",
    "tis",
)  # draw by the pixels of the image: other pixels, other masks


def named(method: str) -> str:
    return SEARCHES.get(method, method)


def state_of(model: nn.Module) -> list[Any]:
    hooks = [(m._forward_hooks, m._forward_pre_hooks, sorted(vars(m))) for m in model.modules()]
    return [str(hooks), [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]]


def maps_of(model: Any, images: Tensor, methods: list[str], **options: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sg.errors.DegenerateMapWarning)
        maps = sg.explain(model, images, method=methods, **options)
    return {name: attribution.scores for name, attribution in maps.items()}


def close(one: Tensor, other: Tensor, tolerance: float = 1e-9) -> bool:
    return float((one - other).abs().max()) <= tolerance * max(float(other.abs().max()), 1e-12)


# -- arithmetic behind the logits ---------------------------------------------------------------------


def _added_in_place(z: Tensor) -> Tensor:
    z += 1.0
    return z


def _doubled_in_place(z: Tensor) -> Tensor:
    z.mul_(2)
    return z


def _one_column(z: Tensor) -> Tensor:
    z[:, 0] = z[:, 0] - 3
    return z


SHIFTS: dict[str, Any] = {  # the same number added to every logit
    "z + 1.0": lambda z: z + 1.0,
    "1 + z": lambda z: 1 + z,
    "z - 1": lambda z: z - 1,
    "z + a tensor": lambda z: z + torch.tensor(1.0).to(z),
    "torch.add": lambda z: torch.add(z, torch.ones_like(z), alpha=2),
    "z += 1": _added_in_place,
    "z.add_": lambda z: z.add_(1.0),
    "a dict": lambda z: {"logits": z + 1.0, "loss": None},
    "a tuple": lambda z: (z + 1.0, None),
    "torch.where": lambda z: torch.where(z > -1e9, z, torch.zeros_like(z)),
    "clamp": lambda z: z.clamp(-1e6, 1e6) + 1.0,
}
LINEAR: dict[str, Any] = {
    "1 - z": lambda z: 1 - z,
    "-z": lambda z: -z,
    "z + bias": lambda z: z + torch.arange(z.shape[1]).to(z),
    "z.mul_": _doubled_in_place,
    "z / 2 + 1": lambda z: z / 2 + 1,
    "z - mean": lambda z: z - z.mean(-1, keepdim=True),
    "z[:, 0] = ": _one_column,
    "one more class": lambda z: torch.cat([z, z.new_zeros(len(z), 1)], dim=1) + 1.0,
}
ADAPTERS: dict[str, Any] = {
    "timm, class token": partial(tiny, "class"),
    "timm, mean": partial(tiny, "average"),
    "timm, registers": partial(tiny, "registers"),
    "transformers": lambda: zoo.transformers_model("ViTForImageClassification", "sdpa")[0],
    "torchvision": lambda: zoo.torchvision_model("vit_b_16")[0],
    "Swin": HIERARCHICAL["Swin"],
}


class Behind(nn.Module):
    """A function of the logits behind the model."""

    def __init__(self, model: nn.Module, function: Any) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, images: Tensor) -> Any:
        output = self.model(images)
        return self.function(output if isinstance(output, Tensor) else output.logits)


FEW = ("z + 1.0", "z += 1", "a dict", "1 - z", "z.mul_")
EVERY = {**SHIFTS, **LINEAR}


@pytest.mark.parametrize(
    ("kind", "names"),
    tiered(
        [(kind, names) for kind in ADAPTERS for names in (FEW, tuple(EVERY))],
        [("timm, class token", tuple(EVERY)), *((kind, FEW) for kind in ADAPTERS)],
    ),
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} functions",
)
def test_arithmetic_behind_the_logits(kind: str, names: tuple[str, ...]) -> None:
    """A shift of all logits changes no map of class odds; a linear function has the gradient it has."""
    inner = ADAPTERS[kind]()
    images = images_of(inner)
    methods = [name for name in ("gaze_removal", "ixg", "attnlrp_gamma", "transatt") if name in served(inner)]
    expected = maps_of(inner, images, methods, target=1, score="log_odds")
    complete = sg.explain(inner, images, target=1, score="log_odds").unattributed
    for name in [name for name in SHIFTS if name in names]:
        outer = Behind(inner, SHIFTS[name]).eval()
        for method, scores in maps_of(outer, images, methods, target=1, score="log_odds").items():
            assert close(scores, expected[method]), (name, method)
        rest = sg.explain(outer, images, target=1, score="log_odds").unattributed
        assert (rest is None and complete is None) or close(rest, complete), name
    methods = [name for name in methods if name != "transatt"]  # its rules are not those of a gradient
    for name in [name for name in LINEAR if name in names]:
        outer = Behind(inner, LINEAR[name]).eval()

        def quantity(logits: Tensor, function: Any = LINEAR[name]) -> Tensor:
            return function(logits.clone())[:, 1]

        expected = maps_of(inner, images, methods, target=quantity)
        for method, scores in maps_of(outer, images, methods, target=1, score="logit").items():
            assert close(scores, expected[method]), (name, method)


def test_half_precision_and_activations_behind_the_logits() -> None:
    inner = tiny("class")
    wanted = maps_of(inner, IMAGES, ["gaze_removal"], target=1)["gaze_removal"]
    single = maps_of(Behind(inner, lambda z: z.float() + 1.0), IMAGES, ["gaze_removal"], target=1)
    assert close(single["gaze_removal"].double(), wanted, 1e-5)
    capped = maps_of(Behind(inner, lambda z: 1e4 * torch.tanh(z / 1e4)), IMAGES, ["gaze_removal"], target=1)
    assert close(capped["gaze_removal"], wanted, 1e-5)


class InPlace(nn.Module):
    """A head of one's own that changes its features in place."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.backbone, self.change = tiny("class", num_classes=0), change
        self.fc = nn.Linear(24, 4).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.change(self.backbone(images)))


def _in_place_after(activation: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        y = activation(x)
        y *= 2
        return y

    return change


@pytest.mark.parametrize("activation", [F.gelu, lambda x: x, F.normalize])
def test_a_head_that_changes_features_in_place(activation: Any) -> None:
    outer = InPlace(_in_place_after(activation)).eval()
    plain = copy.deepcopy(outer)
    plain.change = lambda x: 2 * activation(x)
    methods = ["gaze_removal", "ixg", "attnlrp_gamma", "transatt"]
    expected = maps_of(plain, IMAGES, methods, target=1)
    for name, scores in maps_of(outer, IMAGES, methods, target=1).items():
        assert close(scores, expected[name]), name


def test_a_head_that_cannot_be_differentiated_is_refused() -> None:
    with pytest.raises(
        sg.errors.UnsupportedModelError, match=r"in place that its gradient needs.*y = y \+ 1"
    ):
        sg.explain(InPlace(_in_place_after(torch.tanh)).eval(), IMAGES)


# -- the same maps as of the ViT inside --------------------------------------------------------------


def test_normalization_before_the_vit_changes_no_map_of_any_method() -> None:
    vit = tiny("class")
    outer = nn.Sequential(Normalize(), vit)
    methods = [named(name) for name in served(vit) if name != "random"]
    assert served(outer) == served(vit) and len(methods) > 35
    before = state_of(outer)
    expected = maps_of(vit, Normalize()(IMAGES), methods, target=1)
    for name, scores in maps_of(outer, IMAGES, methods, target=1).items():
        if name.startswith(DRAWN):
            assert scores.shape == expected[name].shape and scores.isfinite().all()
            continue
        if name == "smoothgrad":  # a gradient with respect to pixels, of another scale
            scores = scores * STD
        assert close(scores, expected[name]), name
    assert state_of(outer) == before


OTHERS: dict[str, Any] = {
    "registers": partial(tiny, "registers"),
    "mean": partial(tiny, "average"),
    "attention pool": lambda: zoo.plain("vit_base_patch16_siglip_224")[0],
    "rotary": lambda: zoo.plain("eva02_tiny_patch14_224")[0],
    "relative positions": lambda: zoo.plain("beit_base_patch16_224")[0],
    "class attention": lambda: zoo.plain("cait_xxs24_224")[0],
    "torchvision": lambda: zoo.torchvision_model("vit_b_16")[0],
    "transformers": lambda: zoo.transformers_model("ViTForImageClassification", "sdpa")[0],
    "transformers eager": lambda: zoo.transformers_model("ViTForImageClassification", "eager")[0],
    "transformers SigLIP": lambda: zoo.transformers_model("SiglipForImageClassification", "sdpa")[0],
    "transformers DINOv3": lambda: zoo.transformers_model("DINOv3ViTModel and a head", "sdpa")[0],
    **HIERARCHICAL,
}


class Permuted(nn.Module):
    """Other classes than those of the model inside: reversed, and only three of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        output = self.model(Normalize()(images))
        logits = output if isinstance(output, Tensor) else output.logits
        return {"logits": logits.flip(1)[:, :3], "all": logits}


@pytest.mark.parametrize("kind", tiered(OTHERS, ["registers", "mean", "transformers DINOv3", "Swin"]))
def test_the_outer_models_classes_are_explained_on_models_of_every_kind(kind: str) -> None:
    inner = OTHERS[kind]()
    outer, images = Permuted(inner).eval(), images_of(inner)
    vit, plain = sg.adapt(outer), sg.adapt(inner)
    assert close(vit(images), outer(images)["logits"]) and vit(images).shape[1] == 3
    fields = ("readout", "readout_rows", "readout_patches", "removable", "global_attention", "prefix", "grid")
    assert [getattr(vit.plan, f) for f in fields] == [getattr(plain.plan, f) for f in fields]
    wanted = [
        "ixg",
        "gae",
        "rollout",
        "transatt",
        "attnlrp",
        "fullgrad",
        "gradcam",
        "alti",
        "occlusion:budget=3",
    ]
    available = served(inner)
    methods = [name for name in wanted if name.partition(":")[0] in available]
    classes = plain(images).shape[1]
    expected = maps_of(inner, Normalize()(images), methods, target=classes - 2, score="logit")
    for name, scores in maps_of(outer, images, methods, target=1, score="logit").items():
        assert close(scores, expected[name]), name


@pytest.mark.parametrize("kind", ["class", "registers", "average"])
def test_removing_patches_is_that_of_the_vit_inside(kind: str) -> None:
    vit = tiny(kind)
    outer, images = nn.Sequential(Normalize(), vit), random_images(vit)
    keep = torch.tensor([[3, 0, 5], [7, 1, 2]])
    with torch.no_grad():
        one, other = sg.adapt(outer), sg.adapt(vit)
        kept = one.logits(one.select(one.embed(images), keep))
        assert close(kept, other.logits(other.select(other.embed(Normalize()(images)), keep)))
        assert not close(kept, outer(images), 1e-3)


def test_a_batch_gives_what_single_images_give() -> None:
    outer = OwnHead("both").eval()
    methods = ["gaze_removal", "gae", "occlusion:budget=5", "fullgrad"]
    together = maps_of(outer, IMAGES, methods, target=[0, 1])
    for i in range(2):
        for name, scores in maps_of(outer, IMAGES[i : i + 1], methods, target=i).items():
            assert close(scores, together[name][i : i + 1]), name


def test_pixel_gradients_pass_through_the_normalisation() -> None:
    vit = tiny("class")
    outer = nn.Sequential(Normalize(), vit)
    images = IMAGES.clone().requires_grad_()
    (expected,) = torch.autograd.grad(outer(images)[:, 1].sum(), images)
    (gradient,) = torch.autograd.grad(sg.adapt(outer)(images)[:, 1].sum(), images)
    assert close(gradient, expected)


# -- heads of one's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "readout", "rows", "share"),
    [
        ("class", "class", (0,), 0.0),
        ("mean", "mean", (), 0.0),
        ("all", "mean", (0,), 0.0),
        ("both", "class", (0,), 0.5),
    ],
)
@pytest.mark.parametrize("frozen", tiered([False, True], [True]))
def test_the_tokens_that_a_head_reads_are_found(
    pool: str, readout: str, rows: tuple[int, ...], share: float, frozen: bool
) -> None:
    """Also behind torch.no_grad, which spares a frozen backbone and would cut every gradient."""
    outer = OwnHead(pool, frozen=frozen).eval()
    plan = sg.adapt(outer).plan
    assert (plan.readout, plan.readout_rows, plan.readout_patches, plan.removable) == (
        readout,
        rows,
        share,
        True,
    )
    assert close(sg.adapt(outer)(IMAGES), outer(IMAGES))
    for name, scores in maps_of(outer, IMAGES, ["gaze_removal", "gae", "ixg", "occlusion:budget=3"]).items():
        assert scores.abs().max() > 0, name


@pytest.mark.full
def test_a_frozen_backbone_gives_the_maps_of_a_trained_one() -> None:
    frozen, free = OwnHead("mean", frozen=True).eval(), OwnHead("mean").eval()
    free.load_state_dict(frozen.state_dict())
    methods = ["ixg", "gae", "integrated_gradients"]
    expected = maps_of(free, IMAGES, methods)
    for name, scores in maps_of(frozen, IMAGES, methods).items():
        assert close(scores, expected[name]), name


BACKBONES = [
    "ViTModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "BeitModel",
    "IJepaModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
]


@pytest.mark.parametrize("pool", ["class", "mean", "pooler"])
@pytest.mark.parametrize("name", tiered(BACKBONES, ["ViTModel", "DINOv3ViTModel"]))
def test_a_backbone_of_transformers_with_a_head_of_ones_own(name: str, pool: str) -> None:
    import transformers

    config_class = getattr(transformers, name).config_class
    size = {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    backbone = getattr(transformers, name)(config_class(**size, intermediate_size=48)).double()
    zoo.randomize(backbone)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head, self.metric = backbone, nn.Linear(24, 4).double(), nn.Identity()

        def forward(self, images: Tensor) -> Tensor:
            output = self.encoder(pixel_values=images)
            tokens = output.last_hidden_state
            pooled = {"class": lambda: tokens[:, 0], "mean": lambda: tokens.mean(1)}
            return self.head(pooled[pool]() if pool in pooled else output.pooler_output)

    outer = Classifier().eval()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if pool == "pooler" and outer.encoder(images).get("pooler_output") is None:
        pytest.skip(f"{name} has no pooler")
    vit = sg.adapt(outer)
    assert close(vit(images), outer(images)) and vit(images).shape == (2, 4)
    if pool == "mean":
        assert vit.readout == "mean" and vit.plan.readout_rows == tuple(range(vit.prefix))
    if name == "SiglipVisionModel" and pool == "pooler":
        assert vit.readout == "pool"
    for method, scores in maps_of(outer, images, ["ixg", "rollout", "occlusion:budget=3"]).items():
        assert scores.shape == (2, 4, 4) and scores.isfinite().all(), method


def test_a_head_that_needs_the_grid_cannot_lose_patches() -> None:
    class OnGrid(OwnHead):
        def forward(self, images: Tensor) -> Tensor:
            grid = self.backbone(images)[:, 1:].reshape(len(images), 4, 4, -1)
            return self.head(grid[:, 1:3, 1:3].mean((1, 2)))

    outer = OnGrid("mean").eval()
    assert not sg.adapt(outer).plan.removable
    assert sg.explain(outer, IMAGES, method="ixg").scores.abs().max() > 0


# -- how a model is wrapped and called ---------------------------------------------------------------


class Peft(nn.Module):
    """As peft wraps: PeftModel.base_model (LoraModel) .model, with calls passed on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def lora() -> nn.Module:
    model = tiny("class")
    for block in model.blocks:
        block.attn.qkv = Lora(block.attn.qkv)
    return Peft(model).eval()


WRAPPERS: dict[str, Any] = {
    "lightning": lambda: Lit(tiny("class")).eval(),
    "lightning twice, normalized": lambda: Lit(Lit(nn.Sequential(Normalize(), tiny("class")))).eval(),
    "peft": lora,
    "DataParallel inside": lambda: Lit(nn.DataParallel(tiny("class"))).eval(),
    "compiled inside": lambda: Lit(torch.compile(tiny("class"), backend="aot_eager")).eval(),  # type: ignore[arg-type]
    "compiled outside": lambda: torch.compile(Lit(tiny("class")).eval(), backend="aot_eager"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers(kind: str) -> None:
    outer = WRAPPERS[kind]()
    with torch.compiler.set_stance("force_eager"):
        expected = outer(IMAGES)
    before = state_of(outer)
    assert close(sg.adapt(outer)(IMAGES), expected)
    for name, scores in maps_of(outer, IMAGES, ["gaze_removal", "gae", "alti", "occlusion:budget=3"]).items():
        assert scores.abs().max() > 0, name
    assert state_of(outer) == before


def test_a_model_compiled_in_place_stays_compiled() -> None:
    outer = Lit(tiny("class")).eval()
    outer.compile(backend="aot_eager")
    for block in outer.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    slots = [vars(m).get("_compiled_call_impl") for m in outer.modules()]
    assert sg.explain(outer, IMAGES, method="gae").scores.abs().max() > 0
    assert [vars(m).get("_compiled_call_impl") for m in outer.modules()] == slots


class Conditioned(nn.Module):
    """Takes more than the image."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.shift = tiny("class"), nn.Linear(2, 5).double()

    def forward(self, images: Tensor, meta: Tensor) -> Tensor:
        return self.vit(images) + self.shift(meta)


def test_a_forward_of_ones_own() -> None:
    model, meta = Conditioned().eval(), torch.tensor([[1.0, -2.0]]).double()
    with pytest.raises(sg.UnsupportedModelError, match=r"missing 1 required positional.*forward=lambda m, x"):
        sg.adapt(model)
    vit = sg.adapt(model, forward=lambda m, x: m(x, meta))
    assert close(vit(IMAGES), model(IMAGES, meta))
    scores = sg.explain(vit, IMAGES, target=1, method="ixg", score="logit").scores
    assert close(scores, sg.explain(model.vit, IMAGES, target=1, method="ixg", score="logit").scores)
    assert len(sg.verify(vit, [(IMAGES, torch.tensor([0, 1]))], methods=["ixg"]))


class Pair(NamedTuple):
    scores: Tensor
    hidden: Tensor


class Returning(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.vit, self.wrap = tiny("class"), wrap

    def forward(self, images: Tensor) -> Any:
        return self.wrap(self.vit(images), self.vit.patch_embed(images))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, tokens: {"logits": logits, "other": logits * 2},
        lambda logits, tokens: {"output": logits, "tokens": tokens},
        lambda logits, tokens: (tokens, logits),
        lambda logits, tokens: Pair(logits, tokens),
    ],
)
def test_logits_are_found_in_what_a_model_returns(wrap: Any) -> None:
    outer = Returning(wrap).eval()
    assert close(sg.adapt(outer)(IMAGES), outer.vit(IMAGES))


def test_two_tensors_that_may_be_logits_are_refused() -> None:
    outer = Returning(lambda logits, tokens: {"a": logits, "b": logits * 2}).eval()
    with pytest.raises(
        sg.UnsupportedModelError, match=r"2 tensors of shape \(B, C\): \['a'\], \['b'\].*m\(x\)\['a'\]"
    ):
        sg.adapt(outer)
    vit = sg.adapt(outer, forward=lambda m, x: m(x)["b"])
    assert close(vit(IMAGES), 2 * outer.vit(IMAGES))


def test_a_subclass_with_a_forward_of_its_own() -> None:
    class Sliced(type(tiny("class"))):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 0.5).flip(1)[:, :2]

    model = tiny("class")
    model.__class__ = Sliced
    assert close(sg.adapt(model)(IMAGES), model(IMAGES)) and model(IMAGES).shape == (2, 2)


def test_an_outer_model_that_resizes_takes_any_size() -> None:
    class Resized(Lit):
        def forward(self, images: Tensor) -> Tensor:
            return self.model(torch.nn.functional.interpolate(images, (12, 12)))

    outer = Resized(tiny("class")).eval()
    images = torch.rand(2, 3, 30, 30, dtype=torch.float64)
    assert close(sg.adapt(outer)(images), outer(images))
    assert sg.explain(outer, images, method="gae").scores.shape == (2, 4, 4)


def test_a_first_layer_for_other_channels() -> None:
    outer = nn.Sequential(nn.Conv2d(5, 3, 1), tiny("class")).double().eval()
    images = torch.rand(2, 5, 12, 12, dtype=torch.float64)
    assert sg.explain(outer, images, method="gae").scores.shape == (2, 4, 4)


# -- refused, with what to do ------------------------------------------------------------------------


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tiny("class"), tiny("class", seed=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images) + self.second(images)


def test_an_ensemble_is_refused_and_one_of_two_is_not() -> None:
    with pytest.raises(
        sg.UnsupportedModelError, match=r"2 vision transformers \('first', 'second'\).*get_submodule"
    ):
        sg.adapt(Ensemble().eval())
    vit = sg.adapt(Ensemble().eval(), forward=lambda m, x: m.second(x))
    assert close(vit(IMAGES), tiny("class", seed=1)(IMAGES))


def refused(model: nn.Module, message: str) -> None:
    before = state_of(model)
    with pytest.raises(sg.UnsupportedModelError, match=message):
        sg.adapt(model.eval())
    assert state_of(model) == before


class Odd(Lit):
    def __init__(self, forward: Any) -> None:
        super().__init__(tiny("class"))
        self.run = forward

    def forward(self, images: Tensor) -> Any:
        return self.run(self.model, images)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: m(x) + m(x.flip(3)), "2 times in one forward pass"),
        (lambda m, x: m.head(m.patch_embed(x).mean(1)), "does not run all of it"),
        (lambda m, x: m(x).softmax(1), r"probabilities.*m\(x\)\.log\(\)"),
        (lambda m, x: m.forward_features(x)[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2), "a segmenter"),
        (lambda m, x: m(x)[:, 0], r"m\(x\)\[:, None\]"),
        (lambda m, x: m(x).detach(), "no gradient passes"),
        (lambda m, x: m(x) + x.mean((2, 3))[:, :1], "differ"),
        (lambda m, x: m.fc_norm(m(x), 3), "fails on images of shape"),
    ],
)
def test_what_a_view_cannot_show_is_refused(forward: Any, message: str) -> None:
    refused(Odd(forward).eval(), message)


def test_an_error_leaves_nothing_behind() -> None:
    outer = nn.Sequential(Normalize(), tiny("class"))
    sg.adapt(outer)
    before = state_of(outer)

    def raises(logits: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        sg.explain(outer, IMAGES, target=raises, method="ixg")
    assert state_of(outer) == before
    assert close(sg.adapt(outer)(IMAGES), outer(IMAGES))


# -- threads, copies, measures -----------------------------------------------------------------------


@pytest.mark.full
def test_threads_share_a_model_and_two_outer_models_share_a_vit() -> None:
    vit = tiny("class")
    outers: list[Any] = [nn.Sequential(Normalize(), vit), Permuted(vit).eval(), vit]
    before = [state_of(m) for m in outers]
    expected = [sg.explain(m, IMAGES, target=1, method="gae").scores for m in outers]
    logits = vit(IMAGES)
    barrier, wrong = Barrier(6), []

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(4):
            if not close(
                sg.explain(outers[index % 3], IMAGES, target=1, method="gae").scores, expected[index % 3]
            ):
                wrong.append(index)
            if not close(vit(IMAGES), logits):
                wrong.append(-index)

    threads = [Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and [state_of(m) for m in outers] == before


def test_a_copy_has_a_view_of_its_own() -> None:
    outer = nn.Sequential(Normalize(), tiny("class"))
    vit = sg.adapt(outer)
    other = copy.deepcopy(outer)
    with torch.no_grad():
        other[1].head.weight.mul_(2)  # type: ignore[union-attr,operator]
    assert close(sg.adapt(other)(IMAGES), other(IMAGES)) and close(vit(IMAGES), outer(IMAGES))


@pytest.mark.full
def test_verify_and_stress_measure_an_outer_model() -> None:
    outer = OwnHead("mean").float().eval()
    images = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    batches = [((images - 0.5) / 0.5, torch.tensor([0, 1]))]
    rows = sg.verify(
        outer, batches, methods=["gaze_removal", "random"], metrics=["deletion_accuracy", "randomization"]
    )
    assert {row["method"] for row in rows} == {"gaze_removal", "random"}
    assert len(sg.stress(outer, batches, suites=["occlusion"], mean=[0.5] * 3, std=[0.5] * 3))


def test_a_forgotten_view_is_rebuilt_without_running_the_model() -> None:
    class Counting(Lit):
        runs = 0

        def forward(self, images: Tensor) -> Tensor:
            self.runs += 1
            return self.model(images)

    outer = Counting(tiny("class")).eval()
    expected = sg.explain(outer, IMAGES, method="gae").scores
    gc.collect()
    runs = outer.runs
    assert isinstance(sg.adapt(outer), ViT) and outer.runs == runs
    assert close(sg.explain(outer, IMAGES, method="gae").scores, expected)
