"""Is an explanation true? Measures of maps: pure functions of tensors and a view of the model; no files, no printing.

metric.py        METRICS, metric(name), Metric, Values, Batch         evaluate.py     evaluate(vit, batch, maps, metrics)
removal.py       insertion and deletion by true token removal         perturbation.py pixels painted over (Chefer, DiffMask)
localisation.py  average precision, IoU, pointing game on masks       sanity.py       randomisation, class sensitivity, agreement
truth.py         AUROC and precision against known truth              ground_truth.py tasks made in memory whose truth is known
ranks.py         rank statistics with ties
"""

from steadygaze.faithfulness.evaluate import Evaluation, evaluate
from steadygaze.faithfulness.metric import METRICS, Batch, Metric, Values, metric
from steadygaze.faithfulness.sanity import agreement

__all__ = ["METRICS", "Batch", "Evaluation", "Metric", "Values", "agreement", "evaluate", "metric"]
