"""`insert`, `remove`, and what a checkpoint with modules is rebuilt by."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from steadygaze.errors import BadCheckpoint, BadInput
from steadygaze.modules.base import Cost, Inserted, chosen_blocks, decode, told
from steadygaze.modules.cb import CB, ContextBroadcast
from steadygaze.modules.sites import Site, broadcast_site, embedding_of, pooling_site
from steadygaze.modules.tap import TAP, TokenPool
from steadygaze.vit import ViT, adapt

log = logging.getLogger("steadygaze.modules")
NAMES = ("tap", "cb_mlp", "cb_msa")  # of the inserted children of a block
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
)
Model = TypeVar("Model", bound=nn.Module)


def insert(model: Model, tap: TAP | None = None, cb: CB | None = None) -> Model:
    """A copy of the model with the modules in it; the given one is left as it was.

    Weights of new modules come from torch's own initialisation and random state. Parameters and operations added are logged
    (logger "steadygaze.modules"), and `cost` gives them. A block can hold one module of each kind.
    """
    for name, spec, kind in (("tap", tap, TAP), ("cb", cb, CB)):
        if spec is not None and not isinstance(spec, kind):
            raise BadInput(f"{name}: expected steadygaze.modules.{kind.__name__}(...), got {spec!r}")
    if tap is None and cb is None:
        raise BadInput("expected something to insert: tap=TAP(...), cb=CB(...), or both")
    made, vit, grids = _prepared(model)
    depth = len(vit.blocks)
    if tap is not None:
        _check_whole(made)
        for i in chosen_blocks(tap.allocation, depth):  # type: ignore[arg-type]
            _pool(vit, i, grids[i], tap)
    if cb is not None:
        for i in chosen_blocks(cb.allocation, depth):  # type: ignore[arg-type]
            for branch in cb.branches:
                _broadcast(vit, i, branch, cb)
    _say(made, depth, _cost(vit, grids))
    return made


def remove(model: Model) -> Model:
    """A copy of the model without inserted modules; what was learnt beside them stays."""
    made = _copy(model)
    for module in list(made.modules()):
        for hooks in (getattr(module, name) for name in HOOKS[::2]):
            for key in [
                k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Inserted)
            ]:
                for name in HOOKS:
                    getattr(module, name).pop(key, None)
        for name in [n for n, child in module.named_children() if isinstance(child, Inserted)]:
            del module._modules[name]
    return made


def inserted(model: nn.Module) -> dict[str, Inserted]:
    """The inserted modules of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Inserted)}


def cost(model: nn.Module) -> Cost:
    """Parameters and operations (for one image of the model's own size) that its inserted modules add."""
    vit = adapt(model)
    return _cost(vit, _grids(vit))


def restore(model: Model, weights: Mapping[str, Tensor]) -> Model:
    """The model with the modules that a state dict names, to load it into; the model itself if it names none."""
    told_of = {
        name.removesuffix("._extra_state"): value
        for name, value in weights.items()
        if name.endswith("._extra_state")
    }
    wanted = {path: decode(value) for path, value in told_of.items() if path.rpartition(".")[2] in NAMES}
    if not wanted:
        return model
    made, vit, grids = _prepared(model)
    names = {id(m): name for name, m in made.named_modules()}
    for i, block in enumerate(vit.blocks):
        for child in NAMES:
            ends = (f"{names[id(block.module)]}.{child}", f".{names[id(block.module)]}.{child}")
            path = next((p for p in wanted if p == ends[0] or p.endswith(ends[1])), None)
            spec = None if path is None else dict(wanted.pop(path))
            if spec is None:
                continue
            kind = spec.pop("module")
            if kind == "TAP":
                _pool(vit, i, grids[i], TAP(**spec))
            else:
                _broadcast(vit, i, child.removeprefix("cb_"), CB(**spec))
    if wanted:
        path, spec = next(iter(wanted.items()))
        raise BadCheckpoint(
            f"the checkpoint has {told(spec)} at {path}, where a {type(model).__name__} has no block. Give the model that it is of."
        )
    return made


def _cost(vit: ViT, grids: list[tuple[int, int]]) -> Cost:
    total = Cost()
    for (h, w), block in zip(grids, vit.blocks, strict=True):
        prefix = _prefix(vit, block.module)
        for module in (m for m in block.module.children() if isinstance(m, Inserted)):
            total += module.cost(prefix + h * w)
    return total


def _copy(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper, and those of parallel training
    model = (
        model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    )
    if not isinstance(model, nn.Module):
        raise BadInput(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return copy.deepcopy(model)


def _prepared(model: Any) -> tuple[Any, ViT, list[tuple[int, int]]]:
    made = _copy(model)
    vit = adapt(made)
    return made, vit, _grids(vit)


def _grids(vit: ViT) -> list[tuple[int, int]]:
    """Rows and columns of the patches at the input of every block, at the model's own image size."""
    parameter = next(vit.model.parameters())
    images = torch.zeros(1, *vit.plan.input_size, device=parameter.device, dtype=parameter.dtype)
    modes = [(m, m.training) for m in vit.model.modules()]
    try:
        for m, _ in modes:
            m.training = False
        with torch.no_grad():
            layout = vit.layout(vit.embed(images))
    finally:
        for m, mode in modes:
            m.training = mode
    return (
        list(layout.state[: len(vit.blocks)])
        if not vit.plan.global_attention
        else [layout.grid] * len(vit.blocks)
    )


def _prefix(vit: ViT, block: nn.Module) -> int:
    """Class, register and distillation tokens at a block; PVT has one in its last stage only, and says so."""
    return getattr(block, "prefix", vit.prefix)


def _pool(vit: ViT, index: int, grid: tuple[int, int], spec: TAP) -> None:
    block = vit.blocks[index].module
    site = pooling_site(block)
    pool = TokenPool(site.width, spec, grid=grid, prefix=_prefix(vit, block))
    _put(block, "tap", pool, site)
    if not vit.plan.fixed_size:
        pool.shape = (vit.plan.input_size[1], vit.plan.input_size[2])
        embedding = embedding_of(vit.model)
        if embedding is not None:
            embedding.register_forward_pre_hook(pool.check_images)


def _check_whole(model: nn.Module) -> None:
    """Patches that are dropped in training leave no grid to pool on; a quarter of 14x14 would even pass for 7x7."""
    for name, module in model.named_modules():
        share = getattr(module, "prob", 0.0) if type(module).__name__.startswith("PatchDropout") else 0.0
        if share > 0:
            raise BadInput(
                f"TAP pools each patch with its neighbours, and this model drops {share:.0%} of them in training ({name}). "
                "Make it without patch_drop_rate."
            )


def _broadcast(vit: ViT, index: int, branch: str, spec: CB) -> None:
    block = vit.blocks[index].module
    if spec.needs_class_token and not _has_class_token(vit, block):
        raise BadInput(
            f"CB(variant={spec.variant!r}) multiplies by the class token, and block {index} of this {vit.plan.kind} has none. "
            "Take variant='plain' or 'scaled'."
        )
    site = broadcast_site(block, branch, spec.position)
    _put(block, f"cb_{branch}", ContextBroadcast(site.width, spec, channels_first=site.channels_first), site)


def _has_class_token(vit: ViT, block: nn.Module) -> bool:
    """Whether the first token at a block is a class token, and not a register."""
    if _prefix(vit, block) == 0:
        return False
    model: Any = vit.model
    return not (hasattr(model, "reg_token") and model.cls_token is None)  # timm's models with registers alone


def _put(block: nn.Module, name: str, module: Inserted, site: Site) -> None:
    """Make the module a child of the block, like it in device, dtype and mode, and let it answer at the site."""
    if isinstance(getattr(block, name, None), Inserted):
        raise BadInput(
            f"the model has {told(getattr(block, name).spec)} in this block already. Take modules.remove(model) first."
        )
    parameter = next(block.parameters())
    block.add_module(name, module.to(parameter.device, parameter.dtype).train(block.training))
    if site.side == "before":
        site.module.register_forward_pre_hook(module.before, with_kwargs=True)
    else:
        site.module.register_forward_hook(module.after)


def _say(model: nn.Module, depth: int, added: Cost) -> None:
    for kind, found in _by_kind(model):
        log.info("%s in %d of %d blocks", kind, len(found), depth)
    whole = sum(p.numel() for p in model.parameters())
    log.info(
        "%+d parameters (%.2f %%), %+.4g GFLOP an image (%+.4g GMAC of convolutions)",
        added.parameters, 100 * added.parameters / whole, added.operations / 1e9, added.multiply_adds / 1e9,
    )  # fmt: skip


def _by_kind(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """(what it is, names) of equal inserted modules."""
    groups: dict[str, list[str]] = {}
    for name, module in inserted(model).items():
        groups.setdefault(f"{told(module.spec)} as {name.rpartition('.')[2]}", []).append(name)
    yield from groups.items()
