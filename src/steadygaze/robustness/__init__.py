"""Robustness: corruptions, sequences, shifts, attacks, occlusion, segmentation, and attention under them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
