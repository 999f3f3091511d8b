"""The registry of attribution methods: what a method declares, and how its name is read.

A name is `base`, `base+aggregator` or an alias of such a pair; options follow a colon:

    attixg    attixg+plus    gaze    attixg+plus:pairing=next,freeze=0.75

`register_method` adds a base method, `register_alias` another name for a pair; both share one registry, so
that no two methods can have the same name. `list_methods()` describes them, `method(name, **options)` sets
options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.notebook import Listing
from steadygaze.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from steadygaze.trace.capture import Forward
    from steadygaze.trace.rules import Rules
    from steadygaze.vit.view import ViT

DEFAULT = "gaze_outline"  # chosen on the panel: docs/evidence/default.md

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
    "eigencam": "eigen",
    "eigen_cam": "eigen",
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


@dataclass(frozen=True, kw_only=True)
class BaseMethod:
    """What every base method declares; `MapMethod`, `MatrixMethod` and `ModelMethod` add their own fields.

    Attributes:
        name: Name in the registry.
        function: The method itself.
        options: Keyword-only arguments of the function with their defaults.
        family: Heading under which the method is listed.
        gradient: Whether a backward pass is needed.
        class_specific: Whether the map depends on the target class; by default, if a gradient is needed.
        class_specific_if: Option values under which it does, although it does not by default.
        cost: Forward passes for one image; by default 2 with gradient, 1 without.
        summary: One line for listings; by default the first line of the function's docstring.
        score: The quantity explained by default: "logit", "log_prob", "log_odds", "contrast" or "prob".
        rules: Rules of the backward pass that are part of the method, or a function of the options that
            returns them; None leaves them to the options `freeze`, `slope` and `gate`.
        freeze: Default of the option `freeze`, the share of attention that is held constant.
        unsupported: (vit, and those options that it names) -> why the model is not supported, "" if it is.
        check_options: (name, options) -> None; raises `InputError` for combinations that make no sense.
    """

    name: str
    function: Callable[..., Any]
    options: Options
    summary: str
    class_specific: bool
    cost: float
    family: str = "custom"
    gradient: bool = True
    class_specific_if: Options = field(default_factory=dict)
    score: str = "logit"
    rules: Rules | Callable[[Options], Rules] | None = None
    freeze: float | None = None
    unsupported: Callable[..., str] | None = None
    check_options: Callable[[str, Options], None] | None = None


@dataclass(frozen=True, kw_only=True)
class MapMethod(BaseMethod):
    """A function (trace, layer, **options) -> (B, h, w), one score per patch on the grid of that layer.

    Attributes:
        aggregator: What the bare name means: "first" layer, "last" layer, "plus" or "skipplus".
        needs: What the trace must record, as fields of `steadygaze.trace.Want` such as {"attention": True};
            or a function of the options that returns it.
        differentiable: Whether a training loss can be taken of the map.
        added_once: (trace, first layer, **options) -> maps added once, not once per layer.
        input_x_gradient: Whether the map of a layer is ⟨x^l, ∂T/∂x^l⟩ (besides what `added_once` adds), or a
            function of the options; results then have `unattributed`, and `parts` at block 0.
    """

    kind: ClassVar[str] = "map"
    aggregator: Aggregator = "last"
    needs: Needs | Callable[[Options], Needs] = field(default_factory=dict)
    differentiable: bool = True
    added_once: Callable[..., Sequence[Tensor]] | None = None
    input_x_gradient: bool | Callable[[Options], bool] = False


@dataclass(frozen=True, kw_only=True)
class MatrixMethod(BaseMethod):
    """A function (trace, layer, **options) -> (B, N, N), how much token i takes from token j.

    Attributes:
        aggregator: As for `MapMethod`, or "rollout".
        needs: As for `MapMethod`.
        differentiable: As for `MapMethod`.
        rollout_step: (matrix, **options) -> the factor of the rollout, such as A + I.
        read_row: (row, **options) -> what is done to the row that feeds the head.
        fuse_heads: (attention, gradient, **options) -> attention pooling's matrix over heads; by default the
            mean of the attention.
        pool_residual: Weights (of the query, of what it takes) in attention pooling.
    """

    kind: ClassVar[str] = "matrix"
    aggregator: Aggregator = "last"
    needs: Needs | Callable[[Options], Needs] = field(default_factory=dict)
    differentiable: bool = True
    rollout_step: Callable[..., Tensor] | None = None
    read_row: Callable[..., Tensor] | None = None
    fuse_heads: Callable[..., Tensor] | None = None
    pool_residual: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelMethod(BaseMethod):
    """A function (query, **options) -> (B, h, w) that runs the model itself and has no layers.

    `query` is a `steadygaze.trace.Query`. No training loss can be taken of its map.

    Attributes:
        reads_hidden: Whether the query carries the hidden states of the forward pass.
        recorded: (vit, tokens, rules, **options) -> a `Forward` of the whole images, for methods that begin
            with one: `query.run` is it, and no other pass is needed for the logits and the class.
    """

    kind: ClassVar[str] = "model"
    aggregator: ClassVar[None] = None
    differentiable: ClassVar[bool] = False
    reads_hidden: bool = False
    recorded: Callable[..., Forward] | None = None


AnyMethod = MapMethod | MatrixMethod | ModelMethod
KINDS: dict[str, type[AnyMethod]] = {"map": MapMethod, "matrix": MatrixMethod, "model": ModelMethod}


@dataclass(frozen=True)
class Alias:
    """Another name for `target`, a base method with aggregator and options; with its own default score."""

    target: str
    score: str = "logit"
    summary: str = ""


@dataclass(frozen=True)
class MethodInfo:
    """The public description of a method, as `list_methods` gives it.

    Attributes:
        cost: Number of forward passes for one image; a backward pass counts as one.
        class_specific: Whether the map depends on the target class.
        layers: Whether the method composes with aggregators such as `+plus`.
        options: Every option with its default.
        score: The quantity that is explained by default.
        alias_of: For an alias, the name it stands for.

    Examples:
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

    Attributes:
        name: `stem`, a colon and the options in `given`.
        options: All options, also those that an alias stands for.
        stem: The name without options, as the user wrote it.
        given: The options that the user wrote.

    Examples:
        >>> import steadygaze as sg
        >>> method = sg.method("attixg+plus:freeze=0.75")
        >>> method.name, method.base.name, method.score
        ('attixg+plus:freeze=0.75', 'attixg', 'logit')
    """

    name: str
    base: AnyMethod = field(repr=False)
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

    @property
    def needs(self) -> Needs:
        """What a trace must record for this method, with these options; nothing for kind "model"."""
        if isinstance(self.base, ModelMethod):
            return {}
        needs = self.base.needs
        return needs(dict(self.options)) if callable(needs) else needs

    @property
    def input_x_gradient(self) -> bool:
        """Whether the map of a layer is input x gradient, with these options."""
        declared = isinstance(self.base, MapMethod) and self.base.input_x_gradient
        return declared(dict(self.options)) if callable(declared) else declared

    def __str__(self) -> str:
        return self.name


FAMILIES = (  # one file each, in the order of listings
    "attention",
    "intuition",
    "tokens",
    "perturbation",
    "greedy",
    "atman",
    "patching",
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
    "calibrated",
)
METHODS: Registry[AnyMethod | Alias] = Registry(
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
    name: str, kind: Literal["map", "matrix", "model"] = "map", *, replace: bool = False, **declaration: Any
) -> Callable[[Function], Function]:
    """Register the decorated function as an attribution method. Its keyword-only arguments become options.

    Args:
        name: Name of the method.
        kind: What the function is given and what it returns: see `MapMethod`, `MatrixMethod`, `ModelMethod`.
        replace: Replace a method that has this name already, instead of raising an error.
        declaration: Fields of the kind's class, such as `family="my lab"` or `aggregator="plus"`.

    Raises:
        UnknownNameError: If there is no such kind or aggregator.
        InputError: If methods of this kind do not have a field of `declaration`.

    Examples:
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
    """
    if kind not in KINDS:
        raise UnknownNameError(f"kind of method {name!r}:", str(kind), KINDS)
    declared = {field.name for field in fields(KINDS[kind])} - {"name", "function", "options"}
    for key in declaration:
        if key not in declared:
            known = ", ".join(sorted(declared))
            raise InputError(f"method {name!r}: methods of kind {kind!r} have no {key!r}. Known: {known}")
    aggregator = declaration.get("aggregator", "last")
    if aggregator not in get_args(Aggregator):
        raise UnknownNameError("aggregator", aggregator, get_args(Aggregator))
    if aggregator == "rollout" and kind != "matrix":
        raise InputError(
            f"method {name!r}: rollout multiplies matrices, so it needs kind='matrix', got {kind!r}"
        )
    gradient = declaration.get("gradient", True)

    def decorate(function: Function) -> Function:
        parameters = signature(function).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
        for option in options:
            if option in RESERVED_OPTIONS:
                raise InputError(f"method {name!r}: the option name {option!r} is reserved. Choose another")
        defaults = {
            "summary": (function.__doc__ or "").strip().partition("\n")[0],
            "class_specific": gradient,
            "cost": 2.0 if gradient else 1.0,
        }
        base = KINDS[kind](name=name, function=function, options=options, **defaults | declaration)
        METHODS.add(name, base, origin=function.__module__, replace=replace)
        return function

    return decorate


def register_alias(
    name: str, target: str, *, score: str = "logit", summary: str = "", replace: bool = False
) -> None:
    """Let `name` stand for `target`, such as "ixg+plus" or "decompx+plus:freeze=0.75".

    Examples:
        >>> import steadygaze as sg
        >>> register_alias("my_plus", "ixg+plus:freeze=0.5", summary="Half of attention is frozen.")
        >>> sg.method("my_plus").base.name
        'ixg'
        >>> METHODS.remove("my_plus")
    """
    METHODS.add(name, Alias(target, score, summary), origin="", replace=replace)  # of a user


def base_methods() -> list[AnyMethod]:
    """All registered methods except aliases.

    Examples:
        >>> "gae" in [method.name for method in base_methods()]  # an alias of genatt
        False
    """
    return [entry for entry in METHODS.values() if isinstance(entry, BaseMethod)]


def aliases() -> dict[str, Alias]:
    """All registered aliases by name.

    Examples:
        >>> aliases()["gae"].target
        'genatt'
    """
    return {name: entry for name, entry in METHODS.items() if isinstance(entry, Alias)}


def allowed_options(base: AnyMethod, aggregator: str | None) -> dict[str, Any]:
    """Every option that `base` takes with `aggregator`, with its default."""
    allowed = dict(base.options)
    if base.kind != "model":
        allowed |= _AGGREGATOR_OPTIONS
    if aggregator == "skipplus":
        allowed |= _SKIPPLUS_OPTIONS
    if base.gradient and base.rules is None:
        allowed |= {**_GRADIENT_OPTIONS, "freeze": base.freeze}
    return allowed


def _entry(name: str) -> AnyMethod | Alias | None:
    return METHODS[name] if name in METHODS else None  # noqa: SIM401 - `get` of a Registry raises


def parse_method(text: str) -> Method:
    """Read a method's name with options, as in `attixg+plus:pairing=next,freeze=0.75`.

    An unknown name, aggregator or option is an error that suggests the nearest known one.

    Examples:
        >>> parsed = parse_method("attixg+plus:pairing=next")
        >>> parsed.base.name, parsed.aggregator, parsed.given
        ('attixg', 'plus', (('pairing', 'next'),))
    """
    name, options = split_options(text)
    return method(name, **options)


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split a method's name from its options, whether or not the method is known.

    Examples:
        >>> split_options("attixg+plus:pairing=next,freeze=0.75")
        ('attixg+plus', {'pairing': 'next', 'freeze': 0.75})
    """
    name, _, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"method {text!r}: expected options as key=value after the colon, got {item!r}")
        options[key.strip()] = _parse_value(value.strip())
    return name, options


def method(name: str, **options: Any) -> Method:
    """A method with options, accepted wherever a method's name is.

    Args:
        name: A name, perhaps with an aggregator and options, such as "attixg+plus:pairing=next".
        options: Options of the method; they replace those in the name.

    Raises:
        UnknownNameError: If the method, its aggregator or an option is not known.
        InputError: If the value of an option is wrong.

    Examples:
        >>> method("attixg+plus", pairing="next", freeze=0.75).name
        'attixg+plus:freeze=0.75,pairing=next'
    """
    if ":" in name:
        parsed = parse_method(name)
        return method(parsed.stem, **(dict(parsed.given) | options))
    entry = _entry(name)
    if isinstance(entry, Alias):
        target = parse_method(entry.target)
        chosen = method(target.stem, **(dict(target.options) | options))
        return replace(_named(chosen, name, options), score=entry.score)
    stem, plus, aggregator = name.partition("+")
    entry = _entry(stem)
    if isinstance(entry, Alias):
        return _aggregated_alias(name, stem, aggregator, entry, options)
    if entry is None or (plus and name in SYNONYMS):  # "gradcam++" is not an aggregation of gradcam
        raise UnknownNameError(
            "method", name if name in SYNONYMS else stem, METHODS, METHODS.hint, METHODS.synonyms
        )
    chosen_aggregator = _checked_aggregator(entry, aggregator) if plus else entry.aggregator
    options = _checked_options(name, entry, chosen_aggregator, options)
    return _named(
        Method(name, entry, chosen_aggregator, tuple(sorted(options.items())), entry.score), name, options
    )


def _named(chosen: Method, stem: str, options: Options) -> Method:
    """The method under the name that the user wrote."""
    return replace(chosen, name=join_name(stem, options), stem=stem, given=tuple(sorted(options.items())))


def _aggregated_alias(name: str, stem: str, aggregator: str, alias: Alias, options: dict[str, Any]) -> Method:
    """`gae+plus`: an alias of a bare base method can be aggregated, an alias of a pair cannot."""
    if isinstance(_entry(alias.target), BaseMethod):
        return _named(method(f"{alias.target}+{aggregator}", **options), name, options)
    pair, colon, tail = alias.target.partition(":")
    other = f"{pair.partition('+')[0]}+{aggregator}{colon}{tail}"
    with_score = "" if alias.score == "logit" else f" with score={alias.score!r}"
    advice = f" Use {other!r}{with_score}." if aggregator in AGGREGATORS else ""
    raise InputError(f"{name!r}: {stem!r} is an alias of {alias.target!r} and takes no aggregator.{advice}")


def _checked_aggregator(base: AnyMethod, aggregator: str) -> Aggregator:
    """The aggregator after the plus sign, if the method can be aggregated by it."""
    if aggregator not in AGGREGATORS:
        raise UnknownNameError("aggregator", aggregator, AGGREGATORS)
    if base.kind == "model":
        raise InputError(
            f"{base.name!r} has no layers, so {aggregator!r} cannot aggregate it. Use the bare name."
        )
    if aggregator == "rollout" and base.kind != "matrix":
        matrices = ", ".join(other.name for other in base_methods() if other.kind == "matrix")
        raise InputError(
            f"rollout multiplies token-by-token matrices, and {base.name!r} gives one score per token. "
            f"It works with {matrices}."
        )
    return aggregator  # type: ignore[return-value]  # one of AGGREGATORS


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


_TYPES: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    str: (str, "a word"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
}
_WORDS = {"slope": ("origin", "tangent"), "gate": ("held", "half"), "cut": ("ceil", "floor")}


def _checked_options(
    name: str, base: AnyMethod, aggregator: Aggregator | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options, each known, of the type of its default, and in its range."""
    allowed = allowed_options(base, aggregator)
    checked = dict(options)
    for key in options:
        if key not in allowed:
            raise UnknownNameError(f"option of {name!r}", key, allowed)
        default = allowed[key]
        if checked[key] is None and isinstance(default, str):
            checked[key] = "none"  # the word "none", which was parsed as None
        value = checked[key]
        expected, description = _TYPES.get(type(default), (object, ""))
        if not isinstance(value, expected) or (isinstance(value, bool) and type(default) in (int, float)):
            raise InputError(
                f"{name}: expected {description} for {key}, for example {default!r}, got {value!r}"
            )
        if key in _WORDS and value not in _WORDS[key]:
            raise UnknownNameError(key, str(value), _WORDS[key])
    freeze, start = checked.get("freeze"), checked.get("start")
    if freeze is not None and (isinstance(freeze, (bool, str)) or not 0 <= freeze <= 1):
        raise InputError(
            f"{name}: freeze is the share of attention held constant, a number in 0..1, got {freeze!r}"
        )
    if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
        raise InputError(f"{name}: start is the first layer, an integer >= 0, got {start!r}")
    if base.check_options is not None:
        base.check_options(name, checked)
    return checked


def parse_methods(requested: Any) -> dict[str, Method]:
    """The requested methods, one or several, by the text they were requested with."""
    alone = isinstance(requested, (str, Method)) or not isinstance(requested, Iterable)
    several = [requested] if alone else list(requested)
    if not all(isinstance(m, (str, Method)) for m in several):
        raise InputError(
            f"method: expected a name, a steadygaze.method(...) or a list of them, got {requested!r}"
        )
    if not several:
        raise InputError("method: expected at least one method, got an empty list")
    return {str(m): m if isinstance(m, Method) else parse_method(m) for m in several}


def list_methods() -> Listing[MethodInfo]:
    """Describe every attribution method, base methods first, then aliases.

    Returns:
        A list of `MethodInfo` that shows itself as a table.

    Examples:
        >>> [info.cost for info in list_methods() if info.name == "gaze_removal"]
        [2.0]
    """
    infos = [_describe(base) for base in base_methods()]
    for name, alias in aliases().items():
        target = parse_method(alias.target)
        options = allowed_options(target.base, target.aggregator) | dict(target.options)
        info = replace(_describe(target.base), name=name, layers=False, options=options, score=alias.score)
        infos.append(replace(info, summary=alias.summary or info.summary, alias_of=alias.target))
    return Listing(infos, "methods", ("name", "family", "cost", "class_specific", "summary"))


def _describe(base: AnyMethod) -> MethodInfo:
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


def unavailable(method: Method, vit: ViT) -> str:
    """Why `method` cannot explain this model; empty if it can.

    Examples:
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

    Examples:
        >>> import steadygaze as sg
        >>> rules_of(sg.method("gaze")).attention  # three quarters of attention are frozen
        0.25
    """
    from steadygaze.trace.rules import PLAIN, frozen  # imports torch, which listing does not need

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
