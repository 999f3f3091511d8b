"""Which patches made a model give this answer? Visual question answering, and a model that generates text.

    python -m examples.answers

Runs in seconds on tiny random models, without a network. With real weights, replace the two marked lines by
`sg.load_model("dandelin/vilt-b32-finetuned-vqa")` and `sg.load_model("llava-hf/llava-1.5-7b-hf")`, or local
folders, and leave out `tokenizer` and `processor`, which a loaded model brings along.
"""

import torch

import steadygaze as sg
from benchmarks.vision_language import llava, photograph, vilt


def main() -> None:
    """Explain and verify an answer of each kind of model."""
    model, tokenizer = vilt()  # replace by sg.load_model(...)
    images = torch.randn(1, 3, 64, 64)
    question = "what is on the table ?"
    asked = sg.ask(model, question=question, tokenizer=tokenizer)
    attribution = sg.explain(asked, images, target="cup")
    print("patches", attribution.scores[0])
    for word, score in zip(attribution.words, attribution.word_scores[0].tolist(), strict=True):
        print(f"{word:8} {score:+.3f}")
    rows = sg.verify(asked, [(images, torch.tensor([6]))], methods=["gae", "random"])
    print(rows.to_pandas().groupby(["method", "metric"])["value"].mean())

    model, processor = llava()  # replace by sg.load_model(...)
    image, prompt, answer = photograph(), "what is on the table ?", "a red cup"
    asked = sg.ask(model, prompt=prompt, answer=answer, image=image, processor=processor)
    whole = sg.explain(asked, asked.prepared)
    print("log-probability of the answer", float(whole.logits[0, 0]), whole.scores[0])
    each = sg.explain(asked, asked.prepared, target=["red", "cup"])
    print("maps of two tokens", each.scores.shape)


if __name__ == "__main__":
    main()
