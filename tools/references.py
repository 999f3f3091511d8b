"""Write src/steadygaze/assets/references.json from docs/equations.md: what `steadygaze cite` prints.

    python tools/references.py          # write the file
    python tools/references.py --check  # exit 1 if it is out of date

A section cites what its paragraph "Source:" links to. It is found by the names in backticks in its heading;
those that stand in no heading are listed here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "equations.md"
OUT = ROOT / "src" / "steadygaze" / "assets" / "references.json"
REFERENCE = re.compile(r'^- <a id="ref-([\w-]+)"></a>(.+?)\. \*(.+?)\.?\* ?(.*)$', re.MULTILINE)
SECTION = re.compile(r'<a id="([\w-]+)"></a>\n#{2,4} (.*?)\n(.*?)(?=\n<a id=|\Z)', re.DOTALL)
EXACT = {  # sections about several methods of several papers
    "genatt": ["gae"],
    "gae": ["gae"],
    "gradsam": ["gradsam"],
    "gradcam": ["gradcam"],
    "xgradcam": ["xgradcam"],
    "xgradcam_plus": ["xgradcam", "skipplus"],
    "gradcam_plus_plus": ["gradcampp"],
    "hirescam": ["hirescam"],
    "layercam": ["layercam"],
    "sensitivity_n": ["sensitivity-n"],
    "faithfulness_correlation": ["bhatt"],
    "infidelity": ["infidelity"],
    "sparseness": ["sparseness"],
    "complexity": ["bhatt"],
}
SECTIONS = {  # name -> anchor, where the heading does not have it
    "elementwise_gradcam": "gradcam-family",
    **dict.fromkeys(("libra_hirescam", "libra_xgradcam_plus"), "libra"),
    "attnlrp_gamma": "gamma-rule",
    **dict.fromkeys(
        (
            "insertion_accuracy",
            "deletion_accuracy",
            "insertion_aopc",
            "deletion_aopc",
            "insertion_value",
            "deletion_value",
            "removal_mean",
        ),
        "token-removal",
    ),
    **dict.fromkeys(("positive_perturbation", "negative_perturbation"), "perturbation-tests"),
    **dict.fromkeys(
        ("positive_accuracy", "negative_accuracy", "positive_kl", "negative_kl"), "diffmask-perturbation"
    ),
    "average_precision": "segmentation-ap",
    **dict.fromkeys(("pixel_accuracy", "map_chefer", "miou"), "segmentation-chefer"),
    **dict.fromkeys(("pointing_game", "mask_share"), "pointing-game"),
    "randomization": "randomization",
    "class_sensitivity": "class-sensitivity",
    "agreement": "agreement",
    **dict.fromkeys(("truth_auroc", "truth_precision"), "known-truth"),
    **dict.fromkeys(("importance_correlation", "importance_rank", "distractor_share"), "hand-set"),
    **dict.fromkeys(("focus", "grid_pointing"), "mosaics"),
    "single_deletion": "single-deletion",
    **dict.fromkeys(
        (
            f"funnybirds_{name}"
            for name in ("accuracy", "background", "completeness", "correctness", "contrastivity")
        ),
        "funnybirds",
    ),
}
SUITES = {  # of stress
    "clean": ("ece",),
    "corruptions": ("corruption-error",),
    "sequences": ("flip-rate",),
    "attacks": ("fgsm", "pgd"),
    "autoattack": ("autoattack",),
    "patchfool": ("patch-fool",),
    "occlusion": ("occlusion",),
    "attention": ("attention-entropy", "attention-stability"),
    "shift": ("shift-accuracy",),
    "cue_conflict": ("shape-bias",),
    "synthetic": ("shift-accuracy",),
    "neighbors": ("knn",),
    "segmentation": ("miou",),
    "vqa": ("vqa-accuracy",),
    "backgrounds": ("background-gap",),
    "backgrounds_challenge": ("background-gap",),
    "ood": ("ood",),
}
MODELS = {"deit": "deit", "dinov2": "dinov2", "vit": "vit", "clip": "clip", "rvt": "rvt"}  # part of a name


def references(text: str) -> dict[str, dict[str, str]]:
    """Key -> author, title, venue, year, arxiv or url."""
    found = {}
    for key, authors, title, rest in REFERENCE.findall(text):
        link = re.search(r"\[([^\]]*)\]\(([^)]*)\)", rest)
        venue = re.sub(r"\[[^\]]*\]\([^)]*\)\.?", "", rest).strip().rstrip(".")
        year = re.findall(r"(?:19|20)\d\d", venue)[-1]
        entry = {"author": authors.rstrip("."), "title": title, "year": year}
        entry["venue"] = venue.replace(year, "").strip(" ,")
        if link:
            entry["url"] = link[2]
        found[key] = entry
    return found


def cited(text: str) -> dict[str, dict[str, list[str]]]:
    """The references of methods and metrics, of suites, and of models, by name."""
    by_anchor: dict[str, list[str]] = {}
    by_name: dict[str, list[str]] = {}
    for anchor, heading, body in SECTION.findall(text):
        source = re.search(r"^Source: .*?(?=\n\n|\Z)", body, re.DOTALL | re.MULTILINE)
        keys = list(dict.fromkeys(re.findall(r"\(#ref-([\w-]+)\)", source[0] if source else body)))
        by_anchor[anchor] = keys
        for name in re.findall(r"`([^`]+)`", heading):
            by_name.setdefault(name, keys)
    by_name |= {name: by_anchor[anchor] for name, anchor in SECTIONS.items()} | EXACT
    suites = {
        name: list(dict.fromkeys(key for anchor in anchors for key in by_anchor[anchor]))
        for name, anchors in SUITES.items()
    }
    models = {part: [key] for part, key in MODELS.items()}
    return {"names": dict(sorted(by_name.items())), "suites": suites, "models": models}


def content() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    made = {"references": references(text), **cited(text)}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(OUT.read_text(encoding="utf-8") != content())
    OUT.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
