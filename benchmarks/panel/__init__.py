"""A panel of trained classifiers that differ in what matters to an explanation: methods are chosen on all.

| model                  | pooling          | positions | other                              | trained on  |
| deit_tiny              | class token      | learned    | no patch dropout                   | ImageNet-1k |
| embedded               | class token      | learned    | patch dropout in the first half    | CIFAR-10    |
| cifar10-average-pool   | mean of patches  | learned    | no patch dropout                   | CIFAR-10    |
| cifar10-registers      | class token      | learned    | four registers, patch dropout 0.5  | CIFAR-10    |
| cifar10-rotary         | class token      | rotary    | SwiGLU (EVA-02), patch dropout 0.5 | CIFAR-10    |
| cifar10-attention-pool | attention pool   | learned    | LayerScale, patch dropout 0.5      | CIFAR-10    |
| dinov2                 | class token      | learned   | ViT-S/14, self-supervised; a probe | LVD-142M    |

A folder of this package holds the float16 weights of one model, the recipe that made it (train.json, which
`steadygaze train NAME` of the shipped recipe of that name writes) and the log of its training; it is a name
for `load_model`. The weights of DeiT-Tiny and of DINOv2 are not included; `dinov2/head.safetensors` is the
linear probe of DINOv2 on 24 breeds of pets that the recipe pets-dinov2-probe made (14 images a breed). A
folder with "swin" in its name is a model whose patches cannot be removed: it is measured by hiding them from
attention, and reported apart.

Any other name is a model for `load_model`, of timm or transformers, measured on ImageNet's images.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
from safetensors import safe_open
from safetensors.torch import load_file

import steadygaze as sg
from steadygaze.loading.options import read_class_names

FOLDER = Path(os.path.relpath(Path(__file__).parent))  # a model is named by its path, in rows too
DEIT = "deit_tiny_patch16_224"
# of 10,000 CIFAR-10 test images; of one ImageNet validation image of each class
# and of 144 photographs of pets, six of each of 24 breeds
ACCURACY = {"embedded": 77.4, "deit_tiny": 71.0, "dinov2": 91.7}
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

    data: the data set it is measured on, "cifar10", "imagenet" or "pets"
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
        if not (FOLDER / self.name / "log.csv").is_file():
            return float("nan")  # a model of the user
        log = (FOLDER / self.name / "log.csv").read_text(encoding="utf-8").splitlines()
        last = dict(zip(log[0].split(","), log[-1].split(","), strict=True))
        return 100 * float(last["test_top1"])

    @property
    def patches(self) -> int | None:
        """Number of patches: 14 x 14 of DeiT-Tiny, 16 x 16 of DINOv2, 8 x 8 of the models for CIFAR-10; None
        for a model of the user."""
        return {"deit_tiny": 196, "dinov2": 256}.get(self.name, 64 if self.data == "cifar10" else None)

    def load(
        self,
        weights: Path | None,
        backbone: Path | None = None,
        *,
        checkpoint: Path | None = None,
        class_names: Path | None = None,
    ) -> sg.LoadedModel:
        """The model, in evaluation mode.

        weights: the file of DeiT-Tiny's weights; backbone: that of DINOv2 ViT-S/14
        checkpoint, class_names: of a model of the user; with class names, a model that compares images with
        text becomes a classifier
        """
        if self.name == "deit_tiny":
            return sg.load_model(DEIT, checkpoint=weights)
        if self.name == "dinov2":
            return load_probe(backbone)
        if (FOLDER / self.name / "train.json").is_file():
            return sg.load_model((FOLDER / self.name).as_posix())
        loaded = sg.load_model(self.name, checkpoint=checkpoint)
        return loaded if class_names is None else sg.zero_shot(loaded, read_class_names(class_names))


def load_probe(backbone: Path | None, size: int = 224) -> sg.LoadedModel:
    """DINOv2 ViT-S/14 with the linear probe of this folder."""
    if backbone is None:
        raise SystemExit("dinov2: give the weights of DINOv2 ViT-S/14: --dinov2 FILE")
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=24, dynamic_img_size=True).eval()
    with safe_open(FOLDER / "dinov2" / "head.safetensors", framework="pt") as file:
        head = {f"head.{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        classes = tuple(file.metadata()["classes"].split())
    model.load_state_dict({name: x.float() for name, x in load_file(backbone).items()} | head)
    loaded = sg.load_model(model, image_size=size, class_names=classes)
    return replace(loaded, name="dinov2")


def panel(names: Sequence[str] = ()) -> dict[str, PanelModel]:
    """All models by name: DeiT-Tiny, the embedded one, DINOv2, those with a folder, and other `names`."""
    trained = sorted(path.parent.name for path in FOLDER.glob("*/train.json"))
    models = [PanelModel("deit_tiny", "imagenet"), PanelModel("embedded", "cifar10")]
    models += [PanelModel("dinov2", "pets")]
    models += [PanelModel(name, "cifar10", removable="swin" not in name) for name in trained]
    known = {model.name: model for model in models}
    return known | {name: PanelModel(name, "imagenet") for name in names if name not in known}


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
