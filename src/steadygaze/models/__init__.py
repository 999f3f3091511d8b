"""Architectures that timm lacks, written from their papers and registered with timm: RVT, FAN, PVT v1 and LocalViT.

    import steadygaze.models
    model = timm.create_model("fan_tiny_12_p16_224", num_classes=10)

There are no published weights for them here: train them, or load a checkpoint with `steadygaze.load_model(NAME, FILE)`.
"""

from steadygaze.models.fan import FAN
from steadygaze.models.localvit import LocalViT
from steadygaze.models.pvt import PVT
from steadygaze.models.rvt import RVT

PLAIN = ("fan", "localvit")  # modules of this folder whose models keep one grid from start to end
STAGED = ("pvt", "rvt")  # RVT-S and RVT-B keep one grid, RVT-Ti does not
__all__ = ["FAN", "PLAIN", "PVT", "RVT", "STAGED", "LocalViT", "names"]


def names() -> list[str]:
    """Every name that this package adds to timm."""
    import timm

    return sorted(name for module in (*PLAIN, *STAGED) for name in timm.list_models(module=module))
