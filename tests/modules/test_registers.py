"""Test-time registers: against their authors' way, in models of every library, in files, and in the view."""

import copy
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import steadygaze as sg
from helpers.inserted import MODELS, images_of, plain
from helpers.tiers import tiered
from oracles import registers as oracle
from oracles.models import KINDS, tiny
from steadygaze.errors import CheckpointError, InputError, SteadygazeError, UnsupportedModelError
from steadygaze.modules import CB, TAP, Registers, insert, inserted, remove, restore
from steadygaze.trace import Seam, Want
from steadygaze.vit.outputs import logits_of

NEURONS = ((0, 3), (0, 7), (2, 5), (0, 1))
REFUSED = {  # model -> a word of the reason
    "EVA-02": "rotary",
    "BEiT": "relative",
    "relative positions": "relative",
    "PiT": "grids",
    "PVT v2": "grids",
    "Swin": "grids",
    "transformers BEiT": "relative",
    "transformers Data2Vec": "relative",
    "transformers DINOv3": "rotary",
}


def images(model: torch.nn.Module, batch: int = 3) -> Tensor:
    size = model.patch_embed.img_size  # type: ignore[union-attr]
    return torch.randn(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maximum", ["neuron", "layer"])
@pytest.mark.parametrize("count", [1, 3])
def test_logits_are_those_of_the_authors_way(kind, maximum, count):
    model = tiny(kind)
    x = images(model)
    got = insert(model, registers=Registers(NEURONS, count, maximum))(x)
    wanted = oracle.logits(model, x, {0: [3, 7, 1], 2: [5]}, count, maximum)
    assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(got, model(x), rtol=1e-3)


DEFAULT = ("timm class", "transformers ViT", "torchvision", "BEiT", "Swin")


@pytest.mark.parametrize("name", tiered(MODELS, DEFAULT))
def test_models_of_every_library_take_them_or_say_why_not(name):
    model = plain(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
            insert(model, registers=Registers(NEURONS))
        return
    x = images_of(model)
    better = insert(model, registers=Registers(NEURONS))
    view, before = sg.adapt(better), sg.adapt(model)
    with torch.no_grad():
        own = logits_of(better(x))
        assert torch.allclose(view(x), own, atol=1e-9)
        assert not torch.equal(own, logits_of(model(x)))
        assert torch.equal(logits_of(remove(better)(x)), logits_of(model(x)))
    assert view.prefix == before.prefix + 1
    assert view.plan.removable == before.plan.removable


@pytest.mark.parametrize("kind", ["CaiT", "map", "map with a class token"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_attention_pooling_does_not_read_them(kind, count):
    if kind == "CaiT":
        model = plain("CaiT")
    else:
        sizes = {"img_size": 64, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
        pooling = {"global_pool": "map", "class_token": "class" in kind}
        model = timm.create_model("vit_tiny_patch16_224", **sizes, **pooling).double().eval()
    x = images_of(model).double()
    better = insert(model, registers=Registers(NEURONS[:2], count=count) if count else Registers(count=0))
    with torch.no_grad():
        assert torch.allclose(sg.adapt(better)(x), better(x), atol=1e-12)
    a = sg.attention(better, x)
    rows, columns = a.grid
    names = ("class",) if "class" in kind else ()
    assert a.tokens[: -rows * columns] == (*names, *(f"register {n}" for n in range(count)))
    with torch.no_grad(), Seam(want=Want(attention=True)) as seam:
        record = seam.next_record()
        better(x)
    pooling = [attention.a for attention in record.attention[len(a) :]]
    expected = sum(weights.mean((1, 2))[:, -rows * columns :] for weights in pooling)
    found = sg.explain(better, x, 1, "raw_attention").scores.flatten(1)
    assert len(pooling) >= 1 and torch.allclose(found, expected)
    assert sg.explain(better, x, 1, "rollout").scores.shape == (len(x), rows, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_the_identity_bit_for_bit(kind):
    model = tiny(kind)
    x = images(model)
    better = insert(model, registers=Registers(count=0))
    assert torch.equal(better(x), model(x))
    assert sg.adapt(better).prefix == sg.adapt(model).prefix
    assert torch.equal(sg.adapt(better)(x), model(x))


def test_the_model_is_not_changed_and_removal_undoes_it():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    better = insert(model, registers=Registers(NEURONS))
    assert sorted(inserted(better)) == [
        "blocks.0.register_neurons",
        "blocks.0.registers",
        "blocks.2.register_neurons",
    ]
    assert not inserted(model) and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    bare = remove(better)
    assert not inserted(bare) and list(bare.state_dict()) == list(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bare.modules())
    again = copy.deepcopy(better)
    assert torch.equal(again(images(model)), better(images(model)))
    assert sg.modules.cost(better).parameters == 0 < sg.modules.cost(better).operations


def test_gradients_of_the_view_are_those_of_the_model():
    better = insert(tiny(), registers=Registers(NEURONS))
    grads = []
    for run in (better, sg.adapt(better)):
        x = images(better).requires_grad_()
        grads.append(torch.autograd.grad(run(x)[:, 1].sum(), x)[0])
    assert torch.allclose(*grads, rtol=1e-10, atol=1e-12)


def test_patches_can_be_removed():
    better = insert(tiny(), registers=Registers(NEURONS))
    vit, x = sg.adapt(better), images(better)
    tokens = vit.embed(x)
    assert tokens.shape[1] == 2 + 16 and not tokens[:, 1].any()
    keep = torch.tensor([[0, 5, 6, 11]]).expand(3, -1)
    kept = vit.select(tokens, keep)
    x = kept
    for number, block in enumerate(better.blocks):  # the same blocks by hand, hooks of the ends aside
        x = x + block.ls1(block.attn(block.norm1(x)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
        assert number < 3 and x.shape[1] == 6
    wanted = better.forward_head(better.norm(torch.cat([x[:, :1], x[:, 2:]], 1)))
    assert torch.allclose(vit.logits(kept), wanted, atol=1e-12)
    assert torch.allclose(vit.logits(vit.select(tokens, torch.arange(16).expand(3, -1))), vit(images(better)))


@pytest.mark.parametrize(
    "method", ["raw_attention", "rollout", "gaze", "gaze_removal", "decompx", "fullgrad"]
)
def test_methods_run_on_a_model_with_registers(method):
    better = insert(tiny(), registers=Registers(NEURONS))
    assert sg.explain(better, images(better), 1, method).scores.shape == (3, 4, 4)


def test_context_broadcasting_goes_along_and_pooling_does_not():
    model = tiny()
    both = insert(model, cb=CB(), registers=Registers(NEURONS))
    after = insert(insert(model, cb=CB()), registers=Registers(NEURONS))
    x = images(model)
    assert torch.equal(both(x), after(x))
    assert not sg.adapt(both).plan.removable
    with pytest.raises(InputError, match="TAP"):
        insert(insert(model, tap=TAP()), registers=Registers())
    with pytest.raises(InputError, match="TAP"):
        insert(insert(model, registers=Registers()), tap=TAP())
    with pytest.raises(InputError, match="already"):
        insert(insert(model, registers=Registers()), registers=Registers())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_checkpoint_keeps_them(tmp_path: Path, suffix):
    spec = Registers([(1, 4), (-1, 2), (1, 0)], count=2, maximum="layer")
    model = insert(timm.create_model("test_vit", num_classes=3), registers=spec).eval()
    file = tmp_path / f"model{suffix}"
    save_file(model.state_dict(), file) if suffix == ".safetensors" else torch.save(model.state_dict(), file)
    loaded = sg.load_model("test_vit", file)
    assert [m.spec for m in inserted(loaded.model).values()] == [m.spec for m in inserted(model).values()]
    x = torch.randn(1, 3, *loaded.size)
    with torch.no_grad():
        assert torch.equal(loaded.model(x), model(x))


def _state(spec: dict) -> Tensor:
    return torch.tensor(list(json.dumps(spec).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "states",
    [
        {"blocks.0.registers": {"module": "Registers", "count": 10**9}},
        {"blocks.0.registers": {"module": "Registers", "count": "1"}},
        {"blocks.0.registers": {"module": "Registers", "neurons": []}},
        {"blocks.0.registers": {"module": "RegisterNeurons", "neurons": [1], "count": 1}},
        {"blocks.0.register_neurons": {"module": "RegisterNeurons", "neurons": [1], "count": 1}},
        {
            "blocks.0.registers": {"module": "Registers", "count": 1},
            "blocks.1.register_neurons": {"module": "RegisterNeurons", "neurons": [1], "count": 2},
        },
        {
            "blocks.0.registers": {"module": "Registers", "count": 1},
            "blocks.1.register_neurons": {"module": "RegisterNeurons", "neurons": [[1]], "count": 1},
        },
        {
            "blocks.0.registers": {"module": "Registers", "count": 1},
            "blocks.1.register_neurons": {"module": "RegisterNeurons", "neurons": [10**6], "count": 1},
        },
        {"blocks.0.register_neurons": {"module": "RegisterNeurons", "neurons": [], "count": 1}},
        {"blocks.1.registers": {"module": "Registers", "count": 1}},
    ],
)
def test_checkpoints_of_strangers_are_refused(states):
    weights = {f"{path}._extra_state": _state(spec) for path, spec in states.items()}
    with pytest.raises(SteadygazeError):
        restore(tiny(), weights)


def test_a_checkpoint_for_another_number_of_tokens_is_refused():
    model = tiny()
    with pytest.raises(CheckpointError, match="count=2"):
        insert(model, registers=Registers()).load_state_dict(
            insert(model, registers=Registers(count=2)).state_dict()
        )


@pytest.mark.parametrize(
    "options",
    [
        {"neurons": [(0, 1, 2)]},
        {"neurons": [(0, -1)]},
        {"neurons": [(0, 1.5)]},
        {"neurons": "ab"},
        {"neurons": 3},
        {"neurons": [(0, 1), (0, 1)]},
        {"neurons": [(0, 1)], "count": 0},
        {"count": -1},
        {"count": True},
        {"maximum": "most"},
    ],
)
def test_bad_options(options):
    with pytest.raises(SteadygazeError, match=r"neurons|count|maximum"):
        Registers(**options)


@pytest.mark.parametrize("neurons", [[(3, 0)], [(-4, 0)], [(0, 48)]])
def test_neurons_that_the_model_does_not_have(neurons):
    with pytest.raises(InputError, match="from 0 to"):
        insert(tiny(), registers=Registers(neurons))


def test_a_pair_of_one_layer_twice_is_one_neuron():
    with pytest.raises(InputError, match="once"):
        insert(tiny(), registers=Registers([(2, 1), (-1, 1)]))


class Outer(nn.Module):
    """A model around a ViT, which pools its tokens itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.backbone, self.fc = tiny(kind), nn.Linear(24, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone.forward_features(2 * x - 0.1).mean(1).tanh())


@pytest.mark.parametrize("kind", ["class", "pre_norm"])
def test_in_a_model_around_a_vit(kind):
    model = Outer(kind).eval()
    better = insert(model, registers=Registers(NEURONS))
    x = images(model.backbone)
    assert torch.allclose(sg.adapt(better)(x), better(x), atol=1e-12)
    assert not torch.allclose(better(x), model(x), rtol=1e-3)
    again = restore(model, better.state_dict())
    assert torch.equal(again(x), better(x))
