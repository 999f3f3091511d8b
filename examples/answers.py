"""Which patches made a model give this answer? Visual question answering, and a model that generates text.

    python answers.py

Runs in seconds on tiny random models, without a network. With real weights, replace the two marked lines by
`sg.load_model("dandelin/vilt-b32-finetuned-vqa")` and `sg.load_model("llava-hf/llava-1.5-7b-hf")`, or local
folders, and leave out `tokenizer` and `processor`, which a loaded model brings along.
"""

from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import steadygaze as sg

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<image>",
    "what",
    "is",
    "on",
    "the",
    "table",
    "?",
    "a",
    "red",
    "cup",
]
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>"}


def randomized(model: Any) -> Any:
    """The model with other random weights, so that no bias is zero; in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.15 * noise if is_gain else 0.2 * noise)
    return model.eval()


def tokenizer(**special: str) -> Any:
    """One token for each word: <s> words </s>."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if "cls_token" in special:
        words.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL, **special)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return made


def tiny_vilt() -> tuple[Any, Any]:
    """A random ViLT with seven answers, and its tokenizer."""
    config = transformers.ViltConfig(
        **TOWER,
        num_hidden_layers=3,
        image_size=64,
        patch_size=16,
        vocab_size=40,
        max_position_embeddings=12,
        id2label={i: f"answer {i}" for i in range(6)} | {6: "cup"},
    )
    model = randomized(transformers.ViltForQuestionAnswering(config))
    return model, tokenizer(cls_token="<s>", sep_token="</s>")


def tiny_llava() -> tuple[Any, Any]:
    """A random LLaVA of 4 x 4 patches, and its processor."""
    tokens = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **TOWER, num_hidden_layers=2, image_size=56, patch_size=14
        ),
        text_config=transformers.LlamaConfig(**TOWER, **tokens, num_hidden_layers=3, num_key_value_heads=2),
        image_token_index=WORDS.index("<image>"),
        image_seq_length=16,
    )
    size = {"height": 56, "width": 56}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=size),
        tokenizer(bos_token="<s>", eos_token="</s>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return randomized(transformers.LlavaForConditionalGeneration(config)), processor


def main() -> None:
    """Explain and verify an answer of each kind of model."""
    model, words = tiny_vilt()  # replace by sg.load_model(...)
    images = torch.randn(1, 3, 64, 64)
    question = "what is on the table ?"
    asked = sg.ask(model, question=question, tokenizer=words)
    attribution = sg.explain(asked, images, target="cup")
    print("patches", attribution.scores[0])
    for word, score in zip(attribution.words, attribution.word_scores[0].tolist(), strict=True):
        print(f"{word:8} {score:+.3f}")
    rows = sg.verify(asked, [(images, torch.tensor([6]))], methods=["gae", "random"])
    print(rows.to_pandas().groupby(["method", "metric"])["value"].mean())

    model, processor = tiny_llava()  # replace by sg.load_model(...)
    image, prompt, answer = (
        Image.effect_noise((70, 50), 80).convert("RGB"),
        "what is on the table ?",
        "a red cup",
    )
    asked = sg.ask(model, prompt=prompt, answer=answer, image=image, processor=processor)
    whole = sg.explain(asked, asked.prepared)
    print("log-probability of the answer", float(whole.logits[0, 0]), whole.scores[0])
    each = sg.explain(asked, asked.prepared, target=["red", "cup"])
    print("maps of two tokens", each.scores.shape)


if __name__ == "__main__":
    main()
