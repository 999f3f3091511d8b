"""Explain a model of your own: a backbone, a head that you wrote, normalization inside. Needs no network.

    python own_model.py [FOLDER]

Writes own_model.png, one figure with a class-specific map for each of two images, into FOLDER (by default a
temporary one).
"""

import sys
import tempfile
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import steadygaze as sg


class Classifier(nn.Module):
    """A timm backbone without its head; a new head on the mean of the patch tokens."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, depth=2, num_classes=0, global_pool=""
        )
        width = self.backbone.embed_dim
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, classes))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images of 0..1: the normalization is part of the model."""
        tokens = self.backbone((images - 0.5) / 0.5)
        return {"logits": self.head(tokens[:, 1:].mean(dim=1)), "tokens": tokens}


def main(folder: Path | None = None) -> Path:
    """Explain two images of noise and write a figure, by default into a temporary folder."""
    folder = folder or Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    model = Classifier(classes=3).eval()
    loaded = sg.load_model(
        model, image_size=64, mean=(0, 0, 0), std=(1, 1, 1), class_names=("cat", "dog", "bird")
    )
    images = torch.rand(2, 3, 64, 64)
    attribution = sg.explain(loaded, images, target=1)  # evidence for "dog"
    file = folder / "own_model.png"
    attribution.save(file)

    rows = sg.verify(loaded, [(images, torch.tensor([0, 1]))], methods=["gaze_outline", "random"])
    print(f"maps of {tuple(attribution.scores.shape)}, {len(rows)} rows of verify, figure in {file}")
    return file


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
