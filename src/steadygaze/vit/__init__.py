"""Views of vision transformers: `adapt(model)` finds an adapter, checks its view once, and caches it."""

from steadygaze.vit.adapt import adapt, unwrapped
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Block, Layout, Parts, Plan, ViT

__all__ = ["Block", "Layout", "Parts", "Plan", "ViT", "adapt", "register_adapter", "unwrapped"]
