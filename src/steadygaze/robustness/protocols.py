"""Numbers of published protocols, apart from the code that runs them: reports read them without torch.

| numbers | of |
| --- | --- |
| ATTACKS, STEPS, QUERIES, TARGETS, PRESETS | AutoAttack (`auto_attack.py`) and its settings in RobustBench |
| PATCH_FOOL_STEPS | Patch-Fool (`patch_fool.py`) |
| DISTANCES | k nearest neighbors (`neighbors.py`) |
| BINS | the expected calibration error (`calibration.py`) |
| STILL | sequences of ImageNet-P whose frames are compared with the first one (`sequences.py`) |
"""

from typing import Literal

Norm = Literal["linf", "l2"]

ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
STEPS, QUERIES, TARGETS = 100, 5000, 9  # as published
PRESETS: dict[str, tuple[Norm, float]] = {
    "robustbench-cifar10-linf": ("linf", 8 / 255),
    "robustbench-cifar10-l2": ("l2", 0.5),
    "robustbench-imagenet-linf": ("linf", 4 / 255),
}

PATCH_FOOL_STEPS = 250
DISTANCES = ("cosine", "euclidean")
BINS = 15
STILL = ("gaussian_noise", "shot_noise")
