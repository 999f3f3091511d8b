"""Outputs of the authors' code of AutoAttack, recorded for tests/robustness/test_auto_attack.py.

    git clone https://github.com/fra31/auto-attack
    python tests/oracles/published_auto_attack.py auto-attack

Writes auto_attack.npz beside this file. Each image is attacked alone, by one attack, from its own seed, in
float64: eight square images by all four attacks, two wide ones by Square.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("auto_attack.npz")
ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
EPSILON = {"linf": 0.016, "l2": 0.22}
SHAPES = {"square": (8, 3, 10, 10), "wide": (2, 3, 10, 15)}
CLASSES, QUERIES = 6, 1000  # published: 5000 queries


def classifier(weights: Mapping[str, Any]) -> nn.Module:
    """Pixels in [0, 1], of any size from 9 x 9 -> logits of six classes."""
    layers = (
        nn.Conv2d(3, 8, 3, stride=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    model = nn.Sequential(*layers).double().eval()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    return model


def inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and images by shape."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    filters, last = draw(8, 3, 3, 3) - 0.5, draw(CLASSES, 128) - 0.5
    filters -= filters.mean((1, 2, 3), keepdim=True)  # otherwise every image has the same class
    last -= last.mean(1, keepdim=True)
    weights = {
        "0.weight": filters,
        "0.bias": torch.zeros(8),
        "4.weight": last,
        "4.bias": torch.zeros(CLASSES),
    }
    return weights, {name: draw(*shape) for name, shape in SHAPES.items()}


class Outcome(NamedTuple):
    """Of an attack of the authors' code: which images it fooled, and the adversarial images of these."""

    fooled: Tensor
    images: Tensor


@cache
def recorded() -> tuple[nn.Module, dict[str, Tensor], dict[tuple[str, str, str], Outcome]]:
    """The classifier; images by shape; and outcomes by shape, norm and attack."""
    with np.load(FILE) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    weights = {key.removeprefix("weights "): arrays[key] for key in arrays if key.startswith("weights ")}
    outcomes = {run: Outcome(arrays["fooled " + " ".join(run)], arrays[" ".join(run)]) for run in runs()}
    return classifier(weights), {shape: arrays[f"images {shape}"] for shape in SHAPES}, outcomes


def runs() -> Iterator[tuple[str, str, str]]:
    for shape in SHAPES:
        for norm in EPSILON:
            for attack in ATTACKS if shape == "square" else ("square",):
                yield shape, norm, attack


@contextmanager
def in_float64() -> Iterator[None]:
    """Their code makes tensors of the default type and rounds images by `float()`; it draws in float32."""
    default = torch.get_default_dtype()
    uniform, normal = torch.rand, torch.randn
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(Tensor, "float", Tensor.double),
            patch.object(torch, "rand", lambda shape: uniform(shape, dtype=torch.float32).double()),
            patch.object(torch, "randn", lambda shape: normal(shape, dtype=torch.float32).double()),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout of github.com/fra31/auto-attack")
    sys.path.insert(0, str(parser.parse_args().folder))
    from autoattack import AutoAttack  # type: ignore[import-not-found]

    warnings.filterwarnings("ignore")
    weights, images = inputs()
    model = classifier(weights)
    arrays = {f"weights {name}": value for name, value in weights.items()}
    arrays |= {f"images {shape}": value for shape, value in images.items()}
    for shape, norm, attack in runs():
        x = images[shape]
        y = model(x).argmax(1)
        found = []
        for seed in range(len(x)):
            published = AutoAttack(
                model,
                norm={"linf": "Linf", "l2": "L2"}[norm],
                eps=EPSILON[norm],
                seed=seed,
                device="cpu",
                verbose=False,
            )
            published.attacks_to_run, published.square.n_queries = [attack], QUERIES
            published.apgd_targeted.n_target_classes = published.fab.n_target_classes = CLASSES - 1
            with in_float64():
                found.append(published.run_standard_evaluation(x[seed : seed + 1], y[seed : seed + 1]))
        attacked = torch.cat(found)
        fooled = model(attacked).argmax(1) != y
        arrays |= {f"fooled {shape} {norm} {attack}": fooled, f"{shape} {norm} {attack}": attacked[fooled]}
        print(shape, norm, attack, f"{int(fooled.sum())} of {len(x)} fooled")
    np.savez_compressed(FILE, **{name: value.numpy() for name, value in arrays.items()})
    print(f"{FILE.name}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
