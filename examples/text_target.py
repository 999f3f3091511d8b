"""Which patches make an image similar to a text? CLIP, SigLIP and open_clip.

    python -m examples.text_target

Runs in seconds on a tiny random model, without a network. With real weights, replace the marked line by
`model = sg.load_model("openai/clip-vit-base-patch32")`, or a local folder, leave out `tokenizer`, which a
loaded model brings along, and prepare images by `model.preprocess(image)[None]`.
"""

import torch

import steadygaze as sg
from benchmarks import text_zoo


def main() -> None:
    """Explain prompts, alone and against one another, and verify a zero-shot classifier."""
    model, tokenizer = text_zoo.clip(), text_zoo.tokenizer()  # replace by sg.load_model(...)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    asked = sg.ask(model, text=["a photo of a dog", "a photo of a cat"], tokenizer=tokenizer)
    one = sg.explain(asked, images, target="a photo of a dog")
    print("similarity", one.logits[:, 0].tolist(), "map", one.scores.shape)
    several = sg.explain(asked, images, target=[*asked.class_names], method="legrad")
    print("two prompts for each image", several.scores.shape)
    prompts = sg.zero_shot(model, ["a dog", "a cat", "a bird"], templates="none", tokenizer=tokenizer)
    against = sg.explain(prompts, images, target="a dog", score="log_odds")
    print("evidence for the dog against the others", against.scores[0])

    classifier = sg.zero_shot(model, ["dog", "cat", "bird"], templates="seven", tokenizer=tokenizer)
    labels = torch.tensor([0, 1])
    rows = sg.verify(classifier, [(images, labels)], methods=["gaze_removal", "grad_eclip", "random"])
    print(rows.to_pandas().groupby(["method", "metric"])["value"].mean())


if __name__ == "__main__":
    main()
