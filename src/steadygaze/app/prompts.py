"""The box of prompts on the page of a model that compares images with text (CLIP, SigLIP, open_clip).

Each line is a class. Every event of the page gets the lines, and is answered by the classifier made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, get_type_hints

from steadygaze.app.events import Events
from steadygaze.app.viewer import Viewer
from steadygaze.errors import BadInput
from steadygaze.questions.text import zero_shot
from steadygaze.vit import unwrapped
from steadygaze.vit.image_features import compares_text

FIRST_PROMPTS = "a photo of a cat\na photo of a dog\na photo of a bird"
MAX_PROMPTS, MAX_LETTERS = 100, 1_000


def needs_prompts(viewer: Viewer) -> bool:
    """Whether the classes of the viewer's model have to be typed in."""
    return compares_text(unwrapped(viewer.loaded))


def prompt_lines(text: Any) -> list[str]:
    """The prompts in the box, one in each line."""
    lines = [line.strip() for line in text.splitlines()] if isinstance(text, str) else []
    prompts = list(dict.fromkeys(line for line in lines if line))
    if not 2 <= len(prompts) <= MAX_PROMPTS or any(len(prompt) > MAX_LETTERS for prompt in prompts):
        raise BadInput(
            f"prompts: expected 2 to {MAX_PROMPTS} different texts of at most {MAX_LETTERS} letters, one in "
            f"each line, got {len(prompts)}"
        )
    return prompts


def with_prompts(viewer: Viewer, text: Any) -> Viewer:
    """The viewer of the classifier made of the prompts in the box."""
    return _with_prompts(viewer, tuple(prompt_lines(text)))


@lru_cache(maxsize=8)
def _with_prompts(viewer: Viewer, prompts: tuple[str, ...]) -> Viewer:
    return replace(viewer, loaded=zero_shot(viewer.loaded, prompts, "none"))


def with_box(viewer: Viewer, name: str, change: Callable[[Viewer, Any], Viewer]) -> Callable[..., Any]:
    """An event of the page as a function of the image, the text in a box and its other inputs.

    change: gives the viewer that answers, from this one and the text
    """
    event = getattr(Events(viewer), name)

    def handler(image: Any, text: Any, *inputs: Any) -> Any:
        return getattr(Events(change(viewer, text)), name)(image, *inputs)

    own = signature(event)
    image, *rest = own.parameters.values()
    box = Parameter("text", Parameter.POSITIONAL_OR_KEYWORD)
    handler.__name__, handler.__annotations__ = name, get_type_hints(event)
    # gradio finds by the signature where it has to pass its progress bar and the place of a click
    handler.__signature__ = own.replace(parameters=[image, box, *rest])  # type: ignore[attr-defined]
    return handler
