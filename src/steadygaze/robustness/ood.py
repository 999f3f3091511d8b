"""Out-of-distribution detection: scores of images, and how well they separate (docs/equations.md#ood).

D. Hendrycks, K. Gimpel: A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017,
arXiv:1610.02136. W. Liu, X. Wang, J. D. Owens, Y. Li: Energy-based Out-of-distribution Detection, NeurIPS
2020, arXiv:2010.03759; temperature 1.

| symbol | here |
| --- | --- |
| max_c softmax(z)_c | max_probability |
| −E(x) = log Σ_c exp(z_c) | negative_energy |
| P(s_in > s_out) + ½ P(s_in = s_out) | auroc, in `detection.py` |
| P(s_out ≥ t), t the largest threshold with P(s_in ≥ t) ≥ 0.95 | fpr95, there |

Both scores are higher on images like those of training, so images of the data are the positives.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def max_probability(logits: Float[Tensor, "b classes"]) -> Float[Tensor, " b"]:
    """Return the probability of the predicted class, in float64.

    Examples:
        >>> max_probability(torch.tensor([[0.0, 0.0]])).tolist()
        [0.5]
    """
    return logits.double().softmax(-1).amax(-1)


def negative_energy(logits: Float[Tensor, "b classes"]) -> Float[Tensor, " b"]:
    """Return the logarithm of the summed exponentials of the logits, in float64.

    Examples:
        >>> round(negative_energy(torch.tensor([[0.0, 0.0]])).item(), 4)
        0.6931
    """
    return torch.logsumexp(logits.double(), -1)
