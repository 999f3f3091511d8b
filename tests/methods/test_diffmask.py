"""Vision DiffMask: hard concrete, gates and map against slow formulas; one training step.

What a model is left as.
"""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from oracles import vit as oracle
from oracles.models import DEFAULT_KINDS, KINDS, random_images, tiny
from steadygaze.methods.diffmask import DiffMask, HardConcrete, Shape, blank, masked, read_file, write
from steadygaze.methods.learned import with_files
from steadygaze.training.diffmask import (
    ALL_OFF,
    ALL_ON,
    DivergenceMonitor,
    Settings,
    StepReport,
    Trainer,
    divergence,
)

CONCRETE = HardConcrete()


def quick(**changes) -> Settings:
    return Settings(
        **{"warmup": 1, "gate_rate": 1e-2, "baseline_rate": 1e-2, "shift": 1.0, "batch": 2, **changes}
    )


def trainer(model, settings=None, images=None):
    images = tiny_models.images_of(model) if images is None else images
    return Trainer(sg.adapt(model), settings or quick()), images


def saved(path, model, seed=0, **facts):
    """A file with random gates for this model, spread around one half."""
    made, _ = trainer(model, quick(seed=seed, stretch=6.0))
    write(path, made.learned, facts)
    return str(path)


# -- hard concrete ---------------------------------------------------------------------------------


@pytest.mark.parametrize("u", [-3.0, -0.5, 0.0, 0.7, 2.0])
def test_hard_concrete_by_monte_carlo(u: float) -> None:
    """P(z ≠ 0) and E[z] of a million draws."""
    uniform = torch.rand(1_000_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = CONCRETE.sample(torch.full_like(uniform, u), uniform)
    assert z.min() >= 0 and z.max() <= 1
    assert (
        abs(float((z > 0).double().mean()) - float(CONCRETE.log_probability(torch.tensor(u)).exp())) < 0.002
    )
    assert abs(float(z.mean()) - float(CONCRETE.expected(torch.tensor(u, dtype=torch.float64)))) < 0.002


def test_hard_concrete_in_closed_form() -> None:
    u = torch.linspace(-12, 12, 49, dtype=torch.float64)
    assert torch.allclose(CONCRETE.log_probability(u).exp(), torch.sigmoid(u + 0.2 * np.log(5)), atol=1e-12)
    t = (np.arange(200_000) + 0.5) / 200_000  # midpoint rule over P(z > t)
    a = np.log((t + 0.2) / 1.2) - np.log(1 - (t + 0.2) / 1.2)
    dense = np.array([(1 / (1 + np.exp(0.2 * a - x))).mean() for x in u.tolist()])
    assert np.allclose(CONCRETE.expected(u).numpy(), dense, rtol=1e-6, atol=0)
    zero = torch.zeros((), dtype=torch.float64)
    assert (
        abs(float(CONCRETE.expected(zero)) - 0.474) < 5e-4
        and abs(float(CONCRETE.log_probability(zero).exp()) - 0.580) < 5e-4
    )
    other = HardConcrete(0.5, -0.1, 1.1)
    draws = other.sample(
        torch.full((400_000,), 0.4), torch.rand(400_000, generator=torch.Generator().manual_seed(2))
    )
    assert (
        abs(float((draws > 0).double().mean()) - float(other.log_probability(torch.tensor(0.4)).exp()))
        < 0.003
    )
    assert abs(float(draws.mean()) - float(other.expected(torch.tensor(0.4)))) < 0.003
    assert float((draws == 1).double().mean()) > 0.1, "stretched past 1 it is exactly one, too"


# -- the map ---------------------------------------------------------------------------------------


def naive(model, images: Tensor, mask: DiffMask, read: str) -> Tensor:
    """Π_l of the gates, one number after the other."""
    content = oracle.embed(model, images) - oracle.embed(model, torch.zeros_like(images[:1]))
    hidden = [content, *oracle.run(model, oracle.embed(model, images)).x]
    weights, out = mask.state_dict(), torch.ones(len(images), content.shape[1], dtype=torch.float64)
    for l, h in enumerate(hidden):
        for b in range(len(images)):
            for n in range(content.shape[1]):
                x = torch.cat([content[b, n], h[b, n]])
                for layer in ("first", "second"):
                    g, v = (weights[f"gates.{l}.{layer}.parametrizations.weight.original{i}"] for i in (0, 1))
                    x = torch.tanh(
                        (g * v / (v**2).sum(1, keepdim=True).sqrt()) @ x + weights[f"gates.{l}.{layer}.bias"]
                    )
                u = mask.shape.stretch * x[0] + weights[f"gates.{l}.shift"]
                out[b, n] *= (
                    torch.sigmoid(u + 0.2 * np.log(5)) if read == "probability" else CONCRETE.expected(u)
                )
    return out[:, model.num_prefix_tokens :]


@pytest.mark.parametrize("kind", tiered(KINDS, DEFAULT_KINDS))
@pytest.mark.parametrize("read", ["expected", "probability"])
def test_map_by_naive_loops(kind: str, read: str, tmp_path) -> None:
    model = tiny(kind)
    file, images = saved(tmp_path / "m.safetensors", model), random_images(model)
    mask = read_file(file)[0].double()
    got = sg.explain(model, images, method=sg.method("diffmask", file=file, read=read)).scores
    wanted = naive(model, images, mask, read)
    assert torch.allclose(got.flatten(1), wanted, rtol=1e-9, atol=1e-14)
    assert wanted.min() >= 0 and wanted.max() <= 1 and wanted.std() > 0.01


def test_one_forward_pass(tmp_path) -> None:
    """Alone, and riding along with methods that have a pass of their own."""
    model = tiny()
    file, images, calls = saved(tmp_path / "m.safetensors", model), random_images(model), []
    hooks = [block.register_forward_hook(lambda *_: calls.append(1)) for block in model.blocks]
    alone = sg.explain(model, images, method=sg.method("diffmask", file=file)).scores
    assert len(calls) == len(model.blocks)
    calls.clear()
    both = sg.explain(model, images, method=["ixg", sg.method("diffmask", file=file)])
    assert len(calls) == len(model.blocks)
    for hook in hooks:
        hook.remove()
    assert torch.allclose(both[f"diffmask:file={file}"].scores, alone, atol=1e-12)
    double = sg.explain(
        model, images, target=[[0, 1], [2, 3]], method=sg.method("diffmask", file=file)
    ).scores
    assert torch.equal(double[:, 0], alone) and torch.equal(double[:, 1], alone)


MAKES = (
    "registers",
    "average",
    "distilled DeiT",
    "attention pool (SigLIP)",
    "EVA-02 tiny (rotary, SwiGLU)",
    "BEiT",
    "CaiT",
    "relative positions",
    "torchvision",
    "transformers ViT",
    "transformers DINOv3",
    "Swin",
    "PVT v2",
    "Hiera",
)


@pytest.mark.parametrize(
    "name", tiered(MAKES, ["registers", "EVA-02 tiny (rotary, SwiGLU)", "transformers DINOv3", "Swin"])
)
def test_any_vit(name: str, tmp_path) -> None:
    """z = 1 changes nothing; z = 0 leaves nothing of the image; a step trains; the file explains."""
    model = tiny_models.ALL[name]()
    made, images = trainer(model)
    vit = made.vit
    with torch.no_grad():
        tokens, empty = vit.embed(images), blank(vit, images)
        prefix = vit.prefix if vit.plan.global_attention else 0
        ones = torch.ones(len(images), prefix + vit.grid[0] * vit.grid[1], dtype=tokens.dtype)
        assert torch.equal(masked(vit, tokens, empty, ones, made.learned.baseline), tokens)
        gone = vit.logits(masked(vit, tokens, empty, 0 * ones, made.learned.baseline))
    assert torch.allclose(gone[0], gone[1], atol=1e-9) and not torch.allclose(gone, vit(images), atol=1e-4)
    before = [p.detach().clone() for p in made.learned.parameters()]
    for _ in range(3):
        report = made.step(images)
    assert all(np.isfinite([report.kl, report.l0])) and report.kl >= -1e-9 and 0 <= report.l0 <= 1
    assert any(not torch.equal(a, b) for a, b in zip(before, made.learned.parameters(), strict=True))
    write(tmp_path / "m.safetensors", made.learned, {})
    scores = sg.explain(
        model, images, method=sg.method("diffmask", file=str(tmp_path / "m.safetensors"))
    ).scores
    assert scores.shape == (len(images), *vit.grid) and scores.min() >= 0 and scores.max() <= 1


# -- the objective ---------------------------------------------------------------------------------


def test_divergence() -> None:
    p, q = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    of = torch.distributions
    assert torch.allclose(
        divergence(p, q), of.kl_divergence(of.Categorical(logits=p), of.Categorical(logits=q))
    )
    classes = torch.tensor([0, 6, 3, 3])
    a, b = (x.softmax(-1)[torch.arange(4), classes] for x in (p, q))
    assert torch.allclose(divergence(p, q, classes), of.kl_divergence(of.Bernoulli(a), of.Bernoulli(b)))
    sure = torch.tensor([[60.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.isfinite(divergence(sure, -sure, torch.tensor([0]))).all()


@pytest.mark.parametrize("l0", ["norm", "log"])
@pytest.mark.parametrize("tokens", ["patches", "all"])
def test_loss_and_gradient_by_hand(l0: str, tokens: str) -> None:
    """λ (KL − m) + L0 of one step, from the pieces."""
    model = tiny()
    settings = quick(l0=l0, tokens=tokens)
    made, _ = trainer(model, settings, random_images(model))
    images = random_images(model)
    again = copy.deepcopy(made.learned)
    layer_of = torch.Generator().manual_seed(settings.seed)
    layer = int(torch.multinomial(torch.ones(5, dtype=torch.float64), 1, generator=layer_of))
    x, empty = oracle.embed(model, images), oracle.embed(model, torch.zeros_like(images[:1]))
    state = oracle.run(model, x)
    content = torch.cat([model.cls_token.detach().expand(len(x), -1, -1), (x - empty)[:, 1:]], 1)
    hidden = [content, *state.x]
    u = torch.stack([again.gates[k](torch.cat([hidden[0], hidden[k]], -1)) for k in range(layer + 1)], -1)
    uniform = torch.rand(u.shape, generator=layer_of, dtype=torch.float32).double()
    z = CONCRETE.sample(u, uniform).prod(-1)
    kept = x.clone()
    for n in range(1, x.shape[1]):
        kept[:, n] = (
            empty[:, n] + z[:, n, None] * hidden[0][:, n] + (1 - z[:, n, None]) * again.baseline[0, 0]
        )
    kl = divergence(state.logits, oracle.run(model, kept).logits).mean()
    open_ = torch.sigmoid(u + 0.2 * np.log(5)).prod(-1)[:, 1 if tokens == "patches" else 0 :]
    loss = settings.dual_start * (kl - settings.margin) + (open_ if l0 == "norm" else open_.log()).mean()
    loss.backward()
    report = made.step(images)
    assert report.layer == layer and abs(report.kl - kl.item()) < 1e-9
    for (name, a), b in zip(again.named_parameters(), made.learned.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-10), name


@pytest.mark.parametrize(
    ("margin", "dual", "rises"), [(-1.0, "ascent", True), (-1.0, "reference", False), (1e6, "ascent", False)]
)
def test_dual_ascent(margin: float, dual: str, rises: bool) -> None:
    """λ rises while the constraint is broken (here: always, or never); with the reference's sign it falls."""
    model = tiny()
    made, images = trainer(model, quick(margin=margin, dual=dual, sync_every=10**9), random_images(model))
    seen = {}
    for _ in range(12):
        report = made.step(images)
        seen.setdefault(report.layer, []).append(report.dual)
    for layer, values in seen.items():
        whole = [20.0, *values]
        steps = np.diff(whole)
        assert (steps > 0).all() if rises else (steps < 0).all(), layer
        assert np.allclose(np.abs(steps), 0.3, atol=0.02), "one rate a step of Adam"
    made, _ = trainer(model, quick(margin=margin, dual=dual, dual_rate=500.0), random_images(model))
    for _ in range(4):
        report = made.step(images)
        assert report.dual == (200.0 if rises else 0.0), "clamped"


def test_lookahead_and_warmup() -> None:
    """After k steps the weights stand half way between where they began and where Adam had gone."""
    model, ends = tiny(), {}
    images = random_images(model)
    for name, change in {
        "fast": {"sync_every": 99},
        "slow": {},
        "late": {"slow": "first_sync"},
        "cold": {"warmup": 10**9},
    }.items():
        made, _ = trainer(model, quick(**{"sync_every": 3, **change}), images)
        start = [p.detach().clone() for p in made.learned.parameters()]
        for _ in range(3):
            made.step(images)
        ends[name] = [p.detach().clone() for p in made.learned.parameters()]
        moved = [p.grad is not None for p in made.learned.parameters()]
    for a, synced, fast, slow, late, cold in zip(start, moved, *ends.values(), strict=True):
        wanted = a + 0.5 * (fast - a) if synced else fast
        assert torch.allclose(slow, wanted, atol=1e-12) and torch.equal(late, fast)
        assert torch.allclose(cold, a, atol=1e-6)


@pytest.mark.full
def test_gates_may_begin_open() -> None:
    """u = β for every patch, so the answer is untouched.

    Drawn weights close patches by chance where hidden states are large.
    """
    model, ends = tiny(), {}
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(8)
    images = random_images(model, 8)
    for begin in ("open", "drawn"):
        made, _ = trainer(model, Settings(begin=begin, warmup=1, gate_rate=1e-2), images)
        ends[begin] = made.evaluate(images)
        before = [p.detach().clone() for p in made.learned.parameters()]
        for _ in range(25):
            made.step(images)
        moved = [not torch.equal(a, b) for a, b in zip(before, made.learned.parameters(), strict=True)]
        assert all(moved), "no weight is out of reach of training"
    chance = (1 / (1 + np.exp(-8 - 0.2 * np.log(5)))) ** 5  # of five gates
    assert abs(ends["open"].l0 - chance) < 1e-6 and ends["open"].kl < 1e-3 and ends["open"].accuracy == 1
    assert ends["drawn"].l0 < 0.9


def test_layers_are_drawn() -> None:
    model = tiny()
    for kind in ("uniform", "weighted"):
        made, _ = trainer(model, quick(layers=kind), random_images(model))
        made.layer_steps[:] = 101
        made.layer_means[:3] = torch.tensor([0.9, 0.05])  # right and sparse
        drawn = np.bincount([made._draw_layer() for _ in range(3000)], minlength=5) / 3000
        wanted = np.full(5, 0.2) if kind == "uniform" else np.array([0.1, 0.1, 0.1, 1, 1]) / 2.3
        assert np.abs(drawn - wanted).max() < 0.04


def test_the_model_comes_back_unchanged() -> None:
    model = tiny().train()
    model.head.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wants, modes = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    made, images = trainer(model, images=random_images(model))
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    made.step(images)
    made.evaluate(images)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == wants and [
        m.training for m in model.modules()
    ] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.full
def test_it_learns_what_is_not_needed() -> None:
    """Gates close for a model that does not look at the image.

    For one that does, they learn to keep its answer.
    """
    ends = {}
    for blind in (True, False):
        model = tiny()
        if blind:
            with torch.no_grad():
                for block in model.blocks:
                    block.attn.proj.weight.zero_()  # the class token never sees a patch
        made, _ = trainer(model, quick(stretch=4.0, shift=2.0), random_images(model))
        data = random_images(model, 8)
        began = made.evaluate(data)
        for _ in range(40):
            made.step(data)
        ends[blind] = (began, made.evaluate(data))
    (began, ended), (blurred, seen) = ends[True], ends[False]
    assert began.l0 > 0.2 and ended.l0 < 0.3 * began.l0 and abs(ended.kl) < 1e-12 and ended.accuracy == 1
    assert seen.l0 > 3 * ended.l0 and seen.kl < 0.5 * blurred.kl


# -- settings, watch, files ------------------------------------------------------------------------


def test_settings() -> None:
    assert Settings(preset="imagenet").stretch == 20
    assert Settings(preset="imagenet", stretch=17.0).batch == 128
    assert Settings(preset="imagenet, reference") == Settings(
        preset="imagenet", dual="reference", l0="log", tokens="all", slow="first_sync"
    )
    paper = Settings()
    assert (paper.stretch, paper.shift, paper.margin, paper.dual_start, paper.dual_limit) == (
        15,
        8,
        0.1,
        20,
        200,
    )
    assert (paper.gate_rate, paper.baseline_rate, paper.dual_rate, paper.warmup, paper.batch) == (
        2e-5,
        1e-3,
        0.3,
        1200,
        16,
    )
    assert (paper.sync_every, paper.sync_share, paper.temperature, paper.left, paper.right) == (
        6,
        0.5,
        0.2,
        -0.2,
        1.0,
    )
    for wrong in (
        {"dual": "descent"},
        {"l0": "l1"},
        {"target": 3, "kl": "all"},
        {"restart_with": "luck"},
        {"left": 0.1},
        {"gate_rate": -1e-3},
        {"dual_rate": float("nan")},
    ):
        with pytest.raises(sg.SteadygazeError):
            Settings(**wrong)
    with pytest.raises(sg.UnknownNameError, match="preset"):
        Settings(preset="mnist")
    assert Settings(target=3).kl == "class"
    assert trainer(tiny())[0].restarted(0) is None
    for restart_with, stretch in (("seed", 15), ("stretch", 20)):
        made, _ = trainer(tiny(), Settings(restarts=1, restart_with=restart_with))
        assert (made.restarted(0).seed, made.restarted(0).stretch) == (1, stretch)


def test_watch() -> None:
    def seen(l0, count, grace=10, kl=0.0, patience=5):
        watch = DivergenceMonitor(grace, patience)
        return [watch(StepReport(0, kl, l0, 20.0, 1.0), step + 1) for step in range(count)]

    low, high = ALL_OFF, ALL_ON
    assert seen(high + 0.01, 15)[-1] == "the masks have been all on for 5 steps" and not any(
        seen(high + 0.01, 14)
    )
    assert seen(low / 2, 5)[-1] == "the masks have been all off for 5 steps" and not any(seen(low / 2, 4))
    assert not any(seen(0.5, 50)) and "not finite" in seen(0.5, 1, kl=float("nan"))[0]
    watch = DivergenceMonitor(0, 3)
    answers = [watch(StepReport(0, 0.0, l0, 1.0, 1.0), 9) for l0 in (1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0)]
    assert answers[-1] and not any(answers[:-1]), "only what lasts is a divergence"


def test_files(tmp_path, monkeypatch) -> None:
    model, path = tiny(), tmp_path / "new" / "m.safetensors"
    file = saved(path, model, note=1)
    mask, facts, rest = read_file(file)
    assert facts == {"note": 1} and rest == {} and not list(path.parent.glob(".*.part"))
    assert mask.shape == Shape((24,) * 5, 6.0, 1.0) and not any(p.requires_grad for p in mask.parameters())
    whole = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "full")

    with monkeypatch.context() as patched:
        patched.setattr("steadygaze.files.os.fsync", full)
        with pytest.raises(OSError):
            write(path, mask, {})
    assert path.read_bytes() == whole, "a failed write leaves the old file"
    torch.save({"mask": torch.zeros(1)}, tmp_path / "pickle.pt")
    (tmp_path / "short.safetensors").write_bytes(whole[:100])
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, message in (
        ("none", "no such file"),
        ("pickle.pt", "not a readable"),
        ("short.safetensors", "not a readable"),
        ("other.safetensors", "holds no gates"),
    ):
        with pytest.raises(sg.CheckpointError, match=message):
            sg.explain(model, random_images(model), method=sg.method("diffmask", file=str(tmp_path / name)))


def test_what_a_mask_cannot_explain(tmp_path) -> None:
    model = tiny()
    images = random_images(model)
    with pytest.raises(
        sg.MethodUnavailableError, match=r"diffmask: it needs gates.*steadygaze diffmask train"
    ):
        sg.explain(model, images, method="diffmask")
    file = saved(tmp_path / "m.safetensors", model)
    for other in (tiny(depth=2), tiny(embed_dim=32)):
        with pytest.raises(
            sg.MethodUnavailableError, match="was trained for tokens of width 24 and 3 blocks"
        ):
            sg.explain(other, images, method=sg.method("diffmask", file=file))
    with pytest.raises(sg.UnknownNameError, match="read"):
        sg.explain(model, images, method=sg.method("diffmask", file=file, read="sample"))
    one = saved(tmp_path / "one.safetensors", model, settings={"target": 3})
    assert sg.explain(model, images, target=3, method=sg.method("diffmask", file=one)).scores.shape == (
        2,
        4,
        4,
    )
    with pytest.raises(sg.MethodUnavailableError, match="class 3 alone"):
        sg.explain(model, images, target=[3, 1], method=sg.method("diffmask", file=one))
    bad = saved(tmp_path / "bad.safetensors", model, diverged="the masks are all on")
    with pytest.warns(UserWarning, match=r"bad.safetensors diverged in training: the masks are all on"):
        sg.explain(model, images, method=sg.method("diffmask", file=bad))


def test_files_of_learned_methods() -> None:
    """--diffmask FILE: the method keeps its short name, reads the file, and is added where it was not
    named.
    """
    assert with_files(["gaze", "diffmask"], {"diffmask": None}) == ["gaze", "diffmask"]
    gaze, gated = with_files(["gaze"], {"diffmask": "f", "vit_shapley": None})
    assert gaze == "gaze" and gated.name == "diffmask" and gated.option("file") == "f"
    (read,) = with_files(["diffmask:read=probability"], {"diffmask": "f"})
    assert (
        read.name == "diffmask:read=probability"
        and read.option("file") == "f"
        and read.option("read") == "probability"
    )
    (own,) = with_files([sg.method("diffmask", file="g")], {"diffmask": "f"})
    assert own.option("file") == "g"
    both = with_files(["vit_shapley"], {"diffmask": "f", "vit_shapley": "s"})
    assert [(m.name, m.option("file")) for m in both] == [("vit_shapley", "s"), ("diffmask", "f")]
