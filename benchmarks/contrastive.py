"""`legrad` and `grad_eclip` against their authors' code, on a tiny random model of open_clip, in float64.

    python -m benchmarks.contrastive --legrad LeGrad --grad-eclip Grad-Eclip

Both are clones of the authors' repositories (github.com/WalBouss/LeGrad, github.com/Cyang-Zhao/Grad-Eclip).
Needs open_clip and einops. Costs seconds. Measured: 4e-16, 4e-16 and 5e-16.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import steadygaze as sg
from benchmarks import text_zoo

PROMPT = "a photo of a dog"


def question(model: Any) -> Any:
    """The similarity with one prompt."""
    return sg.ask(model, text=PROMPT, tokenizer=text_zoo.open_clip_tokenizer)


def tokens_first(model: Any) -> None:
    """The authors' code is for attention on (tokens, batch, width)."""
    for block in model.visual.transformer.resblocks:
        block.attn.batch_first = False


def legrad_error(folder: Path, images: Tensor, layers: int) -> float:
    """Largest difference of the two maps, resized and scaled to 0..1 as the authors do."""
    sys.path.insert(0, str(folder))
    from legrad import LeWrapper

    model = text_zoo.open_clip_model()
    asked = question(model)
    scores = sg.explain(asked, images, target=0, method=sg.method("legrad", layers=layers)).scores.detach()
    ours = F.interpolate(scores[None], scale_factor=8, mode="bilinear")
    ours = (ours - ours.min()) / (ours.max() - ours.min())
    tokens_first(model)
    wrapper = LeWrapper(model, layer_index=-layers if layers else 0)
    theirs = wrapper.compute_legrad(image=images, text_embedding=F.normalize(asked.weight, dim=-1))
    return float((theirs - ours).abs().max())


def grad_eclip_error(folder: Path, images: Tensor) -> float:
    """Largest difference relative to the map's maximum; with one head, as the authors compute attention."""
    model = text_zoo.open_clip_model(head_width=24)
    asked = question(model)
    ours = sg.explain(asked, images, target=0, method="grad_eclip:project=true").scores.detach()
    source = (folder / "generate_emap.py").read_text(encoding="utf-8")
    parts = (("def attention_layer", "def clip_encode_text_dense"), ("def grad_eclip(c", "### Grad-CAM"))
    code = "".join(source[source.index(first) : source.index(last)] for first, last in parts)
    model.visual.transformer.width, model.visual.input_resolution = 24, 32
    tokens_first(model)
    theirs: dict[str, Any] = {"torch": torch, "F": F, "clipmodel": model}
    exec(code.replace("x = x.half()", ""), theirs)
    features, _, _, v, q, k, _, output, grid = theirs["clip_encode_dense"](images)
    cosine = F.normalize(features[:, 0], dim=-1) @ F.normalize(asked.weight, dim=-1)[0]
    scores = theirs["grad_eclip"](cosine[0], q, k, v, output, grid) * model.logit_scale.detach().exp()
    return float((scores - ours[0]).abs().max() / ours.abs().max())


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contrastive", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--legrad", type=Path, help="clone of the authors' repository")
    parser.add_argument("--grad-eclip", type=Path, help="clone of the authors' repository")
    options = parser.parse_args()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if options.legrad:
        for layers in (2, 0):
            print(f"legrad:layers={layers}: {legrad_error(options.legrad, images, layers):.0e}")
    if options.grad_eclip:
        print(f"grad_eclip:project=true: {grad_eclip_error(options.grad_eclip, images):.0e}")


if __name__ == "__main__":
    main()
