"""Questions about an image, each a classifier of images: a module whose forward(images) gives (B, C).

A question is viewed by an adapter like any other model, so that explain, verify, stress, compare, the page
and the command line take it. `ask` and `zero_shot` (`loading/ask.py`) make one of a model and words.

| module     | question                                                             |
| text       | how similar is the image to this prompt? (CLIP, SigLIP, open_clip)   |
| vqa        | which answer does the model give to this question? (ViLT)            |
| generation | how probable is this answer to this prompt? (LLaVA, Qwen2.5-VL, ...) |
| regions    | which class has this region? (SegFormer, DPT, `modules.segmenter`)   |
| detections | which class has the object in this box? (YOLOS)                      |
"""

from steadygaze.questions.detections import Detection
from steadygaze.questions.regions import Region
from steadygaze.questions.text import TEMPLATES, TextClassifier

__all__ = ["TEMPLATES", "Detection", "Region", "TextClassifier"]
