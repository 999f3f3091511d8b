"""The page of `steadygaze app` as a Hugging Face Space."""

import os

import steadygaze as sg
from steadygaze.app import Limits, page

MODEL = os.environ.get("STEADYGAZE_MODEL", "deit_tiny_patch16_224")

demo = page(sg.load_model(MODEL), limits=Limits(max_seconds=30.0, max_calls=20))

if __name__ == "__main__":
    demo.launch()
