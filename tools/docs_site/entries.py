"""Pages of the reference that are made from the registries: methods, metrics, suites, losses and recipes."""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import steadygaze as sg
from steadygaze.faithfulness.metric import METRICS
from steadygaze.methods.registry import MethodInfo, parse_method
from steadygaze.runs.suite import SUITES
from steadygaze.training.losses import LOSSES
from steadygaze.training.recipe_files import shipped_recipes
from tools.docs_site.docstrings import to_markdown
from tools.docs_site.equations import anchors_of, section
from tools.docs_site.illustrations import CAPTIONS
from tools.method_sheet import BUDGET, FOLDER

UP = "../../"  # from reference/<kind>/<name>.md to docs/


TRAINED = {  # methods that are trained first: their image in docs/images, and how it was made
    "diffmask": (
        "diffmask_counting.png",
        "The counting task, in which the red patches are the evidence: gates trained for it, drawn by "
        "patches and interpolated, beside other methods (`python -m benchmarks.diffmask counting`).",
    ),
    "vit_shapley": (
        "vit_shapley.png",
        "An explainer trained for 140 steps of 32 images of CIFAR-10 (`python tools/shapley_figure.py`); the "
        "measurements used 750 steps.",
    ),
}
UNDRAWN = {  # methods without an image, and why
    "calibrated": "No image: `sg.calibrate` chooses for each model what this name stands for.",
}


@dataclass(frozen=True)
class Entry:
    """One page. kind: its folder; summary, group: its line in the table of the kind, and its heading."""

    kind: str
    name: str
    group: str
    summary: str
    body: str

    @property
    def path(self) -> str:
        return f"reference/{self.kind}/{self.name}.md"


KINDS = {  # folder -> title, sentence
    "methods": ("Methods", "Attribution methods of `sg.explain`, `sg.verify` and `steadygaze explain`."),
    "metrics": ("Metrics", "Faithfulness metrics of `sg.verify` and `steadygaze verify`."),
    "suites": ("Suites", "Robustness suites of `sg.stress` and `steadygaze stress`."),
    "losses": ("Losses", "Training losses that a recipe names under `[losses.NAME]`."),
    "recipes": ("Recipes", "Recipes that ship with the package, for `sg.train` and `steadygaze train`."),
}


def all_entries() -> list[Entry]:
    """Every page, in the order of the listings."""
    return [*methods(), *metrics(), *suites(), *losses(), *recipes()]


def methods() -> Iterator[Entry]:
    for info in sg.list_methods():
        method = parse_method(info.name)
        function = method.base.function
        matrices = ["+rollout"] if method.base.kind == "matrix" else []
        aggregators = ", ".join(f"`{name}`" for name in ["+last", *matrices, "+plus", "+skipplus"])
        facts = {
            "family": info.family,
            "cost": f"{info.cost:g} forward passes for one image (a backward pass counts as one)",
            "depends on the class": "yes" if info.class_specific else "no",
            "explains by default": f"`{info.score}`",
            "composes with aggregators": f"yes: {aggregators}" if info.layers else "no",
            "result": "`Attribution.scores`: (B, rows, columns), one signed score per patch, unnormalized",
        }
        if info.alias_of:
            facts = {"stands for": f"`{info.alias_of}`", **facts}
        own = inspect.getdoc(function) or ""
        parts = [
            f"# `{info.name}`",
            info.summary,
            maps(info),
            facts_table(facts),
            "## Use",
            fence(
                "python",
                f'import steadygaze as sg\n\nattribution = sg.explain(model, images, method="{info.name}")',
            ),
            fence("sh", f"steadygaze explain photo.jpg --model embedded --method {info.name} --out seen"),
            "## Options",
            options_table(info.options),
            "## Details",
            details(own),
            equation(anchors_of(info.name, function.__module__, own)),
        ]
        yield Entry("methods", info.name, info.family, info.summary, joined(parts))


def maps(info: MethodInfo) -> str:
    """The method on two photographs, or on the task that it was trained for, or why there is no image."""
    if info.name in TRAINED:
        file, caption = TRAINED[info.name]
        return f"![The map of {info.name}]({UP}images/{file})\n\n*{caption}*"
    if info.name in UNDRAWN:
        return UNDRAWN[info.name]
    if not (FOLDER / f"{info.name}.jpg").exists():
        return f"No image: `python tools/method_sheet.py --methods {info.name}` draws it."
    evidence = "evidence for the predicted class" if info.class_specific else "the same map for every class"
    shortened = (info.options.get("budget") or 0) > BUDGET
    searched = f", a search of {BUDGET:,} forward passes" if shortened else ""
    shown = [
        f"![Two photographs: a cat and a cup of coffee]({UP}images/methods/photographs.jpg)",
        f"![The maps of {info.name} on both]({UP}images/methods/{info.name}.jpg)",
    ]
    caption = f"*DeiT-Tiny on two photographs (CC0, of scikit-image): {evidence}{searched}.*"
    return "\n\n".join(['<div class="pair" markdown>', "\n".join(shown), "</div>", caption])


def metrics() -> Iterator[Entry]:
    for info in sg.list_metrics():
        compute = METRICS[info.name].compute
        better = {"higher": "higher is better", "lower": "lower is better"}.get(info.better, "descriptive")
        facts = {
            "label": info.label,
            "family": info.family,
            "direction": better,
            "unit": info.unit or "none",
            "range": f"{number(info.low)} to {number(info.high)}",
            "needs masks": "yes" if info.needs_masks else "no",
            "result": "one number for each map and image; NaN where it is undefined",
        }
        if info.needs_explain:
            facts["cost"] = "runs the methods again"
        parts = [
            f"# `{info.name}`",
            sentence(info.summary),
            image(f"metrics/{info.name}.svg", f"{info.label} of five methods on the demo images"),
            facts_table(facts),
            "## Use",
            fence(
                "python",
                f'rows = sg.verify(model, data, methods=["gaze_removal", "gae"], metrics=["{info.name}"])',
            ),
            fence("sh", f"steadygaze verify --model embedded --data photos --metrics {info.name} --out run"),
            equation(anchors_of(info.name, compute.__module__, inspect.getdoc(compute) or "")),
        ]
        yield Entry("metrics", info.name, info.family, sentence(info.summary), joined(parts))


def suites() -> Iterator[Entry]:
    for info in sg.list_suites():
        suite = SUITES[info.name]
        name = f"{info.name}:{info.argument.split(' ')[0]}" if info.argument else info.name
        data = "the suite has its own images" if info.own_images else "`data` of the run"
        facts = {"images": data, "argument": f"`{info.argument}`" if info.argument else "none"}
        quantities = [f"`{q.name}`: {sentence(q.summary or q.title)}" for q in suite.quantities]
        parts = [
            f"# `{info.name}`",
            info.summary,
            image(f"suites/{info.name}.png", f"Demo images under the suite {info.name}"),
            facts_table(facts),
            "## Use",
            fence("python", f'rows = sg.stress(model, data, suites=["{name}"])\nrows.cards()'),
            fence("sh", f"steadygaze stress --model embedded --data photos --suites '{name}' --out card"),
            "## Options",
            table(("option", "meaning"), [(f"`{key}`", text) for key, text in info.options.items()]),
            "## Quantities" if quantities else "",
            "\n".join(f"- {line}" for line in quantities),
            "## Details",
            details(inspect.getdoc(suite) or "") if "__doc__" in vars(suite) else "",
            equation(anchors_of(info.name, suite.__module__, kind="suite")),
        ]
        yield Entry("suites", info.name, "", info.summary, joined(parts))


def losses() -> Iterator[Entry]:
    for info in sg.list_losses():
        loss = LOSSES[info.name]
        facts = {
            "terms": ", ".join(f"`{term}`" for term in info.terms) or "one",
            "needs masks": "yes (`data.masks`)" if info.needs_masks else "no",
            "tasks": ", ".join(info.tasks),
            "result": "a scalar, or one scalar for each term; 0 is the best value",
        }
        parts = [
            f"# `{info.name}`",
            info.summary,
            image(f"losses/{info.name}.png", f"Where the gradient of {info.name} acts on a demo image"),
            facts_table(facts),
            "## Use",
            fence("toml", f"[losses.{info.name}]\n{toml_options(info.options)}"),
            "## Options",
            options_table(info.options),
            "## Details",
            details(inspect.getdoc(loss) or ""),
            equation(anchors_of(info.name, loss.__module__, inspect.getdoc(loss) or "", kind="loss")),
        ]
        yield Entry("losses", info.name, "", info.summary, joined(parts))


def recipes() -> Iterator[Entry]:
    for name, text in shipped_recipes().items():
        content = tomllib.loads(text)
        used = list(content.get("losses", {}))
        links = ", ".join(f"[`{loss}`](../losses/{loss}.md)" for loss in used)
        facts = {"cost": content.get("cost", ""), "measured": content.get("result", ""), "losses": links}
        parts = [
            f"# `{name}`",
            content.get("about", ""),
            facts_table({key: value for key, value in facts.items() if value}),
            "## Use",
            fence("sh", content.get("command", f"steadygaze train {name} --out runs/{name}")),
            fence("python", f'sg.train("{name}", "runs/{name}")'),
            "".join(
                image(f"losses/{loss}.png", f"Where the gradient of {loss} acts on a demo image")
                for loss in used
            ),
            "## The recipe",
            fence("toml", text.strip()),
            "Equations: " + ", ".join(equation_links(used)) + "." if equation_links(used) else "",
        ]
        yield Entry("recipes", name, "", content.get("about", ""), joined(parts))


def index(kind: str, entries: Sequence[Entry]) -> str:
    """The page that lists the entries of a kind, by group."""
    title, words = KINDS[kind]
    own = [entry for entry in entries if entry.kind == kind]
    lines = [f"# {title}", words, f"{len(own)} entries; each page is made from its registration."]
    for group in dict.fromkeys(entry.group for entry in own):
        rows = [(f"[`{e.name}`]({e.name}.md)", e.summary) for e in own if e.group == group]
        lines += [f"## {group[:1].upper()}{group[1:]}" if group else "", table(("name", "what it is"), rows)]
    return joined(lines)


def equation(anchors: Sequence[str]) -> str:
    """The sections with these anchors, as one part of a page."""
    if not anchors:
        return ""
    shown = [section(anchor, UP) for anchor in anchors]
    return joined(
        ["## Equation", *shown, f"All equations: [docs/equations.md]({UP}equations.md#{anchors[0]})."]
    )


def equation_links(names: Sequence[str]) -> list[str]:
    found = {name: anchors_of(name, LOSSES[name].__module__, kind="loss") for name in names if name in LOSSES}
    return [f"[{name}]({UP}equations.md#{anchors[0]})" for name, anchors in found.items() if anchors]


def options_table(options: Mapping[str, Any]) -> str:
    rows = [
        (f"`{key}`", f"`{str(value).lower() if isinstance(value, bool | None) else value}`")
        for key, value in options.items()
    ]
    return table(("option", "default"), rows)


def toml_options(options: Mapping[str, Any]) -> str:
    """The options with their defaults, as a recipe writes them; those without a default as a comment."""

    def value(given: Any) -> str:
        return (
            str(given).lower()
            if isinstance(given, bool)
            else f'"{given}"'
            if isinstance(given, str)
            else str(given)
        )

    return "\n".join(
        f"# {key} =" if given is None else f"{key} = {value(given)}" for key, given in options.items()
    )


def facts_table(facts: Mapping[str, str]) -> str:
    return table(("property", "value"), list(facts.items()))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def image(path: str, words: str) -> str:
    """The image, and how it was made if that is special."""
    shown = f"![{words}]({UP}reference/images/{path})"
    caption = CAPTIONS.get(path.rpartition(".")[0])
    return f"{shown}\n\n*{caption}*" if caption else shown


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def number(value: float) -> str:
    return ("−∞" if value < 0 else "∞") if math.isinf(value) else f"{value:g}"


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def joined(parts: Sequence[str]) -> str:
    """Parts with an empty line between; headings without content are left out."""
    kept: list[str] = []
    for part in [part for part in parts if part.strip()]:
        if kept and _heading(kept[-1]) and part.startswith("## "):
            kept.pop()
        kept.append(part)
    if kept and _heading(kept[-1]):
        kept.pop()
    return "\n\n".join(kept) + "\n"


def details(text: str) -> str:
    """A docstring without its first line, which is the summary of the page."""
    return to_markdown(text.partition("\n")[2])


def _heading(part: str) -> bool:
    return part.startswith("## ") and "\n" not in part
