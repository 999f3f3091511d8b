"""The methods of the leaderboard: every listed one, searches at a stated budget."""

from __future__ import annotations

import steadygaze as sg
from steadygaze.methods.registry import unavailable
from steadygaze.vit.view import ViT

BEST_KNOWN = (
    "gaze",
    "gaze_removal",
    "gaze_halves",
    "gaze_twice",
    "libra_fullgrad_plus",
    "attnlrp",
    "attnlrp_gamma",
    "decompx+skipplus",
    "gae",
    "random",
)
# atman, pami and occlusion have one run for each patch or region, vit_cx one for each cluster
SEARCHES = (
    "occlusion",
    "pami",
    "atman",
    "vit_cx",
    "rise:budget=200",
    "lime:budget=200",
    "kernel_shap:budget=200",
    "hsic:budget=200",
    "scorecam:budget=64",
    "tis:budget=128",
    "caap",
    "smdl:budget=1000",
)
# the searched orders whose best is the row `ceiling`
CEILING = ("greedy", "greedy:by=insertion", "greedy:by=deletion")
SAME_MAP = {  # names in earlier rows -> names on the leaderboard
    "genatt": "gae",
    "genatt+plus": "gradsam",
    "ixg+plus": "cat",
    "attixg+plus": "attcat",
    "fullgrad+plus": "fullgrad_plus",
}
LEFT_OUT = {
    "genatt": "gae is the same map",
    "sufficient": "a set of patches, not an order of all of them",
    "diffmask": "has to be trained for each model",
    "vit_shapley": "has to be trained for each model",
}


def white_box() -> list[str]:
    """Every listed method without training and search, each map once, and `decompx+skipplus`."""
    listed = [info.name for info in sg.list_methods() if info.family not in ("black box", "learned")]
    return [*dict.fromkeys([*BEST_KNOWN, *(name for name in listed if name not in LEFT_OUT)])]


def own_scores() -> dict[str, str]:
    """The quantity that each method without training and search explains by default."""
    return {name: sg.method(name).score for name in white_box()}


def expand(names: list[str]) -> list[str]:
    """Method names, with the sets "best", "quick" (all but searches), "searches", "ceiling" and "all" written
    out.

    >>> expand(["random", "best"])[:2]
    ['random', 'gaze']
    """
    sets = {
        "best": [*BEST_KNOWN],
        "quick": white_box(),
        "searches": [*SEARCHES],
        "ceiling": [*CEILING],
        "all": [*white_box(), *SEARCHES],
    }
    return [*dict.fromkeys(method for name in names for method in sets.get(name, [name]))]


def available(names: list[str], vit: ViT) -> list[str]:
    """Those that support the model."""
    return [name for name in names if not unavailable(sg.method(name), vit)]
