"""k-nearest-neighbor accuracy of the features on classes that the model was not trained on.

Features are the input of the final classifier: the input of the linear map whose output is the logits. An
image gets the class that most of its k nearest training images have, nearest by cosine or by Euclidean
distance; between equal votes the smallest class index wins, as in scikit-learn. Accuracy in 0..1, higher is
better.

Formulas: docs/equations.md#knn.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.robustness.protocols import DISTANCES
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.view import ViT

CELLS = 1 << 24  # distances held at once


def features(model: nn.Module | ViT, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
    """The input of the final linear layer of any classifier.

    Two heads whose mean is the prediction (distilled DeiT): the inputs of both, concatenated.

    Examples:
        >>> import steadygaze as sg
        >>> features(sg.load_model("embedded").model, torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 128])
    """
    module = model.model if isinstance(model, ViT) else model
    seen: list[tuple[Tensor, Tensor]] = []

    def look(linear: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if inputs:  # by position, as every classifier calls its head
            seen.append((inputs[0].detach(), out.detach()))

    hooks = []
    try:
        hooks = [m.register_forward_hook(look) for m in module.modules() if isinstance(m, nn.Linear)]
        with torch.no_grad(), evaluation_mode(module):
            logits = logits_of(model(images))
    finally:
        for hook in hooks:
            hook.remove()
    heads = [(inputs, out) for inputs, out in seen if out.shape == logits.shape and inputs.dim() == 2]
    for inputs, out in reversed(heads):
        if torch.equal(out, logits):
            return inputs
    if len(heads) >= 2 and torch.allclose((heads[-2][1] + heads[-1][1]) / 2, logits, rtol=1e-4, atol=1e-5):
        return torch.cat([heads[-2][0], heads[-1][0]], 1)
    raise UnsupportedModelError(
        f"{type(module).__name__}: expected a classifier that ends in a linear layer (nn.Linear) "
        f"whose output is the logits {tuple(logits.shape)}; none of its {len(seen)} linear layers is. "
        "Give the features themselves to knn_accuracy."
    )


def knn_predict(
    train: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    test: Float[Tensor, "q d"],
    *,
    k: int,
    metric: str = "cosine",
) -> Int[Tensor, " q"]:
    """The class of each test image, (Q,), by vote of its k nearest training images.

    Examples:
        >>> train, labels = torch.eye(2), torch.tensor([7, 9])
        >>> knn_predict(train, labels, torch.tensor([[0.9, 0.1]]), k=1)
        tensor([7])
    """
    return _votes(_nearest(train, labels, test, k, metric), labels, k)


def knn_accuracy(
    train: Float[Tensor, "m d"],
    train_labels: Int[Tensor, " m"],
    test: Float[Tensor, "q d"],
    test_labels: Int[Tensor, " q"],
    *,
    ks: Sequence[int] = (1, 10),
    metrics: Sequence[str] = DISTANCES,
) -> dict[tuple[str, int], float]:
    """Accuracy of every metric and k, {(metric, k): 0..1}; the neighbors are found once for all k.

    Examples:
        >>> train, labels = torch.eye(2), torch.tensor([7, 9])
        >>> test, correct = torch.tensor([[0.9, 0.1]]), torch.tensor([7])
        >>> knn_accuracy(train, labels, test, correct, ks=(1,), metrics=("cosine",))
        {('cosine', 1): 1.0}
    """
    _check_labels("test", test, test_labels)
    out = {}
    for metric in metrics:
        nearest = _nearest(train, train_labels, test, max(ks), metric)
        for k in ks:
            right = _votes(nearest[:, :k], train_labels, k) == test_labels.to(train_labels.device)
            out[metric, k] = float(right.double().mean())
    return out


def _nearest(train: Tensor, labels: Tensor, test: Tensor, k: int, metric: str) -> Int[Tensor, "q k"]:
    """Find the k nearest training images, nearest first; of equal distances, the earlier image."""
    if metric not in DISTANCES:
        raise UnknownNameError("metric", str(metric), DISTANCES)
    _check_labels("train", train, labels)
    if not 1 <= k <= len(train):
        raise InputError(f"k: expected a number from 1 to {len(train)} training images, got {k!r}")
    if test.dim() != 2 or not len(test) or test.shape[1] != train.shape[1]:
        raise InputError(
            f"test: expected features (Q, {train.shape[1]}) like the training ones, got {tuple(test.shape)}"
        )
    for name, x in (("train", train), ("test", test)):
        if not torch.isfinite(x).all():
            raise InputError(f"{name}: the features have NaN or infinite values")
    wide = torch.promote_types(train.dtype, torch.float32)
    train, test = train.to(wide), test.to(wide)
    if metric == "cosine":
        train, test = (nn.functional.normalize(x, dim=1) for x in (train, test))
    step = max(1, CELLS // len(train))
    indices = []
    for start in range(0, len(test), step):
        part = test[start : start + step]
        far = -(part @ train.T) if metric == "cosine" else torch.cdist(part, train)
        indices.append(far.sort(dim=1, stable=True).indices[:, :k] if k > 1 else far.argmin(1, keepdim=True))
    return torch.cat(indices)


def _votes(nearest: Int[Tensor, "q k"], labels: Int[Tensor, " m"], k: int) -> Int[Tensor, " q"]:
    classes, class_index = labels.unique(return_inverse=True)
    votes = torch.zeros(len(nearest), len(classes), device=labels.device)
    votes.scatter_add_(
        1,
        class_index[nearest[:, :k].to(labels.device)],
        torch.ones(1, device=labels.device).expand(len(nearest), k),
    )
    return classes[votes.argmax(1)]


def _check_labels(name: str, features: Tensor, labels: Tensor) -> None:
    if features.dim() != 2 or not len(features):
        raise InputError(f"{name}: expected features (images, width), got {tuple(features.shape)}")
    if labels.shape != (len(features),) or labels.is_floating_point():
        raise InputError(f"{name} labels: expected {len(features)} class indices, got {tuple(labels.shape)}")
