"""Faithfulness metrics of attribution maps: pure functions of tensors and a view of the model.

metric.py        the registry: METRICS, register_metric, list_metrics, Metric, Values
inputs.py        what a metric is given: Batch, MetricInput
evaluate.py      evaluate(vit, batch, maps, metrics)
removal.py       insertion and deletion by token removal, and monotonicity
hiding.py        patches removed, or painted over: the option `hide`
perturbation.py  positive and negative pixel perturbation (Chefer et al., Vision DiffMask)
road.py          ROAD: removed pixels are interpolated from their neighbors
magnitude.py     SaCo and completeness: the size of scores, not only their order
subsets.py       infidelity, sensitivity-n and faithfulness correlation, on random sets of patches
localization.py  average precision, IoU and pointing game on masks; rank statistics with ties
sanity.py        parameter randomization, class sensitivity, agreement between methods
stability.py     max- and avg-sensitivity: maps of noisy images
concentration.py sparseness and complexity of a map
truth.py         AUROC and precision against known relevance; synthetic tasks for which it is known

A metric is an entry of the registry, in the file of its family; importing this package registers all of them.
"""

from steadygaze.faithfulness import (
    concentration,
    magnitude,
    perturbation,
    removal,
    road,
    sanity,
    stability,
    subsets,
    truth,
)
from steadygaze.faithfulness import localization as localization
from steadygaze.faithfulness.evaluate import Evaluation, evaluate
from steadygaze.faithfulness.inputs import Batch, MetricInput
from steadygaze.faithfulness.metric import (
    METRICS,
    Metric,
    MetricInfo,
    Values,
    list_metrics,
    metric,
    register_metric,
)
from steadygaze.faithfulness.sanity import agreement

__all__ = [
    "METRICS",
    "Batch",
    "Evaluation",
    "Metric",
    "MetricInfo",
    "MetricInput",
    "Values",
    "agreement",
    "concentration",
    "evaluate",
    "list_metrics",
    "localization",
    "magnitude",
    "metric",
    "perturbation",
    "register_metric",
    "removal",
    "road",
    "sanity",
    "stability",
    "subsets",
    "truth",
]
