"""Slow, obvious float64 re-implementations of the white-box methods on plain timm VisionTransformers.

`NAME(model, images, target, **options) -> (B,P)`: signed patch scores in raster order, prefix dropped, the method as
its bare name means; `NAME_layers -> [(B,P)]` and `NAME_matrices -> [(B,N,N)]` are what aggregators work on.
"""
