"""placeholder"""
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from steadygaze.data.images import read_image
from steadygaze.loading.load import load_model


@dataclass(frozen=True)
class Inputs:
    model: Any
    images: Tensor
    shown: tuple[Image.Image, ...] | None
    names: tuple[str, ...]


def prepare_inputs(model: Any, images: Any, transform: Any = None) -> Inputs:
    if isinstance(images, Tensor):
        return Inputs(model, images, None, tuple(str(i) for i in range(len(images))))
    if not isinstance(images, (list, tuple)):
        images = [images]
    if isinstance(model, str):
        model = load_model(model)
    pils = [read_image(i) if isinstance(i, (str, Path)) else i for i in images]
    t = torch.stack([model.preprocess(p) for p in pils])
    return Inputs(model, t, tuple(model.to_image(x) for x in t), tuple(Path(i).stem if isinstance(i,(str,Path)) else str(k) for k, i in enumerate(images)))
