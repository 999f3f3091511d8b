"""Inserted modules: each formula against its float64 oracle, at its site, in tiny models of every library."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from helpers.inserted import MODELS, images_of, plain, trained
from helpers.tiers import tiered
from oracles import modules as oracle
from oracles.models import tiny
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.modules import CB, TAP, ContextBroadcast, TokenPool, cost, insert, inserted, remove
from steadygaze.modules import tap as tap_module
from steadygaze.modules.base import broadcast_site, pooling_site
from steadygaze.vit.outputs import logits_of

NORM2 = ("norm2", "layernorm_after", "layer_norm2", "ln_2")


def given(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """What `module` is given first while `run` runs, behind whatever else answers there."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda m, a, k: seen.append(a[0] if a else next(iter(k.values()))), with_kwargs=True
    )
    with torch.no_grad():
        run()
    handle.remove()
    return seen[0]


def given_back(module: nn.Module, run: Callable[[], Any], prepend: bool = False) -> Tensor:
    """What `module` gives, before (prepend) or behind whatever else answers there."""
    seen: list[Any] = []
    handle = module.register_forward_hook(lambda m, a, out: seen.append(out), prepend=prepend)
    with torch.no_grad():
        run()
    handle.remove()
    return seen[0] if isinstance(seen[0], Tensor) else seen[0][0]


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return {k: v.clone() for k, v in model.state_dict().items()}, hooks, [m.training for m in model.modules()]


def same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return list(a[0]) == list(b[0]) and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1:] == b[1:]


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    assert got.shape == wanted.shape
    got, wanted = got.detach(), wanted.detach()
    assert float((got - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


def block_inputs(model: nn.Module) -> list[Tensor]:
    vit = sg.adapt(model)
    with torch.no_grad():
        xs = [vit.embed(images_of(model))]
        for block in vit.blocks:
            xs.append(block(xs[-1]))
    return xs


def first(block: nn.Module, names: tuple[str, ...]) -> Any:
    return next(getattr(block, n) for n in names if hasattr(block, n))


# -- the formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dilated", "kernels"])
@pytest.mark.parametrize(
    ("branches", "prefix", "grid"), [(4, 0, (5, 4)), (2, 0, (3, 3)), (2, 2, (3, 3)), (5, 1, (2, 7))]
)
@pytest.mark.parametrize("dense", [True, False])
def test_tap_is_its_formula(
    kind: Any, branches: int, prefix: int, grid: Any, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "DENSE", 512 if dense else 0)
    pool = TokenPool(6, TAP(branches=branches, kind=kind, temperature=0.7), grid=grid, prefix=prefix)
    trained(nn.ModuleList([pool]))
    pool.double()
    x = torch.randn(2, prefix + grid[0] * grid[1], 6, dtype=torch.float64, requires_grad=True)
    wanted = oracle.tap(x, pool, prefix, grid)
    close(pool(x), wanted)
    as_map = x[:, prefix:].unflatten(1, grid)
    close(pool(as_map), wanted[:, prefix:].unflatten(1, grid))
    towards = torch.randn_like(wanted)
    got, expected = (
        torch.autograd.grad((y * towards).sum(), [x, *pool.parameters()]) for y in (pool(x), wanted)
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b)


def test_tap_second_derivatives_and_training_statistics() -> None:
    pool = TokenPool(3, TAP(branches=3), grid=(2, 3), prefix=1).double()
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool.eval(), x) and torch.autograd.gradgradcheck(pool, x)
    pool.train()(x)
    assert int(pool.predict[1].num_batches_tracked) == 1 and not torch.equal(
        pool.predict[1].running_mean, torch.zeros(3)
    )


@pytest.mark.parametrize(("kind", "size"), [("average3", 3), ("average5", 5)])
def test_fixed_pools_count_their_padding(kind: Any, size: int) -> None:
    pool = TokenPool(4, TAP(kind=kind), grid=(4, 3), prefix=1)
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    only = torch.zeros(2, 4, 3, size // 2 + 1, dtype=torch.float64)
    only[..., -1] = 1
    close(pool(x)[:, 1:], oracle.pool(x[:, 1:].unflatten(1, (4, 3)), only, "kernels").flatten(1, 2))
    assert torch.equal(pool(x)[:, :1], x[:, :1]) and not list(pool.parameters())


@pytest.mark.parametrize("kind", ["depthwise", "convolution"])
def test_fixed_convolutions(kind: Any) -> None:
    pool = TokenPool(4, TAP(kind=kind), grid=(4, 3), prefix=1).double()
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    kernel = (
        pool.mix.weight
        if kind == "convolution"
        else torch.diag_embed(pool.mix.weight[:, 0].permute(1, 2, 0)).permute(2, 3, 0, 1)
    )
    close(
        pool(x)[:, 1:], (oracle.convolve(x[:, 1:].unflatten(1, (4, 3)), kernel) + pool.mix.bias).flatten(1, 2)
    )
    assert torch.equal(pool(x)[:, :1], x[:, :1])


@pytest.mark.parametrize("variant", ["plain", "scaled", "gate", "hybrid"])
def test_cb_is_its_formula(variant: Any) -> None:
    cb = ContextBroadcast(5, CB(variant=variant, init=0.3)).double()
    if variant == "scaled":
        cb.scale.data = torch.randn(5, dtype=torch.float64)
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    close(cb(x), oracle.broadcast(x, variant, getattr(cb, "scale", None)))
    assert torch.autograd.gradcheck(cb, x, check_forward_ad=True) and torch.autograd.gradgradcheck(cb, x)
    if variant in ("plain", "scaled"):
        close(cb(x.unflatten(1, (2, 3))).flatten(1, 2), cb(x))
        first_channels = ContextBroadcast(5, CB(variant=variant), channels_first=True).double()
        first_channels.load_state_dict(cb.state_dict())
        close(first_channels(x.unflatten(1, (2, 3)).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2), cb(x))


# -- sites ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    tiered(
        MODELS,
        [
            "timm class",
            "timm registers, mean",
            "EVA-02",
            "torchvision",
            "transformers DINOv3",
            "transformers ViT, eager",
            "CaiT",
            "Swin",
        ],
    ),
)
def test_every_make_there_and_back(name: str) -> None:
    """TAP feeds only the norm before attention, CB ends the MLP, and both can be removed again."""
    model = plain(name)
    images, were, before = images_of(model), state(model), sg.adapt(model)
    better = insert(model, tap=TAP(branches=3), cb=CB(variant="scaled"))
    assert (
        same_state(state(model), were)
        and type(better) is type(model)
        and len(inserted(better)) == 2 * len(before.blocks)
    )
    after = sg.adapt(trained(better))
    close(logits_of(better(images)), after(images))
    assert after.plan.kind.endswith("with TAP and CB") and not after.plan.removable
    x, old, new = block_inputs(better)[-2], before.blocks[-1], after.blocks[-1]
    pooled = oracle.tap(x, new.module.tap, before.prefix, new.module.tap.grid)
    norm = first(new.module, ("norm1", "layernorm_before", "layer_norm1", "ln_1"))
    close(given(norm, lambda: new(x)).reshape(x.shape), pooled)
    middle = [
        given(first(b.module, NORM2), lambda b=b, t=t: b(t)).reshape(x.shape)
        for b, t in ((new, x), (old, pooled))
    ]
    close(middle[0], x + middle[1] - pooled)  # the attention branch sees T(x), the residual x
    mlp = (
        new.module.mlp if hasattr(new.module, "mlp") else new.module.output.dense
    )  # there it lies in two parts
    raw, final = (given_back(mlp, lambda: new(x), prepend=first_of_all) for first_of_all in (True, False))
    close(final, oracle.broadcast(raw, "scaled", new.module.cb_mlp.scale))
    again = remove(better)
    assert same_state(state(again), were) and not inserted(again)
    assert torch.equal(logits_of(again(images)), logits_of(model(images)))


@pytest.mark.parametrize(
    "name",
    tiered(
        ["timm class", "Swin", "PVT v2", "EVA-02", "torchvision", "transformers ViT", "transformers CLIP"],
        ["timm class", "Swin", "transformers ViT"],
    ),
)
@pytest.mark.parametrize("branch", ["mlp", "msa"])
@pytest.mark.parametrize("position", ["front", "mid", "end"])
def test_cb_at_every_position(name: str, branch: Any, position: Any) -> None:
    model = plain(name)
    if position == "mid" and branch == "msa" and name in ("Swin", "torchvision"):
        with pytest.raises(UnsupportedModelError, match="sees all tokens"):
            insert(model, cb=CB(position=position, where=branch))
        return
    better = insert(model, cb=CB(position=position, where=branch))
    x = block_inputs(model)[-2]
    old, new = sg.adapt(model).blocks[-1], sg.adapt(better).blocks[-1]
    sites = [broadcast_site(block.module, branch, position) for block in (old, new)]
    see = given if sites[0].side == "before" else given_back
    tokens = [
        see(site.module, lambda b=b: b(x)).flatten(1, -2) for site, b in zip(sites, (old, new), strict=True)
    ]
    assert tokens[0].shape[:2] == x.shape[:2]
    close(tokens[1], oracle.broadcast(tokens[0], "plain"))


def test_the_whole_model_by_hand() -> None:
    """DeiT with TAP and CB, written out block by block."""
    model = plain("timm class")
    better = trained(insert(model, tap=TAP(), cb=CB(variant="hybrid")))
    vit, images = sg.adapt(better), images_of(model)
    with torch.no_grad():
        x = sg.adapt(model).embed(images)
        for block, new in zip(model.blocks, better.blocks, strict=True):
            x = x + block.ls1(block.attn(block.norm1(oracle.tap(x, new.tap, vit.prefix, vit.grid))))
            hidden = block.mlp.fc2(block.mlp.norm(block.mlp.act(block.mlp.fc1(block.norm2(x)))))
            x = x + block.ls2(oracle.broadcast(hidden, "hybrid"))
        close(better(images), model.forward_head(model.norm(x)))


# -- insert and remove -----------------------------------------------------------------------------


def test_what_was_learned_stays_and_mode_device_and_dtype_are_the_blocks() -> None:
    model = copy.deepcopy(plain("timm class")).float().train()
    better = insert(model, tap=TAP())
    assert better.blocks[0].tap.training and better.blocks[0].tap.predict[0].weight.dtype == torch.float32
    with torch.no_grad():
        better.blocks[1].mlp.fc1.weight.add_(1)
    assert torch.equal(remove(better).blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight + 1)
    for twin in (copy.deepcopy(better), pickle.loads(pickle.dumps(better))):
        with torch.no_grad():
            better.blocks[0].tap.predict[0].weight.mul_(1.5)  # the copies have their own
        x = images_of(model)
        assert not torch.equal(better.eval()(x), twin.eval()(x))
        assert len(inserted(twin)) == len(better.blocks) and not inserted(remove(twin))


@pytest.mark.filterwarnings("ignore")  # torch's own, of tracing
def test_a_model_with_modules_can_be_traced() -> None:
    model = insert(tiny("class").eval(), tap=TAP(), cb=CB("scaled", init=0.5))
    images = torch.randn(2, *sg.adapt(model).plan.input_size, dtype=torch.float64)
    assert torch.allclose(torch.jit.trace(model, images)(images), model(images))


@pytest.mark.parametrize(
    ("allocation", "blocks"),
    [
        ("all", [0, 1, 2]),
        ("shallow", [0, 1]),
        ("deep", [2]),
        ((1,), [1]),
        ([0, -1], [0, 2]),
        (range(2), [0, 1]),
    ],
)
def test_allocation(allocation: Any, blocks: list[int]) -> None:
    model = plain("transformers ViT")
    for options, child in (
        ({"tap": TAP(allocation=allocation)}, "tap"),
        ({"cb": CB(allocation=allocation)}, "cb_mlp"),
    ):
        better = insert(model, **options)  # type: ignore[arg-type]
        assert [i for i, b in enumerate(sg.adapt(better).blocks) if hasattr(b.module, child)] == blocks
        assert len(inserted(better)) == len(blocks)


def test_one_after_the_other() -> None:
    model = plain("timm class")
    both = insert(insert(model, tap=TAP(allocation=(0,))), cb=CB())
    assert {n.rpartition(".")[2] for n in inserted(both)} == {"tap", "cb_mlp"}
    insert(both, tap=TAP(allocation=(1,)))
    with pytest.raises(InputError, match=r"contains TAP\(.*remove"):
        insert(both, tap=TAP())


def test_cost_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = plain("timm class")
    vit = sg.adapt(model)
    width, patches, depth = model.embed_dim, vit.grid[0] * vit.grid[1], len(vit.blocks)
    with caplog.at_level(logging.INFO, "steadygaze.modules"):
        better = insert(model, tap=TAP(), cb=CB(variant="scaled"))
    added = sum(p.numel() for p in better.parameters()) - sum(p.numel() for p in model.parameters())
    found = cost(better)
    assert found.parameters == added == depth * (36 * width + 152 + width)
    assert found.multiply_adds == depth * (36 * width + 144) * patches
    pools = (27 + 7) * width * patches  # three means of nine, and a weighted sum of four
    tokens = patches + vit.prefix
    assert found.operations == 2 * found.multiply_adds + depth * (pools + 2 * tokens * width)
    assert f"+{added} parameters" in caplog.text
    assert f"TAP(kind='dilated', branches=4, temperature=1.0) as tap in {depth} of {depth}" in caplog.text
    assert f"+{found.operations / 1e9:.4g} GFLOP" in caplog.text and "+0.0000" not in caplog.text


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TAP(branches=1), InputError, "branches"),
        (lambda: TAP(temperature=0), InputError, "temperature"),
        (lambda: TAP(kind="dilatd"), UnknownNameError, "dilated"),
        (lambda: TAP(allocation="shalow"), UnknownNameError, "shallow"),
        (lambda: TAP(allocation=()), InputError, "block indices"),
        (lambda: CB(variant="gated"), UnknownNameError, "gate"),
        (lambda: CB(position="middle"), UnknownNameError, "mid"),
        (lambda: CB(where="attention"), UnknownNameError, "msa"),
        (lambda: CB(init=float("nan")), InputError, "init"),
        (lambda: insert(plain("timm class")), InputError, "a module to insert"),
        (lambda: insert(plain("timm class"), tap=CB()), InputError, "tap: expected"),
        (lambda: insert(plain("timm class"), tap=TAP(allocation=(7,))), InputError, "from 0 to"),
        (
            lambda: insert(
                timm.create_model("vit_tiny_patch16_224", depth=1, patch_drop_rate=0.75), tap=TAP()
            ),
            InputError,
            "drops 75%",
        ),
        (lambda: insert(plain("transformers SigLIP"), cb=CB("gate")), InputError, "class token"),
        (lambda: insert(plain("timm registers, mean"), cb=CB("hybrid")), InputError, "class token"),
        (lambda: insert(plain("Swin"), cb=CB("gate")), InputError, "class token"),
        (lambda: insert(nn.Linear(2, 2), cb=CB()), UnsupportedModelError, "vision transformer"),
        (lambda: insert("deit", cb=CB()), InputError, "torch.nn.Module"),
        (
            lambda: insert(zoo.plain("vit_small_patch16_18x2_224")[0], cb=CB()),
            UnsupportedModelError,
            "ParallelThingsBlock",
        ),
        (
            lambda: insert(zoo.hierarchical("swinv2_tiny_window8_256", "swin_transformer_v2")[0], tap=TAP()),
            UnsupportedModelError,
            "windows",
        ),
        (
            lambda: pooling_site(type("HieraBlock", (nn.Module,), {})()),
            UnsupportedModelError,
            "order of mask units",
        ),
        (
            lambda: pooling_site(type("MultiScaleBlock", (nn.Module,), {})()),
            UnsupportedModelError,
            "pools inside",
        ),
        (lambda: pooling_site(nn.Linear(2, 2)), UnsupportedModelError, "no attention"),
    ],
)
def test_bad_input(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_images_of_another_shape_are_refused_where_the_grid_would_be_guessed() -> None:
    model = plain("PVT v2")
    _, height, width = sg.adapt(model).plan.input_size
    better = insert(model, tap=TAP())
    larger = torch.randn(1, 3, 2 * height, 2 * width, dtype=torch.float64)
    assert better(larger).shape == (1, zoo.CLASSES)
    with pytest.raises(InputError, match="wrong grid"):
        better(larger.transpose(2, 3))
    with pytest.raises(InputError, match="same aspect ratio"):
        better.stages[0].blocks[0].tap(torch.randn(1, 7, 16, dtype=torch.float64))
    remove(better)(larger.transpose(2, 3))


def test_post_norm_blocks_pool_before_attention() -> None:
    model = zoo.plain("vit_base_patch16_rpn_224")[0]
    better = trained(insert(model, tap=TAP(branches=2)))
    x, block = block_inputs(better)[0], sg.adapt(better).blocks[0]
    close(
        given(block.module.attn, lambda: block(x)),
        oracle.tap(x, block.module.tap, sg.adapt(model).prefix, sg.adapt(model).grid),
    )
