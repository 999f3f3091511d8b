"""Inserting modules into a model, removing them, and rebuilding them from a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from steadygaze.errors import CheckpointError, InputError, SteadygazeError, UnsupportedModelError
from steadygaze.modules.base import (
    Cost,
    Inserted,
    Site,
    broadcast_site,
    chosen_blocks,
    decode,
    describe,
    embedding_of,
    pooling_site,
)
from steadygaze.modules.cb import CB, ContextBroadcast
from steadygaze.modules.registers import (
    RegisterNeurons,
    Registers,
    RegisterTokens,
    check_takes_registers,
    entrance,
    last_linear,
)
from steadygaze.modules.tap import TAP, TokenPool
from steadygaze.questions.vqa import answers_questions, any_question
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT, blank_image

log = logging.getLogger(__name__)
NAMES = {  # name of an inserted module within its block -> its kind in a specification
    "tap": "TAP",
    "cb_mlp": "CB",
    "cb_msa": "CB",
    "registers": "Registers",
    "register_neurons": "RegisterNeurons",
}
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
)
Model = TypeVar("Model", bound=nn.Module)


def insert(
    model: Model, tap: TAP | None = None, cb: CB | None = None, registers: Registers | None = None
) -> Model:
    """A copy of the model with the modules inserted.

    New weights are initialized by torch with its global random state. The added parameters and operations
    are logged (logger "steadygaze.modules") and returned by `cost`. A block can hold one module of each
    kind.

    Args:
        model: A vision transformer; it is not changed.
        tap: Options of token-aware average pooling, None to leave it out.
        cb: Options of context broadcasting, None to leave it out.
        registers: Test-time registers, as `sg.find_registers` gives them; None to leave them out. They have
            no weights, and patches of a model with them can still be removed.

    Returns:
        The copy, of the same class.

    Raises:
        InputError: No module is given, or the model has it already or cannot hold it.
        UnsupportedModelError: The blocks have no place for it.

    Examples:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2)
        >>> sorted(inserted(insert(model, tap=TAP()))), inserted(model)
        (['blocks.0.tap', 'blocks.1.tap'], {})
    """
    for name, spec, kind in (("tap", tap, TAP), ("cb", cb, CB), ("registers", registers, Registers)):
        if spec is not None and not isinstance(spec, kind):
            raise InputError(f"{name}: expected steadygaze.modules.{kind.__name__}(...), got {spec!r}")
    if tap is None and cb is None and registers is None:
        raise InputError("expected a module to insert: tap=TAP(...), cb=CB(...) or registers=Registers(...)")
    copied, vit, grids = _copy_with_view(model)
    depth = len(vit.blocks)
    if tap is not None:
        _check_no_patch_dropout(copied)
        for i in chosen_blocks(tap.allocation, depth):  # type: ignore[arg-type]
            _insert_tap(vit, i, grids[i], tap)
    if cb is not None:
        for i in chosen_blocks(cb.allocation, depth):  # type: ignore[arg-type]
            for branch in cb.branches:
                _insert_cb(vit, i, branch, cb)
    if registers is not None:
        check_takes_registers(vit)
        _insert_tokens(vit, registers)
        for i, neurons in registers.by_layer(depth).items():
            _insert_neurons(vit, i, neurons, registers)
        _check_runs(copied, vit.plan.kind)
    _log_cost(copied, depth, _cost(vit, grids))
    return copied


def remove(model: Model) -> Model:
    """A copy of the model without inserted modules; all other weights are kept.

    Examples:
        >>> import steadygaze as sg
        >>> model = insert(sg.load_model("embedded").model, tap=TAP())
        >>> len(inserted(model)), len(inserted(remove(model)))
        (6, 0)
    """
    copied = _copy(model)
    for module in list(copied.modules()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Inserted)]
            for key in ours:
                for name in HOOKS:
                    getattr(module, name).pop(key, None)
        for name in [n for n, child in module.named_children() if isinstance(child, Inserted)]:
            del module._modules[name]
    return copied


def inserted(model: nn.Module) -> dict[str, Inserted]:
    """The inserted modules of a model by name.

    Examples:
        >>> import steadygaze as sg
        >>> sorted(inserted(insert(sg.load_model("embedded").model, tap=TAP(allocation=[0, 1]))))
        ['blocks.0.tap', 'blocks.1.tap']
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, Inserted)}


def cost(model: nn.Module) -> Cost:
    """Parameters and operations that inserted modules add, for one image of the model's input size.

    Examples:
        >>> import steadygaze as sg
        >>> cost(insert(sg.load_model("embedded").model, tap=TAP(allocation=[0]))).parameters
        4760
    """
    vit = adapt(any_question(model) if answers_questions(model) else model)
    return _cost(vit, _grids(vit))


def restore(model: Model, weights: Mapping[str, Tensor]) -> Model:
    """A copy of the model with the modules that a state dict needs; the model itself if it needs none.

    Examples:
        >>> import steadygaze as sg
        >>> model = sg.load_model("embedded").model
        >>> len(inserted(restore(model, insert(model, tap=TAP()).state_dict())))
        6
    """
    states = {
        name.removesuffix("._extra_state"): value
        for name, value in weights.items()
        if name.endswith("._extra_state")
    }
    needed = {path: decode(value) for path, value in states.items() if path.rpartition(".")[2] in NAMES}
    if not needed:
        return model
    copied, vit, grids = _copy_with_view(model)
    names = {id(m): name for name, m in copied.named_modules()}
    for i, block in enumerate(vit.blocks):
        for child in NAMES:
            name = f"{names[id(block.module)]}.{child}"
            path = next((p for p in needed if p == name or p.endswith(f".{name}")), None)
            if path is None:
                continue
            spec = dict(needed.pop(path))
            kind = spec.pop("module")
            if kind != NAMES[child] or (kind == "Registers" and i > 0):
                raise CheckpointError(
                    f"the checkpoint has a {kind} at {path}, where only another kind can be"
                )
            if kind == "TAP":
                _insert_tap(vit, i, grids[i], TAP(**spec))
            elif kind == "CB":
                _insert_cb(vit, i, child.removeprefix("cb_"), CB(**spec))
            elif kind == "Registers":
                check_takes_registers(vit)
                _insert_tokens(vit, Registers(**spec))
            else:
                numbers = spec.pop("neurons")
                registers = Registers(neurons=[(i, number) for number in numbers], **spec)
                _insert_neurons(vit, i, registers.by_layer(len(vit.blocks)).get(i, []), registers)
    _check_counts(copied)
    if needed:
        path, spec = next(iter(needed.items()))
        raise CheckpointError(
            f"the checkpoint has {describe(spec)} at {path}, where this {type(model).__name__} has no block. "
            "Use the architecture that the checkpoint was saved from."
        )
    return copied


def _cost(vit: ViT, grids: list[tuple[int, int]]) -> Cost:
    total = Cost()
    for (h, w), block in zip(grids, vit.blocks, strict=True):
        prefix = _prefix(vit, block.module)
        for module in (m for m in block.module.children() if isinstance(m, Inserted)):
            total += module.cost(prefix + h * w)
    return total


def _copy(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # the wrapper of torch.compile
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return copy.deepcopy(model)


def _copy_with_view(model: Any) -> tuple[Any, ViT, list[tuple[int, int]]]:
    """(copy of the model, its view, the patch grid of each block)."""
    copied = _copy(model)
    vit = adapt(any_question(copied) if answers_questions(copied) else copied)
    return copied, vit, _grids(vit)


def _grids(vit: ViT) -> list[tuple[int, int]]:
    """Rows and columns of the patches at the input of every block, at the model's input size."""
    with torch.no_grad(), evaluation_mode(vit.model):
        layout = vit.layout(vit.embed(blank_image(vit)))
    if vit.plan.global_attention:
        return [layout.grid] * len(vit.blocks)
    return list(layout.state[: len(vit.blocks)])


def _prefix(vit: ViT, block: nn.Module) -> int:
    """Number of class, register and distillation tokens at a block; the blocks of PVT state their own."""
    return getattr(block, "prefix", vit.prefix)


def _insert_tap(vit: ViT, index: int, grid: tuple[int, int], spec: TAP) -> None:
    block = vit.blocks[index].module
    if any(isinstance(module, RegisterTokens) for module in vit.model.modules()):
        raise InputError("TAP pools tokens on their grid, where the tokens that registers add have no place")
    site = pooling_site(block)
    pool = TokenPool(site.width, spec, grid=grid, prefix=_prefix(vit, block))
    _attach(block, "tap", pool, site)
    if not vit.plan.fixed_size:
        pool.shape = (vit.plan.input_size[1], vit.plan.input_size[2])
        embedding = embedding_of(vit.model)
        if embedding is not None:
            embedding.register_forward_pre_hook(pool.check_images)


def _insert_tokens(vit: ViT, spec: Registers) -> None:
    """Add tokens at the entrance of the first block, and drop them behind the last one."""
    first, last = vit.blocks[0].module, vit.blocks[-1].module
    if any(isinstance(module, TokenPool) for module in vit.model.modules()):
        raise InputError("registers: TAP pools tokens on their grid, where an added token has no place")
    weights = sum(p.numel() for b in vit.blocks for p in b.module.parameters() if p.dim() > 1)
    tokens = RegisterTokens(spec, prefix=vit.prefix, weights=weights)
    _attach(first, "registers", tokens, Site(entrance(vit), "before", 0))
    last.register_forward_hook(tokens.after)


def _insert_neurons(vit: ViT, index: int, neurons: list[int], spec: Registers) -> None:
    block = vit.blocks[index].module
    last = last_linear(block)
    if not neurons or max(neurons) >= last.in_features:
        raise InputError(
            f"neurons: expected some from 0 to {last.in_features - 1} in block {index}, got {neurons!r:.60}"
        )
    move = RegisterNeurons(neurons, count=spec.count, maximum=spec.maximum, prefix=vit.prefix)
    _attach(block, "register_neurons", move, Site(last, "before", last.in_features))


def _check_counts(model: nn.Module) -> None:
    """Raise `CheckpointError` if the register neurons do not have the tokens that they write to."""
    counts = {m.count for m in model.modules() if isinstance(m, RegisterNeurons)}
    added = [m.extra_tokens for m in model.modules() if isinstance(m, RegisterTokens)]
    if counts and counts != set(added):
        raise CheckpointError(
            f"the checkpoint has register neurons for {sorted(counts)} added tokens, and {added} added tokens"
        )


def _check_runs(model: Any, kind: str) -> None:
    """Raise `UnsupportedModelError` if the model does not run with one more token."""
    try:
        adapt(any_question(model) if answers_questions(model) else model)
    except (SteadygazeError, RuntimeError, IndexError, ValueError, AssertionError) as error:
        raise UnsupportedModelError(
            f"registers cannot be inserted into a {kind}: it does not run with one more token, as with "
            f"relative positions, or one that its view does not see. The model: {error}"
        ) from error


def _check_no_patch_dropout(model: nn.Module) -> None:
    """Patches dropped in training leave no grid to pool on; a quarter of 14x14 would even look like 7x7."""
    for name, module in model.named_modules():
        share = getattr(module, "prob", 0.0) if type(module).__name__.startswith("PatchDropout") else 0.0
        if share > 0:
            raise InputError(
                f"TAP pools each patch with its neighbors, but this model drops {share:.0%} of its patches "
                f"in training ({name}). Create it without patch_drop_rate."
            )


def _insert_cb(vit: ViT, index: int, branch: str, spec: CB) -> None:
    block = vit.blocks[index].module
    if spec.needs_class_token and not _has_class_token(vit, block):
        raise InputError(
            f"CB(variant={spec.variant!r}) multiplies by the class token, and block {index} of this "
            f"{vit.plan.kind} has none. Use variant='plain' or 'scaled'."
        )
    site = broadcast_site(block, branch, spec.position)
    broadcast = ContextBroadcast(site.width, spec, channels_first=site.channels_first)
    _attach(block, f"cb_{branch}", broadcast, site)


def _has_class_token(vit: ViT, block: nn.Module) -> bool:
    """Whether the first token at a block is a class token, and not a register."""
    added = sum(m.extra_tokens for m in vit.model.modules() if isinstance(m, Inserted))
    if _prefix(vit, block) == added:
        return False
    model: Any = vit.model
    return not (hasattr(model, "reg_token") and model.cls_token is None)  # timm models with registers only


def _attach(block: nn.Module, name: str, module: Inserted, site: Site) -> None:
    """Add the module to the block, with the block's device, dtype and mode, and hook it at the site."""
    if isinstance(getattr(block, name, None), Inserted):
        raise InputError(
            f"this block already contains {describe(getattr(block, name).spec)}. "
            "Call modules.remove(model) first."
        )
    parameter = next(block.parameters())
    block.add_module(name, module.to(parameter.device, parameter.dtype).train(block.training))
    if site.side == "before":
        site.module.register_forward_pre_hook(module.before, with_kwargs=True)
    else:
        site.module.register_forward_hook(module.after)


def _log_cost(model: nn.Module, depth: int, added: Cost) -> None:
    counts = Counter(
        f"{describe(module.spec)} as {name.rpartition('.')[2]}" for name, module in inserted(model).items()
    )
    for description, count in counts.items():
        log.info("%s in %d of %d blocks", description, count, depth)
    total = sum(p.numel() for p in model.parameters())
    log.info(
        "%+d parameters (%.2f %%), %+.4g GFLOP per image (%+.4g GMAC of convolutions)",
        added.parameters,
        100 * added.parameters / total,
        added.operations / 1e9,
        added.multiply_adds / 1e9,
    )
