"""Views of models around a vision transformer: normalization before it, a head of one's own behind it, ...

The view of such an outer model has the embedding and the blocks of the ViT inside. Its head is the outer
model's own code, run with the blocks short-circuited: each returns its input at once, the last one returns
the given tokens. So whatever the outer model does behind the blocks is done, and the logits are its own.

    embed(images)   the outer model runs until it gives the ViT its images; these go to the ViT's own `embed`
    head(x)         the outer model runs on a blank image; the last block "returns" x

Which tokens feed the head of the outer model is read from the gradient of its outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.target import outputs_of_task, own_task
from steadygaze.vit.contexts import Answer, answered, evaluation_mode
from steadygaze.vit.intercept import SOFTMAX, Interception, TorchFunction
from steadygaze.vit.outputs import FORWARD, check_logits, logits_of
from steadygaze.vit.registry import find_plan
from steadygaze.vit.view import Layout, Plan, ViT

Head = Callable[[Tensor, Layout], Tensor]


@dataclass(frozen=True)
class Read:
    """The tokens that a head reads.

    Attributes:
        rows: Prefix tokens.
        patches: Whether it reads patches.
        pool: Whether it does so by attention.
        strength: A prefix token's gradient over that of a patch.
    """

    rows: tuple[int, ...]
    patches: bool
    pool: bool
    strength: float

    def describe(self, patches: int) -> dict[str, Any]:
        """The fields of a plan. A head reads a token by itself if its gradient is far above a patch's."""
        if not self.patches:
            return {"readout": "class", "readout_rows": self.rows, "readout_patches": 0.0}
        if self.pool:
            return {"readout": "pool", "readout_rows": (), "readout_patches": 0.0}
        if self.rows and self.strength > patches**0.5:  # the class token beside the mean of the patches
            return {"readout": "class", "readout_rows": self.rows, "readout_patches": 0.5}
        return {"readout": "mean", "readout_rows": self.rows, "readout_patches": 0.0}


def tokens_read(head: Head, x: Tensor, layout: Layout, prefix: int) -> Read | None:
    """Which tokens `head` reads; None if its outputs are constant."""
    with torch.enable_grad(), _Attention(x.shape[1] - prefix) as attention:
        tokens = x.detach().requires_grad_()
        outputs = head(tokens, layout)
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
        total = (outputs * weights).sum()
    gradient, pool = None, False
    if total.requires_grad:
        seen = [y for y in attention.outputs if y.requires_grad]
        try:
            gradient, *through = torch.autograd.grad(total, [tokens, *seen], allow_unused=True)
        except RuntimeError as error:  # the model could not be trained either
            raise UnsupportedModelError(
                "the gradient of the outputs cannot be computed: the model's code behind the blocks changes "
                "a tensor in place that its gradient needs, such as y = x.tanh(); y += 1. Write y = y + 1, "
                f"or give a forward pass that does not: {FORWARD}. torch: {error}"
            ) from error
        pool = any(g is not None for g in through)  # an attention whose result is not used pools nothing
    size = torch.zeros_like(x[0, :, 0]) if gradient is None else gradient.abs().sum(-1).amax(0)
    if not size.any():
        if torch.equal(outputs.detach(), head(x.roll(1, 0), layout)):
            return None  # such as a classifier that is still zero
        raise UnsupportedModelError(
            "no gradient passes from the outputs to the last block, though they depend on it: the model "
            "detaches its tokens, checkpoints activations (turn that off), or rounds. Give a forward pass "
            f"that does not: {FORWARD}."
        )
    read = size > 1e-7 * size.max()
    felt = size * x.std(-1).amax(0)  # the gradient through a norm is divided by the token's deviation
    mean = felt[prefix:].mean()
    strength = float(felt[:prefix].max() / mean) if prefix and mean > 0 else 0.0
    rows = tuple(int(i) for i in read[:prefix].nonzero()[:, 0])
    return Read(rows, bool(read[prefix:].any()), pool, strength)


class _Attention(Interception):
    """The outputs of attentions over at least `keys` tokens."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.outputs: list[Tensor] = []
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("pooled", F.multi_head_attention_forward)
        self.intercept("softmax", *SOFTMAX)

    def sdpa(self, func: TorchFunction, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.add(func(q, k, v, *args, **kwargs), k.shape[-2])

    def pooled(self, func: TorchFunction, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """F.multi_head_attention_forward, whose keys are (tokens, batch, width)."""
        output, weights = func(query, key, *args, **kwargs)
        return self.add(output, key.shape[0]), weights

    def softmax(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.add(func(x, *args, **kwargs), x.shape[-1] if x.dim() > 2 else 0)

    def add(self, output: Tensor, keys: int) -> Tensor:
        if keys >= self.keys:
            self.outputs.append(output)
        return output


def description(plan: Plan, head: Head, x: Tensor, layout: Layout) -> dict[str, Any]:
    """What an outer model's head says of its plan, where `plan` is that of the ViT inside.

    If the head gives what the ViT's own head gives, the plan holds as it is.
    """
    logits, patches = head(x, layout), x.shape[1] - plan.prefix
    read = tokens_read(head, x, layout, plan.prefix)
    removable = {"removable": plan.removable and _takes_fewer(plan, head, x, layout)}
    try:
        own = plan.head(x, layout)
        same = own.shape == logits.shape and torch.allclose(own, logits, rtol=1e-4, atol=1e-6)
        alike = same or _fields(tokens_read(plan.head, x, layout, plan.prefix), patches) == _fields(
            read, patches
        )
    except Exception:  # the ViT has no head, or a pooled one is missing
        same = alike = False
    if same:
        return removable
    outputs = "classes" if plan.outputs == "features" else plan.outputs
    return {"outputs": outputs, **({} if alike else _fields(read, patches)), **removable}


def _fields(read: Read | None, patches: int) -> dict[str, Any]:
    return {} if read is None else read.describe(patches)


def _takes_fewer(plan: Plan, head: Head, x: Tensor, layout: Layout) -> bool:
    """Whether the head runs on fewer patches: one that needs the grid does not."""
    count = max((x.shape[1] - plan.prefix) // 2, 1)
    kept = torch.arange(count, device=x.device).expand(x.shape[0], -1)
    try:
        outputs = head(x[:, : plan.prefix + count], Layout(layout.grid, kept, layout.state))
    except Exception:  # whatever the code of others raises about a number of tokens that it did not expect
        return False
    return outputs.dim() == 2


class CustomForward(nn.Module):
    """A model called in a way of one's own: `forward(model, images)` gives what holds the logits."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return logits_of(self.call(self.model, images))


@dataclass(frozen=True)
class Inner:
    """A vision transformer inside a model: its name there, and its plan."""

    name: str
    module: nn.Module
    plan: Plan

    @property
    def blocks(self) -> list[nn.Module]:
        return [block["module"] for block in self.plan.blocks]


def inner_models(model: nn.Module) -> list[Inner]:
    """The vision transformers inside a model, outermost only."""
    found: list[Inner] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{other.name}.") for other in found):
            continue
        try:
            plan = find_plan(module)
        except UnsupportedModelError:
            continue
        if plan is not None:
            found.append(Inner(name, module, plan))
    return found


@dataclass(frozen=True)
class Facts:
    """What was seen of an outer model, without its modules, so that it can be kept longer than a view."""

    name: str
    entry: str
    outputs: dict[int, Any]
    spatial: bool
    size: tuple[int, ...]
    blank: int | None
    fields: dict[str, Any]


_FACTS: "weakref.WeakKeyDictionary[nn.Module, Facts]" = weakref.WeakKeyDictionary()


def wrapped_plan(model: nn.Module, own: Plan | None = None, *, known: bool = False) -> Plan | None:
    """The plan of a model around a ViT; None if there is none inside.

    Args:
        own: The plan of the model itself, if it is a ViT whose forward does more than its adapter knows.
        known: The model was viewed before, and has not changed.
    """
    facts = _FACTS.get(model) if known else None
    if facts is not None:
        return _remembered(model, own, facts)
    inners = inner_models(model) if own is None else [Inner("", model, own)]
    if not inners:
        return None
    with torch.no_grad(), evaluation_mode(model):
        outer, images, logits = _observed(model, inners)
        fields = outer.describe(images, logits)
    _FACTS[model] = outer.facts(fields)
    return outer.plan(fields)


def _remembered(model: nn.Module, own: Plan | None, facts: Facts) -> Plan:
    module = model.get_submodule(facts.name)
    plan = find_plan(module) if own is None else own
    assert plan is not None
    inner = Inner(facts.name, module, plan)
    outputs = {inner.blocks[index]: output for index, output in facts.outputs.items()}
    seen = Observed(inner, module.get_submodule(facts.entry), 1, outputs, facts.spatial)
    return Outer(model, seen, facts.size, facts.blank).plan(facts.fields)


@dataclass
class Observed:
    """What one run of the outer model showed of a ViT inside it."""

    inner: Inner
    entry: nn.Module | None = None  # the first part of the ViT that is given the images
    runs: int = 0
    outputs: dict[nn.Module, Any] = field(default_factory=dict)  # of blocks that return more than a tensor
    spatial: bool = False  # the last block returns (B, h, w, C)

    def answers(self) -> dict[nn.Module, Answer]:
        """Answers that watch every part of the ViT, and let it run."""
        return {m: self.watch(m) for m in self.inner.module.modules() if m is not self.inner.module}

    def watch(self, module: nn.Module) -> Answer:
        blocks = self.inner.blocks
        is_block, is_last = any(module is b for b in blocks), module is blocks[-1]

        def answer(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            channels = self.inner.plan.input_size[0]
            if self.entry is None and _image(args, kwargs, channels) is not None:
                self.entry = module
            output = call(*args, **kwargs)
            if is_block:
                main = output if isinstance(output, Tensor) else output[0]
                if main is not output:
                    self.outputs[module] = (None, *output[1:])
                self.runs += is_last
                self.spatial = main.dim() == 4
            return output

        return answer


def _observed(model: nn.Module, inners: list[Inner]) -> tuple[Outer, Tensor, Tensor]:
    """Run the model once, and see which ViT inside it runs; also the images, and the logits they gave."""
    name = type(model).__name__
    parameter = next(model.parameters())
    reason = ""
    for channels in _channels(model, inners):
        seen = [Observed(inner) for inner in inners]
        size = (channels, *inners[0].plan.input_size[1:])
        images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0)).to(parameter)
        try:
            with ExitStack() as stack:
                stack.enter_context(_GradientsPass())
                for observed in seen:
                    stack.enter_context(answered(observed.answers()))
                output = model(images)
            break
        except Exception as error:  # whatever the code of others raises
            reason = reason or f"images of shape {tuple(images.shape)}: {type(error).__name__}: {error}"
    else:
        raise UnsupportedModelError(
            f"{name} contains a vision transformer ({inners[0].name or 'itself'}) and fails on {reason}. If "
            f"it takes more than images, or images of another kind, give a function that calls it: {FORWARD}."
        )
    return Outer(model, _the_one_that_runs(name, seen), size), images, check_logits(logits_of(output), name)


def _the_one_that_runs(name: str, seen: list[Observed]) -> Observed:
    running = [observed for observed in seen if observed.runs]
    names = ", ".join(repr(observed.inner.name) for observed in (running or seen))
    if not running:
        raise UnsupportedModelError(
            f"{name} contains a vision transformer ({names}), but its forward pass does not run all of it. "
            f"Give a forward pass that does: {FORWARD}."
        )
    if len(running) > 1:
        raise UnsupportedModelError(
            f"{name} runs {len(running)} vision transformers ({names}), and a map belongs to one. Explain "
            f"each by itself, sg.explain(model.get_submodule({running[0].inner.name!r}), images), or give a "
            f"forward pass that runs one of them: {FORWARD}."
        )
    observed = running[0]
    if observed.runs > 1:
        raise UnsupportedModelError(
            f"{name} runs its vision transformer {names} {observed.runs} times in one forward pass (crops, "
            f"frames, test-time augmentation). Give a forward pass that runs it once: {FORWARD}."
        )
    if observed.entry is None:
        raise UnsupportedModelError(
            f"{name} gives its vision transformer {names} no images of "
            f"{observed.inner.plan.input_size[0]} channels. Give a forward pass that does: {FORWARD}."
        )
    return observed


def _channels(model: nn.Module, inners: list[Inner]) -> list[int]:
    """Numbers of channels that the outer model may take: the ViT's own, or those of a layer before it."""
    inside = {m for inner in inners for m in inner.module.modules()}
    before = [m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d) and m not in inside]
    return list(dict.fromkeys([inners[0].plan.input_size[0], *before, 1]))


@dataclass
class Outer:
    """An outer model and the one ViT that runs inside it."""

    model: nn.Module
    seen: Observed
    size: tuple[int, ...]  # of the images that it takes
    blank: int | None = 1  # batch size of the blank images of `head`; None: that of the tokens

    def facts(self, fields: dict[str, Any]) -> Facts:
        """The facts about the outer model that are remembered."""
        inner, entry = self.seen.inner, self.seen.entry
        name = next(name for name, module in inner.module.named_modules() if module is entry)
        outputs = {inner.blocks.index(block): output for block, output in self.seen.outputs.items()}
        return Facts(inner.name, name, outputs, self.seen.spatial, self.size, self.blank, fields)

    def plan(self, fields: dict[str, Any]) -> Plan:
        """The plan of the inner ViT, with the outer model's code before and behind it."""
        inner = self.seen.inner.plan
        stated = own_task(self.seen.inner.module)
        if stated is not None and inner.outputs == "classes":
            inner = replace(inner, outputs=outputs_of_task(stated))
        kind = f"{type(self.model).__name__} around a {inner.kind}" if self.seen.inner.name else inner.kind
        embed = inner.embed
        plan = replace(
            inner,
            embed=lambda images: embed(self.entered(images)),
            head=self.head,
            input_size=(self.size[0], self.size[1], self.size[2]),
            kind=kind,
        )
        return replace(plan, **fields)

    def describe(self, images: Tensor, logits: Tensor) -> dict[str, Any]:
        """What the outer model changes in the plan of the ViT. images: two of noise, with their logits."""
        inner = self.seen.inner.plan
        view = ViT(self.model, self.plan({}))
        tokens = view.embed(images)
        for block in view.blocks:
            tokens = block(tokens)
        layout = view.layout(tokens)
        self.choose_blank(tokens, layout, logits)
        fixed = inner.fixed_size and not self.resizes(images)
        described = replace(inner, outputs=view.plan.outputs)
        return {"fixed_size": fixed, **description(described, self.head, tokens, layout)}

    def entered(self, images: Tensor) -> Tensor:
        """What the ViT is given when the outer model is given `images`."""
        assert self.seen.entry is not None

        def stop(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise _Entered(_image(args, kwargs, self.seen.inner.plan.input_size[0]))

        try:
            with _GradientsPass(), answered({self.seen.entry: stop}):
                self.model(images)
        except _Entered as entered:
            return entered.images
        raise UnsupportedModelError(
            f"{type(self.model).__name__} no longer runs the vision transformer inside it"
        )

    def head(self, x: Tensor, layout: Layout) -> Tensor:
        """The outer model's logits, with `x` as the output of the last block."""
        inner, seen = self.seen.inner.plan, self.seen
        size = self.size[1:]
        if not inner.fixed_size:
            size = tuple(s // g * n for s, g, n in zip(size, inner.grid, layout.grid, strict=True))
        images = torch.zeros(self.blank or x.shape[0], self.size[0], *size, device=x.device, dtype=x.dtype)
        if seen.spatial and inner.spatial is not None:
            x = inner.spatial(x, layout)
        *blocks, last = seen.inner.blocks
        before = ExitStack()  # what comes before the last block's output is discarded: no gradients, no rules

        def skip(module: nn.Module) -> Answer:
            return lambda call, args, kwargs: seen_output(module, _first_tensor(args, kwargs))

        def seen_output(module: nn.Module, main: Any) -> Any:
            return (main, *seen.outputs[module][1:]) if module in seen.outputs else main

        def given(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before.close()
            return seen_output(last, x)

        with _GradientsPass(), before, answered({**{b: skip(b) for b in blocks}, last: given}):
            before.enter_context(torch._C.DisableTorchFunction())
            before.enter_context(torch.no_grad())
            output = self.model(images)
        return logits_of(output)

    def resizes(self, images: Tensor) -> bool:
        """Whether images of another size reach the ViT in its own size."""
        try:
            entered = self.entered(torch.nn.functional.pad(images[:1], (0, 32, 0, 32)))
        except Exception:  # whatever the code of others raises about a size that it does not take
            return False
        return tuple(entered.shape[-2:]) == tuple(self.seen.inner.plan.input_size[1:])

    def choose_blank(self, tokens: Tensor, layout: Layout, expected: Tensor) -> None:
        """One blank image serves all tokens, unless the outer model reads the batch size of its images."""
        try:
            logits = self.head(tokens, layout)
            same = logits.shape == expected.shape
            if same and torch.allclose(logits, expected, rtol=1e-3, atol=1e-5):
                return
        except Exception:  # whatever the code of others raises about two batch sizes
            pass
        self.blank = None


class _Entered(BaseException):
    """The outer model has called the ViT; not an Exception, which its code might catch."""

    def __init__(self, images: Tensor | None) -> None:
        super().__init__()
        assert images is not None
        self.images = images


class _GradientsPass(Interception):
    """Ignores `torch.no_grad` in the outer model's code, where it serves to train a head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept("ignore", torch._C._set_grad_enabled)

    def ignore(self, func: TorchFunction, *args: Any) -> None:
        """torch._C._set_grad_enabled."""


def _image(args: tuple[Any, ...], kwargs: dict[str, Any], channels: int) -> Tensor | None:
    """The images among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == channels:
            return value
    return None


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
