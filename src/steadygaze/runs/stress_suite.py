"""What a stress run does to each picture: the suites that were asked for, as a list of conditions.

| suite | settings | metrics |
| --- | --- | --- |
| always | `clean` | top1, top5, confidence |
| corruptions | `fog/3`: 15 or 19 corruptions at severities 1 to 5 | the same |
| sequences | `sequence/tilt`: the ten of ImageNet-P | flips, top5_distance |
| attacks | `fgsm/8`, `pgd/8`: epsilon in 1/255 | top1, top5, confidence |
| occlusion | `centre_square/0.5`; of a ViT `random_drop`, `salient_drop` | top1, ...; drop_right, drop_probability |
| attention | `clean`, and each corruption at one severity | attention_entropy, ..., attention_stability |
| shift:NAME=FOLDER | `imagenet-a`, `imagenet-c/fog/3`, ... | top1, top5, confidence; top1_of_200, top5_of_200 |
| shift:imagenet-p=FOLDER | `imagenet-p/tilt`: published films | flips, top5_distance |
| neighbours:NAME=FOLDER | `neighbours/cifar-100`, ...: classes the model never saw | knn1, knn10; knn1_euclidean, ... |
| synthetic | `location/0.1,0.9`, `rotation/21`, `size/0.05`, `background/removed` | top1, top5, confidence |
| segmentation | `clean`, `fog/3`: of a segmenter, so alone (`stress_segmentation`) | miou |

top1, top5, knn1, flips, drop_right are 0..1 for a picture. Each row of top1 has [label, predicted class] as its detail, a curve has
its points, attention the mean over heads of each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygaze.errors import BadInput, MethodUnavailable, UnknownName
from steadygaze.method_registry import DEFAULT
from steadygaze.robustness.attacks import budget
from steadygaze.robustness.corruptions.corrupt import COMMON, CORRUPTIONS, SEVERITIES
from steadygaze.robustness.neighbours import METRICS
from steadygaze.robustness.occlusion import SHARES
from steadygaze.robustness.sequences import PERTURBATIONS
from steadygaze.robustness.shifts import READERS, Shift
from steadygaze.robustness.synthetic import FACTORS
from steadygaze.vit import ViT

SUITES = (
    "corruptions",
    "sequences",
    "attacks",
    "occlusion",
    "attention",
    "shift",
    "synthetic",
    "neighbours",
    "segmentation",
)
APART = ("shift", "neighbours")  # pictures of their own; the others want --data
SETS = {"all15": COMMON, "all19": CORRUPTIONS}
ATTENTION = ("entropy", "overfocus", "gini", "peak", "distance", "diversity")
EPSILONS = (1 / 255, 2 / 255, 8 / 255)
ANSWER = ("top1", "top5", "confidence")
KS = (1, 10)  # neighbours that vote
FRAMES = 31  # of a published film, about


@dataclass(frozen=True)
class Suite:
    """The suites by name, the folder of each shift, and the folder or the two folders of each set of neighbours."""

    names: tuple[str, ...]
    shifts: tuple[tuple[str, Path], ...] = ()
    neighbours: tuple[tuple[str, tuple[Path, ...]], ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.names


NEIGHBOURS = "neighbours:cifar-100=/data/cifar-100-python"


def parse_suite(texts: str | Sequence[str]) -> Suite:
    """From words between commas.

    >>> parse_suite("corruptions,shift:imagenet-a=folder").names
    ('corruptions', 'shift')
    """
    pieces = [
        piece.strip()
        for text in ([texts] if isinstance(texts, str) else texts)
        for piece in str(text).split(",")
    ]
    names: dict[str, None] = {}
    shifts: dict[str, Path] = {}
    neighbours: dict[str, tuple[Path, ...]] = {}
    for piece in filter(None, pieces):
        name, _, rest = piece.partition(":")
        if name not in SUITES:
            raise UnknownName(
                "suite", name, SUITES, "A shift is written shift:NAME=FOLDER, neighbours the same way."
            )
        if name == "shift":
            which, _, folder = rest.partition("=")
            if not which or not folder:
                raise BadInput(
                    f"expected shift:NAME=FOLDER, such as shift:imagenet-a=/data/imagenet-a, got {piece!r}"
                )
            if which not in READERS:
                raise UnknownName("shift", which, READERS)
            if which in shifts:
                raise BadInput(
                    f"{which} is asked for twice: {shifts[which]} and {folder}. Make a run of each."
                )
            shifts[which] = Path(folder)
        elif name == "neighbours":
            which, *folders = rest.split("=")
            if not which or "/" in which or len(folders) not in (1, 2) or not all(folders):
                raise BadInput(
                    f"expected neighbours:NAME=FOLDER or neighbours:NAME=TRAIN=TEST, such as {NEIGHBOURS}, got {piece!r}"
                )
            if which in neighbours:
                raise BadInput(f"{which} is asked for twice. Give each set of neighbours a name of its own.")
            neighbours[which] = tuple(map(Path, folders))
        elif rest:
            raise BadInput(f"{name} takes nothing after a colon, got {piece!r}")
        names[name] = None
    if not names:
        raise BadInput(f"suite: expected at least one of {', '.join(SUITES)}, got none")
    if "segmentation" in names and len(names) > 1:
        raise BadInput(
            "segmentation: it is measured of a segmenter, every other suite of a classifier. Make a run of it alone."
        )
    return Suite(tuple(names), tuple(shifts.items()), tuple(neighbours.items()))


def parse_corruptions(given: str | Sequence[str]) -> tuple[str, ...]:
    """all15, all19, or names; in the order of the paper."""
    words = [
        w.strip()
        for text in ([given] if isinstance(given, str) else given)
        for w in text.split(",")
        if w.strip()
    ]
    chosen = {name for word in words for name in SETS.get(word, (word,))}
    for name in sorted(chosen):
        if name not in CORRUPTIONS:
            raise UnknownName(
                "corruption",
                name,
                (*CORRUPTIONS, *SETS),
                f"The names: all15, all19, {', '.join(CORRUPTIONS)}.",
            )
    if not chosen:
        raise BadInput("corruptions: expected all15, all19 or names, got none")
    return tuple(name for name in CORRUPTIONS if name in chosen)


def _words(given: str | float | Iterable[Any]) -> list[Any]:
    """What stands between commas, one number, or the numbers of a list."""
    if isinstance(given, str):
        return [word.strip() for word in given.split(",") if word.strip()]
    return [given] if isinstance(given, int | float) else list(given)


def parse_severities(given: str | int | Iterable[Any]) -> tuple[int, ...]:
    """Whole numbers from 1 to 5, rising."""
    words = _words(given)
    found = set()
    for word in words:
        if isinstance(word, bool) or str(word) not in map(str, SEVERITIES):
            raise BadInput(
                f"expected severities of 1, 2, 3, 4 or 5, got {word!r}; 0 is the clean picture, which is always measured"
            )
        found.add(int(word))
    if not found:
        raise BadInput("severities: expected at least one of 1 to 5, got none")
    return tuple(sorted(found))


def parse_epsilons(given: str | float | Iterable[Any]) -> tuple[float, ...]:
    """Shares of the full scale: 8/255 or 0.031, not 8.

    >>> [round(255 * e) for e in parse_epsilons("8/255,1/255")]
    [1, 8]
    """
    words = _words(given)
    found: dict[str, float] = {}  # by the name of its setting: 8/255 and 0.0313725 are one
    for word in words:
        try:
            above, _, below = str(word).partition("/")
            value = float(above) / float(below or 1)
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(f"epsilons: expected shares such as 8/255, got {word!r}") from error
        found.setdefault(level(budget("epsilon", value)), value)
    if not found or level(0) in found:
        raise BadInput(
            "epsilons: expected shares of the full scale above 0, such as 1/255,8/255; 0 is the clean picture"
        )
    return tuple(sorted(found.values()))


@dataclass(frozen=True)
class Options:
    """How strong and how much; all checked."""

    corruptions: tuple[str, ...] = COMMON
    severities: tuple[int, ...] = SEVERITIES
    epsilons: tuple[float, ...] = EPSILONS
    pgd_steps: int = 10
    shares: tuple[float, ...] = SHARES
    salient: str = DEFAULT

    @classmethod
    def of(cls, *, corruptions: Any = None, severities: Any = None, epsilons: Any = None, pgd_steps: int = 10,
           salient: str = DEFAULT) -> Options:  # fmt: skip
        if isinstance(pgd_steps, bool) or not isinstance(pgd_steps, int) or pgd_steps < 1:
            raise BadInput(f"pgd_steps: expected a whole number of 1 or more, got {pgd_steps!r}")
        return cls(
            COMMON if corruptions is None else parse_corruptions(corruptions),
            SEVERITIES if severities is None else parse_severities(severities),
            EPSILONS if epsilons is None else parse_epsilons(epsilons),
            pgd_steps,
            salient=salient,
        )

    @property
    def attention_severity(self) -> int:
        """The severity at which attention is looked at: the middle one, 3 of 1..5."""
        return self.severities[len(self.severities) // 2]


@dataclass(frozen=True)
class Condition:
    """One thing done to a picture, and the rows that come of it, (setting, metric).

    pictures: how many pictures are made of one       name, level: a corruption and its severity, an attack and epsilon, ...
    """

    kind: str
    name: str = ""
    level: float = 0
    rows: tuple[tuple[str, str], ...] = ()
    pictures: int = 1

    @property
    def plain(self) -> bool:
        """Whether the model is given the picture as it is (an attack and the like come later)."""
        return self.kind in ("clean", "fgsm", "pgd", "centre_square", "drop", "shift") or (
            self.kind == "attention" and not self.name
        )


@dataclass(frozen=True)
class Plan:
    """The conditions of the data, those of each shift, and what was asked for but cannot be measured."""

    conditions: tuple[Condition, ...]
    shifts: tuple[Shift, ...] = ()
    seed: int = 0
    batch: int = 16
    options: Options = field(default_factory=Options)
    notes: tuple[str, ...] = ()
    answer: tuple[str, ...] = ANSWER
    classes: int = 0

    def of_shift(self, shift: Shift, group: str = "") -> Condition:
        """What is measured on the pictures of a shift, or on a group of them that is a setting of its own."""
        restricted = [] if shift.classes is None else [f"top{k}_of_{len(shift.classes)}" for k in (1, 5)]
        setting = "/".join(filter(None, (shift.name, group.replace(":", "/"))))
        if shift.name == "imagenet-p":
            return Condition("clip", group, rows=_each(setting, ("flips", "top5_distance")), pictures=FRAMES)
        return Condition("shift", shift.name, rows=_each(setting, (*self.answer, *restricted)))

    def of_neighbours(self, name: str, bank: int) -> Condition:
        """What is measured on pictures whose classes a bank of so many labelled pictures must tell."""
        metrics = [
            f"knn{k}{'' if metric == 'cosine' else f'_{metric}'}"
            for metric in METRICS
            for k in KS
            if k <= bank
        ]
        return Condition("neighbours", name, rows=_each(f"neighbours/{name}", metrics))


def level(epsilon: float) -> str:
    """Epsilon in 1/255, as a setting says it."""
    return f"{round(255 * epsilon, 4):g}"


def make_plan(suite: Suite, options: Options, vit: ViT | None, model: str, classes: int, side: int, shifts: Sequence[Shift] = (),
              backgrounds: bool = False, seed: int = 0, batch: int = 16) -> Plan:  # fmt: skip
    """Check that the model serves what is asked for; what cannot be measured is said in the notes."""
    notes: list[str] = []
    answer = ANSWER if classes > 5 else ("top1", "confidence")
    if classes <= 5:
        notes.append(f"top5 is left out: the model has {classes} classes")
    found = [Condition("clean", rows=_each("clean", answer))]
    if "corruptions" in suite:
        found += [
            Condition("corruption", name, s, _each(f"{name}/{s}", answer))
            for name in options.corruptions
            for s in options.severities
        ]
    if "sequences" in suite:
        found += _sequences(classes, side, notes)
    if "attacks" in suite:
        found += [
            Condition(k, k, e, _each(f"{k}/{level(e)}", answer))
            for k in ("fgsm", "pgd")
            for e in options.epsilons
        ]
    if "occlusion" in suite:
        found += _occlusion(vit, model, answer, options, notes)
    if "attention" in suite:
        found += _attention(vit, model, options)
    if "synthetic" in suite:
        for factor, values in FACTORS.items():
            settings = [f"{factor}/{value_text(v)}" for v in values]
            rows = tuple((setting, metric) for setting in settings for metric in answer)
            found.append(Condition("synthetic", factor, rows=rows, pictures=len(values)))
        kinds = ("removed", "swapped") if backgrounds else ("removed",)
        found += [Condition("background", kind, rows=_each(f"background/{kind}", answer)) for kind in kinds]
        if not backgrounds:
            notes.append(
                "synthetic: objects stand before plain grey, and none is moved to another background: no --backgrounds FOLDER"
            )
    return Plan(tuple(found), tuple(shifts), seed, batch, options, tuple(notes), answer, classes)


def value_text(value: Any) -> str:
    return ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}"


def _each(setting: str, metrics: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((setting, metric) for metric in metrics)


def _sequences(classes: int, side: int, notes: list[str]) -> list[Condition]:
    from steadygaze.robustness.corruptions.corrupt import check_settings
    from steadygaze.robustness.sequences import SETTINGS

    metrics = ("flips", "top5_distance") if classes >= 6 else ("flips",)
    if classes < 6:
        notes.append(f"top5_distance is left out: it needs 6 classes or more, the model has {classes}")
    frames = SETTINGS[check_settings(None, side, side)]
    return [
        Condition("sequence", name, 1, _each(f"sequence/{name}", metrics), frames[name][0])
        for name in PERTURBATIONS
    ]


def _occlusion(
    vit: ViT | None, model: str, answer: tuple[str, ...], options: Options, notes: list[str]
) -> list[Condition]:
    from steadygaze.explainer import unavailable
    from steadygaze.methods import parse

    found = [Condition("centre_square", "centre_square", 0.5, _each("centre_square/0.5", answer))]
    if vit is None:
        notes.append(
            f"random_drop and salient_drop are left out: {model} is no vision transformer, it has no tokens to drop"
        )
        return found
    why = unavailable(parse(options.salient), vit)
    if why:
        raise MethodUnavailable(
            f"salient_drop by {options.salient}: {why}. Choose another with --salient METHOD."
        )
    curve = ("drop_right", "drop_probability")
    return found + [
        Condition("drop", name, rows=_each(name, curve)) for name in ("random_drop", "salient_drop")
    ]


def _attention(vit: ViT | None, model: str, options: Options) -> list[Condition]:
    if vit is None or not vit.plan.global_attention:
        kind = (
            "no vision transformer"
            if vit is None
            else f"a {vit.plan.kind}, whose attention is not over all tokens"
        )
        raise MethodUnavailable(f"attention: {model} is {kind}. Leave attention out of --suite.")
    severity = options.attention_severity
    metrics = tuple(f"attention_{name}" for name in ATTENTION)
    found = [Condition("attention", rows=_each("clean", metrics))]
    for name in options.corruptions:
        rows = _each(f"{name}/{severity}", (*metrics, "attention_stability"))
        found.append(Condition("attention", name, severity, rows, pictures=2))
    return found
