"""What "adapted" means, checked in float64.

The view gives the model's own logits; removed patches equal masked keys; DecompX in one backward pass equals
the decomposition with one vector for each token.
"""

import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import oracles, zoo
from steadygaze.questions.detections import QueryClassifier
from steadygaze.trace import forward, frozen
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.view import ViT, remember


def check(model: nn.Module) -> dict[str, float | str]:
    """Relative errors of the three checks by name; a string where a check does not apply or failed."""
    errors: dict[str, float | str] = {}
    try:
        vit = sg.adapt(model)
    except Exception as error:  # any failure is a row of the table, not the end of the run
        return {"logits": f"{type(error).__name__}: {error}"}
    for name, test in (("logits", logits_error), ("removal", removal_error), ("decompx", decompx_error)):
        try:
            errors[name] = test(vit)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def logits_error(vit: ViT) -> float:
    """The view against the model, whole and from each layer's hidden state."""
    images = zoo.image_of(vit.model, vit.plan.input_size, batch=2)
    with torch.no_grad():
        expected = logits_of(vit.model(images))
        x = vit.embed(images)
        worst = relative(vit(images), expected)
        for layer, block in enumerate(vit.blocks):
            if layer == 0 or (layer == len(vit.blocks) - 1 and not vit.plan.reads_layers):
                without_layout = x.clone()
                worst = max(worst, relative(vit.logits(without_layout, start=layer), expected))
            x = block(x)
        return max(worst, relative(vit.head(x), expected))


def removal_error(vit: ViT) -> float | str:
    """Removed patches against keys masked with −inf: compares the kept tokens after the last block, and the
    logits unless the readout averages over the patches."""
    if not vit.plan.removable:
        return "not removable"
    images = zoo.image_of(vit.model, vit.plan.input_size, batch=2, seed=1)
    generator = torch.Generator().manual_seed(2)
    patches = vit.grid[0] * vit.grid[1]
    order = torch.stack([torch.randperm(patches, generator=generator) for _ in range(2)])
    keep, removed = order[:, : patches // 2], order[:, patches // 2 :]
    behind = vit.prefix - 1 if isinstance(vit.model, QueryClassifier) else 0  # [class, patches, queries]
    expected, last = oracles.masked_run(vit.model, vit.blocks[-1].module, images, removed, patches, behind)
    if behind:
        last = torch.cat([last[:, :1], last[:, -behind:], last[:, 1:-behind]], 1)
    with torch.no_grad(), oracles.WideSoftmax():
        x = vit.select(vit.embed(images), keep)
        for block in vit.blocks:
            x = block(x)
        rows = torch.cat([torch.arange(vit.prefix).expand(2, -1), keep + vit.prefix], dim=1)
        error = relative(x, last.gather(1, rows[:, :, None].expand(-1, -1, last.shape[-1])))
        if (vit.readout == "class" and not vit.plan.readout_patches) or vit.readout == "pool":
            error = max(error, relative(vit.head(x), expected))
    return error


def decompx_error(vit: ViT) -> float:
    """Input × gradient of one frozen pass against one propagated vector per source token, from every layer.
    Of more than 64 tokens, a random sample of eight is compared; where the head reads several layers, layer 0
    only: tokens of another layer alone do not determine the logits."""
    images = zoo.image_of(vit.model, vit.plan.input_size, seed=3)
    with torch.no_grad():
        tokens = vit.embed(images)
    run = forward(vit, tokens, rules=frozen(1.0))
    target = int(run.logits[0].argmax())
    trace = run.trace(run.logits[:, target])
    worst, layout = 0.0, run.layout
    generator = torch.Generator().manual_seed(4)
    for layer in range(1 if vit.plan.reads_layers else len(vit.blocks)):
        x, gradient = trace.tokens(layer)
        got = (x * gradient).sum(-1)[0]
        count = x.shape[1] if x.shape[1] <= 64 else 8
        sources = sorted(torch.randperm(x.shape[1], generator=generator)[:count].tolist())
        shares = oracles.decomposition(
            lambda t, l=layer: vit.logits(remember(t, layout), start=l), x, sources
        )[:, target]
        worst = max(worst, relative(got[sources], shares[:-1]))
        if len(sources) == x.shape[1]:
            worst = max(worst, relative(got.sum() + shares[-1], run.logits[0, target]))
    return worst


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference, over the largest value."""
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-12))
