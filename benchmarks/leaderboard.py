"""Write docs/leaderboard.md and its figure from committed rows.

    python -m benchmarks.leaderboard [docs/evidence/rows/panel] [--out docs/leaderboard.md]

`python -m benchmarks.panel` adds rows. How methods are ranked: benchmarks/panel/ranking.py; what is measured:
benchmarks/panel/columns.py.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import steadygaze as sg
from benchmarks.panel import PanelModel, panel
from benchmarks.panel.columns import (
    FOUR,
    LOCALIZATION,
    REMOVAL_MEAN,
    Measure,
    all_columns,
    column_of,
    read_each,
)
from benchmarks.panel.cost import read_costs
from benchmarks.panel.figure import draw, draw_two_ends
from benchmarks.panel.learned import learned_table
from benchmarks.panel.measure import REMOVAL
from benchmarks.panel.methods import LEFT_OUT, SEARCHES
from benchmarks.panel.ranking import Column, Entry, interval, ranked, shares, with_ceiling
from benchmarks.panel.truth import FOLDER as KNOWN_TRUTH_FOLDER
from steadygaze.errors import UnknownNameError
from steadygaze.faithfulness import METRICS
from steadygaze.methods.registry import DEFAULT, forward_passes
from steadygaze.quantity import plural
from steadygaze.runs.request import CEILING
from steadygaze.runs.request import SEARCHED as SEARCHED_ORDER

ROWS = Path("docs/evidence/rows/panel")
SHOWN_FIRST = 6
FEW = 24  # with fewer images of a model, a method has no place on it


@dataclass(frozen=True)
class Board:
    """Everything the page shows. ranks: the methods by measure; apart: models with attention masking;
    searched: the methods and the ceiling on the images that were searched; added: models of users"""

    models: Mapping[str, PanelModel]
    columns: Mapping[Measure, Mapping[str, Column]]
    ranks: Mapping[Measure, Sequence[Entry]]
    apart: Mapping[str, Column]
    searched: Mapping[Measure, Sequence[Entry]]
    added: Mapping[str, Column]
    measured_cost: Mapping[str, float]
    root: Path

    def chance(self, measure: Measure) -> float | None:
        """The value of `random`."""
        return next((entry.value for entry in self.ranks[measure] if entry.method == "random"), None)


def read_board(root: Path, models: Mapping[str, PanelModel] | None = None) -> Board:
    """Rows below `root`, by model (default: the panel's)."""
    models = panel() if models is None else models
    columns = all_columns(root, models)
    ranks = {
        measure: [e for e in ranked(list(by_model.values()), _reference(by_model)) if not _searched(e.method)]
        for measure, by_model in columns.items()
    }
    searched = {
        measure: with_ceiling(list(columns[measure].values()), _reference(columns[measure]))
        for measure in (REMOVAL_MEAN, *FOUR)
        if measure in columns
    }
    masked = [name for name, model in models.items() if not model.removable]
    others = [path.parent.parent.name for path in sorted(root.glob("*/*/run.json"))]
    others = [name for name in dict.fromkeys(others) if name not in models and name != KNOWN_TRUTH_FOLDER]
    apart, added = (
        column_of(REMOVAL_MEAN, read_each(root, names, REMOVAL_MEAN.metrics)) for names in (masked, others)
    )
    return Board(models, columns, ranks, apart, searched, added, read_costs(root), root)


def _reference(by_model: Mapping[str, Column]) -> str:
    """The method with the most images, of those that every model has; the default if it is one of them."""
    counts = {
        method: sum(int((~np.isnan(column[method])).sum()) for column in by_model.values())
        for method in next(iter(by_model.values()))
        if all(method in column for column in by_model.values())
    }
    most = max(counts.values())
    return DEFAULT if counts.get(DEFAULT) == most else max(counts, key=counts.__getitem__)


def markdown(board: Board) -> str:
    """The page."""
    sections = [_introduction(board), _models(board), _ranking(board), _questions(board), _four(board)]
    sections += [_two_ends(board), _by_model(board), apart_section(board), added_section(board)]
    sections += [named_measures(board.root.parent / NAMED_ROWS), _others(board), OWN_METHOD]
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(board: Board) -> str:
    abouts = "\n".join(f"- **{measure.title}**: {measure.about}." for measure in board.ranks if measure.about)
    measured = "; in brackets measured CPU time on a ViT of DeiT-Tiny's size" if board.measured_cost else ""
    return f"""# Leaderboard

Attribution methods on a panel of trained models, from committed rows: `python -m benchmarks.leaderboard`
writes this page, its figures and [leaderboard.csv](leaderboard.csv) with the same numbers,
`python -m benchmarks.panel` adds rows. Which method to use for which
question: [choosing.md](choosing.md). Rows of DeiT-Tiny and the embedded model from before the panel are
included; for images in both, the scores agree to 1e-4. Some images of these two models were used to select
the constants of `gaze` and `gaze_removal`; those of `gaze_outline` were chosen on other images of the same
models ([details](evidence/default.md)).

![The best methods: removal scores with 95 % intervals, and other measures](images/leaderboard.png)

Higher is better in every column:

{abouts}
- **cost**: forward passes; a backward pass counts as one{measured}. Time: [speed.md](speed.md)."""


def _models(board: Board) -> str:
    lines = ["## Models", "", "| model | top-1 | patches | images of the removal scores, by method |"]
    lines.append("| --- | ---: | --- | --- |")
    for name, column in {**board.columns[REMOVAL_MEAN], **board.apart}.items():
        counts = Counter(int((~np.isnan(values)).sum()) for values in column.values())
        text = ", ".join(f"{counts[images]} methods: {images}" for images in sorted(counts, reverse=True))
        how = "removed" if board.models[name].removable else "hidden from attention"
        lines.append(f"| `{name}` | {board.models[name].accuracy:.1f} | {how} | {text} |")
    return "\n".join(lines)


def _ranking(board: Board) -> str:
    entries = board.ranks[REMOVAL_MEAN]
    others = [measure for measure in board.ranks if measure.about and measure is not REMOVAL_MEAN]
    values = {m: {entry.method: entry.value for entry in board.ranks[m]} for m in others}
    of_ceiling = shares(board.searched[REMOVAL_MEAN])
    heads = ["", "method", "family", "cost", "removal", "rank", "level with", *(m.title for m in others)]
    heads[5:5] = ["share"] if of_ceiling else []
    lines = [
        "## Ranking",
        "",
        RANKING.format(number=len(board.columns[REMOVAL_MEAN])),
        "",
        f"| {' | '.join(heads)} |",
        "| ---: | --- | --- |" + " ---: |" * (len(heads) - 3),
    ]
    if of_ceiling:
        lines[2] += CEILING_TEXT.format(number=len(_searched_images(board)))
        lines.append(f"| | ceiling | | | | 100 % | | |{' |' * len(others)}")
    for place, entry in enumerate(entries, 1):
        cells = [
            str(place),
            f"`{entry.method}`",
            family(entry.method),
            cost_text(entry.method, board.measured_cost),
            f"{entry.value:.1f} [{entry.low:.1f}, {entry.high:.1f}]",
            interval(*entry.rank),
            interval(*entry.level_with) if entry.level_with != (place, place) else "–",
            *(_number(values[m].get(entry.method), m.digits) for m in others),
        ]
        if of_ceiling:
            known = entry.method in of_ceiling
            cells[5:5] = [f"{of_ceiling[entry.method]:.0f} %" if known else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _questions(board: Board) -> str:
    lines = [
        "## First in each measure",
        "",
        "The first methods of each measure with 95 % intervals. **Level**: ranks that do not differ",
        "significantly from the first.",
        "",
        f"| measure | models, methods | first {SHOWN_FIRST} | level | random |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for measure, entries in board.ranks.items():
        shown = ", ".join(
            f"`{e.method}` {_number(e.value, measure.digits)} [{_number(e.low, measure.digits)}, "
            f"{_number(e.high, measure.digits)}]"
            for e in entries[:SHOWN_FIRST]
        )
        sizes = f"{len(board.columns[measure])}, {len(entries)}"
        level, chance = interval(*entries[0].level_with), _number(board.chance(measure), measure.digits)
        lines.append(f"| {measure.title} | {sizes} | {shown} | {level} | {chance} |")
    return "\n".join(lines)


def _four(board: Board) -> str:
    values = {m: {entry.method: entry.value for entry in board.ranks[m]} for m in FOUR}
    lines = ["## The four removal scores", "", FOUR_SCORES, ""]
    lines += [f"| method | {' | '.join(m.title for m in FOUR)} |", "| --- |" + " ---: |" * len(FOUR)]
    for entry in board.ranks[REMOVAL_MEAN]:
        cells = [_number(values[m][entry.method], m.digits) for m in FOUR]
        lines.append(f"| `{entry.method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _two_ends(board: Board) -> str:
    """The methods that are best at removal and at localization."""
    heights = {entry.method: entry.value for entry in board.ranks.get(LOCALIZATION, ())}
    both = [entry for entry in board.ranks[REMOVAL_MEAN] if entry.method in heights]
    if len(both) < 2:
        return ""
    faithful = max(both, key=lambda entry: entry.value)
    outline = max(both, key=lambda entry: heights[entry.method])
    ends = [
        f"`{entry.method}` ({entry.value:.1f}, AP {heights[entry.method]:.1f})"
        for entry in (faithful, outline)
    ]
    text = f"""## Two ends

![Every method: removal score against average precision](images/two_ends.png)

No method is first at both ends. For what the model uses: {ends[0]}. For an outline of the object: {ends[1]}.
Removal: mean over the panel; AP: DeiT-Tiny on pets. {len(both)} methods have both; those in black are
exceeded by no other one in both."""
    return text if faithful is not outline else text.replace("No method is first at both ends. ", "")


def _by_model(board: Board) -> str:
    by_model = board.columns[REMOVAL_MEAN]
    lines = ["## By model", "", BY_MODEL, "", f"| method | {' | '.join(by_model)} | worst place |"]
    lines.append(f"| --- |{' ---: |' * (len(by_model) + 1)}")
    order = [entry.method for entry in board.ranks[REMOVAL_MEAN]]
    order += sorted({method for column in by_model.values() for method in column} - set(order))
    places = {name: _places(board, name) for name in by_model}
    for method in order:
        if _searched(method):
            continue
        found = [places[name].get(method) for name in by_model]
        cells = ["" if each is None else f"{each[1].value:.1f} ({each[0] or 'few'})" for each in found]
        ranked_at = [each[0] for each in found if each and each[0]]
        worst = str(max(ranked_at)) if len(ranked_at) == len(by_model) else ""
        lines.append(f"| `{method}` | {' | '.join(cells)} | {worst} |")
    images = _searched_images(board)
    if images:
        tops = [with_ceiling([column], _reference(by_model)) for column in by_model.values()]
        of_first = [shares(entries).get(order[0]) for entries in tops]
        cells = ["" if share is None else f"{share:.0f} %" for share in of_first]
        lines.append(f"| share of the ceiling, `{order[0]}` | {' | '.join(cells)} | |")
    first, *rest = board.ranks[REMOVAL_MEAN][:SHOWN_FIRST]
    texts = []
    for entry in rest:
        pair = [{m: column[m] for m in (first.method, entry.method)} for column in by_model.values()]
        texts.append(f"{difference_text(pair, first.method, entry.method)} over `{entry.method}`")
    return "\n".join([*lines, "", f"`{first.method}`, paired differences: {'; '.join(texts)}."])


def _searched_images(board: Board) -> dict[str, int]:
    """Number of the images that were searched for the ceiling, by model."""
    found = {}
    for name, column in board.columns[REMOVAL_MEAN].items():
        searched = [values for method, values in column.items() if _searched(method)]
        if len(searched) > 1:
            found[name] = int((~np.isnan(np.max(searched, axis=0))).sum())
    return found


def _places(board: Board, model: str) -> dict[str, tuple[int, Entry]]:
    """method -> its place among the methods measured on the model, and its entry. With few images, it has the
    place 0, and searched orders, which are the ceiling, have none."""
    by_model = board.columns[REMOVAL_MEAN]
    column = by_model[model]
    enough = min(FEW, max(int((~np.isnan(values)).sum()) for values in column.values()))
    few = {method for method, values in column.items() if (~np.isnan(values)).sum() < enough}
    entries = [e for e in ranked([column], _reference(by_model)) if not _searched(e.method)]
    placed = [entry for entry in entries if entry.method not in few]
    places = {entry.method: (place, entry) for place, entry in enumerate(placed, 1)}
    return places | {entry.method: (0, entry) for entry in entries if entry.method in few}


def _searched(method: str) -> bool:
    return method.partition(":")[0] == SEARCHED_ORDER


def records(board: Board) -> list[dict[str, object]]:
    """Everything that the page shows as one table: a line for each measure, method and model ("all": their
    mean); `place` counts from 1, the best first."""
    lines: list[dict[str, object]] = []

    def add(measure: Measure, model: str, entries: Sequence[Entry]) -> None:
        placed = [entry for entry in entries if not _searched(entry.method)]
        for place, entry in enumerate(placed, 1):
            rank = {"place": place, "rank_low": entry.rank[0], "rank_high": entry.rank[1]}
            lines.append(_record(measure.title, model, entry) | rank)

    for measure, by_model in board.columns.items():
        add(measure, "all", board.ranks[measure])
        for name, column in by_model.items():
            add(measure, name, ranked([column], _reference(by_model)))
    for measure, entries in board.searched.items():
        for entry in entries:
            lines.append(_record(measure.title, "all, images that were searched", entry))
    for name, column in board.added.items():
        add(REMOVAL_MEAN, name, ranked([column], _reference({name: column})))
    for name, column in board.apart.items():
        add(REMOVAL_MEAN, f"{name}, hidden from attention", ranked([column], _reference({name: column})))
    return lines


def _record(measure: str, model: str, entry: Entry) -> dict[str, object]:
    numbers = {"value": entry.value, "low": entry.low, "high": entry.high}
    rounded = {name: round(value, 4) for name, value in numbers.items()}
    kind = "" if entry.method == CEILING else family(entry.method)
    return {"measure": measure, "model": model, "method": entry.method, "family": kind, **rounded}


def difference_text(models: Sequence[Column], better: str, worse: str) -> str:
    """Mean over models of the paired difference, with its interval."""
    change = [{"change": c[better] - c[worse], "zero": 0 * c[better]} for c in models]
    shared = [{k: x[~np.isnan(c["change"])] for k, x in c.items()} for c in change]
    entry = next(e for e in ranked(shared, "zero") if e.method == "change")
    return f"{entry.value:+.1f} [{entry.low:+.1f}, {entry.high:+.1f}]"


def apart_section(board: Board) -> str:
    """The models with attention masking."""
    if not board.apart:
        return ""
    lines = []
    for name, column in board.apart.items():
        lines += [f"## Apart: `{name}`", "", APART, "", *_one_model(name, column)]
    return "\n".join(lines)


def added_section(board: Board) -> str:
    """Models that are not part of the panel: rows that somebody added."""
    lines = ["## Other models", "", ADDED] if board.added else []
    for name, column in board.added.items():
        images = max(int((~np.isnan(values)).sum()) for values in column.values())
        lines += ["", f"### `{name}`, {plural(images, 'image')}", "", *_one_model(name, column)]
    return "\n".join(lines)


def named_measures(rows: Path) -> str:
    """Measures that reviewers name, of one model: the means of a run; empty without its rows."""
    if not rows.is_dir():
        return ""
    frame = sg.Rows.read(rows).to_pandas()
    means = frame.pivot_table(index="method", columns="metric", values="value", sort=False)
    names = [name for name in dict.fromkeys(frame.metric) if name not in REMOVAL]
    removal = means[list(REMOVAL)].mean(axis=1)
    lines = ["## Measures that reviewers name", "", NAMED.format(images=frame.image.nunique()), ""]
    heads = ["removal ↑", *(f"`{name}`{METRICS[name].arrow}" for name in names)]
    lines += [f"| method | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    best = {name: means[name].max() if METRICS[name].sign > 0 else means[name].min() for name in names}
    for method in removal.sort_values(ascending=False).index:
        value = f"{removal[method]:.1f}"
        cells = [f"**{value}**" if removal[method] == removal.max() else value]
        for name in names:
            text = METRICS[name].text(means.loc[method, name])
            cells.append(f"**{text}**" if means.loc[method, name] == best[name] else text)
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _one_model(name: str, column: Column) -> list[str]:
    """The table of one model."""
    lines = ["| | method | removal scores, mean | rank | level with |", "| ---: | --- | ---: | ---: | ---: |"]
    for place, e in enumerate(ranked([column], _reference({name: column})), 1):
        level = interval(*e.level_with) if e.level_with != (place, place) else "–"
        value = f"{e.value:.1f} [{e.low:.1f}, {e.high:.1f}]"
        lines.append(f"| {place} | `{e.method}` | {value} | {interval(*e.rank)} | {level} |")
    return lines


def _others(board: Board) -> str:
    by_model = board.columns[REMOVAL_MEAN]
    found = {method for column in by_model.values() for method in column}
    searches = ", ".join(f"`{name}`" for name in SEARCHES if name in found)
    missing = sorted(found - {entry.method for entry in board.ranks[REMOVAL_MEAN]})
    lines = ["## Searched and learned methods", ""]
    lines += [SEARCHED, f"{searches}.", ""] if searches else [NOT_SEARCHED, ""]
    left_out = "; ".join(f"`{name}`: {why}" for name, why in LEFT_OUT.items())
    lines += [f"Not in the ranking: {left_out}.", ""]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"Not ranked, since not every model has rows of them: {names}.", ""]
    return "\n".join([*lines, learned_table()])


def family(method: str) -> str:
    """The family of a method, or "yours" if it is not registered here."""
    try:
        return sg.method(method).base.family
    except UnknownNameError:
        return "yours"


def cost_text(method: str, measured: Mapping[str, float]) -> str:
    """Declared forward passes, and measured ones if known."""
    try:
        declared = f"{forward_passes(sg.method(method)):g}"
    except UnknownNameError:
        declared = "?"
    return f"{declared} ({measured[method]:.1f})" if method in measured else declared


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or np.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.0


RANKING = """\
By the mean of the four removal scores over {number} models whose patches can be removed; 95 % intervals by
bootstrap over images within each model. **Rank** is the interval of the rank under the same resampling.
**Level with**: the range of ranks whose difference from the method is not significant (the paired interval
contains 0). A method with fewer images is compared on the images it has
(`benchmarks/panel/ranking.py`). An empty cell: not measured, or not available, on all of its models."""
CEILING_TEXT = """
**Share**: (score − random) / (ceiling − random); the ceiling is the best value that searched orders
(`greedy`) reach for each image. It is of the images that were searched, of {number} models: few, so a share
is less certain than a score ([evidence](evidence/ceiling.md))."""
FOUR_SCORES = """\
Mean over the same models: percent of correct predictions, and points of probability for AOPC. Insertion AOPC
is 100 minus what is lost with the top patches alone: above 100, the class becomes more probable than in the
whole image. Their mean is in points, and can exceed 100 for the same reason."""
BY_MODEL = f"""\
Mean of the four removal scores of each model; in brackets the place among the methods measured on it, or
"few" for a method with fewer than {FEW} images, whose value is that of a reference method on all images plus
the difference on its own ones. **Worst place**: over the models, of methods with a place on each."""
ADDED = """\
Models that were measured with `--models` (below) and are not part of the panel, so not of the means above."""
NAMED_ROWS = "deit_tiny_measures"
NAMED = """\
DeiT-Tiny, {images} images, each method with its own score; the best mean of each measure in bold. Intervals,
the command, and what each measure can and cannot tell:
[faithfulness](evidence/faithfulness.md#measures-that-reviewers-name-24-images), [measures](measures.md)."""
SEARCHED = """\
Searches run with the given budget of forward passes per image and class; without a number, they use one pass
per patch, region or cluster:"""
NOT_SEARCHED = """\
Searches (the family "black box") have no rows of the panel yet; `--methods searches` measures them. Their
cost and results on DeiT-Tiny: [search.md](evidence/search.md)."""
APART = """\
Its windows need every token, so patches cannot be removed. They are hidden from attention instead, which is a
different measurement, and the model is not part of the ranking above. Methods that need an attention matrix
over all tokens are not available."""
OWN_METHOD = """## Add your own method

A method is a function of a trace. Register it, measure it on the panel, and regenerate this page:

```python
# mine.py
import steadygaze as sg


@sg.register_method("mine", "map", family="gradient", aggregator="plus", score="log_odds")
def mine(trace, layer):
    x, g = trace.patches(layer)  # x^l and its gradient, (B, rows, columns, channels)
    return (x * g).sum(-1).relu()
```

```sh
python -c "import mine, runpy; runpy.run_module('benchmarks.panel', run_name='__main__')" \\
    --rows docs/evidence/rows/panel --cifar10 cifar10/test --methods mine --reference mine
python -m benchmarks.leaderboard
```

A method is ranked when every model has rows of it: pass `--imagenet` and `--weights` too, or compare on the
CIFAR-10 models only with `--models`.

## Add a model

Any model of timm or transformers, or a folder for `load_model`, is measured on labeled images of ImageNet:

```sh
python -m benchmarks.panel --rows rows --imagenet imagenet/val --models vit_base_patch16_224 --methods best
```

This prints the table of the model and writes its rows. `--checkpoint FILE` takes local weights, and
`--class-names FILE` makes a classifier of a model that compares images with text (CLIP, SigLIP). Rows are
welcome as a pull request: with the run folders in `docs/evidence/rows/panel/NAME`, gzipped, and the command
in the description, `python -m benchmarks.leaderboard` adds a table of the model to this page."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS)
    parser.add_argument("--out", type=Path, default=Path("docs/leaderboard.md"))
    chosen = parser.parse_args()
    board = read_board(chosen.rows)
    chosen.out.write_text(markdown(board), encoding="utf-8")
    pd.DataFrame(records(board)).to_csv(chosen.out.with_suffix(".csv"), index=False, lineterminator="\n")
    draw_two_ends(board.ranks, chosen.out.parent / "images" / "two_ends.png")
    draw(board.ranks, chosen.out.parent / "images" / "leaderboard.png")
    print(f"{len(board.ranks[REMOVAL_MEAN])} methods: {chosen.out}")


if __name__ == "__main__":
    main()
