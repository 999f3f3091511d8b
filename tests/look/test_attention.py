"""`sg.attention` against the attention that transformers, timm and torchvision give themselves."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.utils.attention_extract import AttentionExtract
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from benchmarks.vision_language import ANSWER, GENERATIVE, PROMPT, QUESTION, photograph, vilt
from helpers.tiny_models import HIERARCHICAL, PLAIN, images_of
from oracles.models import random_images, tiny
from steadygaze.errors import InputError, MemoryUseWarning, MethodUnavailableError
from steadygaze.loading import inputs as loading_inputs
from steadygaze.look import attention as look
from steadygaze.questions.generation import answer_model
from steadygaze.questions.vqa import visual_question
from steadygaze.robustness.attention import attention_measures


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected.to(got), rtol=1e-6, atol=1e-8)


def transformers_attention(model: Any, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(model(images, output_attentions=True).attentions)


@pytest.mark.parametrize(
    "kind",
    [
        "ViTForImageClassification",
        "BeitForImageClassification",
        "Dinov2WithRegistersForImageClassification",
        "CLIPForImageClassification",
        "SiglipForImageClassification",
    ],
)
def test_it_is_what_transformers_gives(kind: str) -> None:
    model = zoo.transformers_model(kind, "eager")[0].eval()
    images = images_of(model)
    a = sg.attention(model, images)
    for layer, expected in enumerate(transformers_attention(model, images)):
        same(a[layer], expected)
    fused = zoo.transformers_model(kind, "sdpa")[0].eval()
    same(sg.attention(fused, images)[-1], a[-1])


def test_rotary_positions_of_dinov3() -> None:
    model = zoo.transformers_model("DINOv3ViTModel and a head", "eager")[0].eval()
    images = images_of(model)
    expected = transformers_attention(model.backbone, images)
    a = sg.attention(model, images)
    same(a[:], torch.stack(expected, 1))
    assert a.tokens[:3] == ("class", "register 0", "register 1")


@pytest.mark.parametrize("kind", ["class", "registers", "average", "distilled DeiT"])
def test_it_is_what_timm_extracts(kind: str) -> None:
    model = PLAIN[kind]().eval()
    images = images_of(model)
    a = sg.attention(model, images)
    read = [a[layer] for layer in range(len(a))]  # under fused attention
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        found = AttentionExtract(model, method="hook")(images)
    for got, expected in zip(read, found.values(), strict=True):
        same(got, expected)


def test_it_is_what_torchvision_needs_weights_for() -> None:
    model = PLAIN["torchvision"]().eval()
    images = images_of(model)
    a = sg.attention(model, images)
    with torch.no_grad():
        x = sg.adapt(model).embed(images)
        for layer, block in enumerate(model.encoder.layers):
            y = block.ln_1(x)
            _, weights = block.self_attention(y, y, y, need_weights=True, average_attn_weights=False)
            same(a[layer], weights)
            x = block(x)


# -- windows, reduced keys ----------------------------------------------------------------------------


def windows_by_hand(
    a: Tensor, grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """(B, heads, N, N) from attention in windows (B·windows, heads, s, s), token by token.

    Padding follows the grid below and on the right; a shifted grid is rolled by -shift after it (torchvision
    pads first, timm and transformers roll first: equal where nothing is padded).
    """
    height, width = grid
    down, across = height // window[0], width // window[1]
    batch = a.shape[0] // (down * across)
    dense = torch.zeros(batch, a.shape[1], height * width, height * width, dtype=a.dtype)
    places = list(itertools.product(range(window[0]), range(window[1])))
    for b, r, c in itertools.product(range(batch), range(down), range(across)):
        number = (b * down + r) * across + c
        tokens = []
        for i, j in places:
            row = (r * window[0] + i + shift[0]) % height
            column = (c * window[1] + j + shift[1]) % width
            tokens.append(row * width + column)
        at = torch.tensor(tokens)
        dense[b, :, at[:, None], at] = a[number]
    return dense


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def recorded(modules: list[nn.Module], run: Any) -> list[Tensor]:
    """Outputs of modules during a run."""
    found: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda module, args, output: found.append(output)) for m in modules]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_windows_of_timm_are_mapped_back_to_the_image(name: str) -> None:
    module = "swin_transformer_v2" if "v2" in name else "swin_transformer"
    model = zoo.hierarchical(name, module)[0].eval()
    images = images_of(model)
    a = sg.attention(model, images)
    blocks = [block for stage in model.layers for block in stage.blocks]
    for block in blocks:
        block.attn.fused_attn = False
    found = recorded([block.attn.softmax for block in blocks], lambda: model(images))
    shifted = 0
    for layer, (block, windows) in enumerate(zip(blocks, found, strict=True)):
        rows = a.tokens_of(layer)[-1]
        grid = (rows[0] + 1, rows[1] + 1)
        shift = pair(block.shift_size)
        same(a[layer], windows_by_hand(windows, grid, pair(block.window_size), shift))
        shifted += any(shift)
    assert shifted


@pytest.mark.parametrize("kind", ["SwinForImageClassification (eager)", "Swinv2ForImageClassification"])
def test_windows_of_transformers(kind: str) -> None:
    model = zoo.transformers_hierarchical(kind)[0].eval()
    images = images_of(model)
    a = sg.attention(model, images)
    with torch.no_grad():
        x = sg.adapt(model).embed(images)
        for layer, block in enumerate(sg.adapt(model).blocks):
            last = a.tokens_of(layer)[-1]
            grid = (last[0] + 1, last[1] + 1)
            windows = block.module(x, grid, output_attentions=True)[-1]
            window, shift = pair(block.module.window_size), pair(block.module.shift_size)
            same(a[layer], windows_by_hand(windows, grid, window, shift))
            x = block(x)


@pytest.mark.parametrize("kind", ["PvtForImageClassification", "PvtV2ForImageClassification"])
def test_reduced_keys_of_transformers(kind: str) -> None:
    model = zoo.transformers_hierarchical(kind)[0].eval()
    images = images_of(model)
    a = sg.attention(model, images)
    found = transformers_attention(model, images)  # PVT v2 has a tuple for each stage
    flat = [a for stage in found for a in (stage if isinstance(stage, tuple) else (stage,))]
    for layer, expected in enumerate(flat):
        same(a[layer], expected)
    assert ("class" in a.tokens) == (kind == "PvtForImageClassification") and "class" not in a.tokens_of(0)


@pytest.mark.parametrize("name", ["swin_t", "swin_v2_t"])
def test_windows_of_torchvision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.torchvision_swin(name)[0].eval()
    images = images_of(model)
    a = sg.attention(model, images)
    read = [a[layer] for layer in range(len(a))]
    found: list[Tensor] = []
    softmax = nn.functional.softmax
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", lambda *s, **d: found.append(softmax(*s, **d)) or found[-1])
        model(images)
    for layer, (windows, block) in enumerate(zip(found, a.vit.blocks, strict=True)):
        last = a.tokens_of(layer)[-1]
        grid = (last[0] + 1, last[1] + 1)
        attn = block.module.attn
        shift = [0 if w >= g else s for w, g, s in zip(attn.window_size, grid, attn.shift_size, strict=True)]
        same(read[layer], windows_by_hand(windows, grid, pair(attn.window_size), pair(shift)))


def test_windows_with_padding_keep_to_the_image() -> None:
    model = zoo.torchvision_swin("swin_t")[0].eval()
    side = images_of(model).shape[-1]
    torch.manual_seed(0)
    images = torch.randn(1, 3, side + 4, side - 4, dtype=torch.float64)
    a = sg.attention(model, images)
    sums = a[0].sum(-1)
    assert sums.max() <= 1 + 1e-9 and sums.min() < 0.99  # what padding receives is not on the image
    row, column = a.tokens_of(0)[-1]
    assert a.map(0, query=(-1, -1)).shape == (1, row + 1, column + 1)


def test_hiera_s_tokens_are_in_raster_order() -> None:
    a = sg.attention(*(lambda m: (m, images_of(m)))(HIERARCHICAL["Hiera"]().eval()))
    seen = a.map(0, query=(0, 0))[0] > 0
    height, width = (int(axis.max()) + 1 for axis in seen.nonzero(as_tuple=True))
    assert seen[:height, :width].all() and seen.sum() == height * width < seen.numel()  # one window


def test_reduced_keys_are_spread_over_their_patches() -> None:
    model = HIERARCHICAL["PVT v2"]().eval()
    images = images_of(model)
    a = sg.attention(model, images)
    layer = a[0]
    assert layer.shape[-1] < layer.shape[-2]
    same(layer.sum(-1), torch.ones_like(layer.sum(-1)))
    spread = a.map(0, head=0, query=(1, 2))
    columns = spread.shape[-1]
    assert set(spread[0].unique().tolist()) <= set(layer[0, 0, columns + 2].unique().tolist())
    assert a.table()[0].distance > 0


def test_what_has_no_map_on_the_tokens_is_refused() -> None:
    model = zoo.hierarchical("xcit_nano_12_p16_224", "xcit")[0].eval()
    a = sg.attention(model, images_of(model))
    with pytest.raises(MethodUnavailableError, match="channels"):
        a[0]
    assert a.map(query="pool").shape[1:] == a.grid
    with pytest.raises(MethodUnavailableError, match="windows"):
        a.rollout()


# -- language models ----------------------------------------------------------------------------------


@cache
def answered(kind: str) -> Any:
    model, processor = GENERATIVE[kind]()
    return answer_model(model, processor, photograph(), PROMPT, ANSWER)


@pytest.mark.parametrize("kind", GENERATIVE)
def test_a_text_token_attends_to_image_patches(kind: str) -> None:
    answer = answered(kind)
    a = sg.attention(answer, answer.prepared)
    with torch.no_grad():
        answer.model.set_attn_implementation("eager")
        inputs = answer.inputs(answer.prepared)
        output = answer.model(**inputs, use_cache=False, output_attentions=True)
        answer.model.set_attn_implementation("sdpa")
    order = answer.order
    for layer, expected in enumerate(output.attentions):
        got = a[layer]
        torch.testing.assert_close(got, expected[:, :, order][..., order], rtol=1e-4, atol=1e-5)
    assert a.query == "answer" and a.tokens[-1] == (a.grid[0] - 1, a.grid[1] - 1)
    assert "cup" in [str(token).strip() for token in a.tokens]
    text = len(a.tokens) - a.grid[0] * a.grid[1]
    same(a.map(0, 0, query=text - 1)[0].flatten(), a[0, 0][0, text - 1, text:])
    expected = a[0, 0][:, list(a.vit.plan.readout_rows), text:].mean(1)
    same(a.map(0, 0).flatten(1), expected)


def test_a_question_s_words_are_tokens() -> None:
    model, tokenizer = vilt()
    question = visual_question(model, QUESTION, tokenizer)
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    a = sg.attention(question, images)
    names = a.tokens[: -a.grid[0] * a.grid[1]]
    assert names == (*question.pieces, "class") and a.query == "answer"
    assert a.map(0, 0, query=question.pieces[1]).shape == (1, *a.grid)


# -- reading ------------------------------------------------------------------------------------------


def model_and_images(kind: str = "registers", batch: int = 2) -> tuple[nn.Module, Tensor]:
    model = tiny(kind)
    return model, random_images(model, batch)


def test_layers_heads_and_queries() -> None:
    a = sg.attention(*model_and_images())
    assert len(a) == 3 and a.heads() == 2 and len(list(a)) == 3
    same(a[-1, -1], a[2][:, 1])
    same(a[1:], torch.stack([a[1], a[2]], 1))
    same(a[:, 0], torch.stack([a[layer, 0] for layer in range(3)], 1))
    same(a[np.int64(1), [1, 0]], a[1].flip(1))
    assert a.tokens[:4] == ("class", "register 0", "register 1", (0, 0))
    assert a.grid == (4, 4) and len(a.tokens) == 19
    first = a[1, 0]
    same(a.map(1, 0), first[:, 0, 3:].unflatten(1, (4, 4)))
    same(a.map(1, 0, "register 1"), first[:, 2, 3:].unflatten(1, (4, 4)))
    same(a.map(1, 0, (2, -1)), first[:, 3 + 11, 3:].unflatten(1, (4, 4)))
    same(a.map(1, 0, -1), first[:, -1, 3:].unflatten(1, (4, 4)))
    same(a.map(1, 0, "mean"), first[:, 3:, 3:].mean(1).unflatten(1, (4, 4)))
    same(a.map(1, [0, 1]).mean(1), a.map(1, "mean"))
    same(a.map(1, [0, 1]).amax(1), a.map(1, "max"))


def test_without_a_class_token_the_default_is_the_mean() -> None:
    a = sg.attention(*model_and_images("average"))
    assert a.query == "mean"
    same(a.map(), a.map(query="mean"))
    with pytest.raises(InputError, match=r"'mean', and \(row, column\) of 4 x 4"):
        a.map(query="class")


def test_the_attention_of_a_pooling() -> None:
    model = PLAIN["attention pool (SigLIP)"]().eval()
    a = sg.attention(model, images_of(model))
    pool = a["pool"]
    same(pool.sum(-1), torch.ones_like(pool.sum(-1)))
    same(a.map(head=1, query="pool").flatten(1), pool[:, 1, 0])
    with pytest.raises(InputError, match="pool"):
        sg.attention(*model_and_images()).map(query="pool")


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (lambda a: a[3], "0..2"),
        (lambda a: a[-4], "-3..-1"),
        (lambda a: a[0, 2], "head: expected 0..1"),
        (lambda a: a["last"], "layer"),
        (lambda a: a[5:], "layer"),
        (lambda a: a.map(0, "median"), "head"),
        (lambda a: a.map(query=(4, 0)), "row: expected 0..3"),
        (lambda a: a.map(query=(0, 0, 0)), "column"),
        (lambda a: a.map(query="register 2"), "'register 1'"),
        (lambda a: a.map(query=19), "0..18"),
        (lambda a: a.map(query=1.5), "token"),
        (lambda a: a.rollout("median"), "heads"),
        (lambda a: a.rollout(discard=1.0), "discard"),
        (lambda a: a.rollout(start=3), "0..2"),
        (lambda a: a.figure(head=1), "layer"),
        (lambda a: a.figure(image=2), "image"),
        (lambda a: a.save("map.svg"), "png"),
        (lambda a: a.animate("map.png"), "gif"),
    ],
)
def test_what_does_not_exist_is_named_with_what_exists(read: Any, word: str) -> None:
    a = sg.attention(*model_and_images())
    with pytest.raises(InputError, match=word):
        read(a)


# -- rollout and table --------------------------------------------------------------------------------


def rollout_by_hand(layers: list[np.ndarray], heads: str, discard: float, *, as_in_code: bool) -> np.ndarray:
    """vit_rollout.py of vit-explain for one image, (N, N); as_in_code: it divides by `a.sum(dim=-1)`."""
    result = np.eye(layers[0].shape[-1])
    for a in layers:
        fused = getattr(np, heads)(a, axis=0).copy()
        flat = fused.reshape(-1)
        for index in np.argsort(flat, kind="stable")[: int(flat.size * discard)]:
            if index != 0:
                flat[index] = 0
        m = (fused + np.eye(len(fused))) / 2
        m = m / m.sum(-1) if as_in_code else m / m.sum(-1, keepdims=True)
        result = m @ result
    return result


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize(("discard", "normalize"), [(0.0, "rows"), (0.9, "rows"), (0.9, "columns")])
def test_rollout_is_that_of_vit_explain(heads: Any, discard: float, normalize: Any) -> None:
    a = sg.attention(*model_and_images("class"))
    got = a.rollout(heads, discard, start=1, normalize=normalize)
    for image in range(2):
        layers = [a[layer][image].numpy() for layer in (1, 2)]
        expected = rollout_by_hand(layers, heads, discard, as_in_code=normalize == "columns")
        same(got[image].flatten(), torch.from_numpy(expected[0, 1:]))


def test_rollout_without_discarding_is_the_method() -> None:
    model, images = model_and_images("class")
    same(sg.attention(model, images).rollout(discard=0), sg.explain(model, images, method="rollout").scores)


def test_table() -> None:
    model, images = model_and_images("class")
    a = sg.attention(model, images)
    table = a.table()
    measures = attention_measures(model, images)
    assert [(line.layer, line.head) for line in table] == list(itertools.product(range(3), range(2)))
    for line in table:
        for name in ("entropy", "distance", "overfocus"):
            expected = getattr(measures, name)[:, line.layer, line.head].mean().item()
            assert getattr(line, name) == pytest.approx(expected)
    received = a[0, 0].mean((0, 1))
    assert table[0].top_tokens[0] == a.tokens[int(received.argmax())]
    assert max(map(len, repr(table).splitlines())) <= 80


# -- the graph, memory, and the model ------------------------------------------------------------------


def test_a_loss_on_attention_reaches_the_parameters() -> None:
    model, images = model_and_images("class")
    model.train()
    images.requires_grad_()
    a = sg.attention(model, images, grad=True)
    for _ in range(2):  # each request has a graph of its own
        a.map(-1, head=0, query="class").std().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.blocks[0].attn.parameters())
    assert images.grad is not None and images.grad.abs().sum() > 0
    assert model.blocks[2].mlp.fc1.weight.grad is None  # behind the attention of the last layer
    assert model.training and all(p.requires_grad for p in model.parameters())
    same(a[1].detach(), sg.attention(model, images)[1])
    assert not sg.attention(model, images)[1].requires_grad


def test_windows_are_in_the_graph_too() -> None:
    model = HIERARCHICAL["Swin"]().eval()
    sg.attention(model, images_of(model), grad=True)[1, 0].square().sum().backward()
    assert next(model.parameters()).grad is not None


def test_nothing_is_left_on_the_model() -> None:
    model, images = model_and_images("class")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    a = sg.attention(model, images)
    a.table(), a.rollout(), a.figure()
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a = sg.attention(*model_and_images("class"))
    ran = []
    run = look.Attention._run
    monkeypatch.setattr(
        look.Attention, "_run", lambda self, layer, *rest: ran.append(layer) or run(self, layer, *rest)
    )
    a[1, 0], a.map(2)
    assert ran == [1, 2]


def test_the_memory_of_a_large_request_is_stated_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = model_and_images("class")
    a = sg.attention(model, images)
    one = a[0].numel() * 8
    monkeypatch.setattr(loading_inputs, "LARGE", one)
    a[0]
    with pytest.warns(MemoryUseWarning, match="3 layers of 2 x 2 x 17 x 17"):
        a[:]
    monkeypatch.setattr(loading_inputs, "LARGE", one - 1)
    with pytest.warns(MemoryUseWarning, match="a layer"):
        a[0]
    monkeypatch.setattr(loading_inputs, "LARGE", 2 * 2 * 17 * 8 - 1)
    with pytest.warns(MemoryUseWarning, match="2 x 2 x 1 x 17"):  # of one query, one row
        a.map(0)
    swin = HIERARCHICAL["Swin"]().eval()
    windows = sg.attention(swin, images_of(swin))
    with pytest.warns(MemoryUseWarning, match="GiB"):
        windows[0]


# -- figures ------------------------------------------------------------------------------------------


def test_figures_and_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = sg.load_model("embedded")
    photo = Image.effect_noise((40, 30), 80).convert("RGB")
    a = sg.attention(loaded, photo)
    legends: list[Any] = []
    words = look.tile.__globals__["legend_words"]
    monkeypatch.setitem(
        look.tile.__globals__, "legend_words", lambda *k: legends.append(words(*k)) or words(*k)
    )
    grid, layer, large = a.figure(), a.figure(layer=-1), a.figure(layer=-1, head=2)
    assert large.height > grid.height > layer.height and grid.width < layer.width
    assert all("attention" in text[0][1] and "evidence" not in text[0][1] for text in legends)
    marked = a.figure(-1, 2, query=(3, 4))
    assert marked.size == large.size and marked.tobytes() != a.figure(-1, 2, query=(3, 5)).tobytes()
    assert a.overlay(-1, 2, image=0).size == (224, 224)
    with Image.open(a.animate(tmp_path / "layers.gif", head=1)) as gif:
        assert gif.n_frames == 6
    assert a.save(tmp_path / "a.png", layer=2, head=[0, 3]).exists()
    assert a.save(tmp_path / "a.gif").exists()
    with np.load(a.save(tmp_path / "a.npz")) as arrays:
        same(torch.from_numpy(arrays["maps"][:, 2, 1]), a.map(2, 1))
    assert a._repr_png_().startswith(b"\x89PNG") and "attention" in a._repr_html_()


@pytest.mark.full
def test_figures_of_layers_that_differ() -> None:
    for kind in HIERARCHICAL:
        model = HIERARCHICAL[kind]().eval()
        a = sg.attention(model, images_of(model, batch=1))
        assert a.figure().mode == "RGB" and len(a.table()) > 4
