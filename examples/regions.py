"""Which patches made a segmenter say "road" here, and a detector "dog" there?

    python regions.py

Runs in seconds on tiny random models, without a network. With real weights, replace the marked lines by
`sg.load_model("nvidia/segformer-b0-finetuned-ade-512-512")` and `sg.load_model("hustvl/yolos-tiny")`, or by
local folders, and give `explain` the path of an image.
"""

from typing import Any

import timm
import torch
import transformers

import steadygaze as sg

ROAD, DOG = 0, 2  # classes; with real weights their names: "road", "dog"


def randomized(model: Any) -> Any:
    """The model with other random weights, so that no bias is zero; in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.15 * noise if is_gain else 0.2 * noise)
    return model.eval()


def tiny_segmenter() -> Any:
    """A random ViT of timm with a linear decoder of five classes."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
    return randomized(sg.modules.segmenter(timm.create_model("vit_tiny_patch16_224", **sizes), 5))


def tiny_yolos() -> Any:
    """A random YOLOS with six queries."""
    config = transformers.YolosConfig(
        hidden_size=24,
        intermediate_size=48,
        num_attention_heads=2,
        num_hidden_layers=3,
        num_labels=5,
        image_size=[32, 40],
        patch_size=8,
        num_detection_tokens=6,
    )
    return randomized(transformers.YolosForObjectDetection(config))


def main() -> None:
    """Explain and verify a point, a box and a mask of a segmenter, and a detection."""
    noise = torch.Generator().manual_seed(0)
    segmenter = tiny_segmenter()  # replace by sg.load_model(...)
    images = torch.randn(2, 3, 32, 32, generator=noise)
    left_half = torch.zeros(32, 32, dtype=torch.bool)
    left_half[:, :16] = True
    for region in (
        sg.Region(point=(5, 20)),  # the class that is predicted there
        sg.Region(ROAD, box=(0, 16, 32, 32)),
        sg.Region(ROAD, mask=left_half),
    ):
        attribution = sg.explain(segmenter, images, region)
        print("classes", attribution.target.tolist(), "map", attribution.scores.shape)
    asked = sg.ask(segmenter, region=sg.Region(ROAD, box=(0, 16, 32, 32)))
    rows = sg.verify(asked, [(images, torch.tensor([ROAD, ROAD]))], methods=["gaze", "gae", "random"])
    print(rows.to_pandas().groupby(["method", "metric"])["value"].mean())

    detector = tiny_yolos()  # replace by sg.load_model(...)
    image = torch.randn(1, 3, 32, 40, generator=noise)
    dog = sg.Detection(DOG, box=(4, 8, 20, 28))
    attribution = sg.explain(detector, image, dog, method=["gaze", "gae"])["gaze"]
    print("evidence for the dog", attribution.scores[0])
    query = sg.ask(detector, region=dog, image=image)
    print("query", query.query, "says", query(image).softmax(-1)[0].tolist())


if __name__ == "__main__":
    main()
