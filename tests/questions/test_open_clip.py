"""Models of open_clip as targets of text: the view, the logits, the tokenizer; tiny and random."""

import json
from pathlib import Path

import pytest
import torch

import steadygaze as sg
from benchmarks import checks, text_zoo

open_clip = pytest.importorskip("open_clip", reason="pip install 'steadygaze[clip]'", exc_type=ImportError)

PROMPTS = ["a photo of a dog", "two cat"]


@pytest.mark.parametrize("kind", text_zoo.OPEN_CLIP)
def test_the_view_and_the_similarity_are_the_models_own(kind: str) -> None:
    classifier = text_zoo.classifier(kind)[0]
    for name, error in checks.check(classifier).items():
        assert isinstance(error, float) and error < 1e-10, (name, error)
    model = classifier.model
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_logits(images, text_zoo.open_clip_tokenizer(PROMPTS))[0]
        question = sg.ask(model, text=PROMPTS, tokenizer=text_zoo.open_clip_tokenizer)
        torch.testing.assert_close(question(images), expected, rtol=0, atol=1e-12)
    maps = sg.explain(question, images, target=PROMPTS)
    assert maps.scores.shape == (2, 2, 4, 4)


def test_an_image_tower_of_open_clip_takes_text_embeddings() -> None:
    model = text_zoo.open_clip_model()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    question = sg.ask(model, text=PROMPTS, tokenizer=text_zoo.open_clip_tokenizer)
    whole = sg.explain(question, images, target=1, method="decompx")
    scale = float(model.logit_scale.detach().exp())
    tower = sg.ask(model.visual, text_embeddings=question.weight, logit_scale=scale)
    alone = sg.explain(tower, images, target=1, method="decompx", score="logit")
    torch.testing.assert_close(alone.scores, whole.scores)


def test_coca_is_refused_in_words() -> None:
    model = text_zoo.open_clip_model(attentional_pool=True, attn_pooler_heads=2)
    with pytest.raises(sg.UnsupportedModelError, match="several queries"):
        sg.adapt(model)


def test_without_a_known_vocabulary_the_tokenizer_is_asked_for() -> None:
    with pytest.raises(sg.InputError, match="a vocabulary of 40 is not that of CLIP's own tokenizer"):
        sg.explain(text_zoo.open_clip_model(), torch.randn(1, 3, 32, 32).double(), target="a dog")


def test_clips_own_tokenizer_is_found_and_a_long_prompt_warns() -> None:
    vision = {"image_size": 32, "patch_size": 8, "width": 24, "layers": 2, "head_width": 12}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.model.CLIP(12, vision, text).eval()
    images = torch.randn(1, 3, 32, 32)
    attribution = sg.explain(model, images, target="a photo of a dog", method="legrad")
    ids = open_clip.tokenizer.SimpleTokenizer(context_length=16)(["a photo of a dog"])
    with torch.no_grad():
        torch.testing.assert_close(attribution.logits, model.get_logits(images, ids)[0])
    with pytest.warns(UserWarning, match="has 22 tokens and CLIP takes 16"):
        sg.ask(model, text=" ".join(["dog"] * 20))


def test_a_folder_of_open_clip_is_loaded_with_tokenizer_and_preprocessing(tmp_path: Path) -> None:
    vision = {"image_size": 32, "patch_size": 8, "width": 24, "layers": 2, "head_width": 12}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    config = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}
    model = open_clip.model.CLIP(12, vision, text)
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}})
    )
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    loaded = sg.load_model(f"open_clip:local-dir:{tmp_path}")
    assert loaded.size == (32, 32) and loaded.mean == (0.5, 0.5, 0.5) and loaded.source == "open_clip"
    images = torch.randn(2, 3, 32, 32)
    classifier = sg.zero_shot(loaded, ["dog", "cat"])
    assert sg.explain(classifier, images, target="cat").scores.shape == (2, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.encode_image(images), model.eval().encode_image(images))


def test_names_of_open_clip_are_checked() -> None:
    with pytest.raises(sg.UnknownNameError, match="ViT-B-32"):
        sg.load_model("open_clip:ViT-B-33")
    with pytest.raises(sg.InputError, match="has no weights: give a checkpoint"):
        sg.load_model("open_clip:ViT-B-32")
