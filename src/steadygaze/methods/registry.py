"""The registry of attribution methods: what a method declares.

A name is `base`, `base+aggregator` or an alias of such a pair; options follow a colon:

    attixg    attixg+plus    gaze    attixg+plus:pairing=next,freeze=0.75

`register_method` adds a base method, `register_alias` another name for a pair. Both share one registry, so
that no two methods can have the same name. `method_names` reads names, `steadygaze.methods` lists them.

How a method's name is read, and what its options may be.

parse_method("attixg+plus:pairing=next,freeze=0.75")
make_method("attixg+plus", pairing="next", freeze=0.75)      # the same method

Every attribution method, one file per family, each registered under its name.

`list_methods()` describes them, `register_method` adds one, `method(name, **options)` sets options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.notebook import Listing
from steadygaze.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from steadygaze.trace.rules import Rules
    from steadygaze.vit.view import ViT

DEFAULT = "gaze_removal"  # chosen by docs/evidence/faithfulness.md

Kind = Literal["map", "matrix", "model"]
Aggregator = Literal["first", "last", "rollout", "plus", "skipplus"]
AGGREGATORS = ("last", "rollout", "plus", "skipplus")
Options = Mapping[str, Any]
Needs = Mapping[str, bool]
Function = TypeVar("Function", bound=Callable[..., Any])

SYNONYMS = {  # names used in papers and by other packages -> ours; offered when such a name is unknown here
    "gradcam++": "gradcam_plus_plus",
    "gradcamplusplus": "gradcam_plus_plus",
    "saliency": "vanilla_grad",
    "attention": "raw_attention",
    "attention_rollout": "rollout",
    "inputxgradient": "ixg",
    "input_x_gradient": "ixg",
    "ig": "integrated_gradients",
    "lrp": "attnlrp",
    "chefer": "gae",
    "generic_attention": "gae",
    "transformer_attribution": "transatt",
    "shap": "kernel_shap",
    "sis": "sufficient",
    "leave_one_out": "occlusion",
}


@dataclass(frozen=True)
class BaseMethod:
    """What a base method declares. `register_method` documents each field."""

    name: str
    kind: Kind
    function: Callable[..., Any]
    family: str
    aggregator: Aggregator | None
    needs: Callable[[Options], Needs]
    gradient: bool
    class_specific: bool
    cost: float
    summary: str
    options: Options
    class_specific_if: Options
    rules: Rules | Callable[[Options], Rules] | None
    freeze: float | None
    score: str
    unsupported: Callable[..., str] | None
    check_options: Callable[[str, Options], None] | None
    reads_hidden: bool
    added_once: Callable[..., Sequence[Tensor]] | None
    rollout_step: Callable[..., Tensor] | None
    read_row: Callable[..., Tensor] | None
    fuse_heads: Callable[..., Tensor] | None
    pool_residual: tuple[float, float]
    input_x_gradient: Callable[[Options], bool]
    differentiable: bool


@dataclass(frozen=True)
class Alias:
    """Another name for `target`, a base method with aggregator and options; with its own default score."""

    target: str
    score: str = "logit"
    summary: str = ""


@dataclass(frozen=True)
class MethodInfo:
    """The public description of a method, as `list_methods` gives it.

    cost: number of forward passes for one image; a backward pass counts as one
    class_specific: whether the map depends on the target class
    layers: whether the method composes with aggregators such as `+plus`
    options: every option with its default
    score: the quantity that is explained by default
    alias_of: for an alias, the name it stands for

    >>> import steadygaze as sg
    >>> info = next(info for info in sg.list_methods() if info.name == "gae")
    >>> info.family, info.cost, info.alias_of
    ('attention', 2.0, 'genatt')
    """

    name: str
    family: str
    cost: float
    class_specific: bool
    layers: bool
    options: dict[str, Any]
    summary: str
    score: str = "logit"
    alias_of: str | None = None


@dataclass(frozen=True)
class Method:
    """A base method with aggregator, options and default score. Accepted wherever a method's name is.

    name: `stem`, a colon and the options in `given`
    options: all options, also those that an alias stands for
    stem, given: the name without options and the options, as the user wrote them

    >>> import steadygaze as sg
    >>> method = sg.method("attixg+plus:freeze=0.75")
    >>> method.name, method.base.name, method.score
    ('attixg+plus:freeze=0.75', 'attixg', 'logit')
    """

    name: str
    base: BaseMethod = field(repr=False)
    aggregator: Aggregator | None
    options: tuple[tuple[str, Any], ...] = ()
    score: str = "logit"
    stem: str = ""
    given: tuple[tuple[str, Any], ...] = ()

    def option(self, key: str) -> Any:
        """The value given for an option; None if it was left at its default."""
        return dict(self.options).get(key)

    @property
    def function_options(self) -> dict[str, Any]:
        """The given options that the base method's function takes; others belong to rules and aggregator."""
        return {key: value for key, value in self.options if key in self.base.options}

    @property
    def class_specific(self) -> bool:
        """Whether the map depends on the target class, with these options."""
        condition = self.base.class_specific_if
        meets = bool(condition) and all(self.option(key) == value for key, value in condition.items())
        return self.base.class_specific or meets

    def __str__(self) -> str:
        return self.name


FAMILIES = (  # one file each, in the order of listings
    "attention",
    "perturbation",
    "atman",
    "gradient",
    "attnlrp",
    "cam",
    "channel_masks",
    "contrastive",
    "decomposition",
    "gaze",
    "diffmask",
    "vit_shapley",
    "propagation",
    "sufficient",
)
METHODS: Registry[BaseMethod | Alias] = Registry(
    "method",
    built_in=[f"steadygaze.methods.{family}" for family in FAMILIES],
    hint="`steadygaze methods` lists them.",
    synonyms=SYNONYMS,
)
_AGGREGATOR_OPTIONS: Options = {"start": None}
_SKIPPLUS_OPTIONS: Options = {"cut": "ceil"}
_GRADIENT_OPTIONS: Options = {"freeze": None, "slope": "origin", "gate": "held"}
RESERVED_OPTIONS = (*_AGGREGATOR_OPTIONS, *_SKIPPLUS_OPTIONS, *_GRADIENT_OPTIONS)


def register_method(
    name: str,
    kind: Kind = "map",
    *,
    family: str = "custom",
    aggregator: Aggregator | None = None,
    gradient: bool = True,
    class_specific: bool | None = None,
    class_specific_if: Options | None = None,
    cost: float | None = None,
    summary: str | None = None,
    score: str = "logit",
    needs: Needs | Callable[[Options], Needs] | None = None,
    rules: Rules | Callable[[Options], Rules] | None = None,
    freeze: float | None = None,
    unsupported: Callable[..., str] | None = None,
    check_options: Callable[[str, Options], None] | None = None,
    reads_hidden: bool = False,
    added_once: Callable[..., Sequence[Tensor]] | None = None,
    rollout_step: Callable[..., Tensor] | None = None,
    read_row: Callable[..., Tensor] | None = None,
    fuse_heads: Callable[..., Tensor] | None = None,
    pool_residual: tuple[float, float] = (1.0, 1.0),
    input_x_gradient: bool | Callable[[Options], bool] = False,
    differentiable: bool = True,
    replace: bool = False,
) -> Callable[[Function], Function]:
    """Register the decorated function as an attribution method. Its keyword-only arguments become options.

    >>> import steadygaze as sg, timm, torch
    >>> @sg.register_method("grad_spread", kind="map", family="my lab")
    ... def grad_spread(trace, layer, *, power: float = 1.0):
    ...     "Standard deviation of the gradient over the channels of each patch."
    ...     x, gradient = trace.patches(layer)  # both (B, rows, columns, channels)
    ...     return gradient.std(-1) ** power
    >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    >>> sg.explain(model, torch.rand(2, 3, 224, 224), method="grad_spread+plus:power=2").scores.shape
    torch.Size([2, 14, 14])
    >>> METHODS.remove("grad_spread")  # forget it again

    kind: what the function is given, and what it returns
        "map"     (trace, layer, **options) -> (B, h, w), one score per patch on the grid of that layer
        "matrix"  (trace, layer, **options) -> (B, N, N), how much token i takes from token j
        "model"   (query, **options) -> (B, h, w), runs the model itself, has no layers; `query` is a
                  `steadygaze.trace.Query`
    family: heading under which the method is listed
    aggregator: what the bare name means, for methods with layers: "first" layer, "last" layer (default),
        "plus", "skipplus", or "rollout" (matrices only)
    gradient: whether a backward pass is needed
    class_specific: whether the map depends on the target class; by default, if a gradient is needed
    class_specific_if: option values under which it does, although it does not by default
    cost: forward passes for one image; default 2 with gradient, 1 without
    summary: one line for listings; by default the first line of the docstring
    score: the quantity explained by default: "logit", "log_prob", "log_odds", "contrast" or "prob"
    needs: what the trace must record, as fields of `steadygaze.trace.Want` such as {"attention": True};
        or a function of the options that returns it
    rules: rules of the backward pass that are part of the method, or a function of the options that returns
        them; None leaves them to the options `freeze`, `slope` and `gate`
    freeze: default of the option `freeze`, the share of attention that is held constant
    unsupported: (vit, and those options that it names) -> why the model is not supported, "" if it is
    check_options: (name, options) -> None; raises InputError for combinations that make no sense
    reads_hidden: kind "model" only: the query carries the hidden states of the forward pass
    added_once: kind "map" only: (trace, first layer, **options) -> maps added once, not once per layer
    rollout_step: kind "matrix" only: (matrix, **options) -> the factor of the rollout, such as A + I
    read_row: kind "matrix" only: (row, **options) -> what is done to the row that feeds the head
    fuse_heads: kind "matrix" only: (attention, gradient, **options) -> attention pooling's matrix over heads;
        default: the mean of the attention
    pool_residual: kind "matrix" only: weights (of the query, of what it takes) in attention pooling
    input_x_gradient: kind "map" only: whether the map of a layer is ⟨x^l, ∂T/∂x^l⟩ (besides what `added_once`
        adds), perhaps depending on the options; results then have `unattributed`, and `parts` at block 0
    differentiable: whether a training loss can be taken of the map
    replace: replace a method that has this name already, instead of raising an error
    """
    _check_declaration(name, kind, aggregator)

    def decorate(function: Function) -> Function:
        parameters = signature(function).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
        for option in options:
            if option in RESERVED_OPTIONS:
                raise InputError(f"method {name!r}: the option name {option!r} is reserved. Choose another")
        docstring = (function.__doc__ or "").strip()
        base = BaseMethod(
            name=name,
            kind=kind,
            function=function,
            family=family,
            aggregator=None if kind == "model" else aggregator or "last",
            needs=needs if callable(needs) else lambda options: needs or {},
            gradient=gradient,
            class_specific=gradient if class_specific is None else class_specific,
            cost=(2.0 if gradient else 1.0) if cost is None else cost,
            summary=docstring.partition("\n")[0] if summary is None else summary,
            options=options,
            class_specific_if=class_specific_if or {},
            rules=rules,
            freeze=freeze,
            score=score,
            unsupported=unsupported,
            check_options=check_options,
            reads_hidden=reads_hidden,
            added_once=added_once,
            rollout_step=rollout_step,
            read_row=read_row,
            fuse_heads=fuse_heads,
            pool_residual=pool_residual,
            input_x_gradient=input_x_gradient
            if callable(input_x_gradient)
            else lambda options: input_x_gradient,
            differentiable=differentiable,
        )
        METHODS.add(name, base, origin=function.__module__, replace=replace)
        return function

    return decorate


def _check_declaration(name: str, kind: str, aggregator: str | None) -> None:
    if kind not in get_args(Kind):
        raise UnknownNameError(f"kind of method {name!r}:", str(kind), get_args(Kind))
    if aggregator is None:
        return
    if kind == "model":
        raise InputError(f"method {name!r}: kind 'model' has no layers to aggregate, got {aggregator!r}")
    if aggregator not in get_args(Aggregator):
        raise UnknownNameError("aggregator", aggregator, get_args(Aggregator))
    if aggregator == "rollout" and kind != "matrix":
        raise InputError(
            f"method {name!r}: rollout multiplies matrices, so it needs kind='matrix', got {kind!r}"
        )


def register_alias(
    name: str, target: str, *, score: str = "logit", summary: str = "", replace: bool = False
) -> None:
    """Let `name` stand for `target`, such as "ixg+plus" or "decompx+plus:freeze=0.75".

    >>> import steadygaze as sg
    >>> register_alias("my_plus", "ixg+plus:freeze=0.5", summary="Half of attention is frozen.")
    >>> sg.method("my_plus").base.name
    'ixg'
    >>> METHODS.remove("my_plus")
    """
    METHODS.add(name, Alias(target, score, summary), origin="", replace=replace)  # of a user


def base_methods() -> list[BaseMethod]:
    """All registered methods except aliases.

    >>> import steadygaze.methods
    >>> "gae" in [method.name for method in base_methods()]  # an alias of genatt
    False
    """
    return [entry for entry in METHODS.values() if isinstance(entry, BaseMethod)]


def aliases() -> dict[str, Alias]:
    """All registered aliases by name.

    >>> import steadygaze.methods
    >>> aliases()["gae"].target
    'genatt'
    """
    return {name: entry for name, entry in METHODS.items() if isinstance(entry, Alias)}


def allowed_options(base: BaseMethod, aggregator: str | None) -> dict[str, Any]:
    """Every option that `base` takes with `aggregator`, with its default."""
    allowed = dict(base.options)
    if base.kind != "model":
        allowed |= _AGGREGATOR_OPTIONS
        if aggregator == "skipplus":
            allowed |= _SKIPPLUS_OPTIONS
    if base.gradient and base.rules is None:
        allowed |= {**_GRADIENT_OPTIONS, "freeze": base.freeze}
    return allowed


def entry_of(name: str) -> BaseMethod | Alias | None:
    """The method or alias registered under `name`; None if there is none."""
    return METHODS[name] if name in METHODS else None  # noqa: SIM401 - Registry raises UnknownNameError


def parse_method(text: str) -> Method:
    """Read a method's name with options, as in `attixg+plus:pairing=next,freeze=0.75`.

    An unknown name, aggregator or option is an error that suggests the nearest known one.

    >>> method = parse_method("attixg+plus:pairing=next")
    >>> method.base.name, method.aggregator, method.given
    ('attixg', 'plus', (('pairing', 'next'),))
    """
    name, _, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"method {text!r}: expected options as key=value after the colon, got {item!r}")
        options[key.strip()] = _parse_value(value.strip())
    return make_method(name, **options)


def make_method(name: str, **options: Any) -> Method:
    """A method with options, all checked."""
    if ":" in name:
        parsed = parse_method(name)
        return make_method(parsed.stem, **(dict(parsed.given) | options))
    entry = entry_of(name)
    if isinstance(entry, Alias):
        target = parse_method(entry.target)
        method = make_method(target.stem, **(dict(target.options) | options))
        return replace(_named(method, name, options), score=entry.score)
    stem, plus, aggregator = name.partition("+")
    entry = entry_of(stem)
    if isinstance(entry, Alias):
        return _aggregated_alias(name, stem, aggregator, entry, options)
    if entry is None or (plus and name in SYNONYMS):  # "gradcam++" is no aggregation of gradcam
        raise UnknownNameError(
            "method", name if name in SYNONYMS else stem, METHODS, METHODS.hint, METHODS.synonyms
        )
    chosen = _aggregator_of(entry, aggregator if plus else None)
    options = _checked_options(name, entry, chosen, options)
    method = Method(name, entry, chosen, tuple(sorted(options.items())), entry.score)
    return _named(method, name, options)


def _named(method: Method, stem: str, given: Options) -> Method:
    """The method under the name that the user wrote."""
    return replace(method, name=join_name(stem, given), stem=stem, given=tuple(sorted(given.items())))


def _aggregated_alias(name: str, stem: str, aggregator: str, alias: Alias, options: dict[str, Any]) -> Method:
    """`gae+plus`: an alias of a bare base method can be aggregated, an alias of a pair cannot."""
    if isinstance(entry_of(alias.target), BaseMethod):
        return _named(make_method(f"{alias.target}+{aggregator}", **options), name, options)
    pair, colon, tail = alias.target.partition(":")
    other = f"{pair.partition('+')[0]}+{aggregator}{colon}{tail}"
    with_score = "" if alias.score == "logit" else f" with score={alias.score!r}"
    advice = f" Use {other!r}{with_score}." if aggregator in AGGREGATORS else ""
    raise InputError(f"{name!r}: {stem!r} is an alias of {alias.target!r} and takes no aggregator.{advice}")


def _aggregator_of(base: BaseMethod, given: str | None) -> Aggregator | None:
    """The aggregator of a method: `given` after the plus sign, or what the bare name means."""
    if given is None:
        return base.aggregator
    if given not in AGGREGATORS:
        raise UnknownNameError("aggregator", given, AGGREGATORS)
    if base.kind == "model":
        raise InputError(f"{base.name!r} has no layers, so {given!r} cannot aggregate it. Use the bare name.")
    if given == "rollout" and base.kind != "matrix":
        matrices = ", ".join(other.name for other in base_methods() if other.kind == "matrix")
        raise InputError(
            f"rollout multiplies token-by-token matrices, and {base.name!r} gives one score per token. "
            f"It works with {matrices}."
        )
    return given  # type: ignore[return-value]  # one of AGGREGATORS


def join_name(name: str, options: Options) -> str:
    """A name with options, as `parse_method` reads it."""
    tail = ",".join(f"{key}={value}" for key, value in sorted(options.items()))
    return f"{name}:{tail}" if tail else name


def _parse_value(text: str) -> Any:
    """The value an option's text stands for: a number, true, false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _checked_options(
    name: str, base: BaseMethod, aggregator: Aggregator | None, options: dict[str, Any]
) -> dict[str, Any]:
    allowed = allowed_options(base, aggregator)
    checked = dict(options)
    for key in options:
        if key not in allowed:
            raise UnknownNameError(f"option of {name!r}", key, allowed)
        if checked[key] is None and isinstance(allowed[key], str):
            checked[key] = "none"  # the word "none", which was parsed as None
        _check_type(name, key, checked[key], allowed[key])
    _check_shared_options(name, checked)
    if base.check_options is not None:
        base.check_options(name, checked)
    return checked


def _check_type(name: str, key: str, value: Any, default: Any) -> None:
    """An option's value must have the type of its default."""
    types: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        str: (str, "a word"),
        int: (int, "an integer"),
        float: ((int, float), "a number"),
    }
    expected, description = types.get(type(default), (object, ""))
    if not isinstance(value, expected) or (isinstance(value, bool) and type(default) in (int, float)):
        raise InputError(f"{name}: expected {description} for {key}, for example {default!r}, got {value!r}")


def _check_shared_options(name: str, options: Options) -> None:
    """Options of rules and aggregators."""
    freeze = options.get("freeze")
    if freeze is not None and (isinstance(freeze, (bool, str)) or not 0 <= freeze <= 1):
        raise InputError(
            f"{name}: freeze is the share of attention held constant, a number in 0..1, got {freeze!r}"
        )
    if options.get("slope", "origin") not in ("origin", "tangent"):
        raise UnknownNameError("slope", str(options["slope"]), ("origin", "tangent"))
    if options.get("gate", "held") not in ("held", "half"):
        raise UnknownNameError("gate", str(options["gate"]), ("held", "half"))
    if options.get("cut", "ceil") not in ("ceil", "floor"):
        raise UnknownNameError("cut", str(options["cut"]), ("ceil", "floor"))
    start = options.get("start")
    if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
        raise InputError(f"{name}: start is the first layer, an integer >= 0, got {start!r}")


def given_methods(method: Any, methods: Any) -> Any:
    """The value of `method` or of its synonym `methods`, whichever was given."""
    if methods is None:
        return method
    if method != DEFAULT:
        raise InputError(f"give either method or methods, got method={method!r} and methods={methods!r}")
    return [methods] if isinstance(methods, (str, Method)) else methods


def parse_methods(given: Any) -> dict[str, Method]:
    """The requested methods by the text they were requested with."""
    alone = isinstance(given, (str, Method)) or not isinstance(given, Iterable)
    several = [given] if alone else list(given)
    if not all(isinstance(m, (str, Method)) for m in several):
        raise InputError(
            f"method: expected a name, a steadygaze.method(...) or a list of them, got {given!r}"
        )
    if not several:
        raise InputError("method: expected at least one method, got an empty list")
    return {str(m): m if isinstance(m, Method) else parse_method(m) for m in several}


def method(name: str, **options: Any) -> Method:
    """A method with options, accepted wherever a method's name is.

    >>> method("attixg+plus", pairing="next", freeze=0.75).name
    'attixg+plus:freeze=0.75,pairing=next'
    """
    return make_method(name, **options)


def list_methods() -> Listing[MethodInfo]:
    """Every attribution method, base methods first, then aliases; a list that shows itself as a table.

    >>> [info.cost for info in list_methods() if info.name == "gaze_removal"]
    [2.0]
    """
    infos = [_describe_base(base) for base in base_methods()]
    infos += [_describe_alias(name, alias) for name, alias in aliases().items()]
    columns = ("name", "family", "cost", "class_specific", "summary")
    return Listing(infos, "methods", columns)


def _describe_base(base: BaseMethod) -> MethodInfo:
    return MethodInfo(
        name=base.name,
        family=base.family,
        cost=base.cost,
        class_specific=base.class_specific,
        layers=base.kind != "model",
        options=allowed_options(base, base.aggregator),
        summary=base.summary,
        score=base.score,
    )


def _describe_alias(name: str, alias: Alias) -> MethodInfo:
    target = parse_method(alias.target)
    options = allowed_options(target.base, target.aggregator) | dict(target.options)
    return replace(
        _describe_base(target.base),
        name=name,
        layers=False,
        options=options,
        summary=alias.summary or target.base.summary,
        score=alias.score,
        alias_of=alias.target,
    )


def unavailable(method: Method, vit: ViT) -> str:
    """Why `method` cannot explain this model; empty if it can.

    >>> import steadygaze as sg
    >>> vit = sg.adapt(sg.load_model("embedded").model)
    >>> unavailable(sg.method("gae"), vit), unavailable(sg.method("diffmask"), vit)[:14]
    ('', 'it needs gates')
    """
    quantized = next((m for m in vit.model.modules() if ".quantized." in f"{type(m).__module__}."), None)
    if quantized is not None and method.base.gradient:
        layer = f"{type(quantized).__module__}.{type(quantized).__name__}"
        return (
            f"no gradient passes through the model's quantized layers ({layer}). Explain the model before "
            f"quantization, or use a method without gradients, such as rollout or occlusion."
        )
    unsupported = method.base.unsupported
    if unsupported is None:
        return ""
    read = signature(unsupported).parameters
    return unsupported(vit, **{key: value for key, value in method.options if key in read})


def rules_of(method: Method) -> Rules:
    """The rules of a method's backward pass.

    >>> import steadygaze as sg
    >>> rules_of(sg.method("gaze")).attention  # three quarters of attention are frozen
    0.25
    """
    from steadygaze.trace.rules import (
        PLAIN,
        frozen,  # imports torch, which listing methods does not need
    )

    if callable(method.base.rules):
        return method.base.rules(dict(method.options))
    if method.base.rules is not None:
        return method.base.rules
    freeze = method.option("freeze")
    freeze = method.base.freeze if freeze is None else freeze
    if freeze is None:
        return PLAIN
    return frozen(freeze, method.option("slope") or "origin", method.option("gate") or "held")


def forward_passes(method: Method) -> float:
    """Return the approximate number of forward passes of a method with its options, for one image."""
    for option in ("budget", "steps", "samples"):  # options that are a number of runs of the model
        runs, usual = method.option(option), method.base.options.get(option)
        if runs is not None:
            return float(runs if usual is None else runs * method.base.cost / usual)
    return method.base.cost
