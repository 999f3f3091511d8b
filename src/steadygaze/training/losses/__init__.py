"""Training losses, one file each; `register_loss` adds one from outside the package.

| loss          | terms                              | source                                          |
| ------------- | ---------------------------------- | ----------------------------------------------- |
| cross_entropy | a scalar                           | labels, soft targets or label maps              |
| relevance     | background, foreground, confidence | Chefer 2022; docs/equations.md#relevance-losses |
| cft           | context, concept, accuracy         | Elisha 2026; docs/equations.md#cft              |
| gradmask      | background, classification         | Simpson 2019; docs/equations.md#gradmask        |
| rrr           | background, classification         | Ross 2017; docs/equations.md#rrr                |
| distillation  | a scalar                           | Hinton 2015; docs/equations.md#distillation     |
| adl           | a scalar                           | Guo 2023; docs/equations.md#adl                 |
| patch_augmentation | a scalar                      | Mao 2022; docs/equations.md#patch-augmentation  |

They are computed, summed and logged in this order, those that run the model themselves first.
"""

from steadygaze.training.losses.registry import (
    LOSSES,
    Loss,
    LossBatch,
    LossInfo,
    LossOptions,
    LossSetup,
    list_losses,
    register_loss,
)

__all__ = [
    "LOSSES",
    "Loss",
    "LossBatch",
    "LossInfo",
    "LossOptions",
    "LossSetup",
    "list_losses",
    "register_loss",
]
