"""How faithful is an attribution map? Pure functions of tensors and a view of the model; no files, no printing.

metric.py        the registry: METRICS, register_metric, Metric, Values        evaluate.py     evaluate(vit, batch, maps, metrics)
inputs.py        what a metric is given: Batch, MetricInput                    removal.py      insertion and deletion by token removal
perturbation.py  pixels painted over (Chefer, DiffMask)                        localisation.py average precision, IoU, pointing game
sanity.py        randomisation, class sensitivity, agreement                   truth.py        AUROC and precision against ground truth
ground_truth.py  tasks made in memory whose truth is known                     ranks.py        rank statistics with ties

A metric is an entry of the registry, in the file of its family. Importing this package registers all of them.
"""

from steadygaze.faithfulness import localisation, perturbation, removal, sanity, truth
from steadygaze.faithfulness.evaluate import Evaluation, evaluate
from steadygaze.faithfulness.metric import (
    METRICS,
    Batch,
    Metric,
    MetricInput,
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
    "MetricInput",
    "Values",
    "agreement",
    "evaluate",
    "list_metrics",
    "localisation",
    "metric",
    "perturbation",
    "register_metric",
    "removal",
    "sanity",
    "truth",
]
