"""What must hold for any model: completeness, batches, permutations, fused and eager attention, shared
passes, no mix-ups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadygaze as sg
from benchmarks.oracles import unfused
from helpers import tiny_models
from helpers.tiers import tiered
from oracles.models import DEFAULT_KINDS, KINDS, random_images, tiny
from steadygaze.trace import PLAIN, Trace, Want, forward, frozen
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of

TARGET = torch.tensor([1, 3])
COMPLETE = [
    name for name in tiny_models.PLAIN if name != "CaiT"
]  # CaiT adds a class token behind the blocks: it has a share
EXTRA = (
    "ixg+plus:freeze=0.75",
    "decompx+plus:slope=tangent",
    "decompx:bias=absdot",
    "decompx:bias=norm,slope=tangent",
    "fullgrad:implicit=true",
    "fullgrad+plus:freeze=0.5,implicit=true,slope=tangent",
    "attixg+plus:pairing=next",
    "gradcam+plus:at=norm1",
    "genatt+skipplus:freeze=0.5",
    "alti+plus:against=block",
)


@lru_cache
def make(name: str) -> tuple[nn.Module, Tensor]:
    model = tiny_models.ALL[name]()
    return model, tiny_models.images_of(model)


def everything(model: nn.Module) -> list[str]:
    """All names and some options that this model can be explained by, in its cheap form."""
    from steadygaze.methods.registry import unavailable

    extra = [m for m in EXTRA if not unavailable(sg.method(m), sg.adapt(model))]
    if type(model).__name__ == "Cait":  # refuses both, see test_bad_input
        extra = [m for m in extra if "implicit" not in m and "bias" not in m]
    if not sg.adapt(model).plan.global_attention:
        extra = [m for m in extra if "bias" not in m and "at=norm1" not in m]
    cheap = {"smoothgrad": "smoothgrad:samples=2", "integrated_gradients": "integrated_gradients:steps=2"}
    cheap |= tiny_models.SEARCHES
    return [cheap.get(name, name) for name in tiny_models.served(model)] + extra


def maps_of(
    model: nn.Module, images: Tensor, target: Any = TARGET, *, searches: bool = True
) -> dict[str, Tensor]:
    methods = [m for m in everything(model) if searches or m not in tiny_models.SEARCHES.values()]
    return {k: a.scores for k, a in sg.explain(model, images, target=target, method=methods).items()}


@lru_cache
def shared_maps(name: str) -> dict[str, Tensor]:
    """All maps of a model of `make` but those of searches, computed once for all tests."""
    return maps_of(*make(name), searches=False)


@lru_cache
def searched_maps(name: str) -> dict[str, Tensor]:
    """The maps of its searches, with a few runs each."""
    model, images = make(name)
    methods = [m for m in everything(model) if m in tiny_models.SEARCHES.values()]
    return {k: a.scores for k, a in sg.explain(model, images, target=TARGET, method=methods).items()}


def same(got: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-9) -> None:
    assert got.shape == wanted.shape, what
    error, size = float((got - wanted).abs().max()), float(wanted.abs().max())
    assert error <= tolerance * size + 1e-12, f"{what}: differs by {error:.1e}, size {size:.1e}"


# -- completeness ----------------------------------------------------------------------------------


def totals(trace: Trace, implicit: bool = True) -> list[Tensor]:
    """For each layer l: what all tokens of x^l (prefix too) and all offsets at or after block l give
    together, (B,).
    """
    offsets = [trace.bias_terms(layer, implicit=implicit).sum(1) for layer in range(trace.depth + 1)]
    sums = [(x * g).sum((1, 2)) for x, g in (trace.tokens(layer) for layer in range(trace.depth))]
    return [torch.stack([s, *offsets[layer:]]).sum(0) for layer, s in enumerate(sums)]


@pytest.mark.parametrize("name", tiered(COMPLETE, [n for n in tiny_models.REPRESENTATIVE if n in COMPLETE]))
def test_tokens_and_offsets_add_up_to_the_logit(name: str) -> None:
    """decompx with its biases, and fullgrad with implicit terms, under every kind of rule."""
    model, images = make(name)
    vit = sg.adapt(model)
    settings = (
        (frozen(1.0), False),
        (frozen(1.0, "tangent"), True),
        (frozen(0.5), True),
        (frozen(0.75, "tangent"), True),
        (PLAIN, True),
    )
    with evaluation_mode(model):
        with torch.no_grad():
            tokens = vit.embed(images)
        for rules, implicit in settings:
            run = forward(vit, tokens, rules=rules, want=Want(bias=True, implicit=implicit))
            logit = run.logits.gather(1, TARGET[:, None])[:, 0]
            for total in totals(run.trace(logit)):
                same(total, logit.detach(), f"{name} under {rules}", 1e-9)
        run = forward(vit, tokens, want=Want(bias=True))
        logit = run.logits.gather(1, TARGET[:, None])[:, 0]
        missing = totals(run.trace(logit))[0] - logit.detach()
        assert missing.abs().max() > 1e-4, "without implicit terms the ordinary gradient is not complete"


@pytest.mark.parametrize(
    "name",
    tiered(
        [
            "class",
            "torchvision",
            "EVA-02 base (sub-LN)",
            "QuickGELU (CLIP)",
            "SwiGLU (DINOv2)",
            "transformers CLIP and text",
        ],
        ["class", "EVA-02 base (sub-LN)"],
    ),
)
@pytest.mark.parametrize("slope", ["origin", "tangent"])
def test_biases_that_are_shared_out_leave_nothing_over(name: str, slope: str) -> None:
    """The full decomposition by absdot, norm, equal, cls: all tokens together are the logit."""
    from steadygaze.trace.replay import decompose

    model, images = make(name)
    with evaluation_mode(model):
        with torch.no_grad():
            tokens = sg.adapt(model).embed(images)
        run = forward(sg.adapt(model), tokens, rules=frozen(1.0, slope))  # type: ignore[arg-type]
        logit = run.logits.gather(1, TARGET[:, None])[:, 0]
        trace = run.trace(logit)
        for rule in ("absdot", "norm", "equal", "cls"):
            for layer in (0, len(run.records) - 2):
                same(
                    decompose(trace, layer, rule).sum(1),
                    logit.detach(),
                    f"{name}, {rule}, from layer {layer}",
                    1e-8,
                )
        x, g = trace.tokens(0)
        same(
            decompose(trace, 0, "none"),
            (x * g).sum(-1),
            f"{name}: one backward pass is the full decomposition",
        )


# -- batches, patches, kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(tiny_models.ALL, tiny_models.REPRESENTATIVE))
def test_batch_equals_singles_and_fused_attention_equals_eager(name: str) -> None:
    """By timm's switch. LRP adds 1e-9 to q·k, which eager attention scales before, the kernel behind."""
    model, images = make(name)
    whole = shared_maps(name)
    for key, scores in maps_of(model, images[1:], TARGET[1:], searches=False).items():
        same(scores, whole[key][1:], f"{name}, {key}", 1e-5 if "eager" in name else 1e-8)
        assert scores.shape[1:] == sg.adapt(model).grid
    if name.startswith("t"):  # of transformers or torchvision
        return
    with unfused(model) as switched:
        eager = maps_of(model, images, searches=False)
    if not switched:
        assert name in ("CaiT", "Swin"), "this model should have a switch for fused attention"
    for key, scores in eager.items():
        same(scores, whole[key], f"{name}, {key}", 1e-5 if key in ("transatt", "full_lrp") else 1e-8)


@pytest.mark.parametrize("name", tiered(tiny_models.ALL, ["registers", "Swin"]))
def test_searches_of_a_batch_equal_those_of_its_images(name: str) -> None:
    """Searches see the outputs of the model alone, so that the kind of attention does not matter."""
    model, images = make(name)
    whole = searched_maps(name)
    single = sg.explain(model, images[1:], target=TARGET[1:], method=list(whole))
    for key, scores in whole.items():
        same(single[key].scores, scores[1:], f"{name}, {key}", 1e-5 if "eager" in name else 1e-8)


@pytest.mark.parametrize("name", tiered(tiny_models.EAGER, ["transformers DINOv3, eager"]))
def test_both_attentions_of_transformers_agree(name: str) -> None:
    """Eager attention there takes its softmax in float32: 1e-5."""
    model, images = make(name)
    fused = tiny_models.ALL[name.removesuffix(", eager")]()
    fused.load_state_dict(model.state_dict())
    eager = shared_maps(name)
    for key, scores in maps_of(fused, images, searches=False).items():
        same(eager[key], scores, f"{name}, {key}", 2e-4)


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_permuted_patches_permute_the_map(kind: str) -> None:
    """A ViT does not know the order of its tokens beside their positions: permute patches and positions
    alike.
    """
    model, images = make(kind)
    (rows, columns), side = model.patch_embed.grid_size, model.patch_embed.patch_size[0]
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(5))
    cells = (
        images.unflatten(3, (columns, side))
        .unflatten(2, (rows, side))
        .permute(0, 2, 4, 1, 3, 5)
        .flatten(1, 2)
    )
    moved = (
        cells[:, order].unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    )
    other = tiny(kind)
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    with torch.no_grad():
        other.pos_embed[:, prefix:] = model.pos_embed[:, prefix:][:, order]
    before, after = shared_maps(kind), maps_of(other, moved, searches=False)
    # noise, like the order of a search, lies on the image; signs of `pca` and `eigen` follow from the border
    placed = {"random", "smoothgrad:samples=2", "pca", "eigen"}
    for key in after.keys() - placed:
        same(after[key].flatten(1), before[key].flatten(1)[:, order], f"{kind}, {key}", 1e-8)


# -- gradients and readout -------------------------------------------------------------------------


@contextmanager
def caught(model: nn.Module) -> Iterator[list[Tensor]]:
    """The inputs of the view's blocks while the model itself runs."""
    inputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    handles = [b.module.register_forward_pre_hook(keep, with_kwargs=True) for b in sg.adapt(model).blocks]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    "name",
    tiered(
        [n for n in tiny_models.ALL if n not in ("Swin", "PVT v2")],
        [n for n in tiny_models.REPRESENTATIVE if n != "Swin"],
    ),
)
def test_hidden_states_and_gradients_are_autograds(name: str) -> None:
    """Against the plain model with hooks on its blocks; `norm_pre` runs between x^0 and the first hook."""
    model, images = make(name)
    with caught(model) as inputs:
        logits = logits_of(model(images))
    grads = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), inputs)
    vit = sg.adapt(model)
    with torch.no_grad():
        tokens = vit.embed(images)
    run = forward(vit, tokens, want=Want(attention=vit.plan.global_attention))
    trace = run.trace(run.logits.gather(1, TARGET[:, None])[:, 0])
    assert len(inputs) == trace.depth
    before = [vit.blocks[0].parts().before if vit.blocks[0].parts is not None else None]
    first = 0 if before[0] is None else 1
    for layer in range(first, trace.depth):
        x, g = trace.tokens(layer)
        same(x, inputs[layer].detach().reshape(x.shape), f"{name}: x of layer {layer}")
        same(
            g,
            grads[layer].reshape(g.shape),
            f"{name}: gradient of layer {layer}",
            1e-5 if "eager" in name else 1e-9,
        )


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_prefix_tokens_never_enter(kind: str) -> None:
    """One score a patch, in raster order: the map of a model whose image is blank but for one patch
    moves there.
    """
    model, images = make(kind)
    vit = sg.adapt(model)
    for key, scores in (shared_maps(kind) | searched_maps(kind)).items():
        assert scores.shape == (2, *vit.grid), key
    tokens = vit.embed(images).detach().requires_grad_()
    logit = vit.logits(tokens).gather(1, TARGET[:, None]).sum()
    (g,) = torch.autograd.grad(logit, tokens)
    wanted = (tokens * g).sum(-1)[:, model.num_prefix_tokens :].detach()
    same(sg.explain(model, images, target=TARGET, method="ixg").scores.flatten(1), wanted, kind)


def test_averaged_heads_read_the_mean_of_patch_rows() -> None:
    """Raw attention of a mean head is the mean over the rows of patches; the class row is not read at all."""
    for kind in ("average", "average_with_class"):
        model = tiny(kind)
        images, vit = random_images(model), sg.adapt(model)
        with torch.no_grad():
            run = forward(vit, vit.embed(images), want=Want(attention=True), grad=False)
        rows = run.records[-2].attention[0].a.mean(1)
        got = sg.explain(model, images, method="raw_attention").scores.flatten(1)
        prefix = model.num_prefix_tokens
        same(got, rows[:, prefix:, prefix:].mean(1), kind)
        if prefix:
            assert (got - rows[:, 0, prefix:]).abs().max() > 1e-3


# -- targets and lists -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", tiered(["class", "average", "attention pool (SigLIP)", "torchvision", "Swin"], ["average"])
)
def test_several_classes_equal_separate_calls(name: str) -> None:
    model, images = make(name)
    classes = torch.tensor([[0, 3], [2, 2]])
    many = sg.explain(model, images, target=classes, method=everything(model))
    for k in range(2):
        for key, scores in maps_of(model, images, classes[:, k]).items():
            same(many[key].scores[:, k], scores, f"{name}, {key}, class {k}")
    assert torch.equal(many["ixg"].target, classes)
    assert many["ixg"].scores.shape == (2, 2, *sg.adapt(model).grid)


def test_targets_in_all_their_forms() -> None:
    model, images = make("class")
    wanted = sg.explain(model, images, target=torch.tensor([2, 2])).scores
    for target in (
        2,
        [2, 2],
        (2, 2),
        torch.tensor(2),
        torch.tensor([2, 2], dtype=torch.int32),
        torch.tensor([2, 2]).numpy(),
    ):
        assert torch.equal(sg.explain(model, images, target=target).scores, wanted)
    found = sg.explain(model, images)
    assert torch.equal(found.target, model(images).argmax(-1))
    same(found.logits, model(images).detach(), "logits")
    own = sg.explain(
        model,
        images,
        target=lambda y: y[:, 1] - y[:, 3],
        method=["ixg", "decompx+plus", "fullgrad", "genatt"],
    )
    one, three = (
        sg.explain(model, images, target=c, method=["ixg", "decompx+plus", "fullgrad"]) for c in (1, 3)
    )
    for key in one:
        same(own[key].scores, one[key].scores - three[key].scores, f"callable, {key}")
    assert own["ixg"].target is None and own["genatt"].scores.abs().max() > 0
    logit = sg.explain(model, images, target=lambda y: y[:, 2], method="transatt:start=1").scores
    same(
        logit, sg.explain(model, images, target=2, method="transatt:start=1").scores, "transatt of a callable"
    )


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, int]]:
    """Forward and backward passes through the model's blocks, whole models' worth."""
    passes = {"forward": 0, "backward": 0}
    blocks = [b.module for b in sg.adapt(model).blocks]

    def back(grad: Tensor) -> None:
        passes["backward"] += 1

    def front(module: nn.Module, args: Any, output: Any) -> None:
        passes["forward"] += 1
        if output.requires_grad:
            output.register_hook(back)

    handle = blocks[-1].register_forward_hook(front)
    try:
        yield passes
    finally:
        handle.remove()


def test_a_list_equals_single_calls_and_shares_the_passes() -> None:
    """One forward for each freezing, one backward for each freezing and score.

    A reader of attention costs none.
    """
    model = tiny("registers")
    images = random_images(model)
    names = [
        n
        for n in everything(model)
        if sg.method(n).base.kind != "model" and "transatt" not in n and "bias=" not in n
    ]
    with counted(model) as passes:
        together = sg.explain(model, images, target=TARGET, method=names)
    rules = {"plain", "decompx 1", "gaze 3/4", "attnlrp", "libra", "tangent 1", "half tangent", "half"}
    assert passes["forward"] == len(rules)
    assert passes["backward"] == len(rules) + 1  # three quarters frozen serves gaze's log-odds and a logit
    for name in names:
        same(together[name].scores, sg.explain(model, images, target=TARGET, method=name).scores, name)
    for methods, forwards, backwards in (
        (["raw_attention", "rollout", "attin", "alti", "globenc"], 1, 0),
        (["ixg", "cat", "gae", "gradsam", "attcat", "fullgrad", "gradcam", "layercam", "rollout"], 1, 1),
        (["decompx", "decompx+plus", "decompx+skipplus", "raw_attention"], 1, 1),
        (["gaze"], 1, 1),
        (["gaze", "decompx", "ixg"], 3, 3),
        (["random"], 1, 0),  # for the logits
    ):
        with counted(model) as passes:
            sg.explain(model, images, target=TARGET, method=methods)
        assert (passes["forward"], passes["backward"]) == (forwards, backwards), methods
    with counted(model) as passes:
        sg.explain(model, images, target=torch.tensor([[0, 1, 2]] * 2), method=["cat", "gae"])
    assert passes == {"forward": 1, "backward": 3}


def test_skipplus_takes_no_gradient_below_the_middle() -> None:
    model = tiny("class", depth=4)
    images, seen = random_images(model), []
    handles = [b.register_forward_hook(lambda m, i, o: seen.append(o.requires_grad)) for b in model.blocks]
    try:
        sg.adapt(model)
        seen.clear()
        sg.explain(model, images, method="decompx+skipplus")
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [False, False, True, True]


# -- no mix-ups ------------------------------------------------------------------------------------

SAME = {
    frozenset({"genatt", "gae"}): "one name and its alias",
    frozenset({"gaze", "decompx+plus:freeze=0.75"}): "an alias with its own score",
    frozenset({"gaze_removal", "gaze_weighted"}): "no layer of a random model exceeds the limit",
}


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
def test_no_two_names_give_one_map(kind: str) -> None:
    """Maps are compared up to scale. Names that vanish under LayerNorm (see test_oracles) are compared by
    their layers' sum.
    """
    model, _ = make(kind)
    found = shared_maps(kind) | searched_maps(kind)
    vanishing = (
        {"hirescam"} if model.global_pool == "token" else set()
    )  # O(eps): patches reach the head through norm1 alone
    vanishing |= {"ixg", "attixg"} if kind == "pre_norm" else set()  # the same at x^0 with norm_pre
    for name in vanishing:
        assert found[name].abs().max() < 1e-6, name
    for a, b in combinations(sorted(found.keys() - vanishing), 2):
        x, y = found[a] / found[a].norm(), found[b] / found[b].norm()
        if frozenset({a, b}) in SAME:
            same(x, y, f"{a} and {b}")
            continue
        assert (x - y).abs().max() > 1e-6, f"{kind}: {a} and {b} give the same map"


def test_what_mathematics_makes_equal() -> None:
    """hirescam at the input of a block is input x gradient.

    Biases as a token of their own draw the same patches.
    """
    model, images = make("average")
    pairs = {
        "hirescam+plus": "ixg+plus",
        "decompx:bias=token": "decompx",
        "ixg:freeze=1": "decompx",
        "rollout+last": "raw_attention",
        "genatt+plus": "gradsam",
        "decompx:start=2": "decompx+last",
        "ixg+skipplus:start=0": "cat",
        "raw_attention+rollout": "rollout",
    }
    found = sg.explain(model, images, target=TARGET, method=[*pairs.keys(), *pairs.values()])
    for a, b in pairs.items():
        same(found[a].scores, found[b].scores, f"{a} and {b}")


# -- many random models ----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(sorted(KINDS)),
    depth=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 3]),
    freeze=st.floats(0, 1),
    start=st.integers(0, 3),
)
def test_random_models(seed: int, kind: str, depth: int, heads: int, freeze: float, start: int) -> None:
    """decompx is complete and linear in its start layers; freezing mixes; plus is the sum of its layers."""
    model = tiny(kind, seed=seed, depth=depth, num_heads=heads)
    images, start = random_images(model, seed=seed), min(start, depth - 1)
    names = [f"decompx:start={layer}" for layer in range(depth)]
    found = sg.explain(model, images, target=TARGET, method=[*names, f"decompx+plus:start={start}"])
    total = torch.stack([found[name].scores for name in names[start:]]).sum(0)
    same(found[f"decompx+plus:start={start}"].scores, total, "plus is the sum")
    vit = sg.adapt(model)
    with evaluation_mode(model):
        run = forward(vit, vit.embed(images), rules=frozen(freeze), want=Want(bias=True, implicit=True))
        logit = run.logits.gather(1, TARGET[:, None])[:, 0]
        for value in totals(run.trace(logit)):
            same(value, logit.detach(), f"complete, freeze {freeze}", 1e-8)
    last = f"decompx:start={depth - 1}"
    one, none, part = (
        sg.explain(model, images, target=TARGET, method=sg.method(last, freeze=f)).scores
        for f in (1.0, 0.0, freeze)
    )
    same(part, freeze * one + (1 - freeze) * none, "in one block, freezing mixes linearly", 1e-8)


@pytest.mark.parametrize("cut", ["ceil", "floor"])
def test_skipplus_of_a_single_block_is_that_block(cut: str) -> None:
    model = tiny("class", depth=1)
    images = random_images(model)
    for name in ("decompx", "genatt", "raw_attention", "fullgrad"):
        skip = sg.explain(model, images, target=1, method=f"{name}+skipplus:cut={cut}").scores
        assert torch.equal(skip, sg.explain(model, images, target=1, method=f"{name}+plus").scores)
