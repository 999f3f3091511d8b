"""One file for each suite; importing this package registers them in the order of runs and tables."""

# ruff: noqa: F401, I001
from steadygaze.runs.stress.suites import corruptions
from steadygaze.runs.stress.suites import sequences
from steadygaze.runs.stress.suites import attacks
from steadygaze.runs.stress.suites import occlusion
from steadygaze.runs.stress.suites import attention
from steadygaze.runs.stress.suites import shift
from steadygaze.runs.stress.suites import cue_conflict
from steadygaze.runs.stress.suites import synthetic
from steadygaze.runs.stress.suites import neighbours
from steadygaze.runs.stress.suites import segmentation
from steadygaze.runs.stress.suites import vqa
