"""Which patches make an image similar to a text? CLIP, SigLIP and open_clip.

    python text_target.py

Runs in seconds on a tiny random model, without a network. With real weights, replace the marked line by
`model = sg.load_model("openai/clip-vit-base-patch32")`, or a local folder, leave out `tokenizer`, which a
loaded model brings along, and give `explain` the path of an image.
"""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import steadygaze as sg

WORDS = [
    "<pad>",
    "<s>",
    "<unk>",
    "</s>",
    "a",
    "the",
    "photo",
    "of",
    "dog",
    "cat",
    "bird",
    ".",
    "itap",
    "art",
    "origami",
    "bad",
    "large",
    "small",
    "video",
    "game",
    "in",
]
LENGTH = 16  # tokens of a text


def randomized(model: Any) -> Any:
    """The model with other random weights, so that no bias is zero; in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.15 * noise if is_gain else 0.2 * noise)
    return model.eval()


def tiny_tokenizer() -> Any:
    """One token for each word: <s> words </s>."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LENGTH, **special)


def tiny_clip() -> Any:
    """A random CLIP of 4 x 4 patches."""
    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    config = transformers.CLIPConfig(
        text_config={**tower, **tokens, "max_position_embeddings": LENGTH},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    return randomized(transformers.CLIPModel(config))


def main() -> None:
    """Explain prompts, alone and against one another, and verify a zero-shot classifier."""
    model, tokenizer = tiny_clip(), tiny_tokenizer()  # replace by sg.load_model(...)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

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
    rows = sg.verify(classifier, [(images, labels)], methods=["gaze_outline", "grad_eclip", "random"])
    print(rows.to_pandas().groupby(["method", "metric"])["value"].mean())


if __name__ == "__main__":
    main()
