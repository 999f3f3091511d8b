"""RVT, FAN, PVT v1 and LocalViT: parameter counts, timm registration, views, explanations, TAP and CB."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import steadygaze as sg
from benchmarks import checks, zoo
from helpers.losses import SMALL, small
from helpers.tiers import tiered
from steadygaze import models
from steadygaze.loading.load import list_models
from steadygaze.models.fan import ConvNeXtBlock, ConvNeXtStem
from steadygaze.modules import CB, TAP, insert, remove
from steadygaze.vit.masking import masked_logits

COUNTED = {  # parameters, with TAP in every block, multiply-adds in thousand millions
    "rvt_tiny": (8_646_376, 8_744_968, 1.284),
    "rvt_tiny_plus": (10_951_336, 11_049_928, 1.284),
    "rvt_small": (22_148_392, 22_316_104, 4.645),
    "rvt_small_plus": (23_300_872, 23_468_584, 4.645),
    "rvt_base": (86_223_784, None, 17.491),
    "rvt_base_plus": (88_528_744, None, 17.491),
    "fan_tiny_12_p16_224": (7_319_920, 7_404_688, 1.474),
    "fan_small_12_p16_224": (28_345_336, 28_513_048, 5.457),
    "fan_base_18_p16_224": (54_350_320, 54_643_360, 10.656),
    "fan_large_24_p16_224": (80_574_100, 80_992_468, 15.959),
    "fan_tiny_8_p4_hybrid": (7_467_240, 7_523_752, 3.638),
    "fan_small_12_p4_hybrid": (26_117_944, 26_257_704, 6.983),
    "fan_base_16_p4_hybrid": (50_475_048, 50_735_528, 11.768),
    "fan_large_16_p4_hybrid": (76_855_140, 77_238_644, 17.683),
    "pvt_tiny": (13_229_288, None, 1.933),
    "pvt_small": (24_485_864, None, 3.816),
    "localvit_tiny_mlp4_act3_r192": (5_908_696, None, 1.266),
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", tiered(COUNTED, ["rvt_base_plus", "pvt_tiny", "fan_tiny_8_p4_hybrid"]))
def test_as_large_as_counted(name: str) -> None:
    wanted, with_tap, gmac = COUNTED[name]
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert parameters(model) == wanted
    assert counter.get_total_flops() / 2e9 == pytest.approx(
        gmac, abs=3.5e-3 if name.startswith("fan") else 6e-4
    )
    if with_tap is not None:
        blocks = model.blocks if hasattr(model, "blocks") else [b for stage in model.stages for b in stage]
        assert wanted + sum(36 * b.norm1.normalized_shape[0] + 152 for b in blocks) == with_tap


def test_rvt_base_as_tap_was_measured_on_it() -> None:
    with torch.device("meta"):
        assert parameters(timm.create_model("rvt_base", conv_ffn=True)) == 86_758_312


def test_names_are_known() -> None:
    assert set(models.names()) == set(COUNTED) and all(timm.is_model(name) for name in COUNTED)
    assert set(COUNTED) <= {info.name for info in list_models() if info.library == "steadygaze"}
    with pytest.raises(sg.CheckpointError, match="rvt_tiny"):
        sg.load_model("rvt_tiny")  # there are no weights to fetch


@pytest.mark.parametrize(
    "name", tiered(SMALL, ["rvt_tiny", "pvt_tiny", "fan_tiny_12_p16_224", "localvit_tiny_mlp4_act3_r192"])
)
def test_viewed_with_and_without_modules(name: str) -> None:
    model = small(name)
    images = zoo.image_of(model, sg.adapt(model).plan.input_size, batch=2)
    prefixed = name == "pvt_tiny"
    for kind in (model, insert(model, tap=TAP(branches=3), cb=CB("scaled", where="both")).eval()):
        found = checks.check(kind)
        assert float(found["logits"]) <= 1e-12 and float(found["decompx"]) <= 1e-10, found
        assert found["removal"] == "not removable" or (
            name == "rvt_base" and kind is model and float(found["removal"]) <= 1e-10
        )
        vit = sg.adapt(kind)
        tokens = vit.embed(images)
        some = torch.rand(2, *vit.grid, generator=torch.Generator().manual_seed(0)) > 0.4
        some[:, 0, 0] = True
        with torch.no_grad():
            hidden = masked_logits(vit, tokens, some)
            assert torch.isfinite(hidden).all()
            everything = masked_logits(vit, tokens, torch.ones_like(some))
            assert torch.allclose(everything, vit.logits(tokens), atol=1e-9) and not torch.allclose(
                hidden, everything
            )
        assert vit.prefix == int(prefixed or name.startswith("localvit"))
        assert sg.explain(kind, images).scores.shape == (2, *vit.grid)
    assert torch.equal(remove(kind)(images), model(images))


@pytest.mark.full
@pytest.mark.parametrize("name", ["rvt_small", "fan_tiny_12_p16_224", "localvit_tiny_mlp4_act3_r192"])
def test_every_method_answers_or_says_why_not(name: str) -> None:
    model = small(name)
    images = zoo.image_of(model, sg.adapt(model).plan.input_size)
    for info in sg.list_methods():
        if info.cost > 50:
            continue
        try:
            scores = sg.explain(model, images, method=info.name).scores
        except sg.MethodUnavailableError as error:
            assert "steadygaze" in str(error) or "defined for" in str(error), error
            continue
        assert scores.shape == (1, *sg.adapt(model).grid) and torch.isfinite(scores).all(), info.name


def test_they_train_and_change_their_head() -> None:
    for name in ("rvt_tiny", "fan_tiny_12_p16_224", "pvt_tiny", "localvit_tiny_mlp4_act3_r192"):
        model = timm.create_model(name, num_classes=3, drop_path_rate=0.2, **SMALL[name])
        model(torch.randn(2, 3, *sg.adapt(model).plan.input_size[1:])).logsumexp(1).sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters()), name
        model.reset_classifier(5)
        assert model(torch.randn(2, 3, *sg.adapt(model).plan.input_size[1:])).shape == (2, 5)


def test_fan_class_block_by_hand() -> None:
    """z ← z + γ₁[a; u]; z ← w + [γ₂ MLP(w₀); w]: patches come out as twice the norm."""
    block = small("fan_tiny_12_p16_224").cls_blocks[0]
    z = torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        u = block.norm1(z)
        q, k, v = block.attn.q(u[:, :1]), block.attn.k(u), block.attn.v(u)
        heads = [
            torch.softmax(q[..., s] @ k[..., s].mT / 8**0.5, -1) @ v[..., s]
            for s in (slice(0, 8), slice(8, 16))
        ]
        z1 = z + block.gamma1 * torch.cat([block.attn.proj(torch.cat(heads, -1)), u[:, 1:]], 1)
        w = block.norm2(z1)
        assert torch.allclose(block(z)[:, 1:], 2 * w[:, 1:])
        assert torch.allclose(block(z)[:, :1], w[:, :1] + block.gamma2 * block.mlp(w[:, :1]))


def test_fan_channel_attention_by_hand() -> None:
    eca = small("fan_tiny_12_p16_224").blocks[0].mlp
    u = torch.randn(1, 20, 16, dtype=torch.float64)
    with torch.no_grad():
        t = eca.fc1(u)
        t = t + eca.gamma * eca.local(t, (4, 5))
        v = eca.norm_v(eca.fc2(t))
        for h in range(2):
            part = slice(8 * h, 8 * h + 8)
            q = torch.softmax(eca.q(u)[0, :, part], 0)
            k = torch.softmax(u[0, :, part], 0).mean(1)
            s = eca.temperature[h, 0, 0] * torch.sigmoid(q.T @ k)
            assert torch.allclose(eca(u, (4, 5))[0, :, part], s * v[0, :, part])


def test_rvt_scaled_attention_by_hand() -> None:
    attention = small("rvt_base_plus").stages[0][0].attn
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = attention.qkv(x).chunk(3, -1)
        parts = [slice(0, 8), slice(8, 16)]
        heads = [
            torch.softmax(q[..., s] @ k[..., s].mT / 8**0.5 * torch.sigmoid(attention.scaling[h]), -1)
            @ v[..., s]
            for h, s in enumerate(parts)
        ]
        assert torch.allclose(attention(x), attention.proj(torch.cat(heads, -1)))


def test_fan_hybrid_normalizes_as_the_authors_on_request() -> None:
    """Their norm uses the unbiased variance if its input is not contiguous: in every norm but the first."""

    class AuthorsNorm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_contiguous():
                return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            variance, mean = torch.var_mean(x, dim=1, keepdim=True)
            x = (x - mean) / (variance + self.eps).sqrt()
            return x * self.weight[:, None, None] + self.bias[:, None, None]

    torch.manual_seed(0)
    stem = ConvNeXtStem(24, (2, 1), channels=(8, 16), unbiased_norm=True).double()
    for parameter in stem.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = copy.deepcopy(stem)
    for parent in [m for m in theirs.modules() if isinstance(m, ConvNeXtBlock | nn.Sequential)]:
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                norm = AuthorsNorm(child.normalized_shape, eps=1e-6).double()
                norm.load_state_dict(child.state_dict())
                setattr(parent, name, norm)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    plain = ConvNeXtStem(24, (2, 1), channels=(8, 16)).double()
    plain.load_state_dict(stem.state_dict())
    with torch.no_grad():
        assert torch.allclose(stem(images), theirs(images), atol=1e-12)
        assert not torch.allclose(plain(images), theirs(images), atol=1e-3)
    assert timm.create_model("fan_tiny_8_p4_hybrid", unbiased_norm=True) is not None


def test_pvt_decays_its_position_embedding_as_the_authors_do() -> None:
    model = timm.create_model("pvt_tiny")
    assert {name.rpartition(".")[2] for name in model.no_weight_decay()} == {"cls_token"}
