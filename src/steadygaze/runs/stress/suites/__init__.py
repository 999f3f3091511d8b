"""One file for each suite; importing this package registers them all."""

from steadygaze.runs.stress.suites import (
    attacks,  # noqa: F401
    attention,  # noqa: F401
    corruptions,  # noqa: F401
    neighbours,  # noqa: F401
    occlusion,  # noqa: F401
    segmentation,  # noqa: F401
    sequences,  # noqa: F401
    shift,  # noqa: F401
    synthetic,  # noqa: F401
)  # isort: skip
