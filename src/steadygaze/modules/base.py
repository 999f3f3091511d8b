"""Base of inserted modules: checkpoint metadata, cost, and where and how they are hooked into a block.

An inserted module is a child of its block (`blocks.3.tap`), so that the block's own parameters keep their
names. Its specification is stored in the state dict as JSON in bytes (`blocks.3.tap._extra_state`). Every
way of saving a state dict therefore saves it, and a checkpoint records which modules it needs.

`start` is how a new module M begins (docs/equations.md#start):

| start      | initial weights                                                                        |
| ---------- | -------------------------------------------------------------------------------------- |
| "paper"    | those of the module's authors                                                          |
| "identity" | x + g (M(x) − x) with a learned scalar g = 0: the model's outputs are those without it |

Sites of a block are found by the submodule names of timm, transformers, torchvision and `steadygaze.models`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from steadygaze.errors import CheckpointError, InputError, UnknownNameError, UnsupportedModelError
from steadygaze.vit.parts import first

Allocation = str | tuple[int, ...]
Start = Literal["paper", "identity"]
ALLOCATIONS = ("all", "shallow", "deep", "middle_deep")
MAX_SPEC = 65536  # bytes of a specification in a checkpoint
SPEC_OPTIONS: dict[str, dict[str, Any]] = {  # kind of module -> its options in a specification, with types
    "TAP": {"kind": str, "branches": int, "temperature": (int, float), "start": str},
    "CB": {"variant": str, "position": str, "start": str},
    "Registers": {"count": int},
    "RegisterNeurons": {"neurons": list, "count": int, "maximum": str},
}


@dataclass(frozen=True)
class Cost:
    """Cost that modules add, for one image.

    Attributes:
        parameters: Number of weights.
        multiply_adds: Multiply-adds of convolutions.
        operations: Twice those, and every other addition and multiplication.

    Examples:
        >>> Cost(parameters=10) + Cost(parameters=5, operations=8)
        Cost(parameters=15, multiply_adds=0, operations=8)
    """

    parameters: int = 0
    multiply_adds: int = 0
    operations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.multiply_adds + other.multiply_adds,
            self.operations + other.operations,
        )


class Inserted(nn.Module):
    """A module inside a block of a model. `before` and `after` are its hooks on modules of that block.

    Attributes:
        gate: g of a module with start="identity", shape (1,); None without one.

    Examples:
        >>> import steadygaze as sg
        >>> model = sg.modules.insert(sg.load_model("embedded").model, cb=sg.modules.CB(start="identity"))
        >>> next(iter(sg.modules.inserted(model).values())).gate.shape
        torch.Size([1])
    """

    mixes_tokens = True  # read by `adapt`, like the next two
    any_tokens = False  # whether it takes any number of patches: then they can be removed
    extra_tokens = 0  # number of tokens that it adds behind the model's prefix
    spec: dict[str, Any]  # options by name, and the kind of module under "module"
    gate: nn.Parameter | None

    def __init__(self, spec: dict[str, Any], start: Start, *, gated: bool) -> None:
        super().__init__()
        # "paper" is not recorded: it is what a checkpoint without `start` means
        self.spec = spec if start == "paper" else {**spec, "start": start}
        self.gate = nn.Parameter(torch.zeros(1)) if gated and start == "identity" else None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: transform the first argument of `module`, positional or by name."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self(kwargs[name])}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: transform the output of `module`, or the first of several."""
        return self(output) if isinstance(output, Tensor) else (self(output[0]), *output[1:])

    def cost(self, tokens: int) -> Cost:
        """Cost for one image with `tokens` tokens."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(self.spec, sort_keys=True), "ascii"), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if decode(state) != self.spec:
            raise CheckpointError(
                f"the checkpoint has {describe(decode(state))} where the model has {describe(self.spec)}. "
                "Load it with steadygaze.load_model, or insert that module first."
            )


def decode(state: Tensor) -> dict[str, Any]:
    """The specification that `get_extra_state` wrote; `CheckpointError` if it is anything else.

    Keys and types are checked here, ranges by `TAP`, `CB` and `Registers`.
    """
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        raise CheckpointError("an inserted module (_extra_state): expected a row of bytes")
    if len(state) > MAX_SPEC:
        raise CheckpointError(
            f"an inserted module (_extra_state): expected at most {MAX_SPEC} bytes, got {len(state)}"
        )
    try:
        spec = json.loads(bytes(state.tolist()).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("an inserted module (_extra_state): expected JSON") from error
    kind = spec.get("module") if isinstance(spec, dict) else None
    options = SPEC_OPTIONS.get(kind, {}) if isinstance(kind, str) else {}
    for key, value in spec.items() if options else ():
        if key != "module" and (isinstance(value, bool) or not isinstance(value, options.get(key, ()))):
            raise CheckpointError(
                f"an inserted module (_extra_state): {kind} has no option {key}={value!r:.80}"
            )
    if not options:
        expected = ", ".join(SPEC_OPTIONS)
        raise CheckpointError(
            f"an inserted module (_extra_state): expected one of {expected}, got {kind!r:.80}"
        )
    return spec


def describe(spec: dict[str, Any]) -> str:
    """A specification as a user would write it: CB(variant='plain', ...)."""
    return f"{spec['module']}({', '.join(f'{k}={v!r}' for k, v in spec.items() if k != 'module')})"


def check_start(start: Any) -> None:
    """Raise `UnknownNameError` unless it is one of `Start`."""
    if start not in get_args(Start):
        raise UnknownNameError("start", str(start), get_args(Start))


def checked_allocation(allocation: Any) -> Allocation:
    """One of ALLOCATIONS, or a tuple of block indices."""
    if isinstance(allocation, str):
        if allocation not in ALLOCATIONS:
            raise UnknownNameError("allocation", allocation, ALLOCATIONS, "Or give block indices.")
        return allocation
    numbers = tuple(allocation) if isinstance(allocation, Sequence) else None
    if not numbers or not all(isinstance(i, int) and not isinstance(i, bool) for i in numbers):
        names = ", ".join(ALLOCATIONS)
        raise InputError(
            f"allocation: expected one of {names}, or block indices such as (0, 1, 2), got {allocation!r}"
        )
    return numbers


def chosen_blocks(allocation: Allocation, depth: int) -> list[int]:
    """Indices of the blocks that get the module.

    "shallow" is the first half, rounded up, "deep" the rest, "middle_deep" all but the first third; negative
    indices count from the end.

    Examples:
        >>> chosen_blocks("shallow", 12), chosen_blocks("middle_deep", 12)
        ([0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9, 10, 11])
    """
    half, third = -(-depth // 2), depth // 3
    if isinstance(allocation, str):
        named = {
            "all": range(depth),
            "shallow": range(half),
            "deep": range(half, depth),
            "middle_deep": range(third, depth),
        }
        return list(named[allocation])
    if not all(-depth <= i < depth for i in allocation):
        raise InputError(f"allocation: expected blocks from 0 to {depth - 1}, got {list(allocation)}")
    return sorted({i % depth for i in allocation})


NORM1 = ("norm1", "layernorm_before", "layer_norm1", "ln_1")
ATTENTION = ("attn", "attention", "self_attn", "self_attention")
MLP = ("mlp", "intermediate")  # in some models of transformers: two modules, intermediate and output
MLP_LAST = (
    "mlp.fc2",
    "mlp.down_proj",
    "mlp.weights_out",
    "mlp.c_proj",
    "mlp.w3",
    "output.dense",
    "mlp.3",
)
ATTENTION_LAST = (
    "attn.proj",
    "attention.o_proj",
    "attention.out_proj",
    "attention.output.dense",
    "self_attn.out_proj",
)
WINDOWED = ("SwinTransformerBlock", "SwinTransformerV2Block", "SwinTransformerV2CrBlock")
NO_POOLING = {  # blocks whose attention does not read norm1 of the block input in raster order
    "SwinTransformerV2Block": "cuts its input into windows before any module sees it",
    "SwinTransformerV2CrBlock": "cuts its input into windows before any module sees it",
    "MultiScaleBlock": "pools inside its attention, and its residual too",
    "HieraBlock": "keeps its tokens in the order of mask units",
    "ParallelScalingBlock": "runs attention and MLP from one norm",
    "DiffParallelScalingBlock": "runs attention and MLP from one norm",
    "ParallelThingsBlock": "runs several attentions side by side",
    "ViltLayer": "runs text of any length and patches in one sequence",
}


@dataclass(frozen=True)
class Site:
    """A module to hook at its input ("before") or output ("after"), and the number of channels there."""

    module: nn.Module
    side: Literal["before", "after"]
    width: int
    channels_first: bool = False


def pooling_site(block: nn.Module) -> Site:
    """Input of the norm that precedes attention; in post-norm blocks, the input of attention."""
    kind = type(block).__name__
    norm, attention = first(block, *NORM1), first(block, *ATTENTION)
    if kind in NO_POOLING or attention is None:
        reason = NO_POOLING.get(kind, "has no attention module with a known name")
        raise UnsupportedModelError(f"TAP cannot be inserted into a {kind}: it {reason}.")
    return Site(attention if "Post" in kind else norm, "before", width_of(block))


def broadcast_site(block: nn.Module, branch: str, position: str) -> Site:
    """Site of CB in a branch ("mlp" or "msa"), at its "front", "mid" or "end"."""
    kind = type(block).__name__
    body = first(block, *(MLP if branch == "mlp" else ATTENTION))
    last = first(block, *(MLP_LAST if branch == "mlp" else ATTENTION_LAST))
    windowed = branch == "msa" and kind in WINDOWED
    if windowed and kind == "SwinTransformerBlock" and position != "mid":  # attention itself sees windows
        at = block.drop_path1 if position == "end" else block.norm1
        return Site(at, "before" if position == "end" else "after", width_of(block))  # type: ignore[arg-type]
    unseen = position == "mid" and (last is None or isinstance(body, nn.MultiheadAttention))
    if body is None or windowed or unseen or kind == "MultiScaleBlock":
        raise UnsupportedModelError(
            f"CB cannot be inserted at the {position} of the {branch} of a {kind}: no module there sees all "
            "tokens of an image. Use position='end' and where='mlp'."
        )
    if position == "mid":
        conv = isinstance(last, nn.Conv2d)
        return Site(last, "before", last.in_channels if conv else last.in_features, conv)
    if position == "front":
        norm = first(block, *NORM1)
        if branch == "msa" and norm is not None and "Post" not in kind:
            # not at attention itself, which may take its input by name, or three times
            return Site(norm, "after", width_of(block))
        return Site(body, "before", width_of(block))
    # where the MLP is split into `intermediate` and `output`, `output` may add the residual
    split = type(body).__name__.endswith("Intermediate")
    return Site(last if split else body, "after", width_of(block))


def width_of(block: nn.Module) -> int:
    """Number of channels of a block's tokens, by its first norm."""
    norm = first(block, *NORM1)
    return int((getattr(norm, "normalized_shape", None) or norm.weight.shape)[-1])


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The patch embedding, the first module that receives the images."""
    names = ("patch_embed", "embeddings", "conv_proj")
    return next((m for name, m in model.named_modules() if name.rpartition(".")[2] in names), None)
