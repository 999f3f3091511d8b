"""The registry of methods: what each needs of a model, and how a name with options is written and read.

A name is `base`, `base+aggregator` or an alias of such a pair; options follow a colon: `attixg+plus:pairing=next,freeze=0.75`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any, Literal

from steadygaze.errors import BadInput, UnknownName

DEFAULT = "gaze_removal"  # chosen by docs/evidence/faithfulness.md

Kind = Literal["vector", "matrix", "whole"]
Aggregator = Literal["first", "last", "rollout", "plus", "skipplus"]
AGGREGATORS = ("last", "rollout", "plus", "skipplus")
ELSEWHERE = {  # what methods are called in papers and by peers -> ours, for the hint of an unknown name
    "gradcam++": "gradcam_plus_plus", "gradcamplusplus": "gradcam_plus_plus", "saliency": "vanilla_grad", "attention": "raw_attention",
    "attention_rollout": "rollout", "inputxgradient": "ixg", "input_x_gradient": "ixg", "ig": "integrated_gradients", "lrp": "attnlrp",
    "chefer": "gae", "generic_attention": "gae", "transformer_attribution": "transatt", "shap": "kernel_shap", "sis": "sufficient",
    "leave_one_out": "occlusion",
}  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A base method.

    | kind   | its function gives                                                             |
    | vector | (trace, layer, **options) -> (B, h, w): one score a patch of that layer's grid  |
    | matrix | (trace, layer, **options) -> (B, N, N): how much token i takes from token j     |
    | whole  | (ask, **options) -> (B, h, w): runs the model itself, has no layers             |
    """

    name: str
    kind: Kind
    function: Callable[..., Any]
    family: str
    bare: Aggregator | None  # what the bare name means; None for whole
    needs: Callable[[dict[str, Any]], dict[str, bool]]  # options -> fields of trace.Want that must be kept
    gradient: bool
    class_specific: bool
    cost: float
    summary: str
    options: dict[str, Any]
    rules: Any = None  # rules that are part of the method; None: those of the option `freeze`
    freeze: float | None = None  # default of the option `freeze`
    score: str = "logit"  # the quantity that is explained unless the caller says otherwise
    serves: Callable[..., str] | None = (
        None  # (view, and those of the options that it names) -> "" or why not
    )
    hidden: bool = False  # whole: it reads the hidden states of the forward pass that gives the logits
    once: Callable[..., Any] | None = (
        None  # (trace, first layer, **options) -> maps that are added once, not for each layer
    )


@dataclass(frozen=True)
class MethodInfo:
    """What a user wants to know of a method. `cost` counts forward passes (a backward pass counts as one)."""

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
    """A base method with an aggregator, options and a score of its own. Accepted wherever a method's name is."""

    name: str
    base: Base = field(repr=False)
    aggregator: Aggregator | None
    options: tuple[tuple[str, Any], ...] = ()
    score: str = "logit"

    def option(self, key: str) -> Any:
        return dict(self.options).get(key)

    @property
    def class_specific(self) -> bool:
        """Whether the map depends on the class, with these options: output="class" reads the class where the default does not."""
        return self.base.class_specific or self.option("output") == "class"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Alias:
    target: str
    score: str = "logit"
    summary: str = ""


BASES: dict[str, Base] = {}
ALIASES: dict[str, Alias] = {}
_AGGREGATE_OPTIONS: dict[str, Any] = {"start": None}
_SKIP_OPTIONS: dict[str, Any] = {"cut": "ceil"}
_GRADIENT_OPTIONS: dict[str, Any] = {"freeze": None, "slope": "origin"}


def register(name: str, kind: Kind, *, family: str, bare: Aggregator | None = None, gradient: bool = True,
             class_specific: bool | None = None, cost: float | None = None, **more: Any) -> Callable[[Any], Any]:  # fmt: skip
    """Register the decorated function as a base method; its keyword-only arguments are the method's options."""

    needs = more.pop("needs", {})

    def decorate(function: Any) -> Any:
        own = {
            k: p.default
            for k, p in signature(function).parameters.items()
            if p.kind is Parameter.KEYWORD_ONLY
        }
        BASES[name] = Base(
            name=name, kind=kind, function=function, family=family, bare=bare, gradient=gradient, options=own,
            needs=needs if callable(needs) else lambda options: needs,
            class_specific=gradient if class_specific is None else class_specific,
            cost=(2.0 if gradient else 1.0) if cost is None else cost,
            summary=(function.__doc__ or "").strip().splitlines()[0], **more,
        )  # fmt: skip
        return function

    return decorate


def alias(name: str, target: str, *, score: str = "logit", summary: str = "") -> None:
    """Let `name` mean `target`, a pair with options."""
    ALIASES[name] = Alias(target, score, summary)


def parse(text: str) -> Method:
    """Read a method's name with its options.

    Unknown names, aggregators and options are errors that offer the nearest known one.
    """
    name, _, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise BadInput(f"method {text!r}: expected options as key=value after the colon, got {item!r}")
        options[key.strip()] = _literal(value.strip())
    return make(name, **options)


def make(name: str, **options: Any) -> Method:
    """A method with options, checked."""
    if ":" in name:
        given = parse(name)
        return make(given.name.partition(":")[0], **(dict(given.options) | options))
    if name in ALIASES:
        known = ALIASES[name]
        inner = parse(known.target)
        chosen = make(inner.name.partition(":")[0], **(dict(inner.options) | options))
        return replace(chosen, name=_written(name, options), score=known.score)
    stem, plus, aggregator = name.partition("+")
    if stem in ALIASES and plus and ALIASES[stem].target in BASES:  # another name of a base method: gae+plus
        return replace(make(f"{ALIASES[stem].target}+{aggregator}", **options), name=_written(name, options))
    if stem in ALIASES and plus:
        target, score = ALIASES[stem].target, ALIASES[stem].score
        pair, colon, own = target.partition(":")
        other = f"{pair.partition('+')[0]}+{aggregator}{colon}{own}"
        with_score = "" if score == "logit" else f" with score={score!r}"
        say = f" Write {other!r}{with_score}." if aggregator in AGGREGATORS else ""
        raise BadInput(f"{name!r}: {stem!r} is an alias of {target!r} and takes no aggregator.{say}")
    if stem not in BASES or name in ELSEWHERE:
        raise UnknownName(
            "method",
            name if name in ELSEWHERE else stem,
            [*BASES, *ALIASES],
            "`steadygaze methods` lists them.",
            ELSEWHERE,
        )
    base = BASES[stem]
    if plus and aggregator not in AGGREGATORS:
        raise UnknownName("aggregator", aggregator, AGGREGATORS)
    if plus and base.kind == "whole":
        raise BadInput(
            f"{stem!r} has no layers, so it cannot be aggregated by {aggregator!r}. Use the bare name."
        )
    if aggregator == "rollout" and base.kind != "matrix":
        able = ", ".join(b.name for b in BASES.values() if b.kind == "matrix")
        raise BadInput(
            f"rollout multiplies token-by-token matrices, and {stem!r} gives one score a token. It works with {able}."
        )
    how: Any = aggregator or base.bare
    allowed = allowed_options(base, how)
    for key in options:
        if key not in allowed:
            raise UnknownName(f"option of {name!r}", key, allowed)
        if options[key] is None and isinstance(allowed[key], str):
            options[key] = "none"  # the word, which text reads as nothing
        _check_kind(name, key, options[key], allowed[key])
    _check(name, options)
    ordered = tuple(sorted(options.items()))
    return Method(_written(name, options), base, how, ordered, base.score)


def allowed_options(base: Base, aggregator: str | None) -> dict[str, Any]:
    """Every option that `base` takes under `aggregator`, with its default."""
    allowed = dict(base.options)
    if base.kind != "whole":
        allowed |= _AGGREGATE_OPTIONS
        if aggregator == "skipplus":
            allowed |= _SKIP_OPTIONS
    if base.gradient and base.rules is None:
        allowed |= _GRADIENT_OPTIONS | {"freeze": base.freeze}
    return allowed


def infos() -> list[MethodInfo]:
    """All names: base methods, then aliases."""
    listed = [
        MethodInfo(
            b.name,
            b.family,
            b.cost,
            b.class_specific,
            b.kind != "whole",
            allowed_options(b, b.bare),
            b.summary,
            b.score,
        )
        for b in BASES.values()
    ]
    for name, known in ALIASES.items():
        inner = parse(known.target)
        base = inner.base
        options = allowed_options(base, inner.aggregator) | dict(inner.options)
        listed.append(
            MethodInfo(name, base.family, base.cost, base.class_specific, False, options, known.summary or base.summary,
                       known.score, known.target)
        )  # fmt: skip
    return listed


def _written(name: str, options: dict[str, Any]) -> str:
    tail = ",".join(f"{k}={v}" for k, v in sorted(options.items()))
    return f"{name}:{tail}" if tail else name


def _literal(text: str) -> Any:
    """The value that an option's text means: a number, true, false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check_kind(name: str, key: str, value: Any, default: Any) -> None:
    """A value of the kind of the default: true or false, a word, a whole number, a number."""
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        str: (str, "a word"),
        int: (int, "a whole number"),
        float: ((int, float), "a number"),
    }
    kind, said = kinds.get(type(default), (object, ""))
    if not isinstance(value, kind) or (isinstance(value, bool) and type(default) in (int, float)):
        raise BadInput(f"{name}: expected {said} for {key}, for example {default!r}, got {value!r}")


def _check(name: str, options: dict[str, Any]) -> None:
    freeze = options.get("freeze")
    if freeze is not None and (isinstance(freeze, (bool, str)) or not 0 <= freeze <= 1):
        raise BadInput(
            f"{name}: freeze is the share of attention that is held constant, a number in 0..1, got {freeze!r}"
        )
    if options.get("bias", "none") not in ("none", "token") and freeze not in (None, 1):
        raise BadInput(
            f"{name}: sharing out biases (bias={options['bias']!r}) decomposes with attention wholly held, got freeze={freeze!r}. "
            f"Use freeze=1, or bias='none'."
        )
    if options.get("slope", "origin") not in ("origin", "tangent"):
        raise UnknownName("slope", str(options["slope"]), ("origin", "tangent"))
    if options.get("cut", "ceil") not in ("ceil", "floor"):
        raise UnknownName("cut", str(options["cut"]), ("ceil", "floor"))
    start = options.get("start")
    if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
        raise BadInput(f"{name}: start is the first layer, an integer from 0 on, got {start!r}")
