"""Architectures that timm does not have, registered with timm: RVT, FAN, PVT v1 and LocalViT.

    import steadygaze.models
    model = timm.create_model("fan_tiny_12_p16_224", num_classes=10)

They are implemented from their papers. No pretrained weights are provided: train them, or load a checkpoint
with `steadygaze.load_model(NAME, FILE)`.
"""

from steadygaze.models.fan import FAN
from steadygaze.models.localvit import LocalViT
from steadygaze.models.pvt import PVT
from steadygaze.models.rvt import RVT

PLAIN = ("fan", "localvit")  # modules whose models have one grid for all blocks
STAGED = ("pvt", "rvt")  # RVT-S and RVT-B have one grid, RVT-Ti has two
__all__ = ["FAN", "PLAIN", "PVT", "RVT", "STAGED", "LocalViT", "names"]


def names() -> list[str]:
    """Names of the models that this package adds to timm.

    Examples:
        >>> names()[:2]
        ['fan_base_16_p4_hybrid', 'fan_base_18_p16_224']
    """
    import timm

    return sorted(name for module in (*PLAIN, *STAGED) for name in timm.list_models(module=module))
