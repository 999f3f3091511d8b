"""Which patches made a segmenter say "road" here, and a detector "dog" there?

    python -m examples.regions

Runs in seconds on tiny random models, without a network. With real weights, replace the marked lines by
`sg.load_model("nvidia/segformer-b0-finetuned-ade-512-512")` and `sg.load_model("hustvl/yolos-tiny")`, or by
local folders, and prepare images by `model.preprocess(image)[None]`.
"""

import torch

import steadygaze as sg
from benchmarks import region_zoo

ROAD, DOG = 0, 2  # classes; with real weights their names: "road", "dog"


def main() -> None:
    """Explain and verify a point, a box and a mask of a segmenter, and a detection."""
    noise = torch.Generator().manual_seed(0)
    segmenter = region_zoo.segmenter()  # replace by sg.load_model(...)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=noise)
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

    detector = region_zoo.yolos()  # replace by sg.load_model(...)
    image = torch.randn(1, 3, 32, 40, dtype=torch.float64, generator=noise)
    dog = sg.Detection(DOG, box=(4, 8, 20, 28))
    attribution = sg.explain(detector, image, dog, method=["gaze", "gae"])["gaze"]
    print("evidence for the dog", attribution.scores[0])
    query = sg.ask(detector, region=dog, image=image)
    print("query", query.query, "says", query(image).softmax(-1)[0].tolist())


if __name__ == "__main__":
    main()
