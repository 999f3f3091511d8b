"""Models with inserted modules are explained, masked, verified, saved and loaded like any other."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import steadygaze as sg
from benchmarks import checks, zoo
from helpers.inserted import MODELS, images_of, plain, trained
from helpers.tiers import tiered
from oracles.models import tiny
from steadygaze.errors import CheckpointError, InputError
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import Batch
from steadygaze.faithfulness.removal import NAMES
from steadygaze.modules import CB, TAP, insert, inserted, remove, restore
from steadygaze.trace import Want, forward
from steadygaze.vit.masking import masked_logits

BOTH: dict[str, Any] = {"tap": TAP(branches=3), "cb": CB(where="both")}


@pytest.mark.parametrize(
    "options",
    [{"tap": TAP()}, {"cb": CB("scaled", position="front")}, {"cb": CB(position="mid")}, BOTH],
    ids=str,
)
def test_views_and_frozen_passes_stay_exact(options: dict[str, Any]) -> None:
    model = trained(insert(plain("timm class"), **options))
    found = checks.check(model)
    assert float(found["logits"]) <= 1e-12 and found["removal"] == "not removable"
    assert float(found["decompx"]) <= 1e-10, found


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
def test_hidden_patches_reach_nothing(name: str) -> None:
    """Attention masking: finite, unchanged if all is visible, independent of what hidden patches contain."""
    model = trained(insert(plain(name), **BOTH))
    vit = sg.adapt(model)
    images = images_of(model)
    with torch.no_grad():
        tokens = vit.embed(images)
        keep = torch.rand(2, *vit.grid, generator=torch.Generator().manual_seed(1)) > 0.5
        keep[:, 0, 0] = True
        whole, some = (masked_logits(vit, tokens, k) for k in (torch.ones_like(keep), keep))
        assert torch.allclose(whole, vit.logits(tokens), atol=1e-9) and torch.isfinite(some).all()
        if (
            vit.grid
            == vit.layout(tokens).grid
            == tuple(vit.blocks[0].patches(tokens, vit.layout(tokens)).shape[1:3])
        ):
            other = tokens.clone()
            other[:, vit.prefix :][~keep.flatten(1)] += 3.0
            other.layout_ = vit.layout(tokens)  # type: ignore[attr-defined]
            assert torch.equal(masked_logits(vit, other, keep), some)


def test_verify_says_that_it_masks() -> None:
    model = insert(tiny("class"), **BOTH).eval()
    images = images_of(model)
    maps = sg.explain(model, images, method=["ixg"])["ixg"].scores[None]
    found = evaluate(sg.adapt(model), Batch(images, torch.tensor([0, 1])), maps, metrics=["deletion_aopc"])
    assert found.notes == {"deletion_aopc": "attention masking"}
    with pytest.raises(InputError, match="VisionTransformer with TAP and CB cannot be removed"):
        sg.adapt(model).select(sg.adapt(model).embed(images), torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.full
def test_verify_and_stress_take_a_model_with_modules() -> None:
    """A model with modules is explained, evaluated (attention masking) and stressed without extra options."""
    model = trained(insert(plain("timm class"), **BOTH))
    images = images_of(model, batch=4).clamp(-1, 1)
    labels = torch.tensor([0, 1, 0, 1])
    rows = sg.verify(
        model, [(images, labels)], methods=["gaze_removal", "decompx+plus", "rollout"], metrics=list(NAMES)
    ).to_pandas()
    assert len(rows) == 3 * 4 * 4 and rows.value.notna().all()
    found = sg.stress(
        model,
        [(images, labels)],
        suites=["occlusion", "attention", "attacks"],
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    ).to_pandas()
    assert found.value.notna().all() and set(found.metric)


def test_methods_that_lack_a_rule_say_so() -> None:
    model = insert(plain("timm class"), cb=CB()).eval()
    images = images_of(model, batch=1)
    for name in ("transatt", "decompx:bias=absdot"):
        with pytest.raises(sg.MethodUnavailableError, match="with CB"):
            sg.explain(model, images, method=name)
    assert (
        sg.explain(model, images, method="alti").scores.shape[0] == 1
    )  # nothing stands in the attention branch
    with pytest.raises(sg.MethodUnavailableError, match="with TAP"):
        sg.explain(insert(plain("timm class"), tap=TAP()).eval(), images, method="alti")


@pytest.mark.parametrize("options", [{"tap": TAP()}, {"cb": CB("hybrid")}], ids=str)
def test_fullgrad_is_complete(options: dict[str, Any]) -> None:
    model = trained(insert(plain("timm class"), **options))
    vit = sg.adapt(model)
    with torch.no_grad():
        tokens = vit.embed(images_of(model, batch=1))
    run = forward(vit, tokens, want=Want(bias=True, implicit=True))
    trace = run.trace(run.logits[:, 1])
    x, g = trace.tokens(0)
    terms = sum(trace.bias_terms(l, implicit=True).sum() for l in range(trace.depth + 1))
    rest = sum(trace.bias_rest(l, implicit=True).sum() for l in range(trace.depth))
    assert torch.allclose((x * g).sum() + terms + rest, run.logits[0, 1])


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoints_name_their_modules(tmp_path: Path, suffix: str) -> None:
    tap, cb = TAP(branches=3, allocation=(0, 2)), CB("scaled", position="mid", init=0.2)
    model = insert(timm.create_model("test_vit", num_classes=3), tap=tap, cb=cb)
    file = tmp_path / f"model{suffix}"
    if suffix == ".safetensors":
        save_file(model.state_dict(), file)
    else:
        torch.save({"model": model.state_dict(), "epoch": 1}, file)
    loaded = sg.load_model("test_vit", file)
    assert list(inserted(loaded.model)) == list(inserted(model))
    assert [m.spec for m in inserted(loaded.model).values()] == [m.spec for m in inserted(model).values()]
    images = torch.randn(1, 3, *loaded.size)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), model.eval()(images))
    assert not inserted(restore(timm.create_model("test_vit"), timm.create_model("test_vit").state_dict()))


def test_a_checkpoint_of_another_make_is_refused(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    better = insert(model, cb=CB("scaled"))
    with pytest.raises(CheckpointError, match=r"variant='plain'.*where the model has .*variant='scaled'"):
        better.load_state_dict(insert(model, cb=CB()).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="_extra_state"):
        better.load_state_dict(model.state_dict())
    better.load_state_dict(
        model.state_dict(), strict=False
    )  # names of the model's own parameters are what they were
    file = tmp_path / "deep.safetensors"
    save_file(
        {f"blocks.99.cb_mlp.{k}": v for k, v in better.blocks[0].cb_mlp.state_dict().items()}
        | model.state_dict(),
        file,
    )
    with pytest.raises(CheckpointError, match=r"blocks.99.cb_mlp, where this VisionTransformer has no block"):
        sg.load_model("test_vit", file)


def test_a_folder_of_transformers_keeps_its_modules(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    model = insert(zoo.transformers_model("ViTForImageClassification", "sdpa")[0].float(), **BOTH).eval()
    model.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    loaded = sg.load_model(str(tmp_path))
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert len(inserted(loaded.model)) == 9 and torch.allclose(
            loaded.model(images).logits, model(images).logits, atol=1e-6
        )


def test_half_trained_weights_go_through_a_training_step() -> None:
    model = insert(timm.create_model("test_vit", num_classes=3), tap=TAP(), cb=CB("scaled"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 160, 160)), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert {n for n in changed if "tap" in n or "cb_mlp" in n} == {
        n for n, _ in model.named_parameters() if "tap" in n or "cb_mlp" in n
    }
    assert "blocks.0.tap.predict.0.weight" not in remove(model).state_dict()
