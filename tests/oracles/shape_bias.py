"""Shape bias, image by image, from its definition (docs/equations.md#shape-bias)."""

import math
from collections.abc import Mapping, Sequence


def decide(logits: Sequence[float], groups: Mapping[str, Sequence[int]]) -> str:
    """The class whose ImageNet classes have the highest mean probability."""
    highest = max(logits)
    total = math.fsum(math.exp(z - highest) for z in logits)
    means = {
        name: math.fsum(math.exp(logits[c] - highest) / total for c in classes) / len(classes)
        for name, classes in groups.items()
    }
    return max(means, key=lambda name: means[name])


def shape_bias(decisions: Mapping[str, str]) -> float:
    """From file names such as cat/cat1-truck3.png to decisions; images with one cue are left out."""
    shape = texture = 0
    for name, decision in decisions.items():
        first, second = name.rsplit("/", 1)[-1].split(".")[0].split("-")
        cues = first.rstrip("0123456789"), second.rstrip("0123456789")
        if cues[0] == cues[1]:
            continue
        shape += decision == cues[0]
        texture += decision == cues[1]
    return shape / (shape + texture)
