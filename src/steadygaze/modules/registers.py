"""Test-time registers (Jiang et al. 2025): outlier tokens go to an added token, without training.

A few neurons of the MLPs ("register neurons") write the high norms of outlier patches. With an added token r
of zeros and the activations h = φ(W₁ x) of block l, for its register neurons c (docs/equations.md#registers):

    h_rc ← the h_ic with the largest |h_ic| over all tokens i,        h_jc ← 0 for every patch j

Class, distillation and trained register tokens keep their activations, as in the authors' code.

| maximum  | h_rc is the largest over                                                                   |
| -------- | ------------------------------------------------------------------------------------------ |
| "neuron" | the tokens, for each neuron: as the paper describes it                                     |
| "layer"  | the tokens and all register neurons of the block: one number, which the authors' code uses |

The token is put in before the first block (and before a norm ahead of it), and taken out behind the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.modules.base import MLP_LAST, Cost, Inserted
from steadygaze.vit.extra_tokens import add_tokens, are_tokens_there, drop_tokens
from steadygaze.vit.parts import first
from steadygaze.vit.view import ViT

Maximum = Literal["neuron", "layer"]
MAX_COUNT, MAX_NEURONS = 64, 4096
PRE_NORMS = ("norm_pre", "pre_layrnorm", "pre_layernorm", "ln_pre")  # of timm, transformers' CLIP, open_clip


@dataclass(frozen=True)
class Registers:
    """Options of test-time registers; `sg.find_registers` finds the neurons of a model.

    Attributes:
        neurons: Register neurons, (layer, neuron) pairs: the block, and the position among the MLP's
            activations. Layers may be negative.
        count: Number of added tokens. With 0, which needs `neurons=()`, nothing changes.
        maximum: What goes to the added tokens: the largest activation of each "neuron", or one number for all
            register neurons of a "layer", as in the authors' code.

    Examples:
        >>> Registers(neurons=[(2, 17), (3, 5)]).neurons
        ((2, 17), (3, 5))
    """

    neurons: tuple[tuple[int, int], ...] | Sequence[Sequence[int]] = ()
    count: int = 1
    maximum: Maximum = "neuron"

    def __post_init__(self) -> None:
        if self.maximum not in get_args(Maximum):
            raise UnknownNameError("maximum", str(self.maximum), get_args(Maximum))
        if not _is_number(self.count) or not 0 <= self.count <= MAX_COUNT:
            raise InputError(f"count: expected a number of tokens from 0 to {MAX_COUNT}, got {self.count!r}")
        pairs = [tuple(pair) if isinstance(pair, Sequence) else () for pair in _listed(self.neurons)]
        if not all(len(pair) == 2 and all(map(_is_number, pair)) and pair[1] >= 0 for pair in pairs):
            raise InputError(
                f"neurons: expected (layer, neuron) pairs such as ((2, 17), (3, 5)), got {self.neurons!r:.99}"
            )
        if len(set(pairs)) < len(pairs) or len(pairs) > MAX_NEURONS:
            raise InputError(f"neurons: expected at most {MAX_NEURONS} pairs, each once")
        if pairs and self.count == 0:
            raise InputError(
                "neurons: expected count of at least 1: without an added token they have no place"
            )
        object.__setattr__(self, "neurons", tuple(pairs))

    def by_layer(self, depth: int) -> dict[int, list[int]]:
        """Layer -> its register neurons, in a model with `depth` blocks."""
        layers: dict[int, list[int]] = {}
        for layer, neuron in self.neurons:
            if not -depth <= layer < depth:
                raise InputError(f"neurons: expected layers from 0 to {depth - 1}, got {layer}")
            chosen = layers.setdefault(layer % depth, [])
            if neuron in chosen:
                raise InputError(f"neurons: expected each once, got neuron {neuron} of layer {layer} twice")
            chosen.append(neuron)
        return layers


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


class RegisterTokens(Inserted):
    """The added tokens: `before` puts them in at the entrance, `after` takes them out behind the last block.

    Examples:
        >>> RegisterTokens(Registers(count=2), prefix=1, weights=100)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 7, 8])
    """

    any_tokens = True

    def __init__(self, spec: Registers, *, prefix: int, weights: int) -> None:
        super().__init__({"module": "Registers", "count": spec.count}, "paper", gated=False)
        self.prefix, self.extra_tokens, self.weights = prefix, spec.count, weights

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m d"]:
        if are_tokens_there() or not self.extra_tokens:
            return x
        return add_tokens(x, self.prefix, self.extra_tokens)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the last block: its output without the added tokens."""
        if are_tokens_there() or not self.extra_tokens:
            return output
        if isinstance(output, Tensor):
            return drop_tokens(output, self.prefix, self.extra_tokens)
        return (drop_tokens(output[0], self.prefix, self.extra_tokens), *output[1:])

    def cost(self, tokens: int) -> Cost:
        """The linear layers of all blocks, for the added tokens; what attention pays for them is left out."""
        return Cost(operations=2 * self.extra_tokens * self.weights)


class RegisterNeurons(Inserted):
    """The register neurons of one block: activations (B, N, C) with those neurons moved to the added tokens.

    Examples:
        >>> move = RegisterNeurons([1], count=1, maximum="neuron", prefix=1)
        >>> move(torch.tensor([[[0.0, 1.0], [0.0, 0.0], [0.0, -7.0], [5.0, 2.0]]]))[0, :, 1].tolist()
        [1.0, -7.0, 0.0, 0.0]
    """

    any_tokens = True
    index: Tensor

    def __init__(self, neurons: Sequence[int], *, count: int, maximum: Maximum, prefix: int) -> None:
        spec = {"module": "RegisterNeurons", "neurons": list(neurons), "count": count, "maximum": maximum}
        super().__init__(spec, "paper", gated=False)
        self.prefix, self.count, self.maximum = prefix, count, maximum
        self.register_buffer("index", torch.tensor(list(neurons), dtype=torch.long), persistent=False)

    def forward(self, hidden: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        index = self.index.to(hidden.device)
        activations = hidden[..., index]
        over = activations.flatten(1)[..., None] if self.maximum == "layer" else activations
        high, low = over.max(1).values, over.min(1).values
        largest = torch.where(high.abs() > low.abs(), high, low)
        registers = largest[:, None].expand(-1, self.count, activations.shape[2])
        patches = torch.zeros_like(activations[:, self.prefix + self.count :])
        moved = torch.cat([activations[:, : self.prefix], registers, patches], dim=1)
        return hidden.index_copy(-1, index, moved)

    def cost(self, tokens: int) -> Cost:
        return Cost()


def check_takes_registers(vit: ViT) -> None:
    """Raise `UnsupportedModelError` for a model whose blocks or head have no place for one more token."""
    plan = vit.plan
    inserted = any(isinstance(module, Inserted) for module in vit.model.modules())  # CB takes any tokens
    grids = any(block.spatial is not None for block in vit.blocks) or plan.spatial is not None
    for is_so, reason in (
        (
            not plan.global_attention or grids,
            "its attention is in windows or on several grids",
        ),
        (plan.rotary, "its positions are rotary, and a register has none"),
        (plan.mixed and not inserted, "convolutions mix its patches on their grid"),
        (plan.reads_layers, "its head reads several layers"),
    ):
        if is_so:
            raise UnsupportedModelError(f"registers cannot be inserted into a {plan.kind}: {reason}.")


def entrance(vit: ViT) -> nn.Module:
    """The module that gets the tokens first: a norm ahead of the blocks, or the first block."""
    block = vit.blocks[0].module
    names = {id(module): name for name, module in vit.model.named_modules()}
    path = names[id(block)].split(".")
    for depth in range(len(path) - 1, -1, -1):  # in the parents of the block, the nearest first
        parent = vit.model.get_submodule(".".join(path[:depth]))
        norm = next((parent._modules[name] for name in PRE_NORMS if parent._modules.get(name)), None)
        if norm is not None:
            return norm
    return block


def last_linear(block: nn.Module) -> nn.Linear:
    """The linear layer of a block's MLP whose inputs are its neurons' activations."""
    last = first(block, *MLP_LAST)
    if last is None or getattr(last, "in_features", None) is None:
        raise UnsupportedModelError(
            f"register neurons: expected an MLP that ends in a linear layer of a known name "
            f"({', '.join(MLP_LAST)}), got a {type(block).__name__} without one."
        )
    return last
