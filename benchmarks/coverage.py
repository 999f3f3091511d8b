"""Which models steadygaze supports, and which methods work on them.

    python -m benchmarks.coverage [--pattern TEXT] [--limit N] [--json FILE [--resume]] [--markdown FILE]

Every plain and hierarchical ViT that timm registers and the classes of transformers and torchvision are built
in a tiny version (`zoo`), checked in float64 (`checks`) and explained with every method. All of them took 18
minutes on one busy core.
"""

import argparse
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import steadygaze as sg
from benchmarks import checks, region_zoo, text_zoo, vision_language, zoo

TOLERANCE = 1e-9
NOT_APPLICABLE = ("not removable", "not linear")
GENERATED = "<!-- what follows is written by python -m benchmarks.coverage --markdown docs/models.md -->"


@dataclass
class Row:
    """One model: its three checks, and the outcome of every method."""

    family: str
    name: str
    cut: str = ""
    checks: dict[str, float | str] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # method -> reason, an error of steadygaze
    failed: dict[str, str] = field(default_factory=dict)  # method -> any other error
    seconds: float = 0.0
    tolerance: float = TOLERANCE

    @property
    def adapted(self) -> bool:
        """Whether all checks that apply agree to the tolerance."""
        results = self.checks.values()
        fine = [v in NOT_APPLICABLE if isinstance(v, str) else v <= self.tolerance for v in results]
        return len(fine) == 3 and all(fine)

    @property
    def why_not(self) -> str:
        """The checks that failed, as text."""
        failures = [
            f"{name}: {result}"
            for name, result in self.checks.items()
            if result not in NOT_APPLICABLE and (isinstance(result, str) or result > self.tolerance)
        ]
        return "; ".join(failures)


def signature(model: nn.Module) -> tuple[Any, ...]:
    """All of a model but its weights; names whose tiny versions are the same model share their results."""
    plain = (str, int, float, bool, tuple, type(None))
    modules = [
        (type(m), sorted((k, v) for k, v in vars(m).items() if isinstance(v, plain))) for m in model.modules()
    ]
    return str(modules), str([(n, p.shape) for n, p in model.named_parameters()])


def examine(entry: zoo.Entry, known: dict[Any, Row]) -> Row:
    """Build one model, check it, and explain one image of noise with every method."""
    row, begin = Row(entry.family, entry.name, tolerance=entry.tolerance), time.perf_counter()
    try:
        model, row.cut = entry.build()
    except Exception as error:  # a model that does not build is a row, not the end of the table
        row.checks["build"] = f"{type(error).__name__}: {error}"
        return row
    key = (entry.family, row.cut, signature(model))
    if key in known:
        return replace(known[key], name=entry.name, seconds=time.perf_counter() - begin)
    known[key] = row
    row.checks = (entry.check or checks.check)(model)
    if row.adapted:
        vit = sg.adapt(model)
        images = zoo.image_of(model, vit.plan.input_size)
        for info in sg.list_methods():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    method = sg.method(info.name, budget=4) if "budget" in info.options else info.name
                    scores = sg.explain(vit, images, method=method).scores
                if scores.shape != (1, *vit.grid) or not scores.isfinite().all():
                    raise ValueError(f"map of shape {tuple(scores.shape)}, grid {vit.grid}, or not finite")
                row.served.append(info.name)
            except sg.errors.MethodUnavailableError as error:
                row.refused[info.name] = str(error)
            except Exception as error:
                row.failed[info.name] = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - begin
    return row


def families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by family, in the order of the zoo."""
    return {family: list(group) for family, group in groupby(rows, key=lambda r: r.family)}


def worst(rows: list[Row], check: str) -> str:
    """Largest error of a check over some models, or why it does not apply."""
    values = [r.checks.get(check) for r in rows]
    numbers = [v for v in values if isinstance(v, float)]
    return f"{max(numbers):.0e}" if numbers else str(next(iter(values), ""))


def served(rows: list[Row]) -> str:
    """How many methods work on a model of this family."""
    counts = sorted({len(r.served) for r in rows if r.adapted})
    total = len(sg.list_methods())
    if not counts:
        return "none"
    return f"{counts[0]} of {total}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} of {total}"


def table(rows: list[Row]) -> Table:
    """The summary that is printed."""
    shown = Table(
        "family",
        "names",
        "adapted",
        "logits",
        "removal",
        "decompx",
        "methods",
        title="Supported models",
    )
    for family, group in families(rows).items():
        adapted = str(sum(r.adapted for r in group))
        shown.add_row(
            family,
            str(len(group)),
            adapted,
            *(worst(group, c) for c in ("logits", "removal", "decompx")),
            served(group),
        )
    return shown


def reasons(rows: list[Row], what: str = "refused") -> list[tuple[str, list[str], dict[str, int]]]:
    """(reason, methods, models by family) of every refusal or failure, the most frequent first."""
    grouped: dict[str, tuple[set[str], set[tuple[str, str]]]] = {}
    for row in rows:
        for method, text in getattr(row, what).items():
            reason = re.sub(
                r"\ba (timm|transformers|torchvision) \w+", "the model", text.removeprefix(f"{method}: ")
            )
            if what == "failed":
                reason = re.sub(r"\d+", "n", reason)
            methods, models = grouped.setdefault(reason, (set(), set()))
            methods.add(method)
            models.add((row.family, row.name))
    listed = [
        (reason, sorted(methods), dict(Counter(f for f, _ in sorted(models))))
        for reason, (methods, models) in grouped.items()
    ]
    return sorted(listed, key=lambda entry: -sum(entry[2].values()))


def _below_guide(file: Path, generated: str) -> str:
    """The text of a file whose guide, up to the marker, is written by hand."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    guide, marker, _ = before.partition(GENERATED)
    return f"{guide}{marker}\n\n{generated}" if marker else generated


def markdown(rows: list[Row]) -> str:
    """docs/models.md."""
    plain = [r for r in rows if r.family.split()[-1] in zoo.PLAIN]
    libraries = ", ".join(f"{n} {version(n)}" for n in ("timm", "transformers", "torchvision"))
    lines = [
        "## Coverage",
        "",
        f"Written by `python -m benchmarks.coverage --markdown docs/models.md` with {libraries}.",
        "",
        INTRODUCTION,
        "",
        f"**{sum(r.adapted for r in rows)} of {len(rows)} models are adapted**; of the plain ViT, EVA, BEiT "
        f"and DeiT names of timm {sum(r.adapted for r in plain)} of {len(plain)}.",
        "",
        "| family | names | adapted | logits | removal | decompx | methods |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family, group in families(rows).items():
        errors = [worst(group, check) for check in ("logits", "removal", "decompx")]
        cells = [family, len(group), sum(r.adapted for r in group), *errors, served(group)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    bad = [r for r in rows if not r.adapted]
    if bad:
        lines += ["", "## Not adapted", "", *(f"- `{r.name}`: {r.why_not}" for r in bad)]
    for what, title in (("failed", "Methods that fail"), ("refused", "Unsupported methods and the reasons")):
        listed = reasons(rows, what)
        if listed:
            lines += ["", f"### {title}", "", "| reason | methods | models |", "| --- | --- | --- |"]
        for reason, methods, models in listed:
            named = ", ".join(f"`{m}`" for m in methods)
            lines.append(
                f"| {reason} | {named} | {', '.join(f'{family} {n}' for family, n in models.items())} |"
            )
    lines += ["", NOTES, "", "### Names", ""]
    for family, group in families(rows).items():
        lines += [
            f"**{family}**: "
            + ", ".join(f"`{r.name}`" + ("" if r.adapted else " (not adapted)") for r in group),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = f"""\
Each model is built with its own architecture, reduced to two or three blocks (hierarchical models:
six), few heads of the original width and a small image size where the constructor allows, with
random weights in float64. **Adapted** means that

- *logits*: the view `embed -> blocks -> head` gives the model's own logits, from the start and from
  any layer;
- *removal*: removing patches with `vit.select` equals masking their keys with -inf in the whole
  model;
- *decompx*: one frozen-linear backward pass equals, from every layer, the decomposition with one
  propagated vector for each source token;

each to a relative error of {TOLERANCE:.0e} (the columns show the largest error). Then every method
explains one image."""

NOTES = """### Notes on the views

- A norm before the first block (`norm_pre`, CLIP's `pre_layrnorm`) belongs to block 0: x^0 is the
  output of `embed`, before that norm.
- Rotary embeddings and relative position biases of the kept patches are gathered, so that each
  patch keeps its own position.
- CaiT: the class-attention blocks are the head, which pools by attention. Its talking heads add a
  bias after the softmax, so a masked key would still have a weight; the reference for the removal
  check also sets the values of masked keys to zero.
- transformers' DINOv2 classifiers apply one linear map to the class token and the mean of the
  patches: attention methods read both rows with equal weight.
- transformers has no DINOv3 classifier: a module with a `DINOv3ViTModel` and a head on its class
  token is supported, for example `steadygaze.vit.adapters.transformers.Classifier(backbone, head)`;
  the same holds for the other backbones.
- transformers' eager attention computes its softmax in float32 whatever the model's dtype; the
  removal check runs it in float64.
- timm creates mixed rotary tables in float32 and fails with float64 positions; the check keeps
  those positions in float32.
- Hybrid stems mix neighboring patches before the tokens: what is removed is a token, not all
  information about its pixels.
- Hierarchical models: the layers are all blocks in order, and x^l is the input of block l.
  Downsampling between stages belongs to the block before it; MViT v2 and Hiera pool inside the
  first block of a stage. The map has the last stage's grid. Patches cannot be removed, and no
  attention matrix spans all tokens.
- Swin of transformers and of torchvision with the weights of timm's Swin has its maps and its masked
  logits to rounding (`tests/vit/test_hierarchical.py`). transformers' PVT has a class token in its last
  stage only. torchvision's Swin states no image size: the view's own is the one with one window in the
  last stage; others are accepted.
- LeViT's attention from a subsampled grid belongs to the block before it. The attention of its variants of
  convolutions (`levit_conv_*`) is multiplied from the other side: patches can be filled, not masked, and
  FullGrad has no implicit terms.
- timm's NaFlexViT and transformers' SigLIP 2 are viewed with images of one size, which need no padding.
- How to load them: `torchvision:swin_v2_t`, `naflexvit_base_patch16_gap`, a folder or `owner/name` of
  transformers such as `microsoft/swin-tiny-patch4-window7-224`, or `sg.adapt(module)`.
- Multi-label and regression models of every family: `task="multilabel"` or `"regression"` in `sg.adapt`
  and `sg.load_model`, `--task` on the command line; `problem_type` in the configuration of a transformers
  model says so itself ([scores](equations.md#target-score)).
- RVT, FAN, PVT v1 and LocalViT come with `import steadygaze.models`. RVT-S, RVT-B, FAN and LocalViT
  keep one grid; all but RVT-B mix patches by convolutions, so patches are masked, not removed.
  FAN's class-attention blocks are its head, which pools by attention.
- A model with modules of `sg.modules.insert` has the view of the original model, with patches
  masked instead of removed."""


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--pattern", default="", help="only models whose family and name contain this text")
    parser.add_argument("--limit", type=int, help="maximum number of models")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that are already in the --json file"
    )
    parser.add_argument("--markdown", type=Path, help="write the summary to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    chosen = list(
        islice(
            (
                e
                for e in chain(
                    zoo.entries(), text_zoo.entries(), vision_language.entries(), region_zoo.entries()
                )
                if options.pattern in f"{e.family} {e.name}"
            ),
            options.limit,
        )
    )
    known: dict[Any, Row] = {}
    rows: list[Row] = []
    kept = (
        [Row(**r) for r in json.loads(options.json.read_text())]
        if options.resume and options.json.exists()
        else []
    )
    done = {(r.family, r.name): r for r in kept}
    for entry in track(chosen, "models", console=console):
        rows.append(done.get((entry.family, entry.name)) or examine(entry, known))
        if not console.is_terminal:
            print(
                f"{len(rows)} of {len(chosen)}: {entry.family} {entry.name}, adapted {rows[-1].adapted}",
                flush=True,
            )
    if not rows:
        raise SystemExit(f"no model matches {options.pattern!r}")
    console.print(table(rows))
    for row in rows:
        if row.why_not:
            console.print(f"[red]{row.family} {row.name}[/red] {row.why_not}", highlight=False)
    for what, color in (("failed", "red"), ("refused", "yellow")):
        for reason, methods, models in reasons(rows, what):
            count = f"{sum(models.values())} models of {', '.join(models)}"
            console.print(
                f"[{color}]{what}[/{color}] by {count}: {', '.join(methods)}: {reason}", highlight=False
            )
    console.print(
        f"{sum(r.adapted for r in rows)} of {len(rows)} adapted, {sum(r.seconds for r in rows):.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if options.markdown:
        options.markdown.write_text(_below_guide(options.markdown, markdown(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
