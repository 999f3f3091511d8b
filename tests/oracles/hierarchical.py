"""FullGrad's explicit bias terms of a hierarchical model, by ordinary autograd on its modules.

    total of block l      sum over its biases b of <b, dy/db>, b a parameter (batch norm: beta - mu
                          gamma/sigma)
    Swin, token n         norm1, norm2, fc1, fc2: <b, dy/dout_n> at the tokens that block l is given qkv,
                          proj, merging: <d out_n/ds, dy/dout_n> at those it gives, s scaling those biases
                          (one window for the whole grid: tokens are not moved, and qkv and proj are as
                          norm1)

Attention must be eager (`benchmarks.oracles.unfused`): the kernel has no second derivative.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def biases(module: nn.Module) -> dict[str, nn.Parameter]:
    """Learned offsets that are added to tokens: `bias`, and `q_bias` and `v_bias` of Swin V2."""
    found = {k: p for k, p in module.named_parameters() if k.split(".")[-1] in ("bias", "q_bias", "v_bias")}
    return {k: p for k, p in found.items() if "cpb_mlp" not in k and "meta_mlp" not in k}


def bias_total(value: Tensor, modules: list[nn.Module]) -> Tensor:
    """Sum over the biases of some modules of <b, dT/db> for one image; unused biases count as zero."""
    known = {id(p): p for m in modules for p in biases(m).values()}
    shifts = {
        id(m.bias): -m.running_mean * m.weight / (m.running_var + m.eps).sqrt()
        for top in modules
        for m in top.modules()
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)
    }
    grads = torch.autograd.grad(value, list(known.values()), allow_unused=True, retain_graph=True)
    pieces = [
        ((p + shifts.get(i, 0)) * g).sum()
        for (i, p), g in zip(known.items(), grads, strict=True)
        if g is not None
    ]
    return torch.stack(pieces).sum().detach() if pieces else torch.zeros((), dtype=value.dtype)


def scaled_biases(module: nn.Module, run: Callable[[], Tensor], names: list[str]) -> Tensor:
    """d run()/ds at s = 1, the biases `names` of `module` multiplied by s, by differentiating a gradient."""
    own = dict(module.named_parameters())

    def outer(s: Tensor) -> Tensor:
        changed = {k: s * own[k].detach() for k in names}
        return functional_call(_Calls(module, run), {f"module.{k}": v for k, v in changed.items()}, ())

    return torch.autograd.functional.jvp(
        outer, torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    )[1]


class _Calls(nn.Module):
    """`run` as a module, so that parameters of `module` can be replaced while it runs."""

    def __init__(self, module: nn.Module, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self) -> Tensor:
        return self.run()


def one_window(block: Any) -> bool:
    return tuple(block.window_size) == tuple(block.input_resolution) and not any(block.shift_size)


def swin_terms(model: Any, images: Tensor, target: int) -> list[tuple[Tensor, Tensor]]:
    """For each block: ((B, N) at the tokens that it is given, (B, M) at those it gives)."""
    stages = list(model.layers)
    blocks = [
        (b, stages[s + 1].downsample if b is stage.blocks[-1] and s + 1 < len(stages) else None)
        for s, stage in enumerate(stages)
        for b in stage.blocks
    ]
    x, seen = stages[0].downsample(model.patch_embed(images)), []
    for block, merge in blocks:
        kept: list[tuple[Tensor, Tensor]] = []
        at_input = [block.norm1, block.norm2, block.mlp.fc1, block.mlp.fc2]
        at_input += [block.attn.qkv, block.attn.proj] if one_window(block) else []
        hooks = [
            m.register_forward_hook(lambda m, _, y, kept=kept: kept.append((m.bias.detach(), y)))
            for m in at_input
        ]
        given = x
        x = block(x) if merge is None else merge(block(x))
        for hook in hooks:
            hook.remove()
        seen.append((block, merge, given.detach(), kept, x))
    logit = model.forward_head(model.norm(x))[:, target].sum()
    found = []
    for block, merge, given, kept, out in seen:
        placed = sum(
            (b * torch.autograd.grad(logit, y, retain_graph=True)[0]).sum(-1).flatten(1) for b, y in kept
        )
        whole = nn.ModuleList([block] if merge is None else [block, merge])
        names = [k for k in biases(whole) if k.startswith("1.") or (".attn." in k and not one_window(block))]
        moved = scaled_biases(whole, lambda b=block, m=merge, g=given: b(g) if m is None else m(b(g)), names)
        (g,) = torch.autograd.grad(logit, out, retain_graph=True)
        found.append((placed.detach(), (moved * g).sum(-1).flatten(1).detach()))
    return found
