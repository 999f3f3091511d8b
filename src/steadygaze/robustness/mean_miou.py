"""Mean mIoU over corruptions, and the share of the clean mIoU that is kept (docs/equations.md#miou).

The protocols are those of `segmentation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from steadygaze.data.datasets.imagenet import CORRUPTIONS
from steadygaze.errors import InputError, UnknownNameError

NOISE = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")
CITYSCAPES_C = (
    "motion_blur",
    "defocus_blur",
    "glass_blur",
    "gaussian_blur",
    *NOISE,
    "brightness",
    "contrast",
    "saturate",
    "jpeg_compression",
    "snow",
    "spatter",
    "fog",
    "frost",
)
PROTOCOLS = ("all", "cityscapes-c")
Protocol = Literal["all", "cityscapes-c"]


def mean_miou(found: Mapping[str, Mapping[int, Any]], protocol: Protocol = "all") -> Any:
    """Mean of the mIoU over corruptions.

    Args:
        found: mIoU by corruption and severity: a number, or an array of resampled ones.

    Examples:
        >>> mean_miou({"fog": {1: 0.75, 5: 0.25}, "shot_noise": {1: 0.5, 5: 0.0}}, "cityscapes-c")
        0.5
    """
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", str(protocol), PROTOCOLS)
    parts = []
    for name, by_severity in found.items():
        if name not in CORRUPTIONS:
            raise UnknownNameError("corruption", name, CORRUPTIONS)
        if protocol == "cityscapes-c" and name not in CITYSCAPES_C:
            continue
        kept = [v for s, v in by_severity.items() if protocol == "all" or name not in NOISE or s <= 3]
        if kept:
            parts.append(sum(kept) / len(kept))
    if not parts:
        raise InputError(
            f"mean_miou: no corruption and severity of the protocol {protocol!r} "
            f"is among {', '.join(found) or 'nothing'}"
        )
    return sum(parts) / len(parts)


def retention(corrupted: Any, clean: Any) -> Any:
    """Share of the clean mIoU that is left under corruption; higher is better, 1 if nothing is lost.

    Examples:
        >>> retention(0.375, 0.5)
        0.75
    """
    return corrupted / clean
