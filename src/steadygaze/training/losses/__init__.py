"""Training losses, one file each; `register_loss` adds one from outside the package.

| loss          | terms                              | source                                          |
| ------------- | ---------------------------------- | ----------------------------------------------- |
| cross_entropy | a scalar                           | labels, soft targets or label maps              |
| relevance     | background, foreground, confidence | Chefer 2022; docs/equations.md#relevance-losses |
| gradmask      | background, classification         | Simpson 2019; docs/equations.md#gradmask        |
| rrr           | background, classification         | Ross 2017; docs/equations.md#rrr                |
| distillation  | a scalar                           | Hinton 2015; docs/equations.md#distillation     |
| adl           | a scalar                           | Guo 2023; docs/equations.md#adl                 |
| patch_augmentation | a scalar                      | Mao 2022; docs/equations.md#patch-augmentation  |

They are computed, summed and logged in this order, those that run the model themselves first.
"""

from steadygaze.training.losses.registry import LOSSES as LOSSES
from steadygaze.training.losses.registry import Loss as Loss
from steadygaze.training.losses.registry import LossBatch as LossBatch
from steadygaze.training.losses.registry import LossInfo as LossInfo
from steadygaze.training.losses.registry import LossOptions as LossOptions
from steadygaze.training.losses.registry import LossSetup as LossSetup
from steadygaze.training.losses.registry import list_losses as list_losses
from steadygaze.training.losses.registry import register_loss as register_loss

# Importing a file registers its losses, and the order of registration is that of the table above.
# isort: off
from steadygaze.training.losses import cross_entropy as cross_entropy
from steadygaze.training.losses import relevance as relevance
from steadygaze.training.losses import input_gradient as input_gradient
from steadygaze.training.losses import distillation as distillation
from steadygaze.training.losses import adl as adl
from steadygaze.training.losses import patch_augmentation as patch_augmentation
# isort: on
