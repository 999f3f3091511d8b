"""Faithfulness metrics of attribution maps: pure functions of tensors and a view of the model.

metric.py        METRICS, metric(name), Metric, Values, Batch
evaluate.py      evaluate(vit, batch, maps, metrics)
removal.py       insertion and deletion by token removal
perturbation.py  positive and negative pixel perturbation (Chefer et al., Vision DiffMask)
localisation.py  average precision, IoU and pointing game on masks
sanity.py        parameter randomisation, class sensitivity, agreement between methods
truth.py         AUROC and precision against known relevance
ground_truth.py  synthetic tasks whose relevant patches are known
ranks.py         rank statistics with ties
"""

from steadygaze.faithfulness.evaluate import Evaluation, evaluate
from steadygaze.faithfulness.metric import METRICS, Batch, Metric, Values, metric
from steadygaze.faithfulness.sanity import agreement

__all__ = ["METRICS", "Batch", "Evaluation", "Metric", "Values", "agreement", "evaluate", "metric"]
