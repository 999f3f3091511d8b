"""Every method, aggregator, option and score against the oracles, to 1e-10 of the map's size, in float64.

`layers_of` and `expected` put the oracles' per-layer maps together as aggregate.py promises; a base method
or option that has no oracle here fails `test_nothing_is_left_out`.
"""

import copy
import inspect
from functools import lru_cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import steadygaze as sg
from helpers.tiers import tiered
from oracles import METHODS, METHODS_HOME, attention, cam, gradient, lrp, mixing, vit
from oracles.gaze import gaze_removal
from oracles.models import DEFAULT_KINDS, KINDS, random_images, tiny
from steadygaze.methods.propagation import pixel_relevance
from steadygaze.methods.registry import aliases, base_methods, join_name, list_methods
from steadygaze.trace.query import Query
from steadygaze.vit.contexts import evaluation_mode

TARGET = torch.tensor([1, 3])
SCORES = ("logit", "log_prob", "log_odds", "contrast")
CAMS = tuple(cam.MAPS)
DEPTH = 3  # of the oracles' models: odd, so that ceil and floor differ
Case = tuple[Any, Tensor]


@lru_cache
def case(kind: str) -> Case:
    model = tiny(kind)
    return model, random_images(model)


def close(got: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """To 1e-10 of the map's size; 1e-13 absolute, for maps that vanish
    (tests/test_oracles.py::expected_to_vanish).
    """
    got = got.flatten(1)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    error, size = float((got - wanted).abs().max()), float(wanted.abs().max())
    assert error <= tolerance * size + 1e-13, f"{what}: differs by {error:.1e}, size {size:.1e}"


def explained(kind: str, method: Any, score: str | None = None, target: Any = TARGET) -> Tensor:
    model, images = case(kind)
    return sg.explain(model, images, target=target, method=method, score=score).scores


# -- the oracles, put together ---------------------------------------------------------------------

MATRIX = (
    *("raw_attention", "rollout", "attn_grad", "attcam", "genatt", "transatt"),
    *("attin", "globenc", "alti", "tokentm"),
)


@lru_cache
def matrices_of(name: str, kind: str, relu: bool = False, **how: Any) -> list[Tensor]:
    """(B,N,N) for each layer, as `+rollout` multiplies them (before residuals)."""
    model, images = case(kind)
    if name in ("genatt", "transatt", "attin", "globenc", "alti", "tokentm"):
        return getattr(METHODS_HOME[name], f"{name}_matrices")(model, images, TARGET, **how)
    A, G = attention.attentions(model, images, TARGET, **how)
    if name in ("raw_attention", "rollout"):
        return [a.mean(1) for a in A]
    if name == "attn_grad":
        return [g.mean(1) for g in G]
    weighted = [
        (g[..., model.num_prefix_tokens :].mean(-1, keepdim=True) * a).mean(1)
        for a, g in zip(A, G, strict=True)
    ]
    return [m.clamp(min=0) for m in weighted] if relu else weighted


def rolled_out(name: str, model: Any, matrices: list[Tensor], form: str = "n") -> Tensor:
    identity = attention.identity(matrices[0])
    if name in ("genatt", "transatt"):
        return vit.read(model, attention.plus_identity(matrices))
    if name in ("raw_attention", "rollout"):
        matrices = [0.5 * m + 0.5 * identity for m in matrices]
    if name == "attin" and form == "n":
        matrices = [0.5 * mixing.rows_to_one(m) + 0.5 * identity for m in matrices]
    return vit.read(model, attention.product(matrices))


@lru_cache
def layers_of(name: str, kind: str, **options: Any) -> list[Tensor]:
    """One map for each layer. With pairing="next" the last layer has none: zeros."""
    model, images = case(kind)
    if name == "attcam":
        return attention.attcam_layers(model, images, TARGET, **options)
    if name in MATRIX:
        return [vit.read(model, m) for m in matrices_of(name, kind, **options)]
    if name in CAMS:
        return cam_layers(name, model, images, **options)
    if name == "vanilla_grad":
        options = {"reduce": "abs"} | options
    if name == "decompx" and options.get("freeze", 1.0) != 1.0:
        return gradient.ixg_layers(model, images, TARGET, **options)
    if name == "decompx":
        options = {k: v for k, v in options.items() if k != "freeze"}
    maps = getattr(METHODS_HOME[name], f"{name}_layers")(model, images, TARGET, **options)
    return maps + [torch.zeros_like(maps[0])] * (DEPTH - len(maps))


def cam_layers(
    name: str, model: Any, images: Tensor, tokens: str = "patches", normalize: bool = False, **options: Any
) -> list[Tensor]:
    """As the oracle; tokens="all" takes the sums over p with the prefix tokens in."""
    if tokens == "patches":
        maps = cam.cam_layers(name, model, images, TARGET, **options)
    else:
        state, scalar = vit.trace(model, images, TARGET)
        places = (
            state.x[:-1] if options.get("at", "input") == "input" else [b.norm1.out for b in state.blocks]
        )
        pairs = zip(places, vit.gradients(scalar, places), strict=True)
        maps = [vit.patches_of(model, cam.MAPS[name](a.detach(), g)) for a, g in pairs]
    if not normalize:
        return maps
    return [torch.stack([m / m.max() if m.max() > 0 else m for m in layer]) for layer in maps]


def expected(
    kind: str, name: str, aggregator: str, start: int | None = None, cut: str = "ceil", **options: Any
) -> Tensor:
    """`name+aggregator` from the oracles' layers."""
    model, images = case(kind)
    first = {"first": 0, "last": DEPTH - 1, "plus": 0, "rollout": 0, "skipplus": 2 if cut == "ceil" else 1}[
        aggregator
    ]
    first = first if start is None else start
    if aggregator == "rollout":
        form = {k: v for k, v in options.items() if k == "form"}
        return rolled_out(name, model, matrices_of(name, kind, **options)[first:], **form)
    if name == "fullgrad" and aggregator in ("plus", "skipplus"):
        return gradient.fullgrad_plus(model, images, TARGET, start=first, **options)
    maps = layers_of(name, kind, **options)
    return maps[first] if aggregator in ("first", "last") else torch.stack(maps[first:]).sum(0)


# -- tests -----------------------------------------------------------------------------------------


BASES = {base.name: base for base in base_methods()}


def bases(kind: str) -> list[str]:
    return [base.name for base in BASES.values() if base.kind == kind]


BIASES = ("none", "token", "absdot", "norm", "equal", "cls")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "vanilla_grad": [{"reduce": "sum"}, {"reduce": "abs"}],
    "attixg": [{"pairing": "same"}, {"pairing": "next"}],
    "fullgrad": [{"implicit": False}, {"implicit": True}],
    "attcam": [{"relu": False}, {"relu": True}],
    "attin": [{"form": "n"}, {"form": "n_res"}],
    "grad_eclip": [{"keys": True}, {"keys": False}, {"project": True}, {"project": False}],
    "alti": [{"against": "attn"}, {"against": "block"}],
    "gaze_removal": [{"keys": 0.5}, {"limit": 0.1}, {"limit": 0.02, "keys": 0.0}],
    "attnlrp": [{"gamma": 0.0}, {"gamma": 0.05}, {"gamma": 1.0}],
    "decompx": [{"bias": b, "slope": s} for b in BIASES for s in ("origin", "tangent")],
    "eigen": [{"at": "norm1"}, {"at": "input"}, {"centered": False}],
} | {
    name: [
        {"at": "norm1"},
        {"at": "input"},
        {"relu": True},
        {"relu": False},
        {"tokens": "all"},
        {"tokens": "patches"},
        {"tokens": "all", "at": "norm1"},
        {"normalize": True},
        {"normalize": False},
    ]
    for name in CAMS
}
OPTIONS_TESTED_ELSEWHERE = {  # of methods without an oracle of the same name and options
    "smoothgrad": {"samples", "noise", "seed"},
    "random": {"seed"},
    "norms": {"at"},
    "pca": {"at", "normalize"},
    "gaze_halves": {"weight", "keys", "limit"},
    "calibrated": {"file"},  # its tests are in tests/faithfulness/test_calibrate.py
    "diffmask": {"file", "read"},  # its oracle is in tests/test_diffmask.py
    "vit_shapley": {"file"},  # its oracle is in test_vit_shapley.py
} | {  # searched methods: their oracles are in tests/test_search.py
    "occlusion": {"budget", "hide"},
    "rise": {"budget", "seed", "hide"},
    "lime": {"budget", "seed", "hide"},
    "kernel_shap": {"budget", "seed", "hide"},
    "pami": {"budget", "hide"},
    "hsic": {"budget", "seed", "output", "hide"},
    "scorecam": {"budget", "softmax"},
    "vit_cx": {"budget", "noise", "seed"},
    "atman": {"budget", "suppress", "similar"},
    "tis": {"budget", "clusters", "keep", "seed", "hide"},
    "caap": {"first", "last", "budget"},  # this and the next two: in test_greedy.py
    "greedy": {"by", "budget", "swaps", "seed", "hide"},
    "smdl": {
        "budget",
        "regions",
        "confidence",
        "effectiveness",
        "consistency",
        "collaboration",
        "hide",
    },
    "sufficient": {"budget", "threshold", "space", "minimal", "summed"},
}
SEARCHED = [info.name for info in list_methods() if info.family == "black box"]


def test_nothing_is_left_out() -> None:
    """Every base method and every option of it has an oracle in this file."""
    for name in bases("map") + bases("matrix"):
        tried = {key for options in OPTIONS.get(name, []) for key in options} - {"slope"}
        assert set(BASES[name].options) == tried, name
    options_of = {name: set(BASES[name].options) for name in bases("model")}
    for name in options_of.keys() & set(METHODS):  # an oracle has the options of its method
        options_of[name] -= set(inspect.signature(METHODS[name]).parameters)
    assert {name: left for name, left in options_of.items() if left} == OPTIONS_TESTED_ELSEWHERE
    assert set(MATRIX) == set(bases("matrix"))
    written_here = {
        "random",
        "smoothgrad",
        "gaze_twice",
        "gaze_halves",
        "diffmask",
        "vit_shapley",
        "calibrated",
    }
    written_here |= set(SEARCHED)
    libra = {name for name in aliases() if name.startswith("libra_")}  # their oracles are in test_libra.py
    assert set(METHODS) | written_here == {i.name for i in list_methods()} - {"gae", "cat", "attcat"} - libra


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_bare_names(kind: str) -> None:
    model, images = case(kind)
    other = {"gae": "genatt", "vanilla_grad": "vanilla_grad"}
    for info in list_methods():
        if info.name not in METHODS and info.name != "gae":
            continue  # each has a test of its own below
        more = {"reduce": "abs"} if info.name == "vanilla_grad" else {}
        wanted = METHODS[other.get(info.name, info.name)](model, images, TARGET, **more)
        close(explained(kind, info.name), wanted, info.name)
    for alias, base in (
        ("cat", "ixg"),
        ("attcat", "attixg"),
        ("gradsam", "genatt"),
        ("fullgrad_plus", "fullgrad"),
    ):
        close(explained(kind, alias), expected(kind, base, "plus"), alias)
    known = {"gae", "gradsam", "cat", "attcat", "fullgrad_plus", "gaze", "gaze_weighted"}
    known |= {"beyond_intuition_token"}
    assert {name for name in aliases() if not name.startswith("libra_")} == known


@pytest.mark.parametrize("kind", tiered(KINDS, ["registers"]))
@pytest.mark.parametrize("name", bases("map") + bases("matrix"))
def test_aggregators(kind: str, name: str) -> None:
    """last, plus, skipplus (ceil, floor), rollout, and any start layer."""
    close(explained(kind, name), expected(kind, name, BASES[name].aggregator or ""), name)
    more: list[dict[str, Any]]
    for aggregator in ("last", "plus", "skipplus", "rollout"):
        if aggregator == "rollout" and name not in MATRIX:
            continue
        more = [{}, {"start": 1}] + ([{"cut": "ceil"}, {"cut": "floor"}] if aggregator == "skipplus" else [])
        for options in more:
            method = sg.method(f"{name}+{aggregator}", **options)
            close(explained(kind, method), expected(kind, name, aggregator, **options), method.name)
    if BASES[name].aggregator in ("first", "last"):
        close(explained(kind, f"{name}:start=1"), expected(kind, name, "first", start=1), f"{name}:start=1")


@pytest.mark.filterwarnings(
    "ignore::steadygaze.DegenerateMapWarning"
)  # attcam with relu, where all is negative
@pytest.mark.parametrize("kind", tiered(KINDS, ["registers"]))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kind: str, name: str) -> None:
    """Each value of each option, at the bare name and summed over the layers."""
    for options in OPTIONS[name]:
        if options.get("bias") == "cls" and case(kind)[0].cls_token is None:
            with pytest.raises(sg.MethodUnavailableError, match="class token"):
                explained(kind, sg.method(name, **options))
            continue
        for aggregator in ("", "+plus", *(("+rollout",) if name in MATRIX else ())):
            method = sg.method(name + aggregator, **options)
            wanted = expected(kind, name, aggregator[1:] or BASES[name].aggregator or "", **options)
            vanishes = (
                name == "hirescam" and options.get("normalize") and case(kind)[0].global_pool == "token"
            )
            close(
                explained(kind, method), wanted, method.name, 1e-7 if vanishes else 1e-10
            )  # 1e-8 over its own maximum


@pytest.mark.parametrize("score", tiered(SCORES, ["log_odds", "contrast"]))
@pytest.mark.parametrize("kind", tiered(["class", "average_with_class"], ["average_with_class"]))
def test_scores(kind: str, score: str) -> None:
    for name in bases("map") + bases("matrix"):
        how = {"score": score} if BASES[name].gradient else {}
        close(
            explained(kind, f"{name}+plus", score),
            expected(kind, name, "plus", **how),
            f"{name}+plus of {score}",
        )
    model, images = case(kind)
    for name in ("gaze", "integrated_gradients"):
        close(
            explained(kind, name, score),
            METHODS[name](model, images, TARGET, score=score),
            f"{name} of {score}",
        )


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_own_scores(kind: str) -> None:
    """gaze and its kin have log-odds of their own, LibraGrad log_prob, searches and Shapley values the
    probability, every other name the logit; a score given wins.
    """
    own = {"gaze": "log_odds", "calibrated": "log_odds", "libra": "log_prob"}
    for info in list_methods():
        of_probability = info.name == "vit_shapley" or (
            info.name in SEARCHED and info.name not in ("atman", "caap")
        )
        assert info.score == ("prob" if of_probability else own.get(info.name.partition("_")[0], "logit"))
    model, images = case(kind)
    assert sg.explain(model, images, method="gaze").score == "log_odds"
    close(explained(kind, "gaze"), explained(kind, "decompx+plus:freeze=0.75", "log_odds").flatten(1), "gaze")


@pytest.mark.parametrize("freeze", tiered([0, 0.5, 0.75, 1], [0.75, 1]))
@pytest.mark.parametrize("kind", tiered(["class", "registers", "average"], ["registers"]))
def test_freezing(kind: str, freeze: float) -> None:
    """Every gradient method under frozen-linear rules, with both slopes."""
    for name in bases("map") + bases("matrix"):
        if not BASES[name].gradient or BASES[name].rules is not None:
            continue
        for slope in ("origin", "tangent"):
            method = sg.method(f"{name}+plus", freeze=freeze, slope=slope)
            wanted = expected(kind, name, "plus", freeze=float(freeze), slope=slope)
            close(explained(kind, method), wanted, method.name)
    method = sg.method("fullgrad", freeze=freeze, implicit=True, slope="tangent")
    wanted = expected(kind, "fullgrad", "first", freeze=float(freeze), implicit=True, slope="tangent")
    close(explained(kind, method), wanted, method.name)


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_legrad_of_the_last_layers(kind: str) -> None:
    model, images = case(kind)
    for options in ({"layers": 2}, {"layers": 1}, {"layers": 0, "score": "log_odds"}, {"freeze": 0.75}):
        score = options.get("score")
        method = sg.method("legrad", **{key: value for key, value in options.items() if key != "score"})
        wanted = METHODS["legrad"](model, images, TARGET, **options)
        close(explained(kind, method, score), wanted, method.name)
    with pytest.raises(sg.InputError, match=r"from 0 \(all\) to 3, got 4"):
        explained(kind, "legrad:layers=4")


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_integrated_gradients(kind: str) -> None:
    model, images = case(kind)
    for options in (
        {"steps": 3},
        {"space": "pixels", "steps": 4},
        {"freeze": 0.75, "steps": 3},
        {"space": "pixels", "freeze": 1.0},
    ):
        method = sg.method("integrated_gradients", **options)
        close(
            explained(kind, method),
            gradient.integrated_gradients(model, images, TARGET, **options),
            method.name,
        )


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_smoothgrad(kind: str) -> None:
    """|mean gradient| at noisy images, summed over the pixels of a patch.

    One draw of noise serves a whole batch.
    """
    model, images = case(kind)
    for samples, noise, seed in ((20, 0.1, 0), (3, 0.5, 7)):
        generator, total = torch.Generator().manual_seed(seed), torch.zeros_like(images)
        draws = [
            torch.randn(images.shape[1:], generator=generator, dtype=torch.float64) for _ in range(samples)
        ]
        width = images.flatten(1).max(1).values - images.flatten(1).min(1).values
        for draw in draws:
            x = (images + noise * width[:, None, None, None] * draw).requires_grad_()
            scalar = vit.quantity(vit.run(model, vit.embed(model, x)).logits, TARGET).sum()
            total = total + vit.gradients(scalar, [x])[0] / samples
        method = sg.method("smoothgrad", samples=samples, noise=noise, seed=seed)
        close(explained(kind, method), gradient.patch_sums(model, total.abs()), method.name)


def test_random() -> None:
    """Uniform in 0..1, another for another image or seed, the same for the same."""
    a, b, c = (explained("class", f"random:seed={seed}") for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a[0], a[1])
    many = torch.cat([explained("class", f"random:seed={seed}").flatten() for seed in range(30)])
    assert many.min() >= 0 and many.max() < 1 and abs(float(many.mean()) - 0.5) < 0.05
    assert abs(float(many.std()) - 12**-0.5) < 0.03


def test_attention_that_divides_is_explained_as_one_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """q·k / √d plus a table of relative positions, as some releases of transformers write it."""
    model, images = case("class")
    table = torch.randn(17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = ["transatt", "fullgrad:implicit=true", "decompx", "gaze_removal", "alti"]

    def maps(scaled: Any) -> dict[str, sg.Attribution]:
        def forward(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            a = (scaled(q @ k.transpose(-2, -1), q.shape[-1] ** 0.5) + table).softmax(-1)
            return self.proj((a @ v).transpose(1, 2).reshape(b, n, c))

        monkeypatch.setattr(type(model.blocks[0].attn), "forward", forward)
        return sg.explain(copy.deepcopy(model), images, TARGET, method=names)

    divided, multiplied = maps(lambda x, d: x / d), maps(lambda x, d: x * (1 / d))
    for name in names:
        close(divided[name].scores, multiplied[name].scores.flatten(1), name)


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_full_lrp_pixel_by_pixel(kind: str) -> None:
    """The relevance that the map adds up over each patch; the same for every score."""
    model, images = case(kind)
    view = sg.adapt(model)
    with evaluation_mode(model):
        got = pixel_relevance(Query(view, images, view.embed(images), TARGET))
    close(got, lrp.full_lrp_pixels(model, images, TARGET).flatten(1), kind)
    for score in SCORES:
        assert torch.equal(explained(kind, "full_lrp", score), explained(kind, "full_lrp"))


@pytest.mark.parametrize("kind", tiered(KINDS, ["average"]))
def test_shapley_cam(kind: str) -> None:
    """Against the whole Hessian; at the input of the last block it vanishes for class-token heads."""
    model, images = case(kind)
    others = ({"weights": "channels"}, {"at": "input"}) if kind == "class" else ()
    for options in ({}, {"at": "norm1"}, {"weights": "positive"}, *others):
        wanted = cam.shapley_cam(model, images, TARGET, **options)
        close(explained(kind, sg.method("shapley_cam", **options)), wanted, str(options), 1e-8)
    with pytest.raises(sg.UnknownNameError, match="norm1"):
        explained(kind, "shapley_cam:at=norm")


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_attnlrp_gamma(kind: str) -> None:
    model, images = case(kind)
    for options in (
        {"gamma": 0.0, "conv_gamma": 0.0},
        {"gamma": 0.05, "conv_gamma": 0.25},
        {"gamma": 1.0, "attention": "held"},
    ):
        wanted = lrp.attnlrp_gamma(model, images, TARGET, **options)
        close(explained(kind, sg.method("attnlrp_gamma", **options)), wanted, str(options))


def test_gamma_must_be_a_weight() -> None:
    for name in ("attnlrp", "attnlrp_gamma"):
        with pytest.raises(sg.InputError, match="gamma"):
            sg.method(name, gamma=-0.1)
    with pytest.raises(sg.UnknownNameError, match="held"):
        explained("class", "attnlrp_gamma:attention=hold")


def test_full_lrp_of_a_callable_target() -> None:
    got = explained("class", "full_lrp", target=lambda y: y[:, 2])
    close(got, explained("class", "full_lrp", target=2).flatten(1), "callable")


def test_transatt_from_the_second_block_is_the_authors() -> None:
    for kind in KINDS:
        model, images = case(kind)
        close(explained(kind, "transatt:start=1"), lrp.transatt(model, images, TARGET, start_layer=1), kind)


def z(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True).sqrt()


def keys_and_parts(model: Any, tokens: Tensor, score: str = "log_odds") -> Tensor:
    """F of docs/equations.md#gaze-twice, for the patches that `tokens` has."""
    prefix = model.num_prefix_tokens
    tokens = tokens.detach().requires_grad_()
    state = vit.run(model, tokens, how=vit.rule(0.75))
    scalar = vit.quantity(state.logits, TARGET, score).sum()
    own, key = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for x, g in zip(state.x[:-1], vit.gradients(scalar, state.x[:-1]), strict=True):
        patches = x[:, prefix:]
        own = own + ((patches - patches.mean(1, keepdim=True)) * g[:, prefix:]).sum(-1)
    for g in vit.gradients(scalar, [block.S for block in state.blocks]):
        others = g * (1 - torch.eye(g.shape[-1], dtype=torch.float64))
        key = key + others.sum(dim=(1, 2))[:, prefix:]
    return z(z(own) + 0.4 * z(key)).detach()


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_gaze_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = case(kind)
    x = vit.embed(model, images).detach()
    whole = keys_and_parts(model, x)
    prefix, patches = model.num_prefix_tokens, whole.shape[1]
    best, wanted = round(0.7 * patches), whole.clone()
    ranks = whole.argsort(1, descending=True)
    for part in (ranks[:, :best], ranks[:, best:]):
        if model.global_pool == "avg":
            monkeypatch.setattr(vit, "reads", lambda m, n=part.shape[1]: list(range(prefix, prefix + n)))
        rows = [torch.cat([t[:prefix], t[prefix:][keep]]) for t, keep in zip(x, part, strict=True)]
        scores = keys_and_parts(model, torch.stack(rows))
        for b in range(len(x)):
            wanted[b, part[b]] += 0.35 * scores[b]
    monkeypatch.undo()
    close(explained(kind, "gaze_twice"), wanted, "gaze_twice")


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
@pytest.mark.parametrize(
    "options", [{"weight": 0.25}, {"weight": 1.0}, {"weight": 0.25, "keys": 0.5, "limit": 0.1}]
)
def test_gaze_halves(kind: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """`gaze_removal` of the whole image and, by tokens removed by hand, of both halves."""
    model, images = case(kind)
    x = vit.embed(model, images).detach()
    weight, own = options["weight"], {key: value for key, value in options.items() if key != "weight"}
    whole = gaze_removal(model, images, TARGET, **own)
    prefix, patches = model.num_prefix_tokens, whole.shape[1]
    wanted, ranks = whole.clone(), whole.argsort(1, descending=True)
    for part in (ranks[:, : patches // 2], ranks[:, patches // 2 :]):
        if model.global_pool == "avg":
            monkeypatch.setattr(vit, "reads", lambda m, n=part.shape[1]: list(range(prefix, prefix + n)))
        rows = [torch.cat([t[:prefix], t[prefix:][keep]]) for t, keep in zip(x, part, strict=True)]
        monkeypatch.setattr(vit, "embed", lambda m, images, rows=rows: torch.stack(rows))
        scores = gaze_removal(model, images, TARGET, **own)
        for b in range(len(x)):
            wanted[b, part[b]] += weight * scores[b]
        monkeypatch.undo()
    close(explained(kind, join_name("gaze_halves", options)), wanted, "gaze_halves")


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_gaze_outline(kind: str) -> None:
    model, images = case(kind)
    for options in (
        {"limit": 0.1, "keys": 0.5},
        {"against": 1.0, "first": 1},
        {"temperature": 1.0, "against": 0.25, "limit": 1e6, "share": 0.75},
        {"share": 0.0, "first": 2, "limit": 0.05},
    ):
        wanted = METHODS["gaze_outline"](model, images, TARGET, **options)
        close(explained(kind, join_name("gaze_outline", options)), wanted, str(options))


@pytest.mark.parametrize("kind", tiered(KINDS, ["registers"]))
def test_beyond_intuition(kind: str) -> None:
    model, images = case(kind)
    for options in ({"steps": 3, "first": 1}, {"steps": 2, "first": 2, "form": "token"}):
        wanted = METHODS["beyond_intuition"](model, images, TARGET, **options)
        close(explained(kind, sg.method("beyond_intuition", **options)), wanted, str(options))


def test_beyond_intuition_of_attention_pooling() -> None:
    """The pooling is one more block: a patch that it does not read gets nothing."""
    model = timm.create_model(
        "vit_base_patch16_siglip_224",
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=2,
        num_classes=5,
    )
    model = model.double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for form in ("head", "token"):
        scores = sg.explain(model, images, 1, method=f"beyond_intuition:form={form},steps=2").scores
        assert scores.shape == (2, 4, 4) and (scores >= 0).all() and scores.amax() > 0
