"""A panel of trained classifiers that differ in what matters to an explanation: methods are chosen on all.

| model                  | pooling          | positions | other                              | trained on  |
| deit_tiny              | class token      | learned    | no patch dropout                   | ImageNet-1k |
| embedded               | class token      | learned    | patch dropout in the first half    | CIFAR-10    |
| cifar10-average-pool   | mean of patches  | learned    | no patch dropout                   | CIFAR-10    |
| cifar10-registers      | class token      | learned    | four registers, patch dropout 0.5  | CIFAR-10    |
| cifar10-rotary         | class token      | rotary    | SwiGLU (EVA-02), patch dropout 0.5 | CIFAR-10    |
| cifar10-attention-pool | attention pool   | learned    | LayerScale, patch dropout 0.5      | CIFAR-10    |

A folder of this package holds the float16 weights of one model, the recipe that made it (train.json, which
`steadygaze train NAME` of the shipped recipe of that name writes) and the log of its training; it is a name
for `load_model`. DeiT-Tiny's weights are not included. A folder with "swin" in its name is a model whose
patches cannot be removed: it is measured by hiding them from attention, and reported apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import steadygaze as sg

FOLDER = Path(os.path.relpath(Path(__file__).parent))  # a model is named by its path, in rows too
DEIT = "deit_tiny_patch16_224"
# of 10,000 CIFAR-10 test images; of one ImageNet validation image of each class
ACCURACY = {"embedded": 77.4, "deit_tiny": 71.0}
# rows of the same weights from before the panel, on other images too: folders beside the panel's rows
EARLIER = {
    "deit_tiny": (
        "deit_tiny_methods",
        "deit_tiny_methods_more",
        "deit_tiny_best",
        "deit_tiny_best_last",
        "deit_tiny_best_removal",
        "deit_tiny_pets",
        "default_pets",
    ),
    "embedded": ("diffmask_cifar",),
}


@dataclass(frozen=True)
class PanelModel:
    """A model of the panel.

    data: the data set it is measured on, "cifar10" or "imagenet"
    removable: whether its patches can be removed; otherwise they are hidden from attention
    """

    name: str
    data: str
    removable: bool = True

    @property
    def accuracy(self) -> float:
        """Top-1 in percent: of the panel's own models, at the end of the log of their training."""
        if self.name in ACCURACY:
            return ACCURACY[self.name]
        log = (FOLDER / self.name / "log.csv").read_text(encoding="utf-8").splitlines()
        last = dict(zip(log[0].split(","), log[-1].split(","), strict=True))
        return 100 * float(last["test_top1"])

    @property
    def patches(self) -> int:
        """Number of patches: 14 x 14 of DeiT-Tiny, 8 x 8 of the models for CIFAR-10."""
        return 196 if self.data == "imagenet" else 64

    def load(self, weights: Path | None) -> sg.LoadedModel:
        """weights: the file of DeiT-Tiny's weights."""
        if self.name == "deit_tiny":
            return sg.load_model(DEIT, checkpoint=weights)
        return sg.load_model("embedded" if self.name == "embedded" else (FOLDER / self.name).as_posix())


def panel() -> dict[str, PanelModel]:
    """All models by name: DeiT-Tiny, the embedded one, and those with a folder here."""
    trained = sorted(path.parent.name for path in FOLDER.glob("*/train.json"))
    models = [PanelModel("deit_tiny", "imagenet"), PanelModel("embedded", "cifar10")]
    models += [PanelModel(name, "cifar10", removable="swin" not in name) for name in trained]
    return {model.name: model for model in models}


@contextmanager
def selection(folder: Path, per_class: int, offset: int, limit: int | None = None) -> Iterator[Path]:
    """A folder of links to some images of each class of `folder`, those at places offset, offset + 1, ... by
    name. limit: at most this many classes, evenly spaced."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if limit is not None and limit < len(classes):
        classes = [classes[i * len(classes) // limit] for i in range(limit)]
    with TemporaryDirectory() as temporary:
        root = Path(temporary) / folder.name
        for source in classes:
            target = root / source.name
            target.mkdir(parents=True)
            files = sorted(path for path in source.iterdir() if path.is_file())
            for file in files[offset : offset + per_class]:
                (target / file.name).symlink_to(file.resolve())
        yield root
