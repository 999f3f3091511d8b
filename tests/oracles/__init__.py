"""Slow, obvious float64 re-implementations of the white-box methods on plain timm VisionTransformers.

`NAME(model, images, target, **options) -> (B,P)`: signed patch scores in raster order, prefix dropped, the
method as its bare name means; `NAME_layers -> [(B,P)]` and `NAME_matrices -> [(B,N,N)]` are what
aggregators work on. `METHODS` has all of the first kind by name; find the other two in the module
`METHODS_HOME[name]`.
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from . import attention, cam, contrastive, decompx, gaze, gradient, lrp, mixing, tokens

METHODS_HOME: dict[str, ModuleType] = {
    name: home
    for home, names in (
        (
            attention,
            "raw_attention rollout attcam genatt gradsam attn_grad tokentm beyond_intuition "
            "beyond_intuition_token",
        ),
        (
            gradient,
            "vanilla_grad vanilla_grad_norm ixg attixg fullgrad fullgrad_plus integrated_gradients",
        ),
        (
            cam,
            "gradcam xgradcam xgradcam_plus gradcam_plus_plus hirescam elementwise_gradcam layercam "
            "shapley_cam",
        ),
        (lrp, "transatt full_lrp attnlrp attnlrp_gamma"),
        (mixing, "attin globenc alti"),
        (decompx, "decompx"),
        (contrastive, "legrad grad_eclip"),
        (gaze, "gaze gaze_removal gaze_weighted gaze_outline"),
        (tokens, "norms pca eigen"),
    )
    for name in names.split()
}

METHODS: dict[str, Callable[..., Tensor]] = {name: getattr(home, name) for name, home in METHODS_HOME.items()}
