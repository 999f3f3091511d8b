"""Tiny models of every kind that steadygaze supports: real architecture, few layers, small images, random
weights.

All in float64. No parameter keeps a trivial value: LayerScale, norm gains, biases, relative position tables,
registers and position embeddings are random.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from steadygaze.loading.load import TIMM_STAGED

PLAIN = ("vision_transformer", "eva", "beit", "deit")
OTHER_PLAIN = ("cait", "vision_transformer_relpos", "vision_transformer_hybrid")
HIERARCHICAL = TIMM_STAGED
CLASSES = 7


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: where it comes from, its name, and how it is built.

    check: instead of `checks.check`, for models whose own forward pass orders its tokens otherwise
    tolerance: largest relative error of a check
    """

    family: str
    name: str
    build: Callable[[], tuple[nn.Module, str]]  # -> (model, how it was reduced)
    check: Callable[[Any], dict[str, float | str]] | None = None
    tolerance: float = 1e-9


def entries() -> Iterator[Entry]:
    """Every model of the coverage table."""
    for module in (*PLAIN, *OTHER_PLAIN):
        for name in timm.list_models(module=module):
            yield Entry(f"timm {module}", name, partial(plain, name))
    for name in timm.list_models(module="naflexvit"):
        yield Entry("timm naflexvit", name, partial(naflex, name))
    for module in HIERARCHICAL:
        for name in timm.list_models(module=module):
            yield Entry(f"timm {module}", name, partial(hierarchical, name, module))
    for kind in transformers_kinds():
        for attention in ("sdpa", "eager"):
            yield Entry("transformers", f"{kind} ({attention})", partial(transformers_model, kind, attention))
    for kind in TRANSFORMERS_HIERARCHICAL:
        yield Entry("transformers hierarchical", kind, partial(transformers_hierarchical, kind))
    for name in ("vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32"):
        yield Entry("torchvision", name, partial(torchvision_model, name))
    for name in ("swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"):
        yield Entry("torchvision swin", name, partial(torchvision_swin, name))


def image_of(model: nn.Module, size: tuple[int, int, int], batch: int = 1, seed: int = 0) -> Tensor:
    """Noise in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(
        next(model.parameters()).dtype
    )


# -- timm ------------------------------------------------------------


def plain(name: str) -> tuple[nn.Module, str]:
    """A plain ViT of timm: depth 3, two heads of the original width, 4 x 5 patches, if the constructor
    allows."""
    with _without_warnings():
        with torch.device("meta"):
            whole = timm.create_model(name)
        attentions = [m for m in whole.blocks.modules() if isinstance(getattr(m, "num_heads", None), int)]
        width = whole.embed_dim // attentions[0].num_heads
        cut: dict[str, Any] = {"depth": 3, "embed_dim": 2 * width, "num_heads": 2}
        if any(getattr(m, "num_kv_groups", 1) > 1 for m in attentions):  # grouped queries, in some blocks
            cut = {"depth": 3, "embed_dim": 4 * width, "num_heads": 4, "num_kv_heads": (4, 2, 4)}
        embed = whole.patch_embed
        step = [i // g for i, g in zip(embed.img_size, embed.grid_size, strict=True)]
        sizes: list[dict[str, Any]] = [
            {"img_size": (4 * step[0], 5 * step[1])},
            {"img_size": 4 * step[0]},
            {},
        ]
        return _first_that_builds(
            name, [c | s for c in (cut, cut | {"num_kv_heads": None}, {"depth": 3}, {}) for s in sizes]
        )


def naflex(name: str) -> tuple[nn.Module, str]:
    """A NaFlexViT of timm: depth 3, width 24, 4 x 5 patches."""
    with _without_warnings():
        small = {"depth": 3, "embed_dim": 24, "num_heads": 2}
        return _first_that_builds(name, [small | {"pretrained_cfg_overlay": {"input_size": (3, 64, 80)}}])


def hierarchical(name: str, module: str) -> tuple[nn.Module, str]:
    """A hierarchical model of timm: at most two blocks per stage, and small images if the constructor
    allows."""
    with _without_warnings(), torch.device("meta"):
        whole = timm.create_model(name)
    trials: list[dict[str, Any]]
    if module.startswith("swin"):
        heads = [
            s.blocks[0].attn.num_heads for s in (whole.stages if module.endswith("cr") else whole.layers)
        ]
        small = {"depths": (1, 2, 1, 2), "embed_dim": 16, "num_heads": (1, 2, 4, 8)}
        if module == "swin_transformer" and "s3" in name:
            small["window_size"] = (4, 4, 4, 4)
        trials = [small | {"img_size": 128, "window_size": 4}, {"depths": (1, 2, 1, 2)}, {"num_heads": heads}]
    elif module in ("pvt_v2", "twins"):
        trials = [
            {"depths": (1, 2, 1, 2), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 4, 4)},
            {"depths": (1, 2, 1, 2)},
        ]
        small = (
            {"img_size": 64} if module == "twins" else {"pretrained_cfg_overlay": {"input_size": (3, 64, 96)}}
        )
        trials = [t | small for t in trials] + trials
    elif module == "pit":
        trials = [
            {"depth": (1, 2, 2), "base_dims": (16, 16, 16), "heads": (1, 2, 4), "img_size": 96},
            {"depth": (1, 2, 2)},
        ]
    elif module == "mvitv2":
        # the depths are in a config object that the entry point does not accept
        from timm.models.mvitv2 import MultiScaleVit, model_cfgs

        cfg = model_cfgs[name]
        heads = cfg.num_heads[0] if isinstance(cfg.num_heads, tuple) else 1
        cfg = replace(cfg, depths=(1, 2, 1, 2), embed_dim=16 * max(1, heads))
        with _without_warnings():
            model = MultiScaleVit(cfg, img_size=(64, 64), num_classes=CLASSES)
        return randomize(model), "depths (1, 2, 1, 2), width 16, 64 pixels"
    elif module == "hiera":
        trials = [
            {"stages": (1, 2, 1, 2), "embed_dim": 16, "num_heads": 1, "img_size": (64, 96)},
            {"stages": (1, 2, 1, 2)},
        ]
    elif module == "levit":
        small = {"embed_dim": (32, 48, 64), "key_dim": 8, "num_heads": (2, 3, 4), "depth": (1, 2, 2)}
        trials = [small | {"img_size": 224}]
    else:  # xcit
        patch = 16 if "p16" in name else 8
        trials = [
            {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": (4 * patch, 5 * patch)},
            {"depth": 2},
        ]
    with _without_warnings():
        return _first_that_builds(name, [*trials, {}])


def _first_that_builds(name: str, trials: list[dict[str, Any]]) -> tuple[nn.Module, str]:
    reason: Exception | None = None
    for options in trials:
        try:
            with torch.device("meta"):
                shape = timm.create_model(name, num_classes=CLASSES, **options)
            if sum(p.numel() for p in shape.parameters()) > 4e8:
                raise RuntimeError(f"{name} is too large, and its constructor accepts no smaller shape")
            model = timm.create_model(name, num_classes=CLASSES, **options)
        except (
            TypeError,
            ValueError,
            AssertionError,
            RuntimeError,
            ZeroDivisionError,
            KeyError,
            IndexError,
        ) as error:
            reason = error
            continue
        return randomize(model), ", ".join(f"{k} {v}" for k, v in options.items()) or "nothing"
    raise RuntimeError(f"timm cannot build a small {name}: {reason}")


# -- transformers and torchvision ------------------------------------------------------------


def transformers_kinds() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a row -> (class, options of its tiny configuration beside the common ones)."""
    return {
        "ViTForImageClassification": ("ViT", {}),
        "DeiTForImageClassification": ("DeiT", {}),
        "DeiTForImageClassificationWithTeacher": ("DeiT", {}),
        "BeitForImageClassification": (
            "Beit",
            {"use_relative_position_bias": True, "layer_scale_init_value": 0.1},
        ),
        "BeitForImageClassification, shared bias, class token": (
            "Beit",
            {
                "use_shared_relative_position_bias": True,
                "use_mean_pooling": False,
                "use_absolute_position_embeddings": True,
            },
        ),
        "Data2VecVisionForImageClassification": ("Data2VecVision", {"use_relative_position_bias": True}),
        "Data2VecVisionForImageClassification, shared bias": (
            "Data2VecVision",
            {"use_relative_position_bias": True, "use_shared_relative_position_bias": True},
        ),
        "Dinov2ForImageClassification": ("Dinov2", {}),
        "Dinov2ForImageClassification, SwiGLU": ("Dinov2", {"use_swiglu_ffn": True}),
        "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegisters", {"num_register_tokens": 2}),
        "DINOv3ViTModel and a head": ("DINOv3ViT", {"num_register_tokens": 2}),
        "DINOv3ViTModel and a head, gated MLP": (
            "DINOv3ViT",
            {"num_register_tokens": 2, "use_gated_mlp": True},
        ),
        "CLIPForImageClassification": ("CLIP", {}),
        "MetaClip2ForImageClassification": ("MetaClip2", {}),
        "SiglipForImageClassification": ("Siglip", {}),
        "IJepaForImageClassification": ("IJepa", {}),
        "ViTMSNForImageClassification": ("ViTMSN", {}),
    }


def transformers_model(kind: str, attention: str) -> tuple[nn.Module, str]:
    """A classifier of transformers: depth 3, width 24, 4 x 4 patches."""
    import transformers

    stem, options = transformers_kinds()[kind]
    small: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
        **options,
    }
    with _without_warnings():
        if stem in ("CLIP", "Siglip", "MetaClip2"):
            config = getattr(transformers, f"{stem}Config")(vision_config=small, num_labels=CLASSES)
        else:
            config = getattr(transformers, f"{stem}Config")(**small, num_labels=CLASSES)
        config._attn_implementation = attention
        if stem == "DINOv3ViT":
            from steadygaze.vit.adapters.transformers import Classifier

            backbone = transformers.DINOv3ViTModel._from_config(config, attn_implementation=attention)
            return randomize(Classifier(backbone, nn.Linear(24, CLASSES))), "depth 3, width 24"
        cls = getattr(transformers, kind.split(",")[0])
        return randomize(cls._from_config(config, attn_implementation=attention)), "depth 3, width 24"


def torchvision_model(name: str) -> tuple[nn.Module, str]:
    """torchvision's VisionTransformer with the patch size of `name`: depth 3, width 24."""
    from torchvision.models.vision_transformer import VisionTransformer

    patch = int(name.rsplit("_", 1)[1])
    model = VisionTransformer(4 * patch, patch, 3, 2, 24, 48, num_classes=CLASSES)
    return randomize(model), "depth 3, width 24, 4 x 4 patches"


SMALL_SWIN = {"depths": [1, 2, 1, 2], "embed_dim": 16, "num_heads": [1, 2, 4, 8]}
SMALL_PVT = {
    "image_size": 64,
    "depths": [1, 2, 1, 2],
    "hidden_sizes": [16, 16, 32, 32],
    "num_attention_heads": [1, 2, 4, 4],
    "mlp_ratios": [2, 2, 2, 2],
}
# row -> (stem of the classes, options of its tiny configuration, attention implementation)
TRANSFORMERS_HIERARCHICAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "SwinForImageClassification (sdpa)": ("Swin", {}, "sdpa"),
    "SwinForImageClassification (eager)": ("Swin", {"use_absolute_embeddings": True}, "eager"),
    "Swinv2ForImageClassification": ("Swinv2", {}, "eager"),
    "PvtForImageClassification": ("Pvt", {}, "eager"),
    "PvtV2ForImageClassification": ("PvtV2", {}, "eager"),
    "PvtV2ForImageClassification, linear attention": ("PvtV2", {"linear_attention": True}, "eager"),
}


def transformers_hierarchical(kind: str) -> tuple[nn.Module, str]:
    """A hierarchical classifier of transformers: at most two blocks per stage, small images."""
    import transformers

    stem, options, attention = TRANSFORMERS_HIERARCHICAL[kind]
    small = SMALL_PVT if stem.startswith("Pvt") else SMALL_SWIN | {"image_size": 128, "window_size": 4}
    with _without_warnings():
        config = getattr(transformers, f"{stem}Config")(**small, **options, num_labels=CLASSES)
        build = getattr(transformers, f"{stem}ForImageClassification")
        return randomize(build._from_config(config, attn_implementation=attention)), "depths (1, 2, 1, 2)"


def torchvision_swin(name: str) -> tuple[nn.Module, str]:
    """torchvision's SwinTransformer: at most two blocks per stage, windows of 4 x 4."""
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if "v2" in name else {}
    small: dict[str, Any] = SMALL_SWIN | {"patch_size": [4, 4], "window_size": [4, 4]}
    model = SwinTransformer(**small, **second, num_classes=CLASSES)
    return randomize(model), "depths (1, 2, 1, 2), 128 pixels"


# -- random weights ------------------------------------------------------------


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Make every parameter and running statistic random, of a usual size; float64, evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for module in model.modules():
        if hasattr(module, "t_x"):  # timm's mixed rotary tables are float32 and need float32 positions
            module.t_x, module.t_y = module.t_x.float(), module.t_y.float()  # type: ignore[union-attr]

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if "logit_scale" in name or "temperature" in name or "freqs" in name or "periods" in name:
                p.add_(0.1 * noise(p))
            elif leaf in (
                "gamma",
                "gamma_1",
                "gamma_2",
                "gamma1",
                "gamma2",
                "gamma3",
                "lambda1",
                "lambda_1",
                "lambda_2",
            ):
                p.copy_(0.7 + 0.3 * noise(p))
            elif "lambda" in leaf:
                p.copy_(0.3 * noise(p))
            elif p.dim() == 1 and leaf == "weight":
                p.copy_(1 + 0.3 * noise(p))
            elif p.dim() <= 1:
                p.copy_(0.3 * noise(p))
            elif leaf == "weight" and "position_embedding" not in name:
                fan = p[0].numel()
                p.copy_(1.2 * noise(p) / fan**0.5)
            else:  # positions, class and register tokens, relative tables, latents
                p.copy_(0.5 * noise(p))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.copy_(0.3 * noise(b))
            elif name.endswith("running_var"):
                b.copy_(0.5 + noise(b).abs())
    return model


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without the warnings and log lines that libraries print about unusual configurations."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
